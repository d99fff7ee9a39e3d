"""Sets of characters as ascending, disjoint ranges of code points, and the Unicode categories.

No set contains surrogates: JSON text has none.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from emberline.protocol.grammar import MAX_CODE_POINT

Ranges: TypeAlias = tuple[tuple[int, int], ...]
R = TypeVar("R", bound=tuple[Any, ...])

ANY: Ranges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return intersect(tuple(merged), ANY)


def complement(ranges: Ranges) -> Ranges:
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return intersect(tuple(gaps), ANY)


def intersect(first: Ranges, second: Ranges) -> Ranges:
    return tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in overlapping(first, second))


def overlapping(first: Sequence[R], second: Sequence[R]) -> Iterator[tuple[R, R]]:
    """The pairs of ranges (low, high, …), one of each list, that have a character in common."""
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][0] <= second[j][1] and second[j][0] <= first[i][1]:
            yield first[i], second[j]
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def subtract(first: Ranges, second: Ranges) -> Ranges:
    return intersect(first, complement(second))


def chars(text: str) -> Ranges:
    return union((ord(char), ord(char)) for char in text)


_LONG_NAMES = {
    "letter": "L", "lowercase_letter": "Ll", "uppercase_letter": "Lu", "titlecase_letter": "Lt",
    "modifier_letter": "Lm", "other_letter": "Lo", "cased_letter": "LC", "mark": "M", "number": "N",
    "decimal_number": "Nd", "letter_number": "Nl", "other_number": "No", "punctuation": "P", "punct": "P",
    "symbol": "S", "math_symbol": "Sm", "currency_symbol": "Sc", "separator": "Z", "space_separator": "Zs",
    "digit": "Nd", "other": "C", "control": "Cc",
}  # fmt: skip

# Outside of these every character is unassigned or private.
_ASSIGNED = ((0, 0x33FFF), (0xE0000, 0xE01FF))
_PRIVATE = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
_ALPHABETIC_SYMBOLS = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
_JOINERS = ((0x200C, 0x200D),)


@cache
def _by_category() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = {"Co": list(_PRIVATE)}
    for first, last in _ASSIGNED:
        codes = range(first, last + 1)
        for name, group in groupby(codes, key=lambda code: unicodedata.category(chr(code))):
            run = list(group)
            found.setdefault(name, []).append((run[0], run[-1]))
    named = union(*found.values())
    found["Cn"] = [*found.get("Cn", []), *complement(named)]
    return {name: union(pairs) for name, pairs in found.items()}


@cache
def category(name: str) -> Ranges | None:
    """Characters of a general category such as L, Lu or Letter; None if there is no such category."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    short = _LONG_NAMES.get(name.lower(), name)
    if short in {"Alphabetic", "Alpha"}:
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl")))
    if short == "LC":
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt")))
    sets = [ranges for each, ranges in _by_category().items() if each == short or each[0] == short]
    return union(*sets) if sets else None


@cache
def word_characters() -> Ranges:
    """Every character that a common regex dialect may match with \\w."""
    sets = [ranges for name, ranges in _by_category().items() if name[0] in "LMN" or name == "Pc"]
    return union(*sets, _ALPHABETIC_SYMBOLS, _JOINERS)


@cache
def digit_characters() -> Ranges:
    return _by_category()["Nd"]
