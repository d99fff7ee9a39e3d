"""Messages of the JSON decoder, rewritten in the API's terms."""

import re

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


def explain(message: str, prefix: str = "") -> tuple[str, str | None]:
    """The message for a client, and the field that it is about; `prefix` is the path to what was decoded."""
    parts = _PATH.fullmatch(message)
    assert parts is not None
    what, in_keys, path = parts[1], parts[2], _joined(prefix, parts[3] or "")
    if missing := _MISSING.fullmatch(what):
        path = _joined(path, missing[1])
        return f"`{path}` is missing", path
    subject = f"`{path}`" if path else "the body"
    return f"{'a key of ' if in_keys else ''}{subject} {_problem(what, path)}", path or None


def _joined(prefix: str, path: str) -> str:
    return prefix + path if not prefix or not path or path.startswith("[") else f"{prefix}.{path}"


def _problem(what: str, path: str) -> str:
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
        only_text = "; only text is" if ".content[" in path and path.endswith(".type") else ""
        return f"has the value {found[1][:200]}, which is not supported{only_text}"
    return f"is not valid: {what}"
