"""Messages of the JSON decoder, rewritten in the API's terms."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

from emberline.api.http.unknown_fields import UNSUPPORTED

_PATH = re.compile(r"(.*?)(?: - at (`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_RANGE = re.compile(r"Expected `[^`]+` (<=|>=|<|>) (\S+)")
_LENGTH = re.compile(r"Expected `([^`]+)` of length (<=|>=) (\d+)")
_PATTERN = re.compile(r"Expected `str` matching regex (.*)", re.DOTALL)
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)

_TYPES = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}
_UNITS = {"str": ("character", "characters"), "array": ("entry", "entries")}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "greater than"}


def explain(message: str, prefix: str = "", kind: Any = None) -> tuple[str, str | None]:
    """The message for a client, and the field that it is about.

    `prefix` is the path to what was decoded. `kind` is its type: a message about an unknown type of object names those
    that it has."""
    parts = _PATH.fullmatch(message)
    assert parts is not None
    what, in_keys, path = parts[1], parts[2], _joined(prefix, parts[3] or "")
    if missing := _MISSING.fullmatch(what):
        path = _joined(path, missing[1])
        return f"`{path}` is missing", path
    subject = f"`{path}`" if path else "the body"
    return f"{'a key of ' if in_keys else ''}{subject} {_problem(what)}{_choices(what, kind, parts[3])}", path or None


def _joined(prefix: str, path: str) -> str:
    return prefix + path if not prefix or not path or path.startswith("[") else f"{prefix}.{path}"


@cache
def _tags(kind: Any, path: str) -> list[str]:
    """The values that the field at `path` may have where it tells the type of an object; those that are documented."""
    *names, _ = re.findall(r"\[[^]]*\]|[^.\[\]]+", path)
    found = list(_documented(inspect.type_info(kind)))
    for name in names:
        found = [each for one in found for each in _inside(one, name)]
    tags = [one.tag for one in found if isinstance(one, inspect.StructType) and isinstance(one.tag, str)]
    return list(dict.fromkeys(tags))


def _inside(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of a field of an object, or of the elements of a list."""
    if isinstance(kind, inspect.ListType) and name.startswith("["):
        yield from _documented(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _documented(field.type)


def _documented(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the type itself, except what is in the type only to be refused by name."""
    if isinstance(kind, inspect.Metadata):
        if UNSUPPORTED not in (kind.extra_json_schema or {}):
            yield from _documented(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _documented(each)
    else:
        yield kind


def _choices(what: str, kind: Any, path: str | None) -> str:
    """The end of a message about a type of objects that is not supported; empty for other messages."""
    if kind is None or not path or not path.endswith(".type") or not _VALUE.fullmatch(what):
        return ""
    tags = _tags(kind, path)
    return f"; it must be one of {', '.join(tags)}" if tags else ""


def _problem(what: str) -> str:
    if found := _TYPE.fullmatch(what):
        wanted = [_TYPES.get(name, name) for name in found[1].split(" | ") if name != "null"]
        return f"must be {' or '.join(wanted) or 'null'}, not {_TYPES.get(found[2], found[2])}"
    if found := _LENGTH.fullmatch(what):
        one, several = _UNITS.get(found[1], ("field", "fields"))
        return f"must have {_BOUNDS[found[2]]} {found[3]} {one if found[3] == '1' else several}"
    if found := _RANGE.fullmatch(what):
        return f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}"
    if found := _PATTERN.fullmatch(what):
        return f"must match the regular expression {found[1]}"
    if found := _UNKNOWN.fullmatch(what):
        return f"has an unknown field `{found[1]}`"
    if found := _VALUE.fullmatch(what):
        return f"has the value {found[1][:200]}, which is not supported"
    return f"is not valid: {what}"
