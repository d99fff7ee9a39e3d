"""The predictor in an image that `cog build` made: its labels hold its cog.yaml and its OpenAPI document."""

from typing import Any

import msgspec

from emberline.predictor.schema import Signature
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.prediction import Schema
from emberline.supervisor.sandbox.containers import Image

CONFIG, OPENAPI = "run.cog.config", "run.cog.openapi_schema"
MAX_LABEL_BYTES = 8 << 20
MAX_DEPTH, MAX_SCHEMAS = 32, 2_000  # of schemas within schemas
MAX_SCHEMA_BYTES = 1 << 20  # of all schemas that references name, each time that they are named
_REFERENCE = "#/components/schemas/"
_KINDS = {"string", "integer", "number", "boolean", "array", "object", "null"}
_SERVER = ("python", "-m", "cog.server.http")


class ImagePredictor(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of an image's predictor."""

    signature: Signature
    command: tuple[str, ...]
    gpu: bool
    slots: int


def read_image(image: Image) -> ImagePredictor:
    """Read the labels of an image. Raises BadInput for one that `cog build` did not make, or that trains only."""
    if image.Config.Volumes:  # an engine gives it folders of this machine there, whose size nothing bounds
        named = ", ".join(image.Config.Volumes)[:200]
        raise BadInput(
            f"the image has volumes ({named}), whose size cannot be bounded: build it without", param="image"
        )
    labels = image.Config.Labels or {}
    config, document = (_label(labels, name) for name in (CONFIG, OPENAPI))
    variables = dict(each.partition("=")[::2] for each in image.Config.Env or ())
    build = config.get("build")
    concurrency = config.get("concurrency")
    given = variables.get("COG_MAX_CONCURRENCY") or (concurrency.get("max") if isinstance(concurrency, dict) else None)
    count = str(given)[:20]
    slots = int(count) if count.isdigit() and count.isascii() else 1
    if not 1 <= slots <= 256:
        raise BadInput(f"the image has {count} concurrent predictions; from 1 to 256 are possible", param="image")
    return ImagePredictor(
        signature=read_openapi(document),
        command=tuple(image.Config.Cmd or _SERVER),
        gpu=bool(build.get("gpu")) if isinstance(build, dict) else False,
        slots=slots,
    )


def _label(labels: dict[str, str], name: str) -> dict[str, Any]:
    text = labels.get(name, "")
    if not text:
        raise BadInput(f"the image has no label {name}: `cog build` makes such images", param="image")
    if len(text) > MAX_LABEL_BYTES:
        raise BadInput(f"the image's label {name} is too large", param="image")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"the image's label {name} cannot be read: {error}", param="image") from None


def read_openapi(document: dict[str, Any]) -> Signature:
    """The signature in a document of Cog's, with all references replaced by what they name."""
    components = document.get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    if not isinstance(schemas, dict) or not isinstance(schemas.get("Input"), dict):
        is_trained = isinstance(schemas, dict) and "TrainingInput" in schemas
        only = " It can be trained only, which is not supported." if is_trained else ""
        raise BadInput(f"the image's OpenAPI document has no schema `Input`.{only}", param="image")
    resolver = _Resolver(schemas)
    given, output = resolver.resolve(schemas["Input"]), resolver.resolve(schemas.get("Output") or {})
    fields = given.get("properties") or {}
    if not isinstance(fields, dict):
        raise BadInput("the image's OpenAPI document has an `Input` without fields", param="image")
    ordered = sorted(fields.items(), key=_order)
    return Signature(
        input={"title": "Input", "type": "object"} | given | {"properties": dict(ordered)},
        output={"title": "Output"} | output,
        streams=_inner(document, "paths", "/predictions", "post").get("x-cog-streaming") is True,
        slots=0,
        is_async=True,
    )


def _inner(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """The object at these names, one within the other; empty if there is none."""
    for name in names:
        inner = found.get(name)
        found = inner if isinstance(inner, dict) else {}
    return found


def _order(field: tuple[str, Schema]) -> float:
    order = field[1].get("x-order", 0)
    return order if isinstance(order, int | float) else 0


class _Resolver:
    """Replaces references in schemas, and joins the single parts of `allOf`, which is how Cog writes choices."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self._n_left, self._n_bytes_left = MAX_SCHEMAS, MAX_SCHEMA_BYTES

    def resolve(self, given: Any, depth: int = 0) -> Schema:
        self._n_left -= 1
        if not isinstance(given, dict) or depth > MAX_DEPTH or self._n_left < 0:
            raise Unsupported("the image's schemas contain themselves, too many others, or what is no schema")
        found = dict(given)
        if (name := found.pop("$ref", None)) is not None:
            target = self._schemas.get(str(name).removeprefix(_REFERENCE))
            self._n_bytes_left -= len(msgspec.json.encode(target))
            if self._n_bytes_left < 0:
                raise Unsupported("the image's schemas are too large")
            return self.resolve(target, depth + 1) | found
        parts = found.pop("allOf", None)
        for part in parts if isinstance(parts, list) else ():
            found = self.resolve(part, depth + 1) | found
        kind = found.get("type")
        if kind is not None and str(kind) not in _KINDS:
            raise Unsupported(f"the image's schemas have the type {str(kind)[:60]!r}, which is not known")
        for name in ("items", "additionalProperties"):
            if isinstance(found.get(name), dict):
                found[name] = self.resolve(found[name], depth + 1)
        if isinstance(fields := found.get("properties"), dict):
            found["properties"] = {key: self.resolve(field, depth + 1) for key, field in fields.items()}
        if isinstance(choices := found.get("anyOf"), list):
            found["anyOf"] = [self.resolve(each, depth + 1) for each in choices]
        return _checked(found)


def _checked(schema: Schema) -> Schema:
    """The schema. Raises BadInput for a keyword whose value cannot be used: every request would fail."""
    for name in ("minimum", "maximum", "minLength", "maxLength"):
        if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
            raise BadInput(f"the image's schemas have the bound {name} {str(schema[name])[:60]!r}", param="image")
    for name in ("enum", "required"):
        if name in schema and not isinstance(schema[name], list):
            raise BadInput(f"the image's schemas have `{name}` that is no list", param="image")
    if not all(isinstance(each, str) for each in schema.get("required", ())):
        raise BadInput("the image's schemas require fields whose names are no texts", param="image")
    if not isinstance(schema.get("items", {}), dict):
        raise BadInput("the image's schemas have `items` that are no schema", param="image")
    return schema
