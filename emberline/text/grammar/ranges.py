"""Sets of characters as ascending, separate ranges of code points. No set holds surrogates: JSON text has none."""

from collections.abc import Iterable
from typing import TypeAlias

from emberline.protocol.grammar import MAX_CODE_POINT

Ranges: TypeAlias = tuple[tuple[int, int], ...]

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
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low <= high:
            common.append((low, high))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(first: Ranges, second: Ranges) -> Ranges:
    return intersect(first, complement(second))


def chars(text: str) -> Ranges:
    return union((ord(char), ord(char)) for char in text)
