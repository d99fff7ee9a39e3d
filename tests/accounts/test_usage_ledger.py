import asyncio

import msgspec

from emberline.accounts.usage_ledger import UsageLedger, UsageRow
from tests.databases import DatabaseLocation

ROW = UsageRow(
    id="r1",
    account="alice",
    key_id="k1",
    model="@cf/a/b",
    model_version="f" * 32,
    priority="flex",
    input_tokens=10,
    cached_by_tier={"device": 4, "host": 2},
    output_tokens=3,
    reasoning_tokens=1,
    status="finished",
    created_us=1_700_000_000_000_000,
    first_token_us=1_700_000_000_100_000,
    finished_us=1_700_000_000_200_000,
)


async def test_a_usage_row_round_trips_and_is_immutable(database: DatabaseLocation) -> None:
    store = await database.open()
    ledger = UsageLedger(store)
    bare = UsageRow(id="r2", account="a", model="m", model_version="", status="cancelled", created_us=1, finished_us=2)
    await asyncio.gather(ledger.record(ROW), ledger.record(bare))
    await ledger.record(msgspec.structs.replace(ROW, output_tokens=99))  # the first row of an id stands
    assert await ledger.find("r1") == ROW
    assert await ledger.find("r2") == bare
    assert await ledger.find("nobody") is None
    assert await store.read("SELECT count(*) FROM usage") == [(2,)]
    assert ROW.cached_tokens == 6
    await store.close()
