"""The price of a model, and what a request costs at it: integers throughout, nothing is rounded.

A *micro-unit* is 10⁻⁶ of the currency, a *pico-unit* 10⁻¹². A price of so many micro-units per million tokens is the
same number of pico-units per token, so every cost is an integer of pico-units.
"""

from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput

PICO = 10**12  # pico-units in one unit of the currency
MICRO = 10**6
NANO = 10**9

# Bounds that keep the cost of any request within a signed 64-bit integer.
TokenRate = Annotated[int, Meta(ge=0, le=10**10)]
SecondRate = Annotated[int, Meta(ge=0, le=10**11)]
ImageRate = Annotated[int, Meta(ge=0, le=10**9)]
Percent = Annotated[int, Meta(ge=0, le=1000)]


class Unit(NamedTuple):
    """A thing that a model charges for, beside tokens."""

    scale: int  # units of the rate in one unit of the currency
    counted: str  # that a request has of it: the name of its field in a usage row
    pico: int  # pico-units of the cost, for a rate of 1 and a count of 1
    what: str  # that one amount is the price of


# A new unit is a line here, a field of Price and PriceFields, and a count in Usage and UsageRow.
UNITS = {
    "audio_second": Unit(NANO, "audio_ms", 1, "a second of audio"),
    "image": Unit(MICRO, "images", MICRO, "an image"),
    "second": Unit(NANO, "compute_ms", 1, "a second that a predictor computes"),
    "prediction": Unit(MICRO, "predictions", MICRO, "a prediction"),
}
TOKEN_UNITS = ("input", "cached_input", "output")  # micro-units per million tokens


