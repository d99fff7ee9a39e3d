"""The OpenAPI document, generated from the routes and their structs."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from emberline import __version__
from emberline.api.http.errors import CODES, Dialect, UpgradeRequired
from emberline.api.http.reply_schemas import COMPONENTS, Json, reply_schema
from emberline.api.http.router import Policy, Route
from emberline.api.http.unknown_fields import UNSUPPORTED

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
_FILE = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_FORMS: dict[str | tuple[str, ...], Json] = {  # fields of forms, by the end of the path
    "/files": {"type": "object", "properties": {"file": _FILE, "purpose": _TEXT}, "required": ["file", "purpose"]},
    "/images/edits": {
        "type": "object",
        "properties": {"image": _FILE, "mask": _FILE, "model": _TEXT, "prompt": _TEXT},
        "required": ["image", "model", "prompt"],
    },
    ("/audio/transcriptions", "/audio/translations"): {
        "type": "object",
        "properties": {"file": _FILE, "model": _TEXT, "response_format": _TEXT},
        "required": ["file", "model"],
    },
}
_REPLIES: dict[str | tuple[str, ...], list[str]] = {  # content types of replies, by the end of the path
    ("/audio/transcriptions", "/audio/translations"): ["application/json", "text/plain"],
    "/audio/speech": ["application/json", "audio/*", "text/event-stream"],
    "/files/{id}/content": ["application/octet-stream"],
    "/batches/{id}/results": ["application/x-jsonl"],
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


class ModelNames(NamedTuple):
    """Names of the served models by task, for the fields that name a model."""

    by_task: tuple[tuple[str, tuple[str, ...]], ...] = ()
    others: bool = True  # models of providers have names that no list can hold

    def schema(self, tasks: Collection[str] = ()) -> Json:
        """The schema of a model's name; `tasks`: only models for one of them."""
        names = [name for task, names in self.by_task if not tasks or task in tasks for name in names]
        found: Json = {"type": "string", "minLength": 1}
        return found | {"examples" if self.others else "enum": names} if names else found


NO_NAMES = ModelNames()


def document(
    routes: Iterable[Route], names: ModelNames = NO_NAMES, tasks: Mapping[type[Any], Collection[str]] | None = None
) -> dict[str, Any]:
    """The document. `tasks` are those of the models that a body's field `model` names, by the struct of the body."""
    routes = tuple(routes)
    bodies = sorted({route.body for route in routes if route.body}, key=lambda kind: kind.__name__)
    references, components = struct_schemas(bodies, "#/components/schemas/{name}")
    schema_of = dict(zip(bodies, references, strict=True))
    for kind, of in (tasks or {}).items():
        components[kind.__name__]["properties"]["model"] = names.schema(of)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Emberline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **COMPONENTS, "Error": _ERROR, "Envelope": _ENVELOPE},
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


def _operation(route: Route, schema_of: dict[type[Any], Any], names: ModelNames) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "parameters": _parameters(route, names)}
    operation["responses"] = _responses(route)
    if route.policy is not Policy.OPEN:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif (uploaded := _uploads(route)) is not None:
        operation["requestBody"] = {"required": True, "content": uploaded}
    return operation


def _uploads(route: Route) -> dict[str, Any] | None:
    """The content of a request that is no JSON; None if the route takes none."""
    if route.method != "POST":
        return None
    if route.path == "/api/cache/import":
        return {"application/octet-stream": {}}
    fields = next((fields for end, fields in _FORMS.items() if route.path.endswith(end)), None)
    return None if fields is None else {"multipart/form-data": {"schema": fields}}


def _parameters(route: Route, names: ModelNames) -> list[dict[str, Any]]:
    found = []
    if "{account}" in route.path:
        found.append({"name": "account", "in": "path", "required": True, "schema": _ACCOUNT})
    if "{id}" in route.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if "{gateway}" in route.path:
        found.append({"name": "gateway", "in": "path", "required": True, "schema": _ACCOUNT})
    for name in ("model", "asset", "rest"):
        if f"{{{name}}}" in route.path:
            is_model = name == "model" and ("/run/" in route.path or "/models/" in route.path)
            rest = names.schema() if is_model else {"type": "string", "minLength": 1}
            found.append({"name": name, "in": "path", "required": True, "schema": rest})
    for name, schema in (route.query or {}).items():
        found.append({"name": name, "in": "query", "required": False, "schema": schema})
    return found


def _responses(route: Route) -> dict[str, Any]:
    native = route.dialect in (Dialect.NATIVE, Dialect.BINDING)
    statuses = {codes.native_status if native else codes.status for codes in CODES.values()}
    failed = {"description": "Refused or failed", "content": {"application/json": {"schema": _failure(route.dialect)}}}
    reply = {"schema": reply_schema(route.method, route.path, enveloped=route.dialect is Dialect.NATIVE)}
    content = {kind: reply if kind == "application/json" else {} for kind in _content_types(route)}
    done: dict[str, Any] = {"description": "Done", "content": content}
    if route.path == "/favicon.ico":
        return {"204": {"description": "No icon"}}
    if route.opens_websocket:
        success = {"101": {"description": "The connection is a WebSocket"}}
    else:
        success = {"200": done}
        statuses.discard(CODES[UpgradeRequired.kind].status)
    return success | {str(status): failed for status in sorted(statuses)}


def _content_types(route: Route) -> list[str]:
    special = {"/": ["text/html"], "/operations": ["text/html"], "/metrics": ["text/plain"]}
    special["/api/cache/export"] = ["application/octet-stream"]
    special["/api/usage"] = ["application/json", "text/csv"]
    for end, kinds in _REPLIES.items():
        if route.path.endswith(end):
            return kinds
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
