"""What gateways keep in the store, on both databases: cached replies, counters, settings and log rows."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.gateway.cache_stage import replay
from emberline.gateway.counters import CounterTable
from emberline.gateway.gateway_errors import GatewayNotFound
from emberline.gateway.gateways import Gateways
from emberline.gateway.log import LogFilter, LogRow, LogWriter, search
from emberline.gateway.response_cache import MAX_PENDING_BYTES, CachedReply, ResponseCache, request_digest
from emberline.gateway.routing import Counter
from emberline.protocol.complete_response import Answer, AnswerChoice, Encoded, ReasoningPart, TextPart, ToolCallPart
from emberline.protocol.errors import BadInput, Conflict, Forbidden
from emberline.protocol.events import ChoiceDone, Completed, TextDelta, TextLogprob, ToolCallStarted, Usage
from emberline.protocol.gateway import MAX_COST_PICO, GatewaySettings, Guardrail
from emberline.protocol.request import EncodeRequest, GenerateRequest, Message, Priority, SamplingParams
from emberline.store import Database
from tests.databases import DatabaseLocation, mostly_sqlite, on_both_databases
from tests.faulty_store import FaultyStore

database = mostly_sqlite

HOUR_US = 3_600_000_000
CENTURY_S = 36_525 * 86_400  # a window that ends in no test
TEXTS = st.text(max_size=8)
REQUESTS = st.builds(
    GenerateRequest,
    id=TEXTS,
    model=st.just("m"),
    messages=st.lists(
        st.builds(Message, role=st.sampled_from(["user", "system"]), content=TEXTS), min_size=1, max_size=3
    ).map(tuple),
    sampling=st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]), max_tokens=st.integers(1, 3)),
    session=st.none() | TEXTS,
    priority=st.sampled_from(Priority),
    template_kwargs=st.dictionaries(TEXTS, TEXTS, max_size=3),
)


def content(request: GenerateRequest) -> Any:
    return request.messages, request.sampling, request.template_kwargs


@given(REQUESTS, REQUESTS, st.sampled_from(["one", "two"]), st.sampled_from(["one", "two"]))
def test_digests_are_equal_where_account_and_content_are(a: Any, b: Any, first: str, second: str) -> None:
    same = request_digest(first, "g", ["m"], a) == request_digest(second, "g", ["m"], b)
    assert same == (first == second and content(a) == content(b))
    assert request_digest(first, "g", ["m"], a) != request_digest(first, "h", ["m"], a)
    assert request_digest(first, "g", ["m"], a) != request_digest(first, "g", ["m", "n"], a)
    shuffled = msgspec.structs.replace(a, template_kwargs=dict(reversed(a.template_kwargs.items())))
    assert request_digest(first, "g", ["m"], shuffled) == request_digest(first, "g", ["m"], a)


@given(TEXTS, TEXTS, REQUESTS, REQUESTS)
def test_a_key_of_the_clients_own(key: str, other: str, a: Any, b: Any) -> None:
    assert request_digest("x", "g", ["m"], a, key) == request_digest("x", "g", ["n"], b, key)
    assert (request_digest("x", "g", ["m"], a, key) == request_digest("x", "g", ["m"], a, other)) == (key == other)
    assert request_digest("x", "g", ["m"], a, key) != request_digest("y", "g", ["m"], a, key)
    assert request_digest("x", "g", ["m"], a, key) != request_digest("x", "g", ["m"], a)
    texts = EncodeRequest(id="", model="m", texts=("t",))
    assert request_digest("x", "g", ["m"], texts, key) != request_digest("x", "g", ["m"], a, key)


def reply(text: str = "hi", seconds: float = 3600) -> CachedReply:
    parts = [ReasoningPart("hm"), TextPart(text), ToolCallPart("c1", "f", "{}")]
    logprobs = [TextLogprob(text, -0.5, [1])]
    answer = Answer([AnswerChoice(parts, logprobs, "tool_calls")], Usage(prompt_tokens=3, completion_tokens=2))
    expires_us = time.time_ns() // 1000 + int(seconds * 1e6)
    return CachedReply(answer=answer, model="m", provider="p", expires_us=expires_us)


def test_a_replay_has_every_part() -> None:
    events = replay(reply())
    assert [type(event).__name__ for event in events] == [
        *("Started", "ReasoningDelta", "TextDelta", "ToolCallStarted", "ToolCallDelta", "ChoiceDone", "Completed")
    ]
    assert isinstance(events[2], TextDelta)
    assert events[2].logprobs
    assert isinstance(events[3], ToolCallStarted)
    assert events[-2] == ChoiceDone(0, "tool_calls")
    assert isinstance(events[-1], Completed)
    assert events[-1].cost_pico == 0


@pytest.fixture
async def store(database: DatabaseLocation) -> Any:
    opened = await database.open()
    yield opened
    await opened.close()


@on_both_databases
async def test_replies_survive_and_expire(store: Database) -> None:
    cache = ResponseCache(store)
    await cache.open()
    assert cache.put("acme", "d1", reply())
    assert cache.put("acme", "d2", reply(seconds=-1))
    cache.put(
        "acme",
        "d3",
        CachedReply(
            encoded=Encoded(values=b"1234", n_rows=1, usage=Usage()), model="m", provider="p", expires_us=2**53
        ),
    )
    assert not cache.put("acme", "huge", reply("x" * (1 << 20)))
    await cache.close()
    other = ResponseCache(store)
    found = await other.get("acme", "d1")
    assert found is not None
    assert found.answer == reply().answer
    assert await other.get("other", "d1") is None
    assert await other.get("acme", "d2") is None
    encoded = await other.get("acme", "d3")
    assert encoded is not None
    assert encoded.encoded is not None
    await other.sweep()
    assert len(await store.read("SELECT digest FROM gateway_cache")) == 2
    await other.sweep(account_bytes=0)
    assert await store.read("SELECT digest FROM gateway_cache") == []
    await other.purge("acme")
    assert await other.get("acme", "d1") is None


async def test_the_memory_of_the_cache_is_bounded() -> None:
    cache = ResponseCache(None, memory_bytes=5000)
    for number in range(100):
        cache.put("a", f"d{number}", reply("x" * 500))
        assert cache.n_bytes <= 5000
    assert await cache.get("a", "d99") is not None
    assert await cache.get("a", "d0") is None


async def test_a_purge_reaches_every_process(store: Database) -> None:
    one, two = ResponseCache(store), ResponseCache(store)
    await one.open()
    await two.open()
    for account in ("acme", "other"):
        two.put(account, "d1", reply())
    await two._flush()
    assert await one.get("acme", "d1") is not None
    assert await two.purge("acme") == 1
    await one.check_purged()
    assert await one.get("acme", "d1") is None
    assert await one.get("other", "d1") is not None
    assert await two.purge(None) == 1
    await one.check_purged()
    assert [await each.get("other", "d1") for each in (one, two)] == [None, None]
    await one.sweep()
    await one.close()
    await two.close()


async def test_nothing_purged_is_written_afterwards(store: Database) -> None:
    faulty, begun, may_write = FaultyStore(store), asyncio.Event(), asyncio.Event()
    cache = ResponseCache(faulty)

    async def write_late(name: str, asked: object) -> None:
        if name == "transaction":
            begun.set()
            await may_write.wait()

    cache.put("acme", "d1", reply())
    faulty.before = write_late
    flushing = asyncio.create_task(cache._flush())
    await begun.wait()
    faulty.before = None
    purging = asyncio.create_task(cache.purge("acme"))
    await asyncio.wait([purging], timeout=0.1)
    may_write.set()
    await asyncio.gather(flushing, purging)
    assert await cache.get("acme", "d1") is None


async def test_nothing_purged_elsewhere_is_written_afterwards(store: Database) -> None:
    one, two = ResponseCache(store), ResponseCache(store)
    two.put("acme", "d1", reply())
    await one.purge("acme")
    await two.close()
    assert await two.get("acme", "d1") is None
    assert await ResponseCache(store).get("acme", "d1") is None


async def test_a_purge_makes_room_for_what_waits_to_be_written(store: Database) -> None:
    cache = ResponseCache(store)
    for number in range(60):
        cache.put("acme", f"d{number}", reply("x" * (1 << 18)))
    await cache.purge("acme")
    cache.put("acme", "new", reply())
    await cache.close()
    assert await ResponseCache(store).get("acme", "new") is not None


async def test_what_waits_to_be_written_is_bounded(store: Database) -> None:
    cache = ResponseCache(store)
    for number in range(60):
        cache.put("acme", f"d{number}", reply("x" * (1 << 18)))
    assert cache._n_pending_bytes <= MAX_PENDING_BYTES + (1 << 20)
    await cache.close()
    assert cache._n_pending_bytes == 0
    (stored,) = await store.read("SELECT COUNT(*) FROM gateway_cache")
    assert stored[0] >= MAX_PENDING_BYTES >> 20


async def test_values_without_end_share_a_count(store: Database) -> None:
    tables = [CounterTable(store, max_counts=10) for _ in range(2)]
    for table in tables:
        await table.open()
        for number in range(30):
            table.add("acme", "g", Counter(f"r#0/rate/{number}", CENTURY_S, 5), 1)
            table.add("acme", "g", Counter(f"r#0/rate/{number}", CENTURY_S, 5), 1)
        table.add("other", "g", Counter("r#0/rate/1", CENTURY_S, 5), 1)
        await table.sync()
    for table in tables:
        await table.sync()
        assert len(table._counts) <= 12
        for number in range(10):  # whatever order they have in the store, both keep the same
            assert table.has_room("acme", "g", Counter(f"r#0/rate/{number}", CENTURY_S, 5))
            assert not table.has_room("acme", "g", Counter(f"r#0/rate/{number}", CENTURY_S, 4)), "of both processes"
        assert not table.has_room("acme", "g", Counter("r#0/rate/99", CENTURY_S, 5))
        assert table.has_room("acme", "g", Counter("r#0/budget/99", CENTURY_S, 5))
        assert table.has_room("other", "g", Counter("r#0/rate/99", CENTURY_S, 5))
        await table.close()


@on_both_databases
async def test_processes_share_their_counts(store: Database) -> None:
    one, two = CounterTable(store), CounterTable(store)
    counter = Counter("r#0/rate", CENTURY_S, 5)
    for table in (one, two):
        await table.open()
    for _ in range(3):
        one.add("acme", "g", counter, 1)
        two.add("acme", "g", counter, 1)
    assert one.has_room("acme", "g", counter)
    await one.sync()
    await two.sync()
    await one.sync()
    assert not one.has_room("acme", "g", counter)
    assert not two.has_room("acme", "g", counter)
    assert one.has_room("other", "g", counter)
    await one.close()
    await two.close()
    later = CounterTable(store)
    await later.open()
    assert not later.has_room("acme", "g", counter), "counts survive a restart"
    await later.close()


@on_both_databases
async def test_counts_never_exceed_what_the_store_holds(store: Database) -> None:
    counter = Counter("r#0/budget", CENTURY_S, 1 << 50)
    for _ in range(12):
        table = CounterTable(store)
        await table.open()
        for _ in range(2):
            table.add("acme", "g", counter, MAX_COST_PICO)
        table.add("other", "g", counter, 1)
        await table.sync()
        assert not table.has_room("acme", "g", counter)
        assert table.has_room("other", "g", counter)
        await table.close()


@on_both_databases
async def test_a_log_row_that_the_store_refuses_is_lost_alone(store: Database) -> None:
    writer = LogWriter(store)
    await writer.open()
    for name, more in (
        ("bad", {"cost_pico": 1 << 70}),
        ("odd", {"event_id": "a\0b", "requested": "\ud800"}),
        ("ok", {}),
    ):
        writer.add(LogRow(id=name, account="acme", gateway="g", created_us=1, **more))
    await writer.close()
    rows = await search(store, "acme", "g", LogFilter())
    assert [(row.id, row.event_id) for row in rows] == [("ok", ""), ("odd", "ab")]


@on_both_databases
async def test_settings_in_the_store(store: Database) -> None:
    configured = [GatewaySettings(name="ops", account="acme"), GatewaySettings(name="shared", cache_ttl_s=5)]
    one, two = Gateways(store, configured), Gateways(store)
    await one.open()
    await two.open()
    await one.put(GatewaySettings(name="mine", account="acme", cache_ttl_s=60))
    await two.refresh()
    assert two.find("acme", "mine").cache_ttl_s == 60
    assert one.find("anyone", "shared").cache_ttl_s == 5
    assert one.find("anyone", "default") == GatewaySettings(name="default")
    for account, name in (("other", "mine"), ("other", "ops")):
        with pytest.raises(GatewayNotFound):
            one.find(account, name)
    with pytest.raises(Conflict):
        await one.put(GatewaySettings(name="ops", account="acme"), by_operator=True)
    with pytest.raises(BadInput):
        await one.put(GatewaySettings(name="x", account="acme", fallbacks={"a": ("a",)}))
    await two.delete("acme", "mine")
    await one.refresh()
    with pytest.raises(GatewayNotFound):
        one.find("acme", "mine")
    await one.close()
    await two.close()


async def test_an_operators_gateway_in_the_store_is_a_floor(store: Database) -> None:
    words = Guardrail(name="words", model="guard")
    gateways = Gateways(store)
    await gateways.open()
    await gateways.put(GatewaySettings(name="corp", account="acme", guardrails=(words,)), by_operator=True)
    await gateways.put(GatewaySettings(name="corp", account="acme", cache_ttl_s=60))
    await gateways.put(GatewaySettings(name="corp", account="other", cache_ttl_s=60))
    again = Gateways(store)
    await again.open()
    for each in (gateways, again):
        found = each.find("acme", "corp")
        assert (found.guardrails, found.cache_ttl_s) == ((words,), 60)
        assert each.find("other", "corp").guardrails == ()
    await gateways.delete("acme", "corp")
    assert gateways.find("acme", "corp").cache_ttl_s == 0
    with pytest.raises(Forbidden):
        await gateways.delete("acme", "corp")
    await gateways.put(GatewaySettings(name="corp", account="acme", cache_ttl_s=60))
    await gateways.put(GatewaySettings(name="corp", account="acme", max_attempts=2), by_operator=True)
    assert gateways.find("acme", "corp") == GatewaySettings(name="corp", account="acme", max_attempts=2)
    await gateways.delete("acme", "corp", by_operator=True)
    with pytest.raises(GatewayNotFound):
        gateways.find("acme", "corp")
    await gateways.close()
    await again.close()


@on_both_databases
async def test_log_rows(store: Database) -> None:
    writer = LogWriter(store)
    await writer.open()
    for number in range(600):
        writer.add(
            LogRow(id=f"r{number:04}", account="acme", gateway="g", created_us=number, metadata=f'{{"n":{number}}}')
        )
    writer.add(LogRow(id="r0001", account="acme", gateway="g", created_us=1))  # a second row of the same id is none
    await writer.close()
    rows = await search(store, "acme", "g", LogFilter(limit=1000))
    assert [row.id for row in rows] == [f"r{number:04}" for number in reversed(range(600))]
    assert [row.id for row in await search(store, "acme", "g", LogFilter(metadata=("n", "7")))] == ["r0007"]
    page = await search(store, "acme", "g", LogFilter(before=(10, "r0010"), limit=3))
    assert [row.id for row in page] == ["r0009", "r0008", "r0007"]
    assert await search(store, "other", "g", LogFilter()) == []
