"""Prices in the store: versions, where they come from, and processes that share them."""

import asyncio

import pytest

from emberline.accounts.audit_log import Actor
from emberline.accounts.price_store import PriceStore
from emberline.protocol.errors import BadInput, Conflict
from emberline.protocol.price import Price
from tests.databases import DatabaseLocation

CHEAP, DEAR = Price(input=100, output=200), Price(input=1000, cached_input=100, output=2000)
HOUR_US = 3_600_000_000


async def test_versions_are_kept_and_shared(database: DatabaseLocation) -> None:
    store, other_store = await database.open(), await database.open()
    prices, other = PriceStore(store), PriceStore(other_store)
    await prices.start()
    await other.start()
    assert prices.table.find("@cf/a/b", store.now_us()) is None
    await prices.set("@cf/A/b", CHEAP, "admin", Actor("key1"))
    await asyncio.gather(*(process.set("@cf/a/b", DEAR, "admin") for process in (prices, other, prices)))
    await asyncio.gather(prices.refresh(), other.refresh())
    for process in (prices, other):
        assert [version.number for version in process.table.history("@cf/a/b")] == [1, 2, 3, 4]
        price = process.table.find("@cf/a/b", store.now_us() + HOUR_US)
        assert price is not None
        assert (price.input, price.version) == (1000, "4")
    first = other.table.history("@cf/a/B")[0]
    assert (first.source, first.created_by, first.price) == ("admin", "key1", Price(input=100, output=200, version="1"))
    await prices.set("@cf/a/b", None, "admin")
    assert prices.table.find("@cf/a/b", store.now_us()) is None
    for process, its_store in ((prices, store), (other, other_store)):
        await process.close()
        await its_store.close()


async def test_a_price_begins_now_or_later_and_in_order(database: DatabaseLocation) -> None:
    store = await database.open()
    prices = PriceStore(store)
    await prices.start()
    now_us = store.now_us()
    with pytest.raises(BadInput, match="past"):
        await prices.set("m", CHEAP, "admin", valid_from_us=now_us - 1)
    await prices.set("m", CHEAP, "admin")
    await prices.set("m", DEAR, "admin", valid_from_us=now_us + HOUR_US)
    with pytest.raises(Conflict, match="version 2"):
        await prices.set("m", CHEAP, "admin")
    found = [prices.table.find("m", store.now_us() + later_us) for later_us in (0, 2 * HOUR_US)]
    assert [price.input for price in found if price is not None] == [100, 1000]
    await prices.close()
    await store.close()


async def test_a_configured_price_is_a_models_own_whatever_the_default_is(database: DatabaseLocation) -> None:
    store = await database.open()
    prices, own = PriceStore(store), "@accounts/alice/m"
    await prices.start({"@accounts/*": CHEAP, own: CHEAP})
    await prices.set("@accounts/*", DEAR, "admin")
    assert prices.table.n_versions(own) == 1
    assert prices.table.n_versions("@accounts/bob/m") == 0, "the name alone makes no model known"
    found = [prices.table.find(model, store.now_us()) for model in (own, "@accounts/bob/m")]
    assert [price and (price.input, price.version) for price in found] == [(100, "1"), (1000, "*2")]
    await prices.close()
    await store.close()


async def test_configured_prices_are_versions_when_they_change(database: DatabaseLocation) -> None:
    store = await database.open()
    sources: list[str] = []
    for configured in (CHEAP, CHEAP, DEAR):
        prices = PriceStore(store)
        await prices.start({"m": configured}, {"m": Price(input=7), "card": Price(input=7)})
        await prices.close()
        sources = [version.source for version in prices.table.history("m")]
    assert sources == ["config", "config"]
    assert [version.source for version in prices.table.history("card")] == ["card"]
    await prices.set("m", CHEAP, "admin")
    again = PriceStore(store)
    await again.start({"m": DEAR})  # unchanged: what was set since stands
    price = again.table.find("m", store.now_us())
    assert price is not None
    assert price.version == "3"
    await again.close()
    await store.close()


async def test_a_process_hears_of_the_prices_of_others(database: DatabaseLocation) -> None:
    store, other_store = await database.open(), await database.open()
    listening, setting = PriceStore(store, poll_s=0.02), PriceStore(other_store)
    await listening.start()
    await setting.set("m", CHEAP, "admin")
    async with asyncio.timeout(60):
        while not listening.current():
            await asyncio.sleep(0.01)
    assert [version.model for version in listening.current()] == ["m"]
    await listening.close()
    await store.close()
    await other_store.close()
