"""Prices in the store: every version ever set, whatever it came from, and the table that is kept from them.

Prices come from model cards, from `[[prices]]` in emberline.toml and from the admin API. Each becomes a version: a
card's where the model has no other, the configuration's when it differs from what the configuration said last.
"""

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from emberline.accounts.audit_log import Actor, AuditLog
from emberline.accounts.prices import PriceSource, PriceTable, PriceVersion
from emberline.net.periodic import stop
from emberline.protocol.errors import BadInput, Conflict, Unavailable
from emberline.protocol.price import Price, price_fields
from emberline.store import Database, Query, Rows, Transaction

CHANNEL = "prices"
POLL_S = 5.0  # for changes by other processes, should a notification be lost
_COLUMNS = "model, number, valid_from_us, source, created_us, created_by, price"
_ALL = f"SELECT {_COLUMNS} FROM prices ORDER BY model, number"
_COUNT = "SELECT COUNT(*) FROM prices"
_HISTORY = f"SELECT {_COLUMNS} FROM prices WHERE model = ? ORDER BY number"
_INSERT = f"INSERT INTO prices ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING number"
_SKEW_US = 2_000_000  # between the clocks of two processes, at most
_MAX_VERSIONS = 10_000  # of one model: a program that sets a price in a loop has an error

log = logging.getLogger("emberline.prices")


class PriceStore:
    """Owns `table`, which is kept up to date between `start` and `close`."""

    def __init__(self, store: Database, audit: AuditLog | None = None, poll_s: float = POLL_S) -> None:
        """`audit` records the prices that admins set."""
        self.table = PriceTable()
        self._audit = audit
        self._store = store
        self._subscription = store.listen(CHANNEL, poll_s)
        self._following: asyncio.Task[None] | None = None
        self._refreshing = asyncio.Lock()

    async def start(
        self, configured: Mapping[str, Price] | None = None, cards: Mapping[str, Price] | None = None
    ) -> None:
        """Load the table, and record the prices of the configuration and of model cards where they are new."""
        await self.refresh()
        for model, price in (configured or {}).items():
            last = next(
                (v for v in reversed(self.table.history(model)) if v.source == "config" and v.model == model), None
            )
            if last is None or _rates(last.price) != price:
                try:
                    await self.set(model, price, "config")
                except Conflict as error:
                    log.warning("the configured price of %s is not used: %s", model, error.message)
        for model, price in (cards or {}).items():
            if not self.table.history(model):
                await self.set(model, price, "card")
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        await stop(self._following)

    async def set(
        self,
        model: str,
        price: Price | None,
        source: PriceSource,
        actor: Actor | None = None,
        valid_from_us: int | None = None,
    ) -> PriceVersion:
        """Add a version, valid from now or later. With None, the model has no price of its own from then on."""
        now_us, by = self._store.now_us(), "" if actor is None else actor.name
        if valid_from_us is not None and valid_from_us < now_us:
            raise BadInput("a price cannot begin in the past: requests were charged by then", param="valid_from")

        def work() -> Transaction[PriceVersion | None]:
            history = _versions((yield Query(_HISTORY, (model.lower(),))))
            if len(history) >= _MAX_VERSIONS:
                raise BadInput(f"{model} has {len(history):,} prices already", param="model")
            begin_us = now_us if valid_from_us is None else valid_from_us
            if history and valid_from_us is None and history[-1].valid_from_us < now_us + _SKEW_US:
                begin_us = max(begin_us, history[-1].valid_from_us)  # set by another process at the same time
            if history and history[-1].valid_from_us > begin_us:
                raise Conflict(
                    f"version {history[-1].number} of this price begins later: a new one must not begin before it"
                )
            version = PriceVersion(
                model=model.lower(),
                number=len(history) + 1,
                valid_from_us=begin_us,
                source=source,
                created_us=now_us,
                created_by=by,
                price=_rates(price),
            )
            encoded = None if version.price is None else msgspec.json.encode(version.price).decode()
            values = (version.model, version.number, begin_us, source, now_us, by, encoded)
            return version if (yield Query(_INSERT, values)) else None  # None: another process was faster

        version = None
        while version is None:
            if self._audit is None or actor is None:
                version = await self._store.run(work)
            else:
                details = {
                    "price": None if price is None else price_fields(price),
                    "valid_from_us": now_us if valid_from_us is None else valid_from_us,
                }
                version = await self._audit.run(actor, "price.set", model, details, lambda _: work())
        await self._store.notify(CHANNEL)
        await self.refresh()
        return version

    def current(self) -> list[PriceVersion]:
        """The version of each model that is valid now, by model."""
        now_us = self._store.now_us()
        valid = {version.model: version for version in self.table if version.valid_from_us <= now_us}
        return [valid[model] for model in sorted(valid) if valid[model].price is not None]

    async def refresh(self) -> None:
        """Add to the table what others have set. Versions are never removed, so their number shows whether they did."""
        async with self._refreshing:
            ((n_versions,),) = await self._store.read(_COUNT)
            if n_versions == len(self.table):
                return
            for version in _versions(await self._store.read(_ALL)):
                if version.number > self.table.n_versions(version.model):
                    self.table.add(version)

    async def _follow(self) -> None:
        async for _ in self._subscription:
            try:
                await self.refresh()
            except Unavailable as error:
                log.warning("prices were not read: %s", error.message)
            except Exception:
                log.exception("prices were not read")


def _rates(price: Price | None) -> Price | None:
    """Return the price without its version, which is the row's number."""
    return None if price is None else msgspec.structs.replace(price, version="")


def _versions(rows: Rows) -> list[PriceVersion]:
    versions: list[PriceVersion] = []
    for row in rows:
        fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
        price = fields.pop("price")
        decoded = None if price is None else msgspec.json.decode(str(price), type=Price)
        versions.append(msgspec.convert(fields | {"price": decoded}, PriceVersion))
    return versions