class Price(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Price of a model. A class is charged its percentage of every rate, which must be a whole number."""

    input: TokenRate = 0  # micro-units per million tokens
    cached_input: TokenRate = 0  # of the prompt, served from the prefix cache; at most `input`
    output: TokenRate = 0  # reasoning included
    audio_second: SecondRate = 0  # nano-units: a minute for 0.0005 is no whole number of micro-units per second
    image: ImageRate = 0  # micro-units
    second: SecondRate = 0  # nano-units, of a predictor's computing
    prediction: ImageRate = 0  # micro-units
    priority: Percent = 100
    flex: Percent = 100
    batch: Percent = 100
    neuron: Annotated[int, Meta(ge=0, le=10**9)] = 0  # micro-units per neuron; 0: not counted in neurons
    version: str = ""  # of the model's price; empty: not recorded

    def __post_init__(self) -> None:
        if self.cached_input > self.input:
            raise ValueError("cached input must not cost more than input")
        for kind in ("priority", "flex", "batch"):
            percent = getattr(self, kind)
            for name in (*TOKEN_UNITS, *UNITS):
                if getattr(self, name) * percent % 100:
                    raise ValueError(f"{percent} % of the price of {name} is not a whole number of its unit")

    def cost_pico(
        self,
        kind: str,
        *,
        input_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        **counts: int,
    ) -> int:
        """Return the cost in pico-units. `kind` is the class: priority, default, flex or batch. `input_tokens` include
        the cached ones, and `counts` are those of UNITS."""
        cached_tokens = min(cached_tokens, input_tokens)
        total: int = (
            self.input * (input_tokens - cached_tokens)
            + self.cached_input * cached_tokens
            + self.output * output_tokens
        )
        for name, unit in UNITS.items():
            total += getattr(self, name) * unit.pico * counts.pop(unit.counted, 0)
        assert not counts, f"no unit counts {', '.join(counts)}"
        return total if kind == "default" else total * self._percent(kind) // 100

    def cached_discount_pico(self, kind: str, cached_tokens: int) -> int:
        """Amount that these tokens would have cost more if they had not been cached."""
        return (self.input - self.cached_input) * cached_tokens * self._percent(kind) // 100

    def worst_case_pico(self, input_tokens: int, max_output_tokens: int, kind: str = "default", **counts: int) -> int:
        """The most a request can cost that computes at most this much: nothing of its prompt is cached."""
        return self.cost_pico(kind, input_tokens=input_tokens, output_tokens=max_output_tokens, **counts)

    def neurons(self, cost_pico: int) -> str | None:
        """The cost in neurons, with two decimals, half up."""
        if not self.neuron:
            return None
        hundredths = (2 * cost_pico * 100 + self.neuron * MICRO) // (2 * self.neuron * MICRO)
        return f"{hundredths // 100}.{hundredths % 100:02d}"

    def _percent(self, kind: str) -> int:
        if kind == "default":
            return 100
        assert kind in ("priority", "flex", "batch"), kind
        percent: int = getattr(self, kind)
        return percent


Amount = Annotated[str, Meta(max_length=40)] | int | float  # of the currency: "0.60", or 0.60 as it is written
_SCALES = {**dict.fromkeys(TOKEN_UNITS, MICRO), **{name: unit.scale for name, unit in UNITS.items()}, "neuron": MICRO}


class PriceFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A price as people write it: amounts of the currency per million tokens, per unit of UNITS, and per neuron."""

    input: Amount = 0
    cached_input: Amount | None = None  # None: as `input`
    output: Amount = 0
    audio_second: Amount = 0
    image: Amount = 0
    second: Amount = 0
    prediction: Amount = 0
    neuron: Amount = 0  # the price of one neuron, with which `cf-ai-neurons` is calculated
    priority: Percent = 100  # percent of the price, for requests of this class
    flex: Percent = 100
    batch: Percent = 100

    def price(self) -> Price:
        """BadInput names the field."""
        rates: dict[str, Any] = {name: getattr(self, name) for name in ("priority", "flex", "batch")}
        for name, scale in _SCALES.items():
            amount = getattr(self, name)
            if amount is None:
                amount = self.input
            try:
                rates[name] = parse_amount(
                    f"{Decimal(repr(amount)):f}" if isinstance(amount, float) else str(amount), scale
                )
            except (BadInput, ArithmeticError, ValueError) as error:
                raise BadInput(f"`{name}`: {error}", param=name) from None
        try:
            return msgspec.convert(rates, Price)
        except ValueError as error:
            raise BadInput(f"this price cannot be used: {error}") from None


def price_fields(price: Price) -> dict[str, Any]:
    """The price as people write it, with exact amounts; what is not charged is left out."""
    fields: dict[str, Any] = {
        name: format_amount(getattr(price, name), scale) for name, scale in _SCALES.items() if getattr(price, name)
    }
    if price.input:
        fields["cached_input"] = format_amount(price.cached_input, MICRO)
    percents = {name: getattr(price, name) for name in ("priority", "flex", "batch")}
    return fields | {name: percent for name, percent in percents.items() if percent != 100}


def parse_amount(text: str, scale: int = MICRO) -> int:
    """A decimal amount of the currency ("0.60") in units of 1/scale, exactly, or BadInput."""
    whole, _, fraction = text.strip().partition(".")
    digits = len(str(scale)) - 1
    fraction = fraction.rstrip("0")
    if not (whole + fraction).isdecimal() or not (whole + fraction).isascii() or len(whole) > 12:
        raise BadInput(f"{text[:40]!r} is not an amount such as 0.60")
    if len(fraction) > digits:
        raise BadInput(f"{text[:40]!r} has more than {digits} decimals")
    return int(whole or "0") * scale + int(fraction.ljust(digits, "0") or "0")


def format_amount(amount: int, scale: int = PICO) -> str:
    """The exact decimal of `amount`/scale, with at least two decimals."""
    sign = "-" if amount < 0 else ""
    whole, rest = divmod(abs(amount), scale)
    return f"{sign}{whole}.{str(rest).rjust(len(str(scale)) - 1, '0').rstrip('0').ljust(2, '0')}"
