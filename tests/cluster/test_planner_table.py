"""The planner's rows in both databases, and the lock."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from emberline.cluster.planner_table import PlannerTable
from emberline.config import ScalingConfig
from emberline.protocol.errors import NotFound
from emberline.protocol.scaling import ArrivalPoint, DecisionRow, ModelLoad, PlanRow, ReplicaRow, WorkerView
from emberline.store import Database, ProcessLock
from emberline.store.advisory_lock import AdvisoryLock
from tests.databases import DatabaseLocation

# The server process that holds an advisory lock in the database.
HOLDING_PID = """
    SELECT pid FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
PLAN = PlanRow(model="m", at_us=5, core="c", mode="on", plan={"held": []}, observation={"held_requests": 1})


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
def table(store: Database) -> PlannerTable:
    return PlannerTable(store)


def open_lock(database: DatabaseLocation, store: Database, **times: float) -> ProcessLock:
    """The planner's lock. On PostgreSQL with other `times` than a store chooses."""
    if database.kind == "sqlite":
        return store.lock("planner")
    return AdvisoryLock(database.where, "planner", **times)


def decision(at_us: int, outcome: str = "begun", **more: object) -> DecisionRow:
    fields = dict(model="m", number=0, core="c", action="start", role="both", replica="m-1", gpu="", cause="load")
    return DecisionRow(at_us=at_us, outcome=outcome, **{"why": "w", "took_s": 0.0, **fields, **more})  # type: ignore[arg-type]


async def test_a_core_replaces_its_own_report(table: PlannerTable) -> None:
    view = WorkerView(name="w0", connected=True, prefill_rate=9.5)
    first = ModelLoad(model="m", queued_tokens=1, workers=(view,), arrivals=(ArrivalPoint(7, 1, 2, 3, 4),))
    await table.report("a", [first, ModelLoad(model="n")])
    await table.report("b", [ModelLoad(model="m", queued_tokens=2)])
    await table.report("a", [ModelLoad(model="m", queued_tokens=3, workers=(view,), arrivals=first.arrivals)])
    found = await table.loads()
    assert [(row.core, row.load.model, row.load.queued_tokens) for row in found] == [
        ("a", "m", 3),
        ("a", "n", 0),
        ("b", "m", 2),
    ]
    assert found[0].load.workers == (view,)
    assert found[0].load.arrivals == first.arrivals


async def test_bounds_are_set_and_reset(table: PlannerTable) -> None:
    bounds = ScalingConfig(min_replicas=0, max_replicas=4, idle_s=60.0)
    await table.set_bounds("m", bounds)
    assert await table.bounds() == {"m": bounds}
    await table.set_bounds("m", ScalingConfig(max_replicas=2))
    assert (await table.bounds())["m"].max_replicas == 2
    await table.set_bounds("m", None)
    assert await table.bounds() == {}
    with pytest.raises(NotFound):
        await table.set_bounds("m", None)


async def test_replicas_plans_and_decisions(table: PlannerTable) -> None:
    row = ReplicaRow(name="m-1", model="m", role="both", gpu="", state="ordered", since_us=1, launcher="local")
    await table.put_replica(row)
    changed = ReplicaRow(name="m-1", model="m", role="decode", gpu="", state="draining", since_us=2, launcher="local")
    await table.put_replica(changed)
    assert await table.replicas() == [changed]
    await table.drop_replica("m-1")
    assert await table.replicas() == []
    await table.record(PLAN, [decision(1), decision(2)])
    await table.record(PLAN, [decision(1, "done", took_s=4.5)])
    found = await table.decisions("m")
    assert [(each.at_us, each.outcome, each.took_s) for each in found] == [(2, "begun", 0.0), (1, "done", 4.5)]
    assert await table.plans() == [PLAN]
    assert await table.decisions("other") == []


async def test_one_process_holds_the_lock(database: DatabaseLocation) -> None:
    """With SQLite, there is one process."""
    if database.kind == "sqlite":
        store = await database.open()
        assert await store.lock("planner").try_hold()
        await store.close()
        return
    one, two = await database.open(), await database.open()
    first, second = open_lock(database, one, timeout_s=60.0), open_lock(database, two, timeout_s=60.0)
    try:
        assert await first.try_hold()
        assert await first.try_hold()
        assert not await second.try_hold()
        assert await two.lock("another").try_hold()
        await first.release()
        assert await second.try_hold()
        assert not await first.try_hold()
    finally:
        for lock in (first, second):
            await lock.release()
        await one.close()
        await two.close()


async def test_a_lock_that_was_lost_is_not_held(database: DatabaseLocation) -> None:
    """Even where the process could have it again: somebody else may have had it meanwhile."""
    store = await database.open()
    lock = open_lock(database, store, timeout_s=60.0)
    try:
        assert await lock.try_hold()
        assert await lock.is_held()
        if database.kind == "sqlite":
            return
        ((pid,),) = await store.read(HOLDING_PID)
        assert await store.read("SELECT pg_terminate_backend(?, 60000)", (pid,)) == [(True,)]
        assert not await lock.is_held()
        assert await lock.try_hold()
        assert await lock.is_held()
        await lock.release()
        assert not await lock.is_held()
    finally:
        await lock.release()
        await store.close()


async def test_a_stopped_process_loses_the_lock(database: DatabaseLocation) -> None:
    """Its kernel would keep the connection for ever."""
    if database.kind == "sqlite":
        return
    store = await database.open()
    first, second = (open_lock(database, store, silent_s=0.1) for _ in range(2))
    try:
        async with asyncio.timeout(60):
            while not await first.try_hold():  # on a busy machine, it may be silent for too long between two questions
                pass
            while not await second.try_hold():  # asks all the time, and `first` nothing
                await asyncio.sleep(0.01)
        assert not await first.is_held()
    finally:
        for lock in (first, second):
            await lock.release()
        await store.close()


@pytest.mark.parametrize("ask", ["is_held", "try_hold"])
async def test_a_lock_is_lost_with_the_last_message_of_its_session(database: DatabaseLocation, ask: str) -> None:
    """The connection is still open when it comes."""
    if database.kind == "sqlite":
        return
    store = await database.open()
    lock = store.lock("planner")
    try:
        async with asyncio.timeout(60):
            while not await lock.try_hold():
                pass
        assert isinstance(lock, AdvisoryLock)
        connection = lock._connection
        fields = b"SFATAL\0C57P05\0Mterminating connection due to idle-session timeout\0\0"
        connection._protocol.data_received(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
        assert not connection.is_closed()
        assert not await getattr(lock, ask)()
        assert connection.is_closed()
    finally:
        await lock.release()
        await store.close()


HOLDER = """
import asyncio, sys
from emberline.store import open_store

async def main():
    store = await open_store(sys.argv[1])
    lock = store.lock("planner")
    print(await lock.try_hold(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_process_loses_the_lock(database: DatabaseLocation) -> None:
    if database.kind == "sqlite":
        return
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, database.where, stdout=pipe)
    store = await database.open()
    lock = store.lock("planner")
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"True\n"
        assert not await lock.try_hold()
        holder.kill()
        async with asyncio.timeout(60):
            while not await lock.try_hold():
                await asyncio.sleep(0.02)
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.wait()
        await lock.release()
        await store.close()
