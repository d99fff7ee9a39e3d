import asyncio
import logging

import pytest

from emberline.net.periodic import attempt, every, stop
from emberline.protocol.errors import Unavailable

log = logging.getLogger("emberline.test")


class Work:
    """An action that fails as told, one outcome per call, and then succeeds."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.n_calls = 0
        self.called = asyncio.Event()

    def __call__(self) -> None:
        self.n_calls += 1
        self.called.set()
        if self.outcomes and (error := self.outcomes.pop(0)) is not None:
            raise error

    async def slowly(self) -> None:
        await asyncio.sleep(0)
        self()

    async def until(self, n_calls: int) -> None:
        async with asyncio.timeout(60):
            while self.n_calls < n_calls:
                self.called.clear()
                await self.called.wait()


@pytest.mark.parametrize("is_async", [True, False])
async def test_work_that_fails_is_logged_and_repeated(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    work = Work(Unavailable("the store is away"), ZeroDivisionError("a bug"), None)
    task = asyncio.create_task(every(0.001, work.slowly if is_async else work, log, "nothing was swept"))
    await work.until(4)
    await stop(task)
    assert task.cancelled()
    expected, unexpected = caplog.records
    assert (expected.levelname, expected.getMessage()) == ("WARNING", "nothing was swept: the store is away")
    assert (unexpected.levelname, unexpected.getMessage()) == ("ERROR", "nothing was swept")
    assert unexpected.exc_info is not None
    assert isinstance(unexpected.exc_info[1], ZeroDivisionError)


async def test_the_first_call_comes_after_an_interval_unless_at_once() -> None:
    later, now = Work(), Work()
    tasks = [
        asyncio.create_task(every(600.0, later, log, "")),
        asyncio.create_task(every(600.0, now, log, "", at_once=True)),
    ]
    await now.until(1)
    await asyncio.sleep(0)
    assert (later.n_calls, now.n_calls) == (0, 1)
    await stop(*tasks)


async def test_an_event_ends_the_wait() -> None:
    work, wake = Work(), asyncio.Event()
    task = asyncio.create_task(every(600.0, work.slowly, log, "", wake=wake))
    for n in range(1, 4):
        wake.set()
        await work.until(n)
        await asyncio.sleep(0)
        assert not wake.is_set()
    await stop(task)
    assert work.n_calls == 3


async def test_waits_are_spread_over_the_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(wait_s: float) -> None:
        waits.append(wait_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    work = Work()
    task = asyncio.create_task(every(8.0, work, log, "", jitter=0.5))
    await work.until(100)
    await stop(task)
    assert all(4.0 <= wait_s <= 12.0 for wait_s in waits)
    assert max(waits) - min(waits) > 4.0


async def test_a_cancellation_is_not_taken_for_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    attempting = asyncio.create_task(attempt(hang, log, "it hangs"))
    await asyncio.sleep(0)
    await stop(attempting, None)
    assert attempting.cancelled()
    assert not caplog.records


async def test_stopping_waits_for_the_end_whatever_it_is() -> None:
    ended: list[str] = []

    async def tidy_up(error: Exception | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("tidy")
            if error is not None:
                raise error

    tasks = [asyncio.create_task(tidy_up(error)) for error in (None, ValueError("late"))]
    await asyncio.sleep(0)
    await stop(*tasks)
    assert ended == ["tidy", "tidy"]
    await stop()
