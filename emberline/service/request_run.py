"""One admitted request: routed, attempted, moved to other workers when they fail, finalized exactly once.

A `RequestRun` is the same state machine for every kind of worker. What differs between our engines and other servers is
behind `Transport`: `engine_transport.py` and `upstream/transport.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import msgspec

from emberline.accounts.usage_row import UsageRow, UsageStatus, usage_row
from emberline.balancer.endpoint import logged_name
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, Internal, Unavailable, WorkerRemoved
from emberline.protocol.events import Completed, Usage
from emberline.protocol.route_request import Fault, Route, RouteRequest
from emberline.protocol.trace_context import TraceContext, TraceDetails
from emberline.service.core import Core, RequestEnd
from emberline.telemetry.metrics import Counts
from emberline.telemetry.request_log import ONLY_ATTEMPT, AttemptContext, Clock, JobContext, log_end
from emberline.telemetry.tracing import request_trace

MAX_FAILOVERS = 3  # in a row, no token in between: a request that loses more workers may be what kills them

T = TypeVar("T")
Output_co = TypeVar("Output_co", covariant=True)

log = logging.getLogger("emberline.request")


class Transport(Protocol[Output_co]):
    """Computes one request on the workers of a route, one attempt at a time."""

    restart_wait_s: float  # how long a failover waits for a worker to come back
    deadline_grace_s: float  # past the deadline, for workers that keep deadlines themselves
    trace: TraceContext | None  # that the next attempt belongs to
    operation: str  # `gen_ai.operation.name`, and
    provider: str  # `gen_ai.provider.name`: OpenTelemetry's terms

    @property
    def began(self) -> bool:
        """True if the current attempt has produced output, so that its prompt is computed."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the current attempt found in a prefix cache; known once it began."""

    @property
    def done(self) -> bool:
        """True if `next` has returned the last output."""

    @property
    def usage(self) -> Usage:
        """The usage of all attempts, as far as it is known now."""

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        """Begin attempt number `attempt` behind the output already returned; `deadline_s` is the time left."""

    async def next(self) -> Output_co:
        """Return more output, which may be empty."""

    def fault(self, error: EmberlineError) -> Fault:
        """The workers that failed the attempt with `error`, and True if another attempt can follow."""

    def trace_details(self, content: bool) -> TraceDetails:
        """Return the details for the spans of a traced request, including its messages if `content` is set. Called
        before `close`."""

    async def settle(self) -> None:
        """Abort what the workers still compute and wait until `usage` counts all that they have computed."""

    def close(self) -> None:
        """Abort what the workers still compute. Computing on is a waste, and nobody is charged for it."""


