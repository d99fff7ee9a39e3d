"""Event logs in the core's memory."""

import asyncio
import math

import pytest

from emberline.protocol.errors import NoSuchStream, Overloaded
from emberline.service.event_log import LogLimits, MemoryEventLogs, NewLog


def new(log_id: str = "a", account: str = "acme", grace_s: float = 60.0) -> NewLog:
    return NewLog(log_id, account, grace_s, b"text/event-stream", b"data: lost\n\n")


@pytest.fixture
async def logs() -> MemoryEventLogs:
    logs = MemoryEventLogs()
    await logs.open(new())
    return logs


async def read(logs: MemoryEventLogs, after: int = -1, wait_s: float = 0.0) -> tuple[list[bytes], bool]:
    part = await logs.read("acme", "a", after, wait_s)
    return part.events, part.done


async def test_events_are_read_by_number(logs: MemoryEventLogs) -> None:
    logs.append("a", [b"0", b"1"])
    logs.append("a", [b"2"], done=True)
    logs.append("a", [b"too late"])
    assert await read(logs) == ([b"0", b"1", b"2"], True)
    assert await read(logs, 0) == ([b"1", b"2"], True)
    assert await read(logs, 2) == ([], True)
    assert await read(logs, 999) == ([], True)


async def test_a_reader_waits_for_the_next_event(logs: MemoryEventLogs) -> None:
    readers = [asyncio.create_task(read(logs, wait_s=60)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await logs.idle_s("a") == 0
    logs.append("a", [b"0"])
    assert await asyncio.gather(*readers) == [([b"0"], False)] * 2
    assert await read(logs, 0, wait_s=0.01) == ([], False)


async def test_a_part_is_bounded(logs: MemoryEventLogs) -> None:
    logs.append("a", [b"x" * 200_000] * 3, done=True)
    first, done = await read(logs)
    assert (len(first), done) == (2, False)
    assert await read(logs, 1) == ([b"x" * 200_000], True)


async def test_a_log_that_is_held_is_not_idle_and_makes_no_room() -> None:
    logs = MemoryEventLogs(LogLimits(logs=1))
    await logs.open(new("held"))
    logs.append("held", [b"0"], done=True)
    logs.hold("held")
    assert await logs.idle_s("held") == 0
    with pytest.raises(Overloaded):
        await logs.open(new("b"))
    logs.hold("unknown")


async def test_a_purge_forgets_complete_logs_and_soon_those_that_run() -> None:
    logs = MemoryEventLogs(LogLimits(sweep_s=0.01))
    for log_id, account in (("done", "acme"), ("running", "acme"), ("other", "b")):
        await logs.open(new(log_id, account))
        logs.append(log_id, [b"0"], done=log_id != "running")
    assert logs.purge("acme") == 1
    with pytest.raises(NoSuchStream):
        await logs.read("acme", "done", -1, 0)
    logs.append("running", [b"1"], done=True)
    assert (await logs.read("acme", "running", -1, 0)).events == [b"0", b"1"], "its client still reads it"
    assert (await logs.read("b", "other", -1, 0)).events == [b"0"]
    assert logs.purge(None) == 2
    assert len(logs) == 0


async def test_a_log_is_its_accounts(logs: MemoryEventLogs) -> None:
    for account, log_id in (("other", "a"), ("acme", "b"), ("", "a")):
        with pytest.raises(NoSuchStream):
            await logs.read(account, log_id, -1, 0)
        with pytest.raises(NoSuchStream):
            await logs.cancel(account, log_id)
    assert await logs.idle_s("a") < 60
    await logs.cancel("acme", "a")
    assert await logs.idle_s("a") == await logs.idle_s("b") == math.inf


async def test_a_log_whose_writer_died_ends_with_an_error(logs: MemoryEventLogs) -> None:
    logs.append("a", [b"0"])
    logs.abandon("a")
    logs.abandon("b")
    assert await read(logs) == ([b"0", b"data: lost\n\n"], True)


async def test_logs_are_bounded() -> None:
    logs = MemoryEventLogs(LogLimits(account_logs=2, logs=3))
    await logs.open(new("1"))
    await logs.open(new("2"))
    with pytest.raises(Overloaded):
        await logs.open(new("3"))
    logs.append("1", [], done=True)
    await logs.open(new("3"))  # in place of the one that is complete
    await logs.open(new("4", "other"))
    with pytest.raises(Overloaded):
        await logs.open(new("5", "third"))
    assert len(logs) == 3
    assert await logs.idle_s("1") == math.inf


async def test_what_is_beyond_its_size_is_dropped() -> None:
    logs = MemoryEventLogs(LogLimits(log_bytes=200))
    await logs.open(new())
    logs.append("a", [b"x" * 300])
    logs.append("a", [b"x" * 300])
    logs.append("a", [], done=True)
    assert await read(logs) == ([b"x" * 300], True)


async def test_logs_are_removed_when_their_time_is_over() -> None:
    logs = MemoryEventLogs(LogLimits(sweep_s=0.01, orphan_s=0.02))
    await logs.open(new(grace_s=0.02))
    await logs.open(new("b", grace_s=0.02))
    logs.append("a", [b"0"], done=True)
    async with asyncio.timeout(60):
        while len(logs):
            await asyncio.sleep(0.01)
    with pytest.raises(NoSuchStream):
        await read(logs)
