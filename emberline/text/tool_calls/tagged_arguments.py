"""Tool-call arguments written as tagged keys and values (GLM, Qwen3-Coder), read as JSON while they arrive.

    <arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>

Texts stand as they are, other values as JSON: which one a value is, its schema tells.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from emberline.text.detokenizer import MarkerFinder

KEY_CHARS = 256


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
    """Whether values of this schema are written as plain text."""
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
        self._end = MarkerFinder((tags.end.rstrip(), tags.end.strip()))
        self._open = "{"  # before the next key, or before the end
        self._schema: object = None  # of the value that is being read
        self._in_value = False
        self._first = True  # nothing of the value was read yet
        self._text = False  # the value is plain text
        self._held = ""  # of a value that is JSON

    def push(self, text: str, *, final: bool) -> Scanned:
        out, at = "", 0
        while True:
            step = self._push_value(text[at:]) if self._in_value else self._push_key(text[at:], final=final)
            out += step.json
            at += step.n
            if step.ended or not step.n:
                return Scanned(at, out, step.ended)

    def _push_key(self, text: str, *, final: bool) -> Scanned:
        begun = text.lstrip()
        if not begun.startswith(self._key):
            if not final and (not begun or self._key.startswith(begun)):
                return Scanned(0, "", ended=False)
            closing = "{}" if self._open == "{" else "}"
            return Scanned(len(text) - len(begun), closing, ended=True)
        found = self._value.search(begun, len(self._key), len(self._key) + KEY_CHARS)
        if found is None:
            return Scanned(0, "", ended=len(begun) > len(self._key) + KEY_CHARS)
        key = begun[len(self._key) : found.start()].strip()
        self._in_value = self._first = True
        self._schema = self._properties.get(key)
        self._text, self._held = is_text(self._schema), ""
        opening = f"{self._open}{msgspec.json.encode(key).decode()}:" + ('"' if self._text else "")
        self._open = ","
        return Scanned(len(text) - len(begun) + found.end(), opening, ended=False)

    def _push_value(self, text: str) -> Scanned:
        if self._first and len(text) < len(self._before) and self._before.startswith(text):
            return Scanned(0, "", ended=False)
        skip = len(self._before) if self._first and text.startswith(self._before) else 0
        found = self._end.find(text)
        if found is not None:
            self._in_value = False
            return Scanned(found.end(), self._emit(text[skip : found.start()]) + self._close(), ended=False)
        end = len(text) - self._end.n_undecided(text)
        if end <= skip:
            return Scanned(0, "", ended=False)
        self._first = False
        return Scanned(end, self._emit(text[skip:end]), ended=False)

    def _emit(self, value: str) -> str:
        if self._text:
            return msgspec.json.encode(value).decode()[1:-1]
        self._held += value
        return ""

    def _close(self) -> str:
        if self._text:
            return '"'
        try:
            msgspec.json.decode(self._held)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return msgspec.json.encode(self._held).decode()
        return self._held.strip()
