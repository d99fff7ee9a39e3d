"""Calls as models write them beside their format: a JSON object with the format's keys, alone or inside a wrapper.

    ```json                     <tools>                                  {{"name": "now", "arguments": {}}}
    {                           {"name": "now", "arguments": {}}
      "name": "now",            </tools>
      "arguments": {}
    }
    ```

The grammar (`loose_grammar`) binds the arguments from `"arguments":` on. Nothing may follow a call but the end of its
wrapper and more calls. So every such object with a declared name is a call, wherever the text has it.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

BRACE = "{"
FENCE = "```"
WRAPPERS = {FENCE: FENCE, "<tools>": "</tools>", "<function_call>": "</function_call>"}  # beginning → end
MARKERS = (*WRAPPERS, BRACE)  # what a call begins with
SPACES = " \t\r\n"
MAX_SPACES = 24  # in a row
MAX_LANGUAGE_CHARS = 12  # of the language that a fence names
MAX_NAME_CHARS = 64
HEAD_CHARS = 512  # more than any head has
TAIL_CHARS = 96

_S = rf"[{SPACES}]{{0,{MAX_SPACES}}}"


class LooseHead(NamedTuple):
    """The beginning of a call: its wrapper, its name, and all up to its arguments."""

    name: str
    end: int


def read_head(text: str, names: Collection[str]) -> LooseHead | None:
    """The head with one of these names that the text begins with; None if there is none."""
    found = _HEAD.match(text)
    return LooseHead(found["name"], found.end()) if found is not None and found["name"] in names else None


def may_become_head(text: str, names: Collection[str]) -> bool:
    """True if the text may be the beginning of a head with one of these names."""
    found = _BEGUN.fullmatch(text, 0, HEAD_CHARS)
    if found is None or len(text) > HEAD_CHARS:
        return False
    name = found["name"]
    return name is None or (name in names if found["quote"] else any(known.startswith(name) for known in names))


def begins_a_call(text: str) -> bool:
    """True of a text that may become a head if nothing else is likely: it has come to the name."""
    found = _BEGUN.fullmatch(text)
    return found is not None and found["name"] is not None


def tail_end(text: str, *, final: bool) -> int | None:
    """The offset behind what ends a call: its brace, and the end of its wrapper or a comma. None if that is not known
    yet."""
    found = _TAIL.match(text)
    if found is None:
        undecided, end = not text.strip(SPACES), 0
    else:
        undecided = found["end"] is None and any(end.startswith(text[found.end() :]) for end in WRAPPERS.values())
        end = found.end()
    if not undecided or len(text) > TAIL_CHARS:
        return end
    return len(text) if final else None


def _begun(parts: list[str]) -> str:
    """A pattern of every beginning of what the parts match one after the other."""
    pattern = ""
    for part in reversed(parts):
        pattern = f"(?:{part}{pattern})?"
    return pattern


def _chars(text: str) -> list[str]:
    return [re.escape(char) for char in text]


def _after_wrapper(begin: str) -> list[str]:
    return [f"[a-z]{{0,{MAX_LANGUAGE_CHARS}}}", _S] if begin == FENCE else [_S]


_NAME = rf"(?P<name>[a-zA-Z0-9_.-]{{0,{MAX_NAME_CHARS}}})"
_CALL = [*_chars('"name"'), _S, ":", _S, '"', _NAME, '(?P<quote>")', _S, ",", _S, *_chars('"arguments"'), _S, ":", _S]
_OBJECT = [r"\{", r"\{?", _S, *_CALL]
_HEAD = re.compile(
    "".join(f"(?:{''.join([re.escape(begin), *_after_wrapper(begin)])})?" for begin in WRAPPERS)
    + "".join(_OBJECT)
    + r"(?=\{)"
)
_BEGUN = re.compile("".join(_begun([*_chars(begin), *_after_wrapper(begin)]) for begin in WRAPPERS) + _begun(_OBJECT))
_TAIL = re.compile(rf"{_S}\}}\}}?{_S}(?P<end>{'|'.join(map(re.escape, WRAPPERS.values()))}|,)?")
