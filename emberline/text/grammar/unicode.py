"""Characters by Unicode category, read from the interpreter's own tables once, on first use (about 40 ms)."""

import unicodedata
from functools import cache
from itertools import groupby

from emberline.text.grammar.ranges import Ranges, complement, union

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
    """Characters of a general category such as L, Lu or Letter; None: no such category."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    short = _LONG_NAMES.get(name.lower(), name)
    if short in {"Alphabetic", "Alpha"}:
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl")))
    if short == "LC":
        return union(*(_by_category()[each] for each in ("Lu", "Ll", "Lt")))
    sets = [ranges for each, ranges in _by_category().items() if each == short or each[0] == short]
    return union(*sets) if sets else None


@cache
def words() -> Ranges:
    """Everything that any of the common regex dialects may call a word character."""
    sets = [ranges for name, ranges in _by_category().items() if name[0] in "LMN" or name == "Pc"]
    return union(*sets, _ALPHABETIC_SYMBOLS, _JOINERS)


@cache
def digits() -> Ranges:
    return _by_category()["Nd"]
