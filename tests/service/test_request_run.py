"""The run state machine over a scripted transport: failover, resume, deadlines, and one end for every request."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import (
    BadInput,
    DeadlineExceeded,
    EmberlineError,
    EngineLost,
    Internal,
    Unavailable,
    WorkerRemoved,
)
from emberline.protocol.events import Usage
from emberline.protocol.route_request import Fault, Route, RouteRequest
from emberline.protocol.trace_context import TraceContext, TraceDetails, current
from emberline.service.core import RequestEnd
from emberline.service.request_run import MAX_FAILOVERS, RequestRun
from emberline.telemetry.request_log import ONLY_ATTEMPT, AttemptContext, Clock, JobContext
from tests.collector import Start, collector, traced

__all__ = ["collector", "traced"]

Action = str | BaseException | Callable[[], Any]  # output, an error, or something to await


class FakeCore:
    """Routes to w0, w1, … in turn, and records what it is told."""

    def __init__(self, *refusals: EmberlineError | None) -> None:
        self.requests: list[RouteRequest] = []
        self.ends: list[RequestEnd] = []
        self.first_tokens: list[int] = []
        self._refusals = list(refusals)

    async def admit(self, request: RouteRequest) -> Route:
        self.requests.append(request)
        await asyncio.sleep(0)
        refusal = self._refusals.pop(0) if self._refusals else None
        if refusal is not None:
            raise refusal
        return Route(decode=f"w{len(self.requests) - 1}")

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        self.first_tokens.append(cached_tokens)

    async def finalize(self, end: RequestEnd) -> int:
        await asyncio.sleep(0)
        self.ends.append(end)
        return 7


class FakeTransport:
    """One list of actions per attempt; the request is done with the last output of a list."""

    restart_wait_s = 9.0
    deadline_grace_s = 0.0
    cached_tokens = 5
    trace: TraceContext | None = None
    operation, provider = "chat", "emberline"

    def __init__(self, *attempts: list[Action], retryable: bool = True) -> None:
        self.attempts = [list(actions) for actions in attempts]
        self.began = self.done = False
        self.text = ""
        self.opened: list[tuple[str, int]] = []
        self.n_closed = 0
        self.n_unread = 0  # tokens that were generated and not returned by `next`
        self._retryable = retryable

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=3, completion_tokens=len(self.text))

    def trace_details(self, content: bool) -> TraceDetails:
        return TraceDetails(finish_reasons=("stop",))

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        self.opened.append((route.decode, attempt))
        self.began = False

    async def next(self) -> str:
        actions = self.attempts[len(self.opened) - 1]
        action = actions.pop(0)
        if isinstance(action, BaseException):
            raise action
        if not isinstance(action, str):
            await action()
            return ""
        self.began = True
        self.text += action
        self.done = not actions
        return action

    def fault(self, error: EmberlineError) -> Fault:
        worker = self.opened[-1][0]
        return Fault(self._retryable and isinstance(error, Unavailable), (worker,), (worker,))

    async def settle(self) -> None:
        self.n_unread, self.text = 0, self.text + self.n_unread * "u"

    def close(self) -> None:
        self.n_closed += 1


def lost() -> EngineLost:
    return EngineLost("w")


def run_of(core: FakeCore, transport: FakeTransport, **more: Any) -> RequestRun[str]:
    fields = {"deadline_s": more.pop("deadline_s", None), "reject_if_busy": True}
    request = RouteRequest(id="r", account="a", model="m", model_version="v", input_tokens=3, created_us=1, **fields)
    return RequestRun(request, transport, core, Clock(), more.pop("on_end", lambda run: None), **more)  # type: ignore[arg-type]


async def output_of(run: RequestRun[str]) -> str:
    pieces: list[str] = []
    await run.admit()
    async with run:
        while not run.done:
            pieces.append(await run.step())
        await run.finish()
    return "".join(pieces)


async def ended(core: FakeCore) -> RequestEnd:
    """The one end that the core was told."""
    async with asyncio.timeout(60):
        while not core.ends:
            await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # callbacks of the finished task
    (end,) = core.ends
    return end


async def test_a_request_without_failures() -> None:
    core, transport = FakeCore(), FakeTransport(["ab", "c"])
    ends: list[RequestRun[str]] = []
    run = run_of(core, transport, on_end=ends.append)
    assert await output_of(run) == "abc"
    end = await ended(core)
    assert (end.row.status, end.row.input_tokens, end.row.output_tokens, end.lost) == ("finished", 3, 3, ())
    assert end.row.first_token_us is not None
    assert core.first_tokens == [5]
    assert ends == [run]
    assert core.requests[0].reject_if_busy


async def test_failover_continues_the_output_and_blames_each_worker_once() -> None:
    core, transport = FakeCore(), FakeTransport(["a", lost()], [lost()], ["b", "c"])
    assert await output_of(run_of(core, transport)) == "abc"
    assert transport.opened == [("w0", 0), ("w1", 1), ("w2", 2)]
    assert [request.avoid for request in core.requests] == [(), ("w0",), ("w0", "w1")]
    assert [request.lost for request in core.requests] == [(), ("w0",), ("w1",)]
    assert [request.wait_s for request in core.requests] == [0, 9, 9]
    assert not core.requests[1].reject_if_busy  # it was accepted
    assert core.first_tokens == [5, 5]  # of every attempt that began
    end = await ended(core)
    assert (end.row.status, end.lost) == ("finished", ())


async def test_a_worker_that_was_removed_before_the_attempt_is_not_blamed() -> None:
    core, transport = FakeCore(), FakeTransport([WorkerRemoved("w0")], ["a"], retryable=False)
    assert await output_of(run_of(core, transport)) == "a"
    assert [(request.avoid, request.lost) for request in core.requests] == [((), ()), (("w0",), ())]


async def test_failovers_are_bounded_while_no_token_comes() -> None:
    core = FakeCore()
    transport = FakeTransport(["a", lost()], *([lost()] for _ in range(MAX_FAILOVERS)))
    with pytest.raises(EngineLost):
        await output_of(run_of(core, transport))
    assert len(transport.opened) == MAX_FAILOVERS + 1
    end = await ended(core)
    assert (end.row.status, end.row.output_tokens) == ("failed", 1)
    assert end.lost == (f"w{MAX_FAILOVERS}",)


async def test_tokens_between_failures_allow_more_failovers() -> None:
    attempts: list[list[Action]] = [["a", lost()] for _ in range(2 * MAX_FAILOVERS)]
    assert await output_of(run_of(FakeCore(), FakeTransport(*attempts, ["b"]))) == "a" * len(attempts) + "b"


async def test_an_error_of_the_request_is_not_retried() -> None:
    core, transport = FakeCore(), FakeTransport([BadInput("no")])
    with pytest.raises(BadInput):
        await output_of(run_of(core, transport))
    assert (await ended(core)).row.status == "failed"
    assert transport.n_closed


async def test_a_job_is_not_retried_and_records_its_own_usage() -> None:
    core, transport = FakeCore(), FakeTransport([lost()], ["a"])
    rows: list[UsageRow] = []
    with pytest.raises(EngineLost):
        await output_of(run_of(core, transport, job=JobContext("w0", rows.append)))
    assert [row.status for row in rows] == ["failed"]
    assert msgspec.structs.replace((await ended(core)).row, device_ms=7) == rows[0]  # what the core has counted


async def test_no_worker_left_after_a_failure_tells_both() -> None:
    core = FakeCore(None, Unavailable("no engine of m is connected", retry_after_s=2))
    with pytest.raises(Unavailable, match=r"no engine of m is connected \(after: engine w went away\)") as caught:
        await output_of(run_of(core, FakeTransport(["a", lost()])))
    assert caught.value.retry_after_s == 2
    assert (await ended(core)).row.status == "failed"


async def test_a_refused_request_has_no_usage_row() -> None:
    core, ends = FakeCore(Unavailable("none")), []
    run = run_of(core, FakeTransport(), on_end=ends.append)
    with pytest.raises(Unavailable):
        await run.admit()
    assert (core.ends, ends, run.finalizing) == ([], [run], None)


async def test_cancelling_an_admission_finalizes_it_since_it_may_have_been_granted() -> None:
    core, ends = FakeCore(), []
    task = asyncio.create_task(run_of(core, FakeTransport(), on_end=ends.append).admit())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ended(core)).row.status == "cancelled"
    assert len(ends) == 1


async def test_cancelling_a_stream_aborts_the_work() -> None:
    core, transport = FakeCore(), FakeTransport(["a", lambda: asyncio.sleep(60), "b"])
    task = asyncio.create_task(output_of(run_of(core, transport)))
    async with asyncio.timeout(60):
        while not core.first_tokens:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ended(core)).row.status == "cancelled"
    assert transport.n_closed


@pytest.mark.parametrize("failing", ["settle", "settle, cancelled", "spans", "close", "on_end", "record_usage"])
async def test_a_request_ends_whatever_fails_at_its_end(
    failing: str, traced: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingTransport(FakeTransport):
        async def settle(self) -> None:
            if failing.startswith("settle"):
                raise asyncio.CancelledError if "cancelled" in failing else ValueError("a bug")

        def trace_details(self, content: bool) -> TraceDetails:
            if failing == "spans":
                raise ValueError("a bug")
            return super().trace_details(content)

        def close(self) -> None:
            super().close()
            if failing == "close":
                raise ValueError("a bug")

    def fail(row: UsageRow) -> None:
        raise ValueError("a bug")

    core, transport, ends = FakeCore(), FailingTransport(["a", BadInput("no"), "b"]), list[RequestRun[str]]()
    attempt = AttemptContext(on_end=fail) if failing == "on_end" else ONLY_ATTEMPT
    job = JobContext("w0", fail) if failing == "record_usage" else None
    token = current.set(traced().begin(None))
    run = run_of(core, transport, on_end=ends.append, attempt=attempt, job=job)
    with pytest.raises(BadInput):
        await output_of(run)
    current.reset(token)
    assert (await ended(core)).row.status == "failed"
    assert (transport.n_closed, ends) == (1, [run])
    levels = [record.levelname for record in caplog.records if getattr(record, "request_id", "") == "r"]
    assert levels == ["ERROR", "WARNING"], "the failure, and the line of every request"


@pytest.mark.parametrize("actions", [["a", lambda: asyncio.sleep(60), "b"], [lambda: asyncio.sleep(60), "b"]])
async def test_a_deadline_is_a_failure(actions: list[Action]) -> None:
    core, transport = FakeCore(), FakeTransport(actions)
    with pytest.raises(DeadlineExceeded, match=r"0\.05"):
        await output_of(run_of(core, transport, deadline_s=0.05))
    assert (await ended(core)).row.status == "failed"
    assert 0 < (core.requests[0].deadline_s or 0) <= 0.05


async def test_a_usage_row_that_cannot_be_written_is_reported_as_internal() -> None:
    class BrokenCore(FakeCore):
        async def finalize(self, end: RequestEnd) -> None:
            raise ValueError("a bug")

    ends: list[RequestRun[str]] = []
    run = run_of(BrokenCore(), FakeTransport(["a"]), on_end=ends.append)
    with pytest.raises(Internal):
        await output_of(run)
    await asyncio.sleep(0)
    assert ends == [run]


async def test_an_unexpected_exception_is_reported_as_internal() -> None:
    core = FakeCore()
    with pytest.raises(Internal):
        await output_of(run_of(core, FakeTransport([ValueError("a bug")])))
    assert (await ended(core)).row.status == "failed"
