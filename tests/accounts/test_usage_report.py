"""Reports add up to the rows, whatever they are grouped by, and are exact beyond 64 bits."""

import asyncio
import csv
import io

import msgspec
import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.accounts.usage_report import ReportQuery, UsageReports, parse_day, parse_dimensions, report_csv, total
from emberline.protocol.errors import BadInput
from emberline.protocol.price import PICO
from tests.accounts.test_usage_ledger import ROW
from tests.databases import DatabaseLocation

DAY_US = 86_400_000_000
TODAY = ROW.created_us // DAY_US
ALL = ReportQuery(since=TODAY - 10, until=TODAY + 10)


async def test_every_grouping_adds_up_to_the_rows(database: DatabaseLocation) -> None:
    store = await database.open()
    ledger, reports = UsageLedger(store), UsageReports(store)
    rows = [
        msgspec.structs.replace(
            ROW,
            id=f"r{n}",
            account=f"a{n % 2}",
            key_id=f"k{n % 3}",
            model=f"m{n % 5}",
            created_us=(TODAY + n % 4) * DAY_US,
            cost_pico=None if n % 5 == 4 else 5_000_000 * PICO + n,  # the sum exceeds 64 bits
            discount_pico=n,
            session="s" if n % 2 else "",
            device_ms=n,
        )
        for n in range(30)
    ]
    await asyncio.gather(*(ledger.record(row) for row in rows))
    cost_pico = sum(row.cost_pico or 0 for row in rows)
    assert cost_pico > 1 << 63
    assert await reports.report(msgspec.structs.replace(ALL, since=0, until=1)) == []
    for by in ((), ("day",), ("account", "model"), ("day", "account", "key", "model", "class"), ("session", "day")):
        found = await reports.report(msgspec.structs.replace(ALL, by=by))
        assert sum(row.n_requests for row in found) == 30
        assert sum(row.cost_pico for row in found) == cost_pico
        assert sum(row.n_unpriced for row in found) == 6
        assert sum(row.device_ms for row in found) == sum(range(30))
        assert sum(row.session_cached_tokens for row in found) == 15 * ROW.cached_tokens
        assert sum(row.session_discount_pico for row in found) == sum(range(1, 30, 2))
    of_session = await reports.report(msgspec.structs.replace(ALL, by=("session",), account="a1"))
    assert [(row.group, row.n_requests) for row in of_session] == [({"session": "s"}, 15)]
    everything = total(await reports.report(ALL))
    assert everything.body()["cost"] == f"120000000.{cost_pico % PICO:012d}"
    (mine,) = await reports.report(msgspec.structs.replace(ALL, by=("account",), account="a1", model="m4"))
    assert (mine.group, mine.n_requests) == ({"account": "a1"}, 3)
    assert mine.body()["cost"] is None  # no price is not zero
    assert await reports.report(msgspec.structs.replace(ALL, account="nobody' OR 1=1 --")) == []
    (first, *_) = await reports.report(msgspec.structs.replace(ALL, by=("day",), until=TODAY))
    assert first.group == {"day": "2023-11-14"}
    await store.close()


async def test_csv(database: DatabaseLocation) -> None:
    store = await database.open()
    await UsageLedger(store).record(msgspec.structs.replace(ROW, cost_pico=1_500_000_000_000))
    by = ("account", "day")
    text = report_csv(by, await UsageReports(store).report(msgspec.structs.replace(ALL, by=by)))
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["account"], row["day"], row["requests"], row["cost"]) == ("alice", "2023-11-14", "1", "1.50")
    assert report_csv(by, []).count("\r\n") == 1
    await store.close()


@pytest.mark.parametrize("account", [None, "alice"])
async def test_groups_beyond_the_limit_are_added_up(database: DatabaseLocation, account: str | None) -> None:
    """Those that cost the most are listed, whole: over all days. The sum of the rows is the sum of all usage."""
    store = await database.open()
    ledger, reports = UsageLedger(store), UsageReports(store, max_rows=2)
    used = [("made-up-1", 0), ("real", 5), ("made-up-2", 0), ("dear", 7), ("made-up-3", 0), ("real", 5), ("cheap", 1)]
    for number, (model, cost) in enumerate(used):
        row = msgspec.structs.replace(ROW, id=f"r{number}", model=model, cost_pico=cost * PICO + 1)
        await ledger.record(msgspec.structs.replace(row, created_us=(TODAY + number % 3) * DAY_US))
    found = await reports.report(msgspec.structs.replace(ALL, by=("model",), account=account))
    rows = [(row.group["model"], row.n_requests, row.cost_pico, row.n_folded) for row in found]
    assert rows == [("dear", 1, 7 * PICO + 1, 0), ("real", 2, 10 * PICO + 2, 0), ("other", 4, PICO + 4, 4)]
    everything = total(found)
    assert (everything.n_requests, everything.cost_pico, everything.n_folded) == (7, 18 * PICO + 7, 4)
    (last,) = list(csv.DictReader(io.StringIO(report_csv(("model",), found))))[2:]
    assert (last["model"], last["requests"]) == ("other", "4")
    await store.close()


def test_bad_input() -> None:
    assert parse_day("7d", 100, "since") == 93
    assert parse_day("1970-01-03", 100, "since") == 2
    for text in ("", "yesterday", "2026-13-01", "99999d", "1970-01-01T00:00", "٣d"):
        with pytest.raises(BadInput, match="`since`"):
            parse_day(text, 100, "since")
    assert parse_dimensions("day, model") == ("day", "model")
    for text in ("day,day", "price", "day;DROP TABLE usage"):
        with pytest.raises(BadInput, match="`by`"):
            parse_dimensions(text)
