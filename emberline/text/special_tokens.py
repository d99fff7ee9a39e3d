"""Keeps what clients write from becoming special tokens.

A chat template puts messages between special tokens, and the text it renders is parsed for them. So that a message
which contains `<|im_end|>` cannot end its turn, a mark goes into every such string of the client's before rendering,
after its first character: `<` mark `|im_end|>`. The template carries the mark along, the tokenizer does not find a
special token there, takes the mark out, and the string becomes ordinary tokens (Tokenizer.encode_marked). The mark is
one character that Unicode reserves for use inside programs, and one that the client's strings do not contain.
Text without such strings is rendered and tokenised as it is.

Only control tokens are guarded. Tokens that a model writes and reads as text (`<think>`, `<tool_call>`: not special in
their tokenizers) stay what they are, as templates look for them. A template that itself glues two client strings
together without anything in between could still complete a special token; none is known.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from emberline.protocol.errors import BadInput

_NEVER = "(?!)"
_Node = dict[str, Any]  # character → what may follow it; "" where a string ends


def longest(strings: Iterable[str]) -> str:
    """Matches the longest of the strings that stands at a place."""
    return _branch(_grow(strings)) or _NEVER


def beginnings(strings: Iterable[str]) -> str:
    """Matches the first character of every string, also of those that overlap."""
    options = [f"{re.escape(char)}(?={_branch(child)})" for char, child in sorted(_grow(strings).items())]
    return "|".join(options) or _NEVER


def _grow(strings: Iterable[str]) -> _Node:
    root: _Node = {}
    for string in filter(None, strings):
        node = root
        for char in string:
            node = node.setdefault(char, {})
        node[""] = None
    return root


def _branch(node: _Node) -> str:
    options = [re.escape(char) + _branch(child) for char, child in sorted(node.items()) if char]
    if not options:
        return ""
    body = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return body + "?" if "" in node else body


MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters


class Guard:
    def __init__(self, special: Iterable[str]) -> None:
        self._special = re.compile(beginnings(special))

    def choose(self, *values: Any) -> str:
        """The mark to use for these values (strings, and lists and dicts of them); empty when none is needed."""
        if not any(self._special.search(text) for text in _strings(values)):
            return ""
        for mark in MARKS:
            if not any(mark in text for text in _strings(values)):
                return mark
        raise BadInput("the messages use every noncharacter from U+FDD0 to U+FDEF", param="messages")

    def mark(self, value: Any, mark: str) -> Any:
        """The value with the mark inside every special token's text, keys too: those of tool arguments are clients'."""
        if not mark:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
