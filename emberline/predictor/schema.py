"""The schema of a predictor, derived from the syntax tree of its file: nothing of the project is imported.

Types that cannot be told this way are refused by name, as Cog's own server would not know them either without a schema.
"""

import ast
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.prediction import Schema

MAX_SOURCE_BYTES = 4 << 20
MAX_TYPES = 2_000  # in a signature, those of fields included
_PLAIN: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "Path": {"type": "string", "format": "uri"},
    "File": {"type": "string", "format": "uri"},
    "URLPath": {"type": "string", "format": "uri"},
    "URLFile": {"type": "string", "format": "uri"},
    "Secret": {"type": "string", "format": "password", "writeOnly": True, "x-cog-secret": True},
    "dict": {"type": "object"},
    "Dict": {"type": "object"},
    "list": {"type": "array"},
    "List": {"type": "array"},
    "Any": {},
    "Opaque": {},
}
_ITERATORS = ("Iterator", "AsyncIterator", "Generator", "AsyncGenerator")
_CONCATENATED = ("ConcatenateIterator", "AsyncConcatenateIterator")
_LIMITS = {"ge": "minimum", "le": "maximum", "min_length": "minLength", "max_length": "maxLength", "regex": "pattern"}


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The input and output of a predictor, and how it answers."""

    input: Schema
    output: Schema
    streams: bool  # it returns an iterator, or has Cog's decorator for streaming
    slots: int  # by its decorator; 0: it has none
    is_async: bool


def read_signature(source: bytes, reference: str, folder: Path | None = None) -> Signature:
    """Read the signature of `run` (or `predict`) of the class or function that the reference names. `folder`: the
    project's, for types and constants that the source imports from its other files.

    Raises BadInput, or Unsupported naming a type that cannot be derived."""
    try:
        return _Reader(_parsed(source, reference), reference, folder).read()
    except RecursionError:
        raise Unsupported(f"{reference}: its types contain themselves, or a value is nested too deeply") from None


def _parsed(source: bytes, name: str) -> ast.Module:
    if len(source) > MAX_SOURCE_BYTES:
        raise BadInput(f"{name} is too large")
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{name} cannot be read as Python: {error}") from None


class _Reader:
    def __init__(self, module: ast.Module, reference: str, folder: Path | None) -> None:
        self._reference = reference
        self._classes: dict[str, ast.ClassDef] = {}
        self._constants: dict[str, Any] = {}
        for node in module.body:
            if isinstance(node, ast.ImportFrom) and folder is not None:
                self._import(node, folder)
        self._classes |= _classes(module)
        self._functions = {
            node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._constants |= _constants(module)
        self._n_types = 0

    def _import(self, node: ast.ImportFrom, folder: Path) -> None:
        """Add the classes and constants of another file of the project, by the names that the import gives them."""
        path = folder / Path(self._reference).parent if node.level else folder
        path = path / f"{(node.module or '').replace('.', '/')}.py"
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            return  # a package, or a folder
        module = _parsed(path.read_bytes(), path.name)
        classes, constants = _classes(module), _constants(module)
        self._classes |= classes  # also those that the named ones have as fields
        for alias in node.names:
            name = alias.asname or alias.name
            if alias.name == "*":
                self._constants |= constants
            elif alias.name in classes:
                self._classes[name] = classes[alias.name]
            elif alias.name in constants:
                self._constants[name] = constants[alias.name]

    def read(self) -> Signature:
        method = self._method()
        arguments = method.args
        names = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
        pairs = list(zip(names, defaults, strict=True))
        if pairs and pairs[0][0].arg == "self":
            pairs = pairs[1:]
        pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
        if arguments.vararg or arguments.kwarg:
            raise Unsupported(f"{self._reference}: `*` arguments have no schema; name each input")
        properties: dict[str, Schema] = {}
        required = []
        for order, (argument, default) in enumerate(pairs):
            field, is_required = self._field(argument, default)
            properties[argument.arg] = {"title": _title(argument.arg), "x-order": order, **field}
            if is_required:
                required.append(argument.arg)
        decorators = [self._decorator(each) for each in method.decorator_list]
        output = self._output(method.returns)
        return Signature(
            input={"title": "Input", "type": "object", "properties": properties}
            | ({"required": required} if required else {}),
            output={"title": "Output", **output},
            streams="streaming" in [name for name, _ in decorators] or "x-cog-array-type" in output,
            slots=next((self._slots(call) for name, call in decorators if name == "concurrent"), 0),
            is_async=isinstance(method, ast.AsyncFunctionDef),
        )

    def _method(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        name = self._reference.partition(":")[2]
        if (function := self._functions.get(name)) is not None:
            return function
        if (found := self._classes.get(name)) is None:
            raise BadInput(f"{self._reference}: the file has no class or function {name}")
        methods = {each.name: each for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        for wanted in ("run", "predict"):
            if wanted in methods:
                return methods[wanted]
        raise BadInput(f"{self._reference}: the class has no method `run` of its own")

    # --- inputs ------------------------------------------------------------------------------------------------------

    def _field(self, argument: ast.arg, default: ast.expr | None) -> tuple[Schema, bool]:
        """Schema of an input, and True if requests must have it."""
        if argument.annotation is None:
            raise BadInput(f"{self._reference}: the input `{argument.arg}` has no type")
        field = dict(self._type(argument.annotation, argument.arg))
        if not (isinstance(default, ast.Call) and _name(default.func) == "Input"):
            if default is None:
                return field, not field.get("nullable")
            return self._with_default(field, default, argument.arg), False
        options = {each.arg: each.value for each in default.keywords if each.arg is not None}
        if default.args:
            options["default"] = default.args[0]
        has_default = "default" in options
        for option, node in options.items():
            if option in ("default_factory", "accept"):
                continue
            if option == "default":
                field = self._with_default(field, node, argument.arg)
                continue
            if option == "description" and not isinstance(node, ast.Constant):
                continue  # computed: for people, who can do without
            value = self._choices(node, argument.arg) if option == "choices" else self._value(node, argument.arg)
            if value is None:
                continue
            elif option == "choices":
                field["enum"] = value
            elif option in _LIMITS:
                if type(value) not in ((str,) if option == "regex" else (int, float)):
                    raise BadInput(f"{self._reference}: `Input({option}={value!r})` of `{argument.arg}` is no limit")
                field[_LIMITS[option]] = value
            elif option in ("description", "deprecated"):
                field[option] = value
            else:
                raise Unsupported(f"{self._reference}: `Input({option}=…)` of `{argument.arg}` is not known")
        return field, not has_default and not field.get("nullable")

    def _with_default(self, field: Schema, node: ast.expr, name: str) -> Schema:
        """The field with its default. One that is computed is the predictor's affair: Cog's server uses it anyway."""
        try:
            value = self._value(node, name)
        except Unsupported:
            return field
        return field | ({"nullable": True} if value is None else {"default": value})

    def _choices(self, node: ast.expr, name: str) -> list[Any]:
        """A list, a constant of the module, or `list(…)` or the keys of one."""
        while isinstance(node, ast.Call):
            if _name(node.func) in ("list", "sorted", "tuple") and len(node.args) == 1:
                node = node.args[0]
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
                node = node.func.value
            else:
                break
        value = self._value(node, name)
        if not isinstance(value, list | tuple | dict | set):
            raise BadInput(f"{self._reference}: the choices of `{name}` are no list")
        return list(value)

    def _value(self, node: ast.expr, name: str) -> Any:
        try:
            is_constant = isinstance(node, ast.Name) and node.id in self._constants
            value = self._constants[node.id] if is_constant else ast.literal_eval(node)  # type: ignore[attr-defined]
            msgspec.json.encode(value)
            return value
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise Unsupported(
                f"{self._reference}: a value of `{name}` is no JSON, or is computed ({ast.unparse(node)[:80]}): "
                "write it out"
            ) from None

    # --- types -------------------------------------------------------------------------------------------------------

    def _type(self, node: ast.expr, name: str) -> Schema:
        self._n_types += 1
        if self._n_types > MAX_TYPES:
            raise Unsupported(f"{self._reference}: its types contain themselves, or too many others")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, MemoryError):
                raise BadInput(f"{self._reference}: the type of `{name}` cannot be read") from None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._union([node.left, node.right], name)
        if isinstance(node, ast.Subscript):
            return self._generic(_name(node.value), _parts(node.slice), name)
        plain = _name(node)
        if plain in _PLAIN:
            return _PLAIN[plain]
        if plain in self._classes:
            return self._model(self._classes[plain])
        raise Unsupported(
            f"{self._reference}: the type of `{name}`, {ast.unparse(node)[:80]}, has no schema here; use str, int, "
            "float, bool, Path, Secret, Literal, Optional, list, dict or a BaseModel of the same file"
        )

    def _generic(self, outer: str, inner: list[ast.expr], name: str) -> Schema:
        if not inner:
            raise Unsupported(f"{self._reference}: the type {outer}[()] of `{name}` has no schema here")
        if outer == "Optional":
            return self._type(inner[0], name) | {"nullable": True}
        if outer == "Union":
            return self._union(inner, name)
        if outer == "Annotated":
            return self._type(inner[0], name)
        if outer == "Literal":
            return self._literal(inner, name)
        if outer in ("list", "List", "Sequence", "set", "Set", "tuple", "Tuple"):
            return {"type": "array"} | self._items(inner, name)
        if outer in ("dict", "Dict", "Mapping"):
            return {"type": "object"}
        if outer in _ITERATORS:
            return {"type": "array", "items": self._type(inner[0], name), "x-cog-array-type": "iterator"}
        if outer in _CONCATENATED:
            text = self._type(inner[0], name)
            return {
                "type": "array",
                "items": text,
                "x-cog-array-type": "iterator",
                "x-cog-array-display": "concatenate",
            }
        raise Unsupported(f"{self._reference}: the type {outer}[…] of `{name}` has no schema here")

    def _literal(self, nodes: list[ast.expr], name: str) -> Schema:
        values = [self._value(each, name) for each in nodes]
        kinds = {type(each) for each in values}
        kind = {str: "string", int: "integer", bool: "boolean"}.get(kinds.pop()) if len(kinds) == 1 else None
        return {"enum": values} | ({"type": kind} if kind else {})

    def _items(self, inner: list[ast.expr], name: str) -> Schema:
        """The type of the elements; empty if a tuple has several."""
        types = [self._type(each, name) for each in inner if not (isinstance(each, ast.Constant) and each.value is ...)]
        return {"items": types[0]} if types and all(each == types[0] for each in types) else {}

    def _union(self, members: list[ast.expr], name: str) -> Schema:
        flat: list[ast.expr] = []
        for each in members:
            is_union = isinstance(each, ast.BinOp) and isinstance(each.op, ast.BitOr)
            flat += [each.left, each.right] if is_union else [each]  # type: ignore[attr-defined]
        others = [each for each in flat if not (isinstance(each, ast.Constant) and each.value is None)]
        nullable: Schema = {"nullable": True} if len(others) < len(flat) else {}
        kinds = [self._type(each, name) for each in others]
        return (kinds[0] if len(kinds) == 1 else {"anyOf": kinds}) | nullable

    def _output(self, node: ast.expr | None) -> Schema:
        if node is None:
            raise BadInput(f"{self._reference}: the method says nothing of its output: add `-> TYPE`")
        if isinstance(node, ast.Constant) and node.value is None:
            return {"nullable": True}
        return self._type(node, "the output")

    def _model(self, found: ast.ClassDef) -> Schema:
        """A class of fields with types, or an enumeration."""
        if any(_name(base).endswith("Enum") for base in found.bases):
            assigned = [each.value for each in found.body if isinstance(each, ast.Assign)]
            return self._literal(assigned, found.name)
        fields = [each for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        properties = {each.target.id: self._type(each.annotation, each.target.id) for each in fields}  # type: ignore[union-attr]
        required = [each.target.id for each in fields if each.value is None]  # type: ignore[union-attr]
        return {"title": found.name, "type": "object", "properties": properties, "required": required}

    # --- decorators --------------------------------------------------------------------------------------------------

    def _decorator(self, node: ast.expr) -> tuple[str, ast.Call | None]:
        return (_name(node.func), node) if isinstance(node, ast.Call) else (_name(node), None)

    def _slots(self, call: ast.Call | None) -> int:
        given = None if call is None else next((each.value for each in call.keywords if each.arg == "max"), None)
        if given is None and call is not None and call.args:
            given = call.args[0]
        slots = 1 if given is None else self._value(given, "concurrent")
        if type(slots) is not int or not 1 <= slots <= 256:
            raise BadInput(f"{self._reference}: `concurrent` takes a number from 1 to 256")
        return slots


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; empty if the expression is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def _constants(module: ast.Module) -> dict[str, Any]:
    """Literal values of the module's names."""
    found: dict[str, Any] = {}
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                try:
                    found[target.id] = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    found.pop(target.id, None)
    return found


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def openapi(signature: Signature) -> Schema:
    """The document that Cog's server reads for its checks and for streaming (`.cog/openapi_schema.json`)."""
    request = {"$ref": "#/components/schemas/PredictionRequest"}
    post: Schema = {
        "summary": "Predict",
        "operationId": "predict_predictions_post",
        "requestBody": {"content": {"application/json": {"schema": request}}},
        "responses": {"200": {"description": "Successful Response"}},
    }
    if signature.streams:
        post["x-cog-streaming"] = True
    return {
        "openapi": "3.0.2",
        "info": {"title": "Cog", "version": "0.1.0"},
        "paths": {"/predictions": {"post": post}},
        "components": {
            "schemas": {
                "Input": signature.input,
                "Output": signature.output,
                "PredictionRequest": {
                    "type": "object",
                    "properties": {"id": {"type": "string"}, "input": {"$ref": "#/components/schemas/Input"}},
                },
            }
        },
    }
