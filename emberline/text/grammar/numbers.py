"""JSON numbers between bounds, of a step, whole or not: digit by digit, without exponents."""

from collections.abc import Callable
from fractions import Fraction
from math import gcd, lcm
from typing import TypeAlias

from emberline.protocol.grammar import Chars, Expression, Text
from emberline.text.grammar import automaton
from emberline.text.grammar.automaton import Automaton
from emberline.text.grammar.builder import EMPTY, NEVER, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.shapes import Bound, Number
from emberline.text.grammar.strings import literal

INTEGER_DIGITS = 15
FRACTION_DIGITS = 10
DOUBLE_DIGITS = 15  # digits that a double surely keeps: beyond them a text could round onto an excluded bound
MAX_MODULUS = 12  # larger steps: a list of their multiples
MAX_LISTED = 200

_ZERO = Fraction(0)
# How many steps away: all near ones, and of the far ones those that people write.
_DISTANCES = [
    *range(MAX_LISTED),
    *sorted({n << k for n in (1, 3, 5) for k in range(6, 20)} | {n * 10**k for n in range(1, 10) for k in range(2, 6)}),
]

Magnitude: TypeAlias = Callable[[Bound | None, Bound | None], Expression]


def _digits(low: int = 0, high: int = 9) -> Expression:
    return Text(str(low)) if low == high else Chars(((48 + low, 48 + high),))


_ANY_FRACTION = optional(sequence(Text("."), repeat(_digits(), 1, FRACTION_DIGITS)))
_ANY_INTEGER = choice([Text("0"), sequence(_digits(1), repeat(_digits(), 0, INTEGER_DIGITS - 1))])


def number_expression(builder: Builder, shape: Number) -> Expression:
    if shape.among is not None:
        return choice(literal(value) for value in shape.among)
    constrained = shape.low or shape.high or shape.multiples or shape.not_multiples or shape.without
    if not constrained and shape.integral is not False:
        if shape.integral:
            return builder.share("integer", sequence(optional(Text("-")), _ANY_INTEGER))
        return builder.share("number", sequence(optional(Text("-")), _ANY_INTEGER, _ANY_FRACTION))
    return choice(_between(builder, shape, low, high) for low, high in _intervals(shape))


def _intervals(shape: Number) -> list[tuple[Bound | None, Bound | None]]:
    """The bounds, cut where single numbers are excluded."""
    intervals: list[tuple[Bound | None, Bound | None]] = []
    low = shape.low
    for point in sorted(shape.without):
        intervals.append((low, (point, True)))
        if low is None or low[0] <= point:
            low = (point, True)
    intervals.append((low, None))
    cut: list[tuple[Bound | None, Bound | None]] = []
    for start, end in intervals:
        if shape.high is not None and (end is None or (shape.high[0], not shape.high[1]) < (end[0], not end[1])):
            end = shape.high
        if start is None or end is None or start[0] < end[0] or (start[0] == end[0] and not start[1] and not end[1]):
            cut.append((start, end))
    return cut


def _between(builder: Builder, shape: Number, low: Bound | None, high: Bound | None) -> Expression:
    if shape.multiples and low is not None and high is not None:
        common = _common(shape.multiples if shape.integral is not True else shape.multiples | {Fraction(1)})
        if (high[0] - low[0]) / common < MAX_LISTED // 2:
            return _listed(
                low, high, common, [*shape.not_multiples, *([Fraction(1)] if shape.integral is False else [])]
            )
    if shape.integral:
        step = lcm(*(each.numerator for each in shape.multiples)) if shape.multiples else 1
        avoided = [each.numerator for each in shape.not_multiples]
        return _whole(builder, low, high, step, avoided)
    if not shape.multiples and not shape.not_multiples and shape.integral is None:
        return _signed(low, high, _decimals)
    return _stepped(builder, shape, low, high)


