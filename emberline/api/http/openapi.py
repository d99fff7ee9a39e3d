"""The OpenAPI document, generated from the routes and their structs."""

from collections.abc import Iterable
from typing import Any

import msgspec

from emberline import __version__
from emberline.api.http.errors import CODES, Dialect
from emberline.api.http.router import Policy, Route

UNSUPPORTED = "x-unsupported"  # in the schema of a field that is refused: it is left out of the document
_ACCOUNT = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"}
_ERROR = {
    "type": "object",
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    "required": ["message", "type"],
}
_ENVELOPE = {
    "type": "object",
    "properties": {
        "success": {"type": "boolean"},
        "errors": {"type": "array", "items": {"type": "object", "required": ["code", "message"]}},
        "messages": {"type": "array"},
    },
    "required": ["success", "errors", "messages", "result"],
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    routes = tuple(routes)
    bodies = sorted({route.body for route in routes if route.body}, key=lambda kind: kind.__name__)
    references, components = struct_schemas(bodies, "#/components/schemas/{name}")
    schema_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Emberline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "Envelope": _ENVELOPE},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def struct_schemas(structs: Iterable[type[Any]], ref_template: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """References to the structs' JSON schemas, and the schemas by name; without the fields and unions of structs that
    are refused."""
    references, schemas = msgspec.json.schema_components(structs, ref_template=ref_template)
    refused: set[str] = set()  # references to structs
    documented = {name: _documented(schema, refused) for name, schema in schemas.items()}
    names = {name for name in documented if ref_template.format(name=name) in refused}
    return references, {name: schema for name, schema in documented.items() if name not in names}


def _documented(schema: Any, refused: set[str]) -> Any:
    """The schema without what is refused; adds references to structs in refused unions to `refused`."""
    if isinstance(schema, list):
        return [_documented(one, refused) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: {field: _documented(one, refused) for field, one in value.items() if UNSUPPORTED not in one}
        if name == "properties"
        else _documented(value, refused)
        for name, value in schema.items()
        if name != "default"
    }
    if "default" in schema:
        found["default"] = schema["default"]
    kept = [one for one in found.get("anyOf", ()) if UNSUPPORTED not in one]
    for one in found.get("anyOf", ()):
        if one not in kept:
            refused.update(each["$ref"] for each in one["anyOf"])
    return kept[0] if len(kept) == 1 < len(found["anyOf"]) else found


def _operation(route: Route, schema_of: dict[type[Any], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "parameters": _parameters(route)}
    operation["responses"] = _responses(route)
    if route.policy is not Policy.OPEN:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    found = []
    if "{account}" in route.path:
        found.append({"name": "account", "in": "path", "required": True, "schema": _ACCOUNT})
    if "{id}" in route.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if "{gateway}" in route.path:
        found.append({"name": "gateway", "in": "path", "required": True, "schema": _ACCOUNT})
    for name in ("model", "asset", "rest"):
        if f"{{{name}}}" in route.path:
            rest = {"type": "string", "minLength": 1}
            found.append({"name": name, "in": "path", "required": True, "schema": rest})
    for name, schema in (route.query or {}).items():
        found.append({"name": name, "in": "query", "required": False, "schema": schema})
    return found


def _responses(route: Route) -> dict[str, Any]:
    native = route.dialect in (Dialect.NATIVE, Dialect.BINDING)
    statuses = {codes.native_status if native else codes.status for codes in CODES.values()}
    failed = {"description": "Refused or failed", "content": {"application/json": {"schema": _failure(route.dialect)}}}
    done: dict[str, Any] = {"description": "Done", "content": {kind: {} for kind in _content_types(route)}}
    if route.path == "/favicon.ico":
        return {"204": {"description": "No icon"}}
    return {"200": done} | {str(status): failed for status in sorted(statuses)}


def _content_types(route: Route) -> list[str]:
    special = {"/": ["text/html"], "/operations": ["text/html"], "/metrics": ["text/plain"]}
    special["/api/cache/export"] = ["application/octet-stream"]
    special["/assets/{asset}"] = ["text/javascript", "text/css", "image/svg+xml"]
    if route.path.endswith("/events"):
        return ["application/json", "text/event-stream"]
    if route.body is not None or route.dialect is Dialect.GATEWAY:
        return ["application/json", "application/x-ndjson" if route.dialect is Dialect.OLLAMA else "text/event-stream"]
    return special.get(route.path, ["application/json"])


def _failure(dialect: Dialect) -> dict[str, Any]:
    envelope = {"$ref": "#/components/schemas/Envelope"}
    if dialect is Dialect.OLLAMA:
        return {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    if dialect is Dialect.GATEWAY:
        listed = {"type": "array", "items": {"type": "object", "required": ["code", "message"]}}
        return {"type": "object", "properties": {"error": listed}, "required": ["success", "error"]}
    own = {"type": "object", "properties": {"error": {"$ref": "#/components/schemas/Error"}}, "required": ["error"]}
    if dialect in (Dialect.NATIVE, Dialect.BINDING):
        return envelope
    enveloped = dialect in (Dialect.OPENAI_ENVELOPED, Dialect.ANTHROPIC_ENVELOPED)
    return {"allOf": [envelope, own]} if enveloped else own
