"""A grammar as plain data: what a door builds from a schema, a regex or tools, and an engine binds a sequence to.

Expressions over characters, with rules for recursion. Rule 0 is what the whole reply must match. Meaning is that of a
context-free grammar: no lexer, no longest match.
"""

from typing import TypeAlias

import msgspec

MAX_CODE_POINT = 0x10FFFF


class Text(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """These characters."""

    text: str


class Chars(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """One character of these ranges of code points: inclusive, ascending, apart. Surrogates are in none."""

    ranges: tuple[tuple[int, int], ...]


class Token(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """One special token of the model. No other expression ever matches a special token."""

    token_id: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Any text, empty too, in which none of these strings occurs. What follows it must begin with one of them, or
    with a special token, or be the end."""

    without: tuple[str, ...] = ()


class Sequence(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    items: tuple["Expression", ...]


class OneOf(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    options: tuple["Expression", ...]


class Repeat(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    item: "Expression"
    least: int = 0
    most: int | None = None


class Rule(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """The rule with this number; rules may be recursive, except on the left."""

    number: int


Expression: TypeAlias = Text | Chars | Token | Free | Sequence | OneOf | Repeat | Rule


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    rules: tuple[Expression, ...]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Grammar).decode
