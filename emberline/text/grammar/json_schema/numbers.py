"""JSON numbers: their keywords, and expressions of the decimals (without exponents) that they allow.

Intervals are written digit by digit; divisibility is a DFA over the digits that tracks the remainder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, isfinite, lcm, prod
from typing import Any

from emberline.protocol.grammar import Chars, Expression, Text
from emberline.text.grammar.expressions import character_dfa
from emberline.text.grammar.expressions.builder import EMPTY, NEVER, Builder, choice, optional, repeat, sequence
from emberline.text.grammar.expressions.character_dfa import CharacterDfa
from emberline.text.grammar.json_schema.document import Node
from emberline.text.grammar.json_schema.set_algebra import (
    Bound,
    NumberSet,
    SetAlgebra,
    ValueSet,
    fraction,
    has_number,
    in_bounds,
    only,
    union,
)

INTEGER_DIGITS = 15
FRACTION_DIGITS = 10
DOUBLE_DIGITS = 15  # that a double certainly keeps: with more, a text could round onto an excluded bound
MAX_MODULUS = 12  # beyond it, multiples are listed
MAX_LISTED = 200

# In steps from the middle: all near multiples, and of the distant ones those that people write.
_DISTANCES = [
    *range(MAX_LISTED),
    *sorted({n << k for n in (1, 3, 5) for k in range(6, 20)} | {n * 10**k for n in range(1, 10) for k in range(2, 6)}),
]

_DIGIT = Chars(((48, 57),))
_FREE_INTEGER = choice([Text("0"), sequence(Chars(((49, 57),)), repeat(_DIGIT, 0, INTEGER_DIGITS - 1))])
_FREE_FRACTION = optional(sequence(Text("."), repeat(_DIGIT, 1, FRACTION_DIGITS)))

# --- keywords --------------------------------------------------------------------------------------------------------


def _number(algebra: SetAlgebra, node: Node, keyword: str, value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        algebra.document.fail(node, f"{keyword!r} must be a number")
    return fraction(value)


def read_minimum(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    return _read_bound(algebra, node, "minimum", "exclusiveMinimum", negated)


def read_maximum(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    return _read_bound(algebra, node, "maximum", "exclusiveMaximum", negated)


def _read_bound(algebra: SetAlgebra, node: Node, keyword: str, exclusive: str, negated: bool) -> ValueSet:
    bounds: list[Bound] = []
    exclusive_value = node.schema.get(exclusive, False)  # a boolean up to draft 4
    if keyword in node.schema:
        bounds.append((_number(algebra, node, keyword, node.schema[keyword]), exclusive_value is True))
    if not isinstance(exclusive_value, bool):
        bounds.append((_number(algebra, node, exclusive, exclusive_value), True))
    is_low = keyword == "minimum"
    if negated:
        outside = [(bound, not is_open) for bound, is_open in bounds]
        return union([only("number", NumberSet(high=each) if is_low else NumberSet(low=each)) for each in outside])
    values: ValueSet = {}
    for bound in bounds:
        values = algebra.intersect(values, {"number": (NumberSet(low=bound) if is_low else NumberSet(high=bound),)})
    return values


def read_multiple_of(algebra: SetAlgebra, node: Node, value: Any, negated: bool) -> ValueSet:
    step = _number(algebra, node, "multipleOf", value)
    if step <= 0:
        algebra.document.fail(node, "'multipleOf' must be above 0")
    if negated:
        return only("number", NumberSet(not_multiples=frozenset((step,))))
    return {"number": (NumberSet(multiples=frozenset((step,))),)}


# --- expressions -----------------------------------------------------------------------------------------------------


def number_expression(builder: Builder, numbers: NumberSet) -> Expression:
    if numbers == NumberSet(integral=True):
        return builder.share("integer", sequence(optional(Text("-")), _FREE_INTEGER))
    if numbers == NumberSet():
        return builder.share("number", sequence(optional(Text("-")), _FREE_INTEGER, _FREE_FRACTION))
    low, high = numbers.low, numbers.high
    step = common_multiple(numbers.multiples | {Fraction(1)} if numbers.integral else numbers.multiples)
    if numbers.multiples and low is not None and high is not None and (high[0] - low[0]) / step < MAX_LISTED // 2:
        return _listed(numbers, step)
    places = _places(step) if step else None
    if step and places is None:
        return _listed(numbers, step)
    n_places = 6 if places is None else places
    divisors = [_divisor(step, n_places, True)] if step and step * 10**n_places != 1 else []
    divisors += [_divisor(each, n_places, False) for each in sorted(numbers.not_multiples)]
    if numbers.integral is False:
        divisors.append(_divisor(Fraction(1), n_places, False))
    if prod(divisor.modulus for divisor in divisors) > MAX_MODULUS:
        return _listed(numbers, step or Fraction(1, 10**6))

    def magnitudes(low: Bound, high: Bound | None) -> Expression:
        """Numbers of 0 or more."""
        plain = _decimals(low, high, n_places if divisors else places)
        if not divisors:
            return plain
        dfa = character_dfa.from_expression(plain)
        for divisor in divisors:
            dfa = character_dfa.intersect(dfa, _divisor_dfa(divisor, n_places))
        return character_dfa.to_expression(dfa, builder)

    return choice(_signed(low, high, magnitudes) for low, high in _intervals(numbers))


def _intervals(numbers: NumberSet) -> list[tuple[Bound | None, Bound | None]]:
    """The intervals between the bounds, split at excluded numbers."""
    points = [(point, True) for point in sorted(numbers.excluded) if in_bounds(point, numbers.low, numbers.high)]
    return list(pairwise([numbers.low, *points, numbers.high]))


def _signed(
    low: Bound | None, high: Bound | None, magnitudes: Callable[[Bound, Bound | None], Expression]
) -> Expression:
    """Numbers from low to high, each side of zero by its distance from zero."""
    zero = Fraction(0)
    options: list[Expression] = []
    if high is None or in_bounds(zero, None, high) or high[0] > 0:
        options.append(magnitudes((zero, False) if low is None or low[0] < 0 else low, high))
    if low is None or low[0] < 0:
        nearest = (zero, True) if high is None or high[0] >= 0 else (-high[0], high[1])
        options.append(sequence(Text("-"), magnitudes(nearest, None if low is None else (-low[0], low[1]))))
    return choice(options)


def common_multiple(steps: frozenset[Fraction]) -> Fraction:
    """The least common multiple; 0 of no steps."""
    if not steps:
        return Fraction(0)
    return Fraction(lcm(*(step.numerator for step in steps)), gcd(*(step.denominator for step in steps)))


def _places(value: Fraction) -> int | None:
    """Digits after the point that a number and its multiples need; None: more than 30."""
    return next((places for places in range(31) if (value * 10**places).denominator == 1), None)


def _listed(numbers: NumberSet, step: Fraction) -> Expression:
    """Multiples of the step one by one: those next to zero, or to the bound that is nearest to zero."""
    low, high = numbers.low, numbers.high
    start = low[0] if low is not None and low[0] > 0 else high[0] if high is not None and high[0] < 0 else Fraction(0)
    if low is not None and high is not None and low[0] <= 0 <= high[0] and (high[0] - low[0]) / step < MAX_LISTED:
        start = (low[0] + high[0]) / 2
    middle = int(start / step)
    found: list[Expression] = []
    for distance in _DISTANCES:
        for index in sorted({middle + distance, middle - distance}):
            text = decimal(index * step)
            if text is not None and has_number(numbers, index * step):
                found.append(Text(text))
    return choice(found)


def decimal(value: Fraction) -> str | None:
    """A number in decimal; None where it does not end or has too many digits for a double."""
    places = _places(value)
    if places is None:
        return None
    digits = str((abs(value) * 10**places).numerator).rjust(places + 1, "0")
    if len(digits) > DOUBLE_DIGITS and places:
        return None
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


# --- divisibility ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Divisor:
    """Divides the digits, read as one integer, by modulus · 10^zeros."""

    modulus: int
    zeros: int
    divides: bool  # whether it must, or must not

    def after(self, state: tuple[int, int], digit: int) -> tuple[int, int]:
        """State: (trailing zeros up to `zeros`, remainder of the digits before them)."""
        trailing, remainder = state
        if digit or trailing == self.zeros:
            digits = remainder * 10 ** (trailing + 1 if digit else 1) + digit
            return (0 if digit else trailing, digits % self.modulus)
        return trailing + 1, remainder


def _divisor(step: Fraction, places: int, divides: bool) -> _Divisor:
    """The divisor of numbers with `places` decimal digits, written without the point."""
    scaled = 10**places * step.numerator
    modulus, zeros = scaled // gcd(scaled, step.denominator), 0
    while modulus % 10 == 0:
        modulus, zeros = modulus // 10, zeros + 1
    return _Divisor(modulus, zeros, divides)


def _divisor_dfa(divisor: _Divisor, places: int) -> CharacterDfa:
    """The DFA of decimals with up to `places` decimal digits. State: the divisor's, and the digits after the point
    (-1: no point yet)."""

    def edges_of(state: tuple[tuple[int, int], int]) -> list[tuple[int, int, tuple[tuple[int, int], int]]]:
        remainder, n_fraction = state
        edges = [(46, 46, (remainder, 0))] if n_fraction < 0 and places else []
        if n_fraction < places:
            after = n_fraction if n_fraction < 0 else n_fraction + 1
            edges += [(48 + digit, 48 + digit, (divisor.after(remainder, digit), after)) for digit in range(10)]
        return edges

    def accepting(state: tuple[tuple[int, int], int]) -> bool:
        remainder, n_fraction = state
        for _ in range(places - max(n_fraction, 0)):
            remainder = divisor.after(remainder, 0)
        return n_fraction != 0 and (remainder == (divisor.zeros, 0)) == divisor.divides

    return character_dfa.explore(((divisor.zeros, 0), -1), edges_of, accepting)


# --- intervals of decimals of 0 or more ------------------------------------------------------------------------------


def _digits(low: int = 0, high: int = 9) -> Expression:
    return Text(str(low)) if low == high else Chars(((48 + low, 48 + high),))


def _integers(first: int, last: int) -> Expression:
    """Integers between the bounds, without leading zeros."""
    if first > last:
        return NEVER
    if first == 0 and last > 9:
        return choice([Text("0"), _integers(1, last)])
    options: list[Expression] = []
    while len(str(first)) < len(str(last)):
        if first == 10 ** (len(str(first)) - 1):  # whole lengths at once
            n_first, n_last = len(str(first)), len(str(last + 1)) - 1
            options.append(sequence(_digits(1), repeat(_DIGIT, n_first - 1, n_last - 1)))
            first = 10**n_last
        else:
            end = 10 ** len(str(first)) - 1
            options.append(_same_length(str(first), str(end)))
            first = end + 1
    if first <= last:
        options.append(_same_length(str(first), str(last)))
    return choice(options)


def _same_length(first: str, last: str) -> Expression:
    """Digit strings from first to last, all of one length."""
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
        options.append(sequence(_digits(low, high), repeat(_DIGIT, rest, rest)))
    return choice([*options, ending] if ending is not None else options)


def _decimals(low: Bound, high: Bound | None, places: int | None) -> Expression:
    """Decimals with up to `places` digits after the point; None: as many as a double distinguishes there."""
    if places is None:
        ends = [bound[0] for bound in (low, high) if bound is not None]
        n_whole = max(len(str(int(end))) for end in ends)
        needed = max(_places(end) or 0 for end in ends)
        places = max(min(FRACTION_DIGITS, DOUBLE_DIGITS - n_whole), min(needed + 1, 30), 1)
    low = _rounded(low, places, up=True)
    start, start_digits = _split(low[0], places)
    after_start = _Range(start_digits, low[1])
    if high is None:
        top = 10 ** max(INTEGER_DIGITS, len(str(start)) + 1) - 1
        return choice([
            sequence(Text(str(start)), _fraction(after_start, places)),
            sequence(_integers(start + 1, top), _fraction(_Range(), places)),
        ])  # fmt: skip
    high = _rounded(high, places, up=False)
    if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
        return NEVER
    end, end_digits = _split(high[0], places)
    if start == end:
        both = _Range(start_digits, low[1], end_digits, high[1])
        return sequence(Text(str(start)), _fraction(both, places))
    return choice([
        sequence(Text(str(start)), _fraction(after_start, places)),
        sequence(_integers(start + 1, end - 1), _fraction(_Range(), places)),
        sequence(Text(str(end)), _fraction(_Range(high=end_digits, high_open=high[1]), places)),
    ])  # fmt: skip


def _rounded(bound: Bound, places: int, up: bool) -> Bound:
    """The nearest number inside that has so many digits after the point."""
    scaled = bound[0] * 10**places
    return bound if scaled.denominator == 1 else (Fraction(scaled // 1 + up, 10**places), False)


def _split(value: Fraction, places: int) -> tuple[int, str]:
    whole, part = divmod(value, 1)
    return int(whole), str(int(part * 10**places)).rjust(places, "0").rstrip("0") if part else ""


@dataclass(frozen=True, slots=True)
class _Range:
    """Digits after the point, from .low to .high (None: up to 1), without trailing zeros."""

    low: str = ""
    low_open: bool = False
    high: str | None = None
    high_open: bool = False

    @property
    def has_zero(self) -> bool:
        return not (self.low or self.low_open) and (bool(self.high) or not self.high_open)


def _fraction(digits: _Range, places: int) -> Expression:
    """Return the expression after the integer part: a point and digits or, where the range contains 0, nothing."""
    if not places:
        return EMPTY if digits.has_zero else NEVER
    point = sequence(Text("."), _fraction_digits(digits, places))
    return optional(point) if digits.has_zero else point


def _fraction_digits(digits: _Range, places: int) -> Expression:
    """At least one digit."""
    low, high = digits.low, digits.high
    if places == 0 or high == "":
        return NEVER
    if high is None and not low:
        if not digits.low_open:
            return repeat(_DIGIT, 1, places)
        n_zeros = places // 2  # very small numbers are left out
        return sequence(repeat(Text("0"), 0, n_zeros), _digits(1), repeat(_DIGIT, 0, places - n_zeros - 1))
    first, last = int(low[0]) if low else 0, int(high[0]) if high else 10
    above = _Range(low[1:], digits.low_open)
    if first == last:
        assert high
        return _after_digits(first, first, _Range(low[1:], digits.low_open, high[1:], digits.high_open), places)
    options = [_after_digits(first, first, above, places)]
    if first + 1 < last:
        options.append(_after_digits(first + 1, last - 1, _Range(), places))
    if high:
        options.append(_after_digits(last, last, _Range(high=high[1:], high_open=digits.high_open), places))
    return choice(options)


def _after_digits(first: int, last: int, rest: _Range, places: int) -> Expression:
    if rest == _Range():
        return sequence(_digits(first, last), repeat(_DIGIT, 0, places - 1))
    following = _fraction_digits(rest, places - 1)
    return sequence(_digits(first, last), optional(following) if rest.has_zero else following)
