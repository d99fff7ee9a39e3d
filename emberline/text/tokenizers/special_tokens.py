"""Prevents special-token injection: text of clients never becomes special tokens.

A chat template puts messages between special tokens, and the rendered text is parsed for them. So that a message that
contains `<|im_end|>` cannot end its turn, a mark is inserted behind the first character of every such string before
rendering: `<` mark `|im_end|>`. The template copies the mark, the tokenizer finds no special token there, removes the
mark, and the string becomes ordinary tokens (`Tokenizer.encode_marked`). The mark is a Unicode noncharacter that the
client's strings do not contain. Text without such strings is rendered and tokenized unchanged.

Only control tokens are guarded. Tokens that models read and write as text (`<think>`, `<tool_call>`, not special in
their tokenizers) are left alone, since templates look for them. A template that concatenates two client strings
directly could still complete a special token; no such template is known.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from emberline.protocol.errors import BadInput

_NEVER = "(?!)"
_Node = dict[str, Any]  # a trie: character → child; "" where a string ends


def longest_match(strings: Iterable[str]) -> str:
    """A regex that matches the longest of the strings at a position."""
    return _branch(_trie(strings)) or _NEVER


def first_characters(strings: Iterable[str]) -> str:
    """A regex that matches the first character of every string, also where strings overlap."""
    options = [f"{re.escape(char)}(?={_branch(child)})" for char, child in sorted(_trie(strings).items())]
    return "|".join(options) or _NEVER


def _trie(strings: Iterable[str]) -> _Node:
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


MAX_DEPTH = 256  # of the values that a template gets
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters


class Guard:
    def __init__(self, special: Iterable[str]) -> None:
        self._special = re.compile(first_characters(special))

    def choose(self, *values: Any) -> str:
        """The mark for these values (strings, lists and dicts of them); empty if none is needed."""
        text = "\0".join(_strings(*values))  # one search: what joined texts spell is marked in vain at worst
        if self._special.search(text) is None:
            return ""
        for mark in MARKS:
            if mark not in text:
                return mark
        raise BadInput("the messages use every noncharacter from U+FDD0 to U+FDEF", param="messages")

    def mark(self, value: Any, mark: str) -> Any:
        """The value with the mark inside every text of a special token, also in keys, which may be tool arguments."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value


def _strings(*values: Any) -> list[str]:
    """All strings inside, level by level: recursion would cost every string as many steps as it is nested deep, and its
    limit is another in every version of Python."""
    found: list[str] = []
    level, n_levels = list(values), 0
    while level:
        if n_levels == MAX_DEPTH:
            raise BadInput("the tool arguments in the messages are nested too deeply", param="messages")
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                found.append(value)
            elif isinstance(value, Mapping):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
        level, n_levels = below, n_levels + 1
    return found
