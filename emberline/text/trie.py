"""Many literal strings as one regular expression that never tries them one by one: models have thousands of
special tokens."""

import re
from collections.abc import Iterable
from typing import Any

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
