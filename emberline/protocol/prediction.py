"""Predictions of models that users bring along: what a worker gets and returns, and a predictor's manifest.

A predictor takes a JSON object, whose fields its schema describes, and returns any JSON. Files are data URLs in both.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, PredictionFailed

MAX_INPUT_BYTES = 32 << 20
MAX_OUTPUT_BYTES = 48 << 20
PIECE_BYTES = 256 << 10  # of a larger output: copying one holds up an event loop for a fraction of a millisecond
MAX_LOG_CHARS = 64 << 10  # of one prediction, in its result
_MAX_BYTES, _MAX_NUMBER = 1 << 50, 1_000_000  # of a bound: of memory, and of cores, processes or seconds


FILE_SCHEMES = ("data:", "https:", "http:")  # of a file input; the core fetches what is not in its URL

Schema = dict[str, Any]  # a JSON Schema


class PredictParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of an `EngineRequest` for a predictor. The result is a `Prediction`, encoded as JSON. If `stream` is
    set, outputs come before it, each as JSON. If `takes_pieces` is set, a large output comes before it in pieces."""

    input: bytes  # a JSON object; empty: ask for the predictor's health, which is the result
    stream: bool = False
    takes_pieces: bool = False
    context: bytes = b""  # a JSON object for the predictor's scope; empty: none


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    output: msgspec.Raw = msgspec.Raw(b"null")
    pieces: tuple[bytes, ...] = ()  # of a large output, whose JSON they are together; then `output` is null
    logs: str = ""  # that the predictor printed meanwhile
    metrics: dict[str, Any] = {}  # of the predictor's own, and `predict_time` in seconds
    warning: str = ""  # what the predictor did that it should not, although the prediction succeeded

    @property
    def whole(self) -> bytes:
        """The JSON of the output in one. Copying a large one takes tens of milliseconds."""
        return b"".join(self.pieces) if self.pieces else bytes(self.output)


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds of a predictor's processes."""

    memory_bytes: int = 2 << 30
    scratch_bytes: int = 1 << 30
    cpus: float = 1.0
    n_processes: int = 256
    setup_s: float = 300.0  # for `setup` to end
    predict_s: float = 600.0  # for a prediction to end


