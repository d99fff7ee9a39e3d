"""The price table: the versions of every model's price, and what a usage row costs.

A version is never changed. A new price is a new version that is valid from a later time, so a request is charged what
was valid when it was accepted, and its row can be calculated again years later.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.price import Price

PriceSource = Literal["card", "config", "admin"]

# Workers AI's own prices, for models of these names whose card states none: 0.60, 0.10 and 3.00 dollars per million
# tokens, and 11 millionths of a dollar a neuron.
PUBLISHED = {"@cf/moonshotai/kimi-k2.5": Price(input=600_000, cached_input=100_000, output=3_000_000, neuron=11)}


# Stands for the models of accounts that have no price of their own.
ACCOUNTS_MODELS = "@accounts/*"
_PREFIX = ACCOUNTS_MODELS[:-1]
_PREFIX_LEN = len(_PREFIX)


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A price and when it begins. `price` is None where the model has none of its own from then on."""

    model: str  # lower case
    number: int  # from 1, per model
    valid_from_us: int
    source: PriceSource
    created_us: int
    created_by: str = ""  # the admin's key id
    price: Price | None


class PriceTable:
    """All versions, in memory. Owned by the core; lookups are a dictionary access."""

    def __init__(self, versions: Iterable[PriceVersion] = ()) -> None:
        self._versions: dict[str, list[PriceVersion]] = {}
        self._n_versions = 0
        for version in sorted(versions, key=attrgetter("number")):
            self.add(version)

    def add(self, version: PriceVersion) -> None:
        """The next version of a model. It must not begin before the one it follows."""
        history = self._versions.setdefault(version.model, [])
        assert not history or version.number > history[-1].number, "versions are added in order"
        assert not history or version.valid_from_us >= history[-1].valid_from_us, "a version must not begin earlier"
        if version.price is not None:
            # A usage row names its model and this: "*1" is the first default price, "1" the model's own first one.
            name = f"{'*' if version.model == ACCOUNTS_MODELS else ''}{version.number}"
            version = msgspec.structs.replace(version, price=msgspec.structs.replace(version.price, version=name))
        history.append(version)
        self._n_versions += 1

    def find(self, model: str, at_us: int) -> Price | None:
        """The price valid at a time: the model's own, else the default price if it is a model of an account.

        Returns None if the model has no price then."""
        own, history = None, self._versions.get(model) or self._versions.get(model.lower())
        if history and history[-1].valid_from_us <= at_us:
            own = history[-1].price
        elif history and (place := bisect_right(history, at_us, key=attrgetter("valid_from_us"))):
            own = history[place - 1].price
        if own is not None:
            return own
        is_defaulted = model[:_PREFIX_LEN] == _PREFIX and model != ACCOUNTS_MODELS
        return self.find(ACCOUNTS_MODELS, at_us) if is_defaulted else None

    def version(self, model: str, number: str) -> Price | None:
        """The price that a usage row names."""
        history = self._versions.get(ACCOUNTS_MODELS if number.startswith("*") else model.lower(), ())
        return next((each.price for each in history if each.price is not None and each.price.version == number), None)

    def n_versions(self, model: str) -> int:
        """The number of versions of a model's own price."""
        return len(self._versions.get(model.lower(), ()))

    def history(self, model: str) -> list[PriceVersion]:
        """The versions of a model's price, or else of the default price of accounts' models, oldest first."""
        own = self._versions.get(model.lower(), ())
        return list(own or (self._versions.get(ACCOUNTS_MODELS, ()) if model.lower().startswith(_PREFIX) else ()))

    def cost(self, row: UsageRow) -> int | None:
        """Cost of a usage row at the price version it names. Returns None if the model had no price."""
        price = self.version(row.model, row.price_version)
        return None if price is None else row.priced(price).cost_pico

    def worst_case(
        self, model: str, at_us: int, input_tokens: int, max_output_tokens: int, priority: str = "default"
    ) -> int | None:
        """The most that a request accepted at `at_us` can cost, in pico-units. Returns None without a price."""
        price = self.find(model, at_us)
        return None if price is None else price.worst_case_pico(input_tokens, max_output_tokens, priority)

    def priced(self, row: UsageRow) -> UsageRow:
        """The row with its cost at the price valid when it was created, if it has none yet."""
        price = self.find(row.model, row.created_us) if row.cost_pico is None else None
        return row if price is None else row.priced(price)

    def __len__(self) -> int:
        """Versions, of all models."""
        return self._n_versions

    def __iter__(self) -> Iterator[PriceVersion]:
        return (version for history in self._versions.values() for version in history)
