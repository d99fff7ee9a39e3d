"""What a grammar may be at most, and what it must be, before anything is built from it."""

from collections.abc import Iterator, Sequence

import msgspec

from emberline.protocol import grammar as ir
from emberline.protocol.errors import BadInput

MAX_BYTES = 4 << 20  # encoded
MAX_EXPRESSIONS = 200_000
MAX_DEPTH = 200
MAX_REPEATS = 1 << 20
NEVER = 1 << 60  # the cost of what no text matches


def read(encoded: bytes) -> ir.Grammar:
    """The grammar, checked; BadInput says what is wrong with it."""
    if len(encoded) > MAX_BYTES:
        raise _bad(f"it has {len(encoded)} bytes, at most {MAX_BYTES} are allowed")
    try:
        grammar = ir.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(f"it cannot be read: {error}") from None
    check(grammar)
    return grammar


def check(grammar: ir.Grammar) -> None:
    if not grammar.rules:
        raise _bad("it has no rules")
    n = 0
    todo = [(rule, 1) for rule in grammar.rules]
    while todo:
        expression, depth = todo.pop()
        n += 1
        if n > MAX_EXPRESSIONS:
            raise _bad(f"it has more than {MAX_EXPRESSIONS} expressions")
        if depth > MAX_DEPTH:
            raise _bad(f"it is nested more than {MAX_DEPTH} deep")
        _check_one(expression, len(grammar.rules))
        todo += [(part, depth + 1) for part in parts(expression)]
    _refuse_left_recursion(grammar)
    if costs(grammar)[0] >= NEVER:
        raise _bad("no text matches it")


def parts(expression: ir.Expression) -> tuple[ir.Expression, ...]:
    match expression:
        case ir.Sequence():
            return expression.items
        case ir.OneOf():
            return expression.options
        case ir.Repeat():
            return (expression.item,)
    return ()


def costs(grammar: ir.Grammar) -> list[int]:
    """The fewest bytes and special tokens that each rule matches; NEVER where nothing does. 0: it may be empty."""
    found = [NEVER] * len(grammar.rules)
    order = called_first(grammar)
    changed = True
    while changed:
        changed = False
        for number in order:
            cost = _cost(grammar.rules[number], found)
            if cost < found[number]:
                found[number], changed = cost, True
    return found


def references(expression: ir.Expression) -> Iterator[int]:
    todo = [expression]
    while todo:
        one = todo.pop()
        if isinstance(one, ir.Rule):
            yield one.number
        todo += parts(one)


def tokens(grammar: ir.Grammar) -> set[int]:
    """The special tokens that it names."""
    found = set()
    todo = list(grammar.rules)
    while todo:
        one = todo.pop()
        if isinstance(one, ir.Token):
            found.add(one.token_id)
        todo += parts(one)
    return found


def _cost(expression: ir.Expression, rules: Sequence[int]) -> int:
    match expression:
        case ir.Text():
            return len(expression.text.encode())
        case ir.Chars():
            return len(chr(expression.ranges[0][0]).encode()) if expression.ranges else NEVER
        case ir.Token():
            return 1
        case ir.Free():
            return 0
        case ir.Sequence():
            return min(NEVER, sum(_cost(item, rules) for item in expression.items))
        case ir.OneOf():
            return min((_cost(option, rules) for option in expression.options), default=NEVER)
        case ir.Repeat():
            return min(NEVER, expression.least * _cost(expression.item, rules)) if expression.least else 0
        case ir.Rule():
            return rules[expression.number]


def _check_one(expression: ir.Expression, n_rules: int) -> None:
    match expression:
        case ir.Rule(number) if not 0 <= number < n_rules:
            raise _bad(f"rule {number} does not exist")
        case ir.Token(token_id) if token_id < 0:
            raise _bad(f"{token_id} is no token id")
        case ir.Repeat(_, least, most):
            if least < 0 or (most is not None and most < least) or max(least, most or 0) > MAX_REPEATS:
                raise _bad(f"repeating between {least} and {most} times is not possible")
        case ir.Chars(ranges):
            last = -1
            for low, high in ranges:
                if not last < low <= high <= ir.MAX_CODE_POINT or (low <= 0xDFFF and high >= 0xD800):
                    raise _bad("a range of characters is out of order, too large, or has surrogates")
                last = high
        case ir.Free(without) if not all(without):
            raise _bad("a forbidden string is empty")
        case ir.Text(text):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise _bad("a text has a lone surrogate")


def called_first(grammar: ir.Grammar) -> list[int]:
    """Rule numbers, those that others call before their callers: costs settle in few rounds."""
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(grammar.rules)):
        stack = [(start, False)]
        while stack:
            number, done = stack.pop()
            if done:
                order.append(number)
            elif number not in seen:
                seen.add(number)
                stack.append((number, True))
                stack += [(called, False) for called in references(grammar.rules[number])]
    return order


def _refuse_left_recursion(grammar: ir.Grammar) -> None:
    fewest = costs(grammar)
    first = [set(_leading(rule, fewest)) for rule in grammar.rules]
    state = [0] * len(first)  # 1: on the path, 2: done
    for start in range(len(first)):
        stack = [(start, False)]
        while stack:
            number, done = stack.pop()
            if done:
                state[number] = 2
            elif state[number] == 0:
                state[number] = 1
                stack.append((number, True))
                for called in first[number]:
                    if state[called] == 1:
                        raise _bad(f"rule {called} begins with itself")
                    stack.append((called, False))


def _leading(expression: ir.Expression, rules: Sequence[int]) -> Iterator[int]:
    """The rules that an expression may begin with."""
    match expression:
        case ir.Rule():
            yield expression.number
        case ir.Sequence():
            for item in expression.items:
                yield from _leading(item, rules)
                if _cost(item, rules):
                    return
        case ir.OneOf() | ir.Repeat():
            for part in parts(expression):
                yield from _leading(part, rules)


def _bad(reason: str) -> BadInput:
    return BadInput(f"the grammar is not valid: {reason}", param="grammar")
