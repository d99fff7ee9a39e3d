"""Characters by Unicode category, read from the interpreter's own tables once, on first use (about 0.2 s)."""

import unicodedata
from functools import cache

from emberline.protocol.grammar import MAX_CODE_POINT
from emberline.text.grammar.ranges import Ranges, union

_LONG_NAMES = {
    "letter": "L", "lowercase_letter": "Ll", "uppercase_letter": "Lu", "titlecase_letter": "Lt",
    "modifier_letter": "Lm", "other_letter": "Lo", "cased_letter": "LC", "mark": "M", "number": "N", "decimal_number": "Nd",
    "letter_number": "Nl",    "other_number": "No", "punctuation": "P", "punct": "P", "symbol": "S", "math_symbol": "Sm", "currency_symbol": "Sc",
    "separator": "Z", "space_separator": "Zs", "digit": "Nd", "other": "C", "control": "Cc",
}  # fmt: skip


@cache
def _by_category() -> dict[str, Ranges]:
    category = unicodedata.category
    found: dict[str, list[tuple[int, int]]] = {}
    start, current = 0, category(chr(0))
    for code in range(1, MAX_CODE_POINT + 1):
        name = category(chr(code))
        if name != current:
            found.setdefault(current, []).append((start, code - 1))
            start, current = code, name
    found.setdefault(current, []).append((start, MAX_CODE_POINT))
    return {name: union(pairs) for name, pairs in found.items()}


@cache
def category(name: str) -> Ranges | None:
    """Characters of a general category such as L, Lu or Letter; None: no such category."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    short = _LONG_NAMES.get(name.lower(), name)
    if short in {"Alphabetic", "Alpha"}:
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl")))
    if short == "LC":
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt")))
    sets = [
        ranges for each, ranges in _by_category().items() if each == short or (len(short) == 1 and each[0] == short)
    ]
    return union(*sets) if sets else None


@cache
def words() -> Ranges:
    """Everything that any of the common regex dialects may call a word character."""
    return union(*(_by_category()[each] for each in _by_category() if each[0] in "LMN" or each == "Pc"))


@cache
def digits() -> Ranges:
    return _by_category()["Nd"]
