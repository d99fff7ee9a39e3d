"""Tool-call arguments written as tagged keys and values (GLM, Qwen3-Coder), read as JSON while they arrive.

    <arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>

Texts stand as they are, other values as JSON: which one a value is, its schema tells.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from emberline.text.tokenizers.detokenizer import MarkerFinder

KEY_CHARS = 256
_SPACE = re.compile(r"\s*")
_SENTINEL = re.compile("[\ud800-\udfff]")  # a special token that has no place in a value


class Tags(NamedTuple):
    """Around the keys and values of a call's arguments."""

    key: str
    value: str
    end: str


class Scanned(NamedTuple):
    n: int  # characters read
    json: str  # what they are in JSON
    ended: bool  # the arguments are complete


def is_text(schema: object) -> bool:
    """True if values of this schema are written as plain text."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kind == "string"


def write_tagged(tags: Tags, arguments: str) -> str:
    """A JSON object as tagged keys and values."""
    values = msgspec.json.decode(arguments, type=dict[str, Any])
    return "".join(f"{tags.key}{key}{tags.value}{_as_text(value)}{tags.end}" for key, value in values.items())


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class TaggedScanner:
    """Reads one call's arguments. `schema` is the tool's; `tags` may contain sentinels."""

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._key = tags.key.strip()
        self._value = re.compile(r"\s*".join(map(re.escape, re.split(r"\s+|(?<=>)(?=<)", tags.value.strip()))))
        self._before = tags.value[len(tags.value.rstrip()) :]  # white space before a value that is no part of it
        ends = (tags.end.rstrip(), tags.end.strip())
        self._end = re.compile("|".join(map(re.escape, ends)))
        self._n_undecided = MarkerFinder(ends).n_undecided
        self._open = "{"  # before the next key, or before the end
        self._in_value = False
        self._first = True  # nothing of the value was read yet
        self._text = False  # the value is plain text
        self._held: list[str] = []  # of a value that is JSON

    def push(self, text: str, *, final: bool) -> Scanned:
        out: list[str] = []
        at = 0
        while True:
            step = self._push_value(text, at) if self._in_value else self._push_key(text, at, final=final)
            out.append(step.json)
            if step.ended or step.n == at:
                return Scanned(step.n, "".join(out), step.ended)
            at = step.n

    def _push_key(self, text: str, at: int, *, final: bool) -> Scanned:
        """Read the key from `at` on; `n` of the result is the offset reached."""
        begun = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere
        closing = Scanned(begun, "{}" if self._open == "{" else "}", ended=True)
        if not text.startswith(self._key, begun):
            may_begin = self._key.startswith(text[begun : begun + len(self._key)])
            return Scanned(begun, "", ended=False) if may_begin and not final else closing
        first = begun + len(self._key)
        found = self._value.search(text, first, first + KEY_CHARS)
        if found is None:
            return closing if final or len(text) > first + KEY_CHARS else Scanned(at, "", ended=False)
        key = _SENTINEL.sub("", text[first : found.start()]).strip()
        self._in_value = self._first = True
        self._text, self._held = is_text(self._properties.get(key)), []
        opening = f"{self._open}{msgspec.json.encode(key).decode()}:" + ('"' if self._text else "")
        self._open = ","
        return Scanned(found.end(), opening, ended=False)

    def _push_value(self, text: str, at: int) -> Scanned:
        if self._first and len(text) - at < len(self._before) and self._before.startswith(text[at:]):
            return Scanned(at, "", ended=False)
        start = at + len(self._before) if self._first and text.startswith(self._before, at) else at
        found = self._end.search(text, start)
        if found is not None:
            self._in_value = False
            return Scanned(found.end(), self._emit(text[start : found.start()]) + self._close(), ended=False)
        end = len(text) - self._n_undecided(text)
        if end <= start:
            return Scanned(at, "", ended=False)
        self._first = False
        return Scanned(end, self._emit(text[start:end]), ended=False)

    def _emit(self, value: str) -> str:
        value = _SENTINEL.sub("", value)
        if self._text:
            return msgspec.json.encode(value).decode()[1:-1]
        self._held.append(value)
        return ""

    def _close(self) -> str:
        if self._text:
            return '"'
        value = "".join(self._held)
        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return msgspec.json.encode(value).decode()
        return value.strip()