class RequestRun(Generic[T]):
    """One request from its admission to its end.

    Call `admit`, then `step` inside `async with` until `done`, then `finish`. Leaving it earlier is a failure, or a
    cancellation."""

    def __init__(
        self,
        request: RouteRequest,
        transport: Transport[T],
        core: Core,
        clock: Clock,
        on_end: "Callable[[RequestRun[T]], None]",
        job: JobContext | None = None,
        inter_token: Counts | None = None,
        attempt: AttemptContext = ONLY_ATTEMPT,
    ) -> None:
        self.finalizing: asyncio.Task[None] | None = None  # once the request has ended
        self._request = request
        self._transport = transport
        self._core = core
        self._clock = clock
        self._on_end = on_end  # called once, when nothing of the request is left to do
        self._job = job
        self._attempt = attempt
        self._max_failovers = MAX_FAILOVERS if attempt.max_failovers is None else attempt.max_failovers
        self._inter_token = inter_token or Counts()  # latencies, filled by the transport where it measures them
        self.route = Route(decode="")
        self._row: UsageRow | None = None  # once the request has ended
        self._last_usage = Usage()  # that of the last usage row
        self._opened = False  # the attempt on `_route`
        self._left = False  # nobody reads the output any more
        self._prefilled = False  # the core knows that the attempt has computed the prompt
        self._first_token_us: int | None = None
        self._avoid: list[str] = []  # workers of failed attempts
        self._lost: tuple[str, ...] = ()  # those of them that the core has not been told of yet
        self._n_failovers = 0
        self._n_stuck = 0  # failovers since the last new token
        self._n_tokens = 0  # of the reply, at the last failover
        self._n_checkpointed = 0  # tokens of prompt and reply
        self._trace = request_trace(clock)  # None: not sampled

    @property
    def model(self) -> str:
        """Id of the requested model; a provider's begins with the provider's name and a slash."""
        return self._request.model

    @property
    def done(self) -> bool:
        return self._transport.done

    @property
    def usage(self) -> Usage:
        return self._transport.usage

    @property
    def completed(self) -> Completed:
        """The terminal event of a request that was finished."""
        assert self._row is not None
        return Completed(self._last_usage, self.route.price, self._row.cost_pico)

    async def admit(self) -> None:
        """Wait for workers. Overloaded or Unavailable when there are none; then there is no usage row."""
        request = self._request
        try:
            self.route = await self._core.admit(request if request.deadline_s is None else self._route_request())
            if self._trace is not None:
                self._trace.admitted()
        except asyncio.CancelledError:
            self.finalize("cancelled")  # the core may have granted it all the same
            raise
        except BaseException:
            self._on_end(self)
            raise

    @property
    def step(self) -> Callable[[], Awaitable[T]]:
        """The function that waits for more output, which may be empty. It replaces failed workers."""
        deadline_s = self._request.deadline_s
        return self._step if deadline_s is None else partial(self._step_until, deadline_s)

    async def _step_until(self, deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s + self._transport.deadline_grace_s - self._clock.elapsed_s()):
                return await self._step()
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {deadline_s:g} s") from None

    async def finish(self) -> None:
        """Return once the usage row is durable."""
        await asyncio.shield(self.finalize("finished"))

    def finalize(self, status: UsageStatus, error: Exception | None = None) -> "asyncio.Task[None]":
        """End the request, once; the task goes on whatever becomes of the caller. Later calls change nothing."""
        if self.finalizing is None:
            finished_us = self._clock.now_us()
            if status == "failed":
                is_billed = isinstance(error, EmberlineError) and error.caused_by_request
            else:
                is_billed = self._attempt.timed_out is None or not self._attempt.timed_out()
            self.finalizing = asyncio.create_task(self._finalize(status, error, finished_us, is_billed))
            self.finalizing.add_done_callback(partial(self._end, error))
        return self.finalizing

    async def _finalize(
        self,
        status: UsageStatus,
        error: Exception | None,
        finished_us: int,
        is_billed: bool,
    ) -> None:
        """`is_billed`: the request finished, the client ended it, or caused its failure: what was computed is paid."""
        transport = self._transport
        if is_billed and self._opened and status != "finished":
            with self._logging_failure("what the workers computed is not counted in full"):
                await transport.settle()
        row = self._row = self._usage_row(status, is_billed, finished_us)
        if self._trace is not None:
            with self._logging_failure("its spans are not exported"):
                details = transport.trace_details(self._trace.content)
                self._trace.end(row, transport.operation, transport.provider, error, details)
        if self._left:
            with self._logging_failure("its workers may compute on"):
                transport.close()
        if self._attempt.on_end is not None:
            with self._logging_failure("its cost is not counted by the gateway"):
                self._attempt.on_end(row)
        end = RequestEnd(
            row,
            self._inter_token,
            self._job is not None,
            lost=self._lost,
            operation=transport.operation,
            provider=transport.provider,
        )
        try:
            device_ms = await self._core.finalize(end)
            row = msgspec.structs.replace(row, device_ms=device_ms)
        finally:
            if self._job is not None:
                with self._logging_failure("its queue has no usage row"):
                    self._job.record_usage(row)

    @contextmanager
    def _logging_failure(self, consequence: str) -> Iterator[None]:
        """Log an exception and go on: whatever fails at the end of a request, its slot and its reservation are given
        back. The end itself is never cancelled: a cancellation comes from what it waits for."""
        try:
            yield
        except (Exception, asyncio.CancelledError):
            log.exception(
                "the end of a request failed in part: %s", consequence, extra={"request_id": self._request.id}
            )

    def _end(self, error: Exception | None, finalizing: "asyncio.Task[None]") -> None:
        if self._row is not None:
            log_end(logged_name(self.route.decode), self._row, error, finalizing)
        self._on_end(self)

    def checkpoint(self) -> UsageRow | None:
        """The usage row in case the request never ends. None: nothing new is to be recorded."""
        usage = self.usage
        n_tokens = usage.prompt_tokens + usage.completion_tokens
        if n_tokens == self._n_checkpointed or self.finalizing is not None or self._job is not None:
            return None
        self._n_checkpointed = n_tokens
        return self._usage_row("failed", False, self._clock.now_us())

    async def __aenter__(self) -> "RequestRun[T]":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        if self.finalizing is not None:  # it finished, or the server has closed
            self._transport.close()
        if error is None and self.finalizing is not None:
            return
        if error is not None and not isinstance(error, Exception):
            finalizing = self.finalize("finished" if self.done else "cancelled")
        else:
            finalizing = self.finalize("failed", error)
        if self._job is not None:  # its queue writes the usage row as soon as the request has ended
            await asyncio.wait([finalizing])
        if not isinstance(error, EmberlineError) and (error is None or isinstance(error, Exception)):
            log.error("a request failed", exc_info=error, extra={"request_id": self._request.id})
            raise Internal("the request failed; the log has it under its id") from error

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def _step(self) -> T:
        while True:
            try:
                if not self._opened:
                    if self._trace is not None:
                        self._transport.trace = self._trace.attempt(self.route.decode)
                    left_s = None if self._request.deadline_s is None else self._time_left_s()
                    await self._transport.open(self.route, self._n_failovers, left_s)
                    self._opened = True
                output = await self._transport.next()
            except EmberlineError as error:
                await self._fail_over(error)
                continue
            if not self._prefilled and self._transport.began:
                self._prefilled = True
                if self._first_token_us is None:
                    self._first_token_us = self._clock.now_us()
                self._core.first_token(self._request.id, self._transport.cached_tokens)
            return output

    async def _fail_over(self, error: EmberlineError) -> None:
        """Route to other workers after `error`, or raise it. A job goes back to its queue, which counts the failure."""
        if isinstance(error, WorkerRemoved):  # no attempt was made
            fault = Fault(True, (error.worker,))
        else:
            fault = self._transport.fault(error)
        if self._trace is not None:
            self._trace.failed(error)
        self._lost = fault.lost
        self._avoid += [name for name in fault.avoid if name not in self._avoid]
        n_tokens = self.usage.completion_tokens
        if n_tokens > self._n_tokens:
            self._n_tokens, self._n_stuck = n_tokens, 0
        if not fault.retryable or self._n_stuck >= self._max_failovers or self._job is not None:
            raise error
        self._transport.close()
        self._opened = self._prefilled = False
        self._n_failovers += 1
        self._n_stuck += 1
        log.warning("failover: %s", error.message, extra={"request_id": self._request.id, "tokens": n_tokens})
        try:
            self.route = await self._core.admit(self._route_request())
        except Unavailable as none_left:
            message = f"{none_left.message} (after: {error.message})"
            raise Unavailable(message, retry_after_s=none_left.retry_after_s) from error
        self._lost = ()

    def _route_request(self) -> RouteRequest:
        time_left_s = self._time_left_s()
        if not self._n_failovers:
            return msgspec.structs.replace(self._request, deadline_s=time_left_s)
        wait_s = self._transport.restart_wait_s
        return msgspec.structs.replace(
            self._request,
            avoid=tuple(self._avoid),
            lost=self._lost,
            wait_s=wait_s if time_left_s is None else min(wait_s, time_left_s),
            reject_if_busy=False,  # it was accepted
            deadline_s=time_left_s,
        )

    def _time_left_s(self) -> float | None:
        deadline_s = self._request.deadline_s
        if deadline_s is None:
            return None
        left_s = deadline_s - self._clock.elapsed_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"not started within {deadline_s:g} s")
        return left_s

    def _usage_row(self, status: UsageStatus, is_billed: bool, finished_us: int) -> UsageRow:
        usage = Usage()
        if status != "failed" or self._attempt.bills_failure or is_billed:
            usage = self._transport.usage
        self._last_usage = usage
        row = usage_row(self._request, usage, status, finished_us, self._first_token_us, self.route.lease)
        if self.route.price is None:
            return row
        row = row.priced(self.route.price, is_billed)
        if row.lease and row.cost_pico is not None:  # an upstream server may count more tokens than was foreseen
            row = msgspec.structs.replace(row, cost_pico=min(row.cost_pico, self.route.reserved_pico))
        return row
