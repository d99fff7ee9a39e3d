"""Responses that are kept: for how long, for whom, and what of a chain survives what."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import TooLarge, Unavailable
from emberline.service import Service, open_core_server, open_http_worker
from emberline.service.core import LocalCore
from emberline.service.responses import DatabaseResponses
from emberline.store import Database, SqliteStore
from emberline.text.text_model import TextModel
from tests.databases import DatabaseLocation
from tests.examples import n_examples
from tests.faulty_store import FaultyStore
from tests.service.conftest import PATIENCE_S, Opener, offer
from tests.service.fake_engine import FakeEngine

DAY_US = 86_400_000_000


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def now_us() -> list[int]:
    """The clock, to be moved."""
    return [1_000 * DAY_US]


@pytest.fixture
async def kept(store: Database, now_us: list[int]) -> DatabaseResponses:
    kept = DatabaseResponses(store, retention_days=30, now_us=lambda: now_us[0])
    for number in range(4):
        assert await kept.put(record(number, now_us[0] + number))
    return kept


def record(number: int, created_us: int, account: str = "alice", size: int = 0) -> StoredResponse:
    """r0 ← r1 ← r2 …"""
    return StoredResponse(
        id=f"r{number}",
        account=account,
        parent=f"r{number - 1}" if number else None,
        depth=number,
        created_us=created_us,
        input=f'["in {number}"]' + " " * size,
        body=f'{{"out":{number}}}',
    )


async def ids(kept: DatabaseResponses, response_id: str, account: str = "alice") -> list[str]:
    return [found.id for found in await kept.get(account, response_id, whole=True)]


async def n_rows(store: Database) -> int:
    return int(str((await store.read("SELECT COUNT(*) FROM responses"))[0][0]))


async def test_a_chain_is_read_from_its_beginning(kept: DatabaseResponses, now_us: list[int]) -> None:
    assert await ids(kept, "r3") == ["r0", "r1", "r2", "r3"]
    assert await kept.get("alice", "r1") == [record(1, now_us[0] + 1)]
    assert await ids(kept, "r9") == []


async def test_accounts_are_isolated(kept: DatabaseResponses) -> None:
    assert await kept.get("bob", "r1") == []
    assert await ids(kept, "r1", "bob") == []
    assert not await kept.delete("bob", "r1")
    assert not await kept.put(record(2, 0, "bob"))  # continues what is not bob's
    assert await ids(kept, "r1") == ["r0", "r1"]


async def test_a_restart(tmp_path: Path) -> None:
    for turn in range(3):
        store = await SqliteStore.open(tmp_path / "again.db")
        kept = DatabaseResponses(store)
        await kept.open()
        assert kept.n_bytes.total() == sum(record(n, 0).n_bytes for n in range(turn))
        assert await kept.put(record(turn, 4_000_000_000_000_000))
        assert len(await ids(kept, f"r{turn}")) == turn + 1
        await kept.close()
        await store.close()


async def test_deleted_is_gone_for_its_owner_and_kept_for_its_children(
    kept: DatabaseResponses, store: Database
) -> None:
    assert await kept.delete("alice", "r1")
    assert not await kept.delete("alice", "r1")
    assert await kept.get("alice", "r1") == []
    assert await ids(kept, "r1") == []
    assert await ids(kept, "r3") == ["r0", "r1", "r2", "r3"]
    assert await n_rows(store) == 4
    assert await kept.delete("alice", "r3")
    assert await kept.delete("alice", "r2")  # now nothing continues r1 any more
    assert await n_rows(store) == 1
    assert kept.n_bytes["alice"] == record(0, 0).n_bytes
    assert await ids(kept, "r0") == ["r0"]


async def test_what_expires(kept: DatabaseResponses, store: Database, now_us: list[int]) -> None:
    began_us = now_us[0]
    now_us[0] = began_us + 20 * DAY_US
    assert await kept.put(record(4, now_us[0]))
    now_us[0] = began_us + 31 * DAY_US
    assert await ids(kept, "r3") == []
    assert await ids(kept, "r4") == ["r0", "r1", "r2", "r3", "r4"]
    await kept.clean_up()
    assert await n_rows(store) == 5
    now_us[0] = began_us + 51 * DAY_US
    await kept.clean_up()
    assert await n_rows(store) == 0
    assert kept.n_bytes.total() == 0


async def test_too_much_is_kept(store: Database, now_us: list[int]) -> None:
    """The account with most loses its oldest conversations, from their ends; the others lose nothing."""
    kept = DatabaseResponses(store, max_bytes=100_000, now_us=lambda: now_us[0])
    await kept.open()
    assert await kept.put(record(0, now_us[0], "bob", 5_000))
    for talk in range(12):
        for turn in range(2):
            one = record(turn, now_us[0] + 10 * talk + turn, size=10_000)
            parent = f"t{talk}r0" if turn else None
            assert await kept.put(msgspec.structs.replace(one, id=f"t{talk}r{turn}", parent=parent))
            async with asyncio.timeout(60):
                while kept.n_bytes.total() > 100_000:
                    await asyncio.sleep(0.001)
    assert await ids(kept, "r0", "bob") == ["r0"]
    assert await ids(kept, "t11r1") == ["t11r0", "t11r1"]
    assert await ids(kept, "t0r0") == await ids(kept, "t0r1") == []
    assert kept.n_bytes["alice"] > 70_000
    await kept.close()


async def test_a_parent_that_vanished_is_said(kept: DatabaseResponses, now_us: list[int]) -> None:
    for number in (3, 2, 1, 0):
        await kept.delete("alice", f"r{number}")
    assert not await kept.put(record(4, now_us[0]))
    assert await ids(kept, "r4") == []


async def test_a_conversation_has_a_limit(kept: DatabaseResponses, store: Database, now_us: list[int]) -> None:
    most = 3 * record(0, 0).n_bytes
    kept = DatabaseResponses(store, max_history_bytes=most, now_us=lambda: now_us[0])
    assert len(await ids(kept, "r2")) == 3
    with pytest.raises(TooLarge, match=f"larger than {most:,} bytes: start anew"):
        await kept.get("alice", "r3", whole=True)
    assert len(await kept.get("alice", "r3")) == 1


async def test_store_errors_do_not_stop_the_cleanup(store: Database, now_us: list[int]) -> None:
    faulty, n_reads = FaultyStore(store), 0

    async def third_fails(name: str, asked: object) -> None:
        nonlocal n_reads
        n_reads += name == "read"
        if name == "read" and n_reads == 3:
            raise Unavailable("the disk is full")

    async def until_read(n: int) -> None:
        async with asyncio.timeout(60):
            while n_reads < n:
                await asyncio.sleep(0.001)

    faulty.before = third_fails
    kept = DatabaseResponses(faulty, max_bytes=1_000, now_us=lambda: now_us[0])
    await kept.open()
    await until_read(2)  # by the first cleanup
    assert await kept.put(record(0, now_us[0], size=2_000))
    await until_read(3)
    assert kept.n_bytes.total() > 1_000
    assert await kept.put(msgspec.structs.replace(record(0, now_us[0] + 1), id="next"))
    async with asyncio.timeout(60):
        while kept.n_bytes.total() > 1_000:
            await asyncio.sleep(0.001)
    assert await ids(kept, "next") == ["next"]
    await kept.close()


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(-1, 9)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
        st.tuples(st.just("days"), st.sampled_from([1, 10, 31])),
        st.tuples(st.just("clean_up"), st.just(0)),
    ),
    max_size=25,
)


@given(DEEDS)
@settings(max_examples=n_examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_happens_to_a_tree(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, int]]
) -> None:
    """What is not deleted and not old is there with all that it continues; nothing stays that none of it needs."""
    now_us, made = 1_000 * DAY_US, {}
    parents: dict[str, str | None] = {}
    store = await SqliteStore.open(tmp_path_factory.mktemp("tree") / "t.db")
    kept = DatabaseResponses(store, retention_days=30, now_us=lambda: now_us)
    for deed, number in deeds:
        live = [name for name, created_us in made.items() if created_us + 30 * DAY_US > now_us]
        if deed == "keep":
            parent = f"r{number}" if f"r{number}" in live else None
            name = f"r{len(parents)}"
            one = msgspec.structs.replace(record(0, now_us), id=name, parent=parent)
            assert await kept.put(one)
            made[name], parents[name] = now_us, parent
        elif deed == "forget":
            assert await kept.delete("alice", f"r{number}") == (f"r{number}" in live)
            made.pop(f"r{number}", None)
        elif deed == "days":
            now_us += number * DAY_US
        else:
            await kept.clean_up()
    await kept.clean_up()
    live = [name for name, created_us in made.items() if created_us + 30 * DAY_US > now_us]
    needed = set()
    for name in parents:
        chain = []
        step: str | None = name
        while step is not None:
            chain.insert(0, step)
            step = parents[step]
        assert await ids(kept, name) == (chain if name in live else [])
        needed |= set(chain) if name in live else set()
    assert await n_rows(store) == len(needed)
    assert kept.n_bytes.total() == len(needed) * record(0, 0).n_bytes
    await store.close()


async def test_from_a_door(open_one: Opener, engine: FakeEngine, text_model: TextModel, tmp_path: Path) -> None:
    service: Service = await open_one(engine)
    server = await open_core_server(service, tmp_path / "core.sock")
    served = [offer(text_model, engine)]
    http_worker = await open_http_worker(served, core_socket=tmp_path / "core.sock")
    assert await http_worker.ready(PATIENCE_S)
    far_us = 4_000_000_000_000_000
    assert await http_worker.responses.put(record(0, far_us))
    assert await http_worker.responses.put(record(1, far_us + 1, size=3 << 20))
    assert not await http_worker.responses.put(record(3, far_us))
    near = await service.responses.get("alice", "r1", whole=True)
    assert (
        near
        == await http_worker.responses.get("alice", "r1", whole=True)
        == [
            record(0, far_us),
            record(1, far_us + 1, size=3 << 20),
        ]
    )
    assert await http_worker.responses.get("bob", "r1") == []
    assert isinstance(service.core, LocalCore)
    service.core.responses = DatabaseResponses(service.core.usage.store, max_history_bytes=100)
    await http_worker.close()
    http_worker = await open_http_worker(served, core_socket=tmp_path / "core.sock")
    with pytest.raises(TooLarge) as refused:
        await http_worker.responses.get("alice", "r1", whole=True)
    assert refused.value.param == "previous_response_id"
    assert await http_worker.responses.delete("alice", "r1")
    assert not await http_worker.responses.delete("alice", "r1")
    await server.close()
    with pytest.raises(Unavailable):
        await http_worker.responses.get("alice", "r0")
    await http_worker.close()