def read_resources(given: dict[str, str]) -> Resources:
    """Bounds from the query of a request; what it leaves out has its default. Raises BadInput."""
    fields = {name: given[name] for name in msgspec.structs.asdict(Resources()) if name in given}
    try:
        found = msgspec.convert(fields, Resources, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(f"the query is not valid: {error}") from None
    return check_resources(found)


def check_resources(found: Resources) -> Resources:
    """Return the bounds. Raises BadInput for one that is no number, not above 0, or larger than any machine has."""
    for name, value in msgspec.structs.asdict(found).items():
        most = _MAX_BYTES if name.endswith("_bytes") else _MAX_NUMBER
        if not 0 < value <= most:  # false for NaN, too
            raise BadInput(f"`{name}` must be above 0 and at most {most:,}", param=name)
    return found


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a push over HTTP."""

    id: str
    version: int
    digest: str
    notes: tuple[str, ...] = ()  # about the project, for the person who pushes it


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a pushed model in a list."""

    version: int
    digest: str
    served: bool


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last lines of a pushed model's log."""

    version: int
    data: list[str]  # lines, without the predictor's secrets


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version of a predictor: `manifest.json` in the version's folder, beside the project's files in `src`."""

    model: str  # the id: "@me/name", or "@accounts/alice/name"
    account: str = ""  # whose model it is; empty: the operator's
    version: int
    digest: str  # of the project, its environment and its settings
    reference: str  # "predict.py:Predictor"
    interpreter: str = ""  # of its environment
    folders: tuple[str, ...] = ()  # that it reads: the environment, and the interpreter it was made from
    store: str = ""  # the folder of what `setup` fetched, shared by versions; empty: it fetches nothing
    mounts: tuple[tuple[str, str], ...] = ()  # folders of `weights`, and where the predictor sees them
    setup_s: float = 0.0  # of the first setup, which fetched; 0: none was done when it was pushed
    fetched_bytes: int = 0
    slots: int = 1  # concurrent predictions
    streams: bool = False
    input: Schema
    output: Schema
    environment: dict[str, str] = {}
    secrets: tuple[str, ...] = ()  # names of variables that the operator grants
    gpu: bool = False
    image: str = ""  # the id of a container image, "sha256:…"; empty: a project's files in an environment
    engine: str = ""  # the container engine that has the image: "docker" or "podman"
    command: tuple[str, ...] = ()  # of the image's server
    resources: Resources = Resources()

    @property
    def file_inputs(self) -> list[str]:
        """Names of the inputs that are files."""
        return [name for name, field in self.input.get("properties", {}).items() if is_file(field)]

    @property
    def returns_file(self) -> bool:
        """True if the output is one file."""
        return is_file(self.output)


def is_file(field: Schema) -> bool:
    """True if the field's value is one file."""
    return bool(field.get("format") == "uri")


def has_files(field: Schema) -> bool:
    """True if the field's value is a file or a list of files."""
    return is_file(field) or is_file(field.get("items") or {})


def holds_file(text: str) -> bool:
    """True if the text is a file, or JSON with one in it: a data: URL."""
    begun = text.lstrip()
    return begun[:5].lower() == "data:" or (begun[:1] in ("{", "[") and '"data:' in begun)


def loggable(given: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The input as a log may have it: values of secrets, files and inputs that the schema does not know are hidden."""
    fields: dict[str, Schema] = schema.get("properties", {})
    clear = {name for name, field in fields.items() if not (has_files(field) or _may_have_secrets(field))}
    return {name: value if name in clear or not value else "**********" for name, value in given.items()}


def _may_have_secrets(field: Schema) -> bool:
    """True if a secret may be anywhere in the field's value."""
    return any(part.get("x-cog-secret") or part.get("format") == "password" for part in _parts(field))


def _parts(field: Any) -> Iterator[Schema]:
    """The schema and all schemas in it."""
    if not isinstance(field, dict):
        return
    yield field
    properties = field.get("properties")
    choices = field.get("anyOf")
    for part in (
        field.get("items"),
        field.get("additionalProperties"),
        *(properties.values() if isinstance(properties, dict) else ()),
        *(choices if isinstance(choices, list) else ()),
    ):
        yield from _parts(part)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_input(given: dict[str, Any], schema: Schema) -> None:
    """Raise BadInput, which names the field, unless the input is as the schema says. Takes linear time."""
    fields: dict[str, Schema] = schema.get("properties", {})
    for name in given:
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise BadInput(f"the model has no input {name[:64]!r}; its inputs are {known}", param=name[:64])
    for name in schema.get("required", ()):
        if name not in given:
            raise BadInput(f"the input `{name}` is needed", param=name)
    for name, value in given.items():
        _check(name, value, fields[name])


def _check(name: str, value: Any, field: Schema) -> None:
    if value is None and field.get("nullable"):
        return
    if choices := field.get("enum"):
        if value not in choices:
            raise BadInput(f"`{name}` must be one of {', '.join(map(str, choices))[:500]}", param=name)
        return
    kind = field.get("type")
    is_number = kind in ("integer", "number")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (is_number and isinstance(value, bool))):
        raise BadInput(f"`{name}` must be of type {kind}", param=name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < field.get("minimum", value):
            raise BadInput(f"`{name}` must be at least {field['minimum']}", param=name)
        if value > field.get("maximum", value):
            raise BadInput(f"`{name}` must be at most {field['maximum']}", param=name)
    if isinstance(value, str):
        n_chars = len(value)
        if not field.get("minLength", 0) <= n_chars <= field.get("maxLength", n_chars):
            raise BadInput(f"`{name}` has {n_chars} characters, which is not what its schema allows", param=name)
        if is_file(field) and not value.startswith(FILE_SCHEMES):
            raise BadInput(f"`{name}` is a file: send a data: URL, or the https: URL that it is at", param=name)
    if isinstance(value, list) and (item := field.get("items")):
        for each in value:
            _check(name, each, item)


def check_output(output: bytes, schema: Schema) -> None:
    """Raise PredictionFailed, which names the part, unless the output is what the schema says. Takes linear time.

    A predictor of any type may return None, as on Cog's server; for a file, None stands for one it cannot read."""
    if output.startswith(b'"data:') if is_file(schema) else output == b"null":
        return  # a large file is not decoded
    try:
        problem = _mismatch("output", msgspec.json.decode(output), schema)
    except (msgspec.MsgspecError, RecursionError):
        problem = "the output is no JSON, or is nested too deeply"
    if problem:
        raise PredictionFailed(f"the predictor's output is not what its schema says: {problem}")


def _mismatch(name: str, value: Any, schema: Schema) -> str:
    """Why the value is not what the schema says; empty if it is. Keywords that are not known allow everything."""
    if value is None and schema.get("nullable"):
        return ""
    if is_file(schema):
        if isinstance(value, str) and value.startswith(FILE_SCHEMES):
            return ""
        return f"`{name}` is no file: the path names none, or one outside of the predictor's folders"
    if isinstance(choices := schema.get("anyOf"), list):
        fits = any(not _mismatch(name, value, choice) for choice in choices)
        return "" if fits else f"`{name}` has none of its types"
    if choices := schema.get("enum"):
        return "" if value in choices else f"`{name}` must be one of {', '.join(map(str, choices))[:500]}"
    kind = str(schema.get("type", ""))
    is_bool = isinstance(value, bool) and kind in ("integer", "number")
    is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()  # 3.0, as NumPy counts
    if kind in _TYPES and (not (isinstance(value, _TYPES[kind]) or is_whole) or is_bool):
        return f"`{name}` must be of type {kind}"
    parts: Iterator[tuple[str, Any, Schema]] = iter(())
    if isinstance(value, dict) and isinstance(fields := schema.get("properties"), dict):
        required = schema.get("required", ())
        if missing := [each for each in required if each not in value and not _may_lack(fields.get(each))]:
            return f"`{name}.{missing[0]}` is missing"
        given = ((key, value[key]) for key in fields if key in value)
        parts = ((f"{name}.{key}", each, fields[key]) for key, each in given if each is not None or key in required)
    elif isinstance(value, list) and isinstance(item := schema.get("items"), dict):
        parts = ((name, each, item) for each in value)
    return next(filter(None, (_mismatch(*part) for part in parts)), "")


def _may_lack(field: Any) -> bool:
    """True if an output may leave the field out, which means None."""
    return isinstance(field, dict) and bool(field.get("nullable"))
