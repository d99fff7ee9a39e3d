"""Limits and validity of a grammar that a client of the engine sends, checked before anything is built from it."""

import msgspec

from emberline.protocol import grammar as ir
from emberline.protocol.errors import BadInput

MAX_BYTES = 4 << 20  # encoded
MAX_EXPRESSIONS = 200_000
MAX_DEPTH = 200
MAX_REPEATS = 1 << 20


def read(encoded: bytes) -> ir.Grammar:
    """The decoded and checked grammar; BadInput says what is wrong with it."""
    if len(encoded) > MAX_BYTES:
        raise _bad(f"it has {len(encoded)} bytes, at most {MAX_BYTES} are allowed")
    try:
        grammar = ir.decode(encoded)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _bad(f"it cannot be decoded: {error}") from None
    check(grammar)
    return grammar


def check(grammar: ir.Grammar) -> None:
    if not grammar.rules:
        raise _bad("it has no rules")
    n = 0
    stack = [(rule, 1) for rule in grammar.rules]
    while stack:
        expression, depth = stack.pop()
        n += 1
        if n > MAX_EXPRESSIONS:
            raise _bad(f"it has more than {MAX_EXPRESSIONS} expressions")
        if depth > MAX_DEPTH:
            raise _bad(f"it is nested more than {MAX_DEPTH} deep")
        _check_expression(expression, len(grammar.rules))
        stack += [(part, depth + 1) for part in ir.children(expression)]
    if (number := ir.left_recursive(grammar.rules)) is not None:
        raise _bad(f"rule {number} is left-recursive")
    if ir.shortest_lengths(grammar.rules, [0])[0] >= ir.UNMATCHABLE:
        raise _bad("no text matches it")


def _check_expression(expression: ir.Expression, n_rules: int) -> None:
    match expression:
        case ir.Rule(number) if not 0 <= number < n_rules:
            raise _bad(f"rule {number} does not exist")
        case ir.Token(token_id) if token_id < 0:
            raise _bad(f"{token_id} is not a token id")
        case ir.Repeat(_, least, most):
            if least < 0 or (most is not None and most < least) or max(least, most or 0) > MAX_REPEATS:
                raise _bad(f"repeating between {least} and {most} times is not possible")
        case ir.Chars(ranges):
            last = -1
            for low, high in ranges:
                if not last < low <= high <= ir.MAX_CODE_POINT or (low <= 0xDFFF and high >= 0xD800):
                    raise _bad("a range of characters is out of order, too large, or contains surrogates")
                last = high
        case ir.Free(without, not_first):
            for part in (*without, *not_first):
                _check_forbidden(part)
        case ir.Text(text):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise _bad("a text contains a lone surrogate")


def _check_forbidden(part: str | ir.Expression) -> None:
    if isinstance(part, str):
        if not part:
            raise _bad("a forbidden string is empty")
    elif any(isinstance(inner, ir.Rule | ir.Token | ir.Free) for inner in ir.walk(part)):
        raise _bad("a forbidden pattern refers to a rule, a token or free text")
    elif not ir.shortest_length(part, ()):
        raise _bad("a forbidden pattern matches the empty text")


def _bad(reason: str) -> BadInput:
    return BadInput(f"the grammar is not valid: {reason}", param="grammar")