def _stepped(builder: Builder, shape: Number, low: Bound | None, high: Bound | None) -> Expression:
    """Numbers that may have a fraction, with a step or without being whole."""
    step = Fraction(1, 10 ** (6 if shape.integral is False else FRACTION_DIGITS))
    if shape.multiples:
        step = _common(shape.multiples)
    places = _places(step)
    avoided = [*shape.not_multiples, *([Fraction(1)] if shape.integral is False else [])]
    if shape.multiples and not avoided and places is not None and (step * 10**places).numerator == 1:
        return _signed(low, high, lambda a, b: _decimals(a, b, places))
    if places is None or (step * 10**places).numerator > MAX_MODULUS or avoided:
        return _listed(low, high, step, avoided)
    modulus = (step * 10**places).numerator

    def magnitude(a: Bound | None, b: Bound | None) -> Expression:
        plain = automaton.from_expression(_decimals(a, b, places))
        return automaton.to_expression(automaton.intersect(plain, _remainders(modulus, places)), builder)

    return _signed(low, high, magnitude)


def _common(steps: frozenset[Fraction]) -> Fraction:
    """The smallest number that is a multiple of each."""
    return Fraction(lcm(*(step.numerator for step in steps)), gcd(*(step.denominator for step in steps)))


def _places(step: Fraction) -> int | None:
    """How many digits after the point multiples of the step need; None: no number suffices."""
    for places in range(31):
        if (step * 10**places).denominator == 1:
            return places
    return None


def _listed(low: Bound | None, high: Bound | None, step: Fraction, avoided: list[Fraction]) -> Expression:
    """The multiples next to zero, or to the bound that is nearer to it, one by one."""
    start = low[0] if low is not None and low[0] > 0 else high[0] if high is not None and high[0] < 0 else _ZERO
    if low is not None and high is not None and low[0] <= 0 <= high[0]:
        start = (low[0] + high[0]) / 2 if (high[0] - low[0]) / step < MAX_LISTED else start
    middle = int(start / step)
    found: list[Expression] = []
    for distance in _DISTANCES:
        for index in sorted({middle + distance, middle - distance}):
            value = index * step
            inside = (low is None or (value, False) >= low) and (
                high is None or value < high[0] or (value == high[0] and not high[1])
            )
            text = _text(value)
            if inside and text is not None and not any((value / each).denominator == 1 for each in avoided):
                found.append(Text(text))
    return choice(found)


def _text(value: Fraction) -> str | None:
    """A number in decimal; None where it has no end or too many digits for a double."""
    places = _places(value)
    if places is None:
        return None
    scaled = abs(value) * 10**places
    digits = str(scaled.numerator).rjust(places + 1, "0")
    if len(digits) > DOUBLE_DIGITS and places:
        return None
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def _signed(low: Bound | None, high: Bound | None, magnitude: "Magnitude") -> Expression:
    """Numbers from low to high, each side of zero by its distance from it."""
    options: list[Expression] = []
    if high is None or high[0] > 0 or (high[0] == 0 and not high[1]):
        start = (_ZERO, False) if low is None or low[0] < 0 else low
        options.append(magnitude(start, high))
    if low is None or low[0] < 0:
        nearest = (_ZERO, True) if high is None or high[0] >= 0 else (-high[0], high[1])
        farthest = None if low is None else (-low[0], low[1])
        options.append(sequence(Text("-"), magnitude(nearest, farthest)))
    return choice(options)


def _whole(builder: Builder, low: Bound | None, high: Bound | None, step: int, avoided: list[int]) -> Expression:
    n_zeros = 0
    while step % 10 == 0 and not avoided:
        step, n_zeros = step // 10, n_zeros + 1
    if n_zeros:  # multiples of what is left, with zeros behind them
        scale = 10**n_zeros
        scaled = [None if bound is None else (bound[0] / scale, bound[1]) for bound in (low, high)]
        above = _whole(builder, _tighter(scaled[0], 1), scaled[1], step, [])
        below = _whole(builder, scaled[0], _tighter(scaled[1], -1), step, [])
        zero = _integers_between(low, high, 0, 0)
        return choice([sequence(choice([above, below]), Text("0" * n_zeros)), zero])
    if step > MAX_MODULUS or any(each > MAX_MODULUS for each in avoided):
        return _listed(low, high, Fraction(step), [Fraction(each) for each in avoided])

    def magnitude(a: Bound | None, b: Bound | None) -> Expression:
        first = _ceiling(a) if a is not None else 0
        last = _floor(b) if b is not None else 10 ** max(INTEGER_DIGITS, len(str(first)) + 1) - 1
        plain = _integers(first, last)
        if step == 1 and not avoided:
            return plain
        found = automaton.from_expression(plain)
        if step > 1:
            found = automaton.intersect(found, _remainders(step, 0))
        for each in avoided:
            found = automaton.intersect(found, automaton.complement(_remainders(each, 0)))
        return automaton.to_expression(found, builder)

    return _signed(low, high, magnitude)


def _tighter(bound: Bound | None, sign: int) -> Bound:
    """A bound that keeps numbers on one side of zero."""
    nearest = (Fraction(sign), False)
    if bound is None:
        return nearest
    return max(bound, nearest) if sign > 0 else min(bound, nearest, key=lambda each: (each[0], not each[1]))


def _integers_between(low: Bound | None, high: Bound | None, first: int, last: int) -> Expression:
    first = first if low is None else max(first, _ceiling(low))
    last = last if high is None else min(last, _floor(high))
    return _integers(first, last)


def _ceiling(bound: Bound) -> int:
    value = -(-bound[0] // 1)
    return value + 1 if bound[1] and value == bound[0] else value


def _floor(bound: Bound) -> int:
    value = bound[0] // 1
    return value - 1 if bound[1] and value == bound[0] else value


def _remainders(modulus: int, places: int) -> Automaton:
    """Numbers with up to `places` digits after the point that the modulus divides once the point is left out and
    missing places are filled with zeros. State: which remainder, and how many places were written (-1: no point)."""
    states = {(0, -1): 0}
    order = [(0, -1)]
    edges: list[list[tuple[int, int, int]]] = []
    accepting: set[int] = set()
    while len(edges) < len(order):
        remainder, written = order[len(edges)]
        if remainder * 10 ** (places - max(written, 0)) % modulus == 0 and written != 0:
            accepting.add(len(edges))
        following = []
        if written < 0 and places:
            following.append((46, (remainder, 0)))
        if written < places or written < 0:
            after = written if written < 0 else written + 1
            following += [(48 + digit, ((remainder * 10 + digit) % modulus, after)) for digit in range(10)]
        row = []
        for code, state in following:
            if state not in states:
                states[state] = len(order)
                order.append(state)
            row.append((code, code, states[state]))
        edges.append(row)
    return Automaton(edges, accepting)


def _integers(first: int, last: int) -> Expression:
    """Whole numbers of these, without leading zeros."""
    first = max(first, 0)
    if first > last:
        return NEVER
    if first == 0 and last > 9:
        return choice([Text("0"), _integers(1, last)])
    options: list[Expression] = []
    while len(str(first)) < len(str(last)):
        if first == 10 ** (len(str(first)) - 1):  # whole lengths at once
            n_first, n_last = len(str(first)), len(str(last + 1)) - 1
            options.append(sequence(_digits(1), repeat(_digits(), n_first - 1, n_last - 1)))
            first = 10**n_last
        else:
            end = 10 ** len(str(first)) - 1
            options.append(_same_length(str(first), str(end)))
            first = end + 1
    if first <= last:
        options.append(_same_length(str(first), str(last)))
    return choice(options)


def _same_length(first: str, last: str) -> Expression:
    """Digit strings from first to last, of one length."""
    if not first:
        return EMPTY
    rest = len(first) - 1
    low, high = int(first[0]), int(last[0])
    if low == high:
        return sequence(Text(first[0]), _same_length(first[1:], last[1:]))
    options: list[Expression] = []
    if first[1:] != "0" * rest:
        options.append(sequence(Text(first[0]), _same_length(first[1:], "9" * rest)))
        low += 1
    ending = None
    if last[1:] != "9" * rest:
        ending = sequence(Text(last[0]), _same_length("0" * rest, last[1:]))
        high -= 1
    if low <= high:
        options.append(sequence(_digits(low, high), repeat(_digits(), rest, rest)))
    return choice([*options, ending] if ending is not None else options)


def _decimals(low: Bound | None, high: Bound | None, places: int | None = None) -> Expression:
    """Numbers of 0 or more from low to high with so many digits after the point at most."""
    low = low or (_ZERO, False)
    if places is None:
        ends = [bound for bound in (low, high) if bound is not None]
        whole = max(len(str(int(bound[0]))) for bound in ends)
        needed = max(_places(bound[0]) or 0 for bound in ends)
        places = max(min(FRACTION_DIGITS, DOUBLE_DIGITS - whole), min(needed + 1, 30), 1)
    low = _rounded(low, places, up=True)
    start, start_digits = _split(low[0], places)
    if high is None:
        top = 10 ** max(INTEGER_DIGITS, len(str(start)) + 1) - 1
        return choice([
            sequence(Text(str(start)), _at_least(start_digits, low[1], places)),
            sequence(_integers(start + 1, top), _fraction(places)),
        ])  # fmt: skip
    high = _rounded(high, places, up=False)
    if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
        return NEVER
    end, end_digits = _split(high[0], places)
    if start == end:
        return sequence(Text(str(start)), _inside_one(start_digits, low[1], end_digits, high[1], places))
    return choice([
        sequence(Text(str(start)), _at_least(start_digits, low[1], places)),
        sequence(_integers(start + 1, end - 1), _fraction(places)),
        sequence(Text(str(end)), _at_most(end_digits, high[1], places)),
    ])  # fmt: skip


def _rounded(bound: Bound, places: int, up: bool) -> Bound:
    """The nearest number inside that can be written with so many places."""
    scaled = bound[0] * 10**places
    if scaled.denominator == 1:
        return bound
    return Fraction(scaled // 1 + up, 10**places), False


def _split(value: Fraction, places: int) -> tuple[int, str]:
    whole, part = divmod(value, 1)
    return int(whole), str(int(part * 10**places)).rjust(places, "0").rstrip("0") if part else ""


def _inside_one(low: str, low_open: bool, high: str, high_open: bool, places: int) -> Expression:
    """What may follow the whole part where both bounds have the same one."""
    if not high:
        return NEVER if low or low_open or high_open else EMPTY
    point = sequence(Text("."), _inside(low, low_open, high, high_open, places))
    return point if low or low_open else optional(point)


def _inside(low: str, low_open: bool, high: str, high_open: bool, places: int) -> Expression:
    """At least one digit, with a value from .low to .high."""
    first, last = int(low[0]) if low else 0, int(high[0])
    if first == last:
        if not high[1:]:
            return NEVER if low[1:] or low_open or high_open else Text(high[0])
        rest = _inside(low[1:], low_open, high[1:], high_open, places - 1)
        return sequence(Text(high[0]), rest if low[1:] or low_open else optional(rest))
    options = [sequence(_digits(first, first), _above(low[1:], low_open, places - 1))]
    if first + 1 < last:
        options.append(sequence(_digits(first + 1, last - 1), repeat(_digits(), 0, places - 1)))
    if high[1:]:
        options.append(sequence(Text(high[0]), optional(_below(high[1:], high_open, places - 1))))
    elif not high_open:
        options.append(Text(high[0]))
    return choice(options)


def _fraction(places: int) -> Expression:
    return optional(sequence(Text("."), repeat(_digits(), 1, places))) if places else EMPTY


def _above_zero(places: int) -> Expression:
    """Digits of which not all are 0; very small numbers are left out."""
    n_zeros = places // 2
    return sequence(repeat(Text("0"), 0, n_zeros), _digits(1), repeat(_digits(), 0, places - n_zeros - 1))


def _at_least(digits: str, is_open: bool, places: int) -> Expression:
    """What may follow the whole part so that the fraction is at least .digits (or above it)."""
    if not digits and not is_open:
        return _fraction(places)
    return sequence(Text("."), _above(digits, is_open, places)) if places else NEVER


def _above(digits: str, is_open: bool, places: int) -> Expression:
    if places <= 0:
        return NEVER if digits or is_open else EMPTY
    if not digits:
        return _above_zero(places) if is_open else repeat(_digits(), 0, places)
    first = int(digits[0])
    same = sequence(Text(digits[0]), _above(digits[1:], is_open, places - 1))
    larger = sequence(_digits(first + 1), repeat(_digits(), 0, places - 1)) if first < 9 else NEVER
    return choice([same, larger])


def _at_most(digits: str, is_open: bool, places: int) -> Expression:
    if not digits:
        return NEVER if is_open else EMPTY
    return optional(sequence(Text("."), _below(digits, is_open, places)))


def _below(digits: str, is_open: bool, places: int) -> Expression:
    """At least one digit, with a value up to .digits (or below it)."""
    first = int(digits[0])
    smaller = sequence(_digits(0, first - 1), repeat(_digits(), 0, places - 1)) if first else NEVER
    if len(digits) == 1:
        return choice([smaller, NEVER if is_open else Text(digits)])
    return choice([smaller, sequence(Text(digits[0]), optional(_below(digits[1:], is_open, places - 1)))])
