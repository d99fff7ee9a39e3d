"""One attempt at one job: run by the service on a granted engine, with its outcome written to the queue."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.queue import Queue
from emberline.jobs.queue.transcript import TranscriptWriter
from emberline.protocol import trace_context
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import (
    BudgetReserved,
    DeadlineExceeded,
    EmberlineError,
    EngineLost,
    Internal,
    Overloaded,
    Unavailable,
)
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Principal, Priority
from emberline.service.event_collector import collect_answer, collect_prediction, result_of
from emberline.service.work import TaskRunner, Work
from emberline.telemetry.request_log import JobContext
from emberline.telemetry.tracing import JobTrace

_TRANSIENT = (Unavailable, Overloaded, Internal)  # another attempt may succeed

# Settles what an attempt, named by its usage row, had reserved of budgets. The bool is False if the row is not stored.
Settle = Callable[[UsageRow, bool], None]

log = logging.getLogger("emberline.jobs")


def encode_job(request: GenerateRequest, encode: EncodeRequest) -> EncodeRequest:
    """The texts under the job's id and deadline."""
    return msgspec.structs.replace(
        encode, id=request.id, model=request.model, priority=request.priority, deadline_s=request.deadline_s
    )


def predict_job(request: GenerateRequest, predict: PredictRequest) -> PredictRequest:
    """The prediction under the job's id and deadline."""
    return msgspec.structs.replace(
        predict, id=request.id, model=request.model, priority=request.priority, deadline_s=request.deadline_s
    )


class AdmissionGrant(Protocol):
    """Room on an engine for one job, issued by admission."""

    @property
    def engine(self) -> str: ...

    def resize(self, n: int) -> None:
        """The job runs `n` sequences."""

    def release(self) -> None: ...


class StopReason(Enum):
    """Why a running attempt is aborted."""

    CANCELLED = "cancelled"  # or expired
    LOST = "lost"  # the job is leased to another worker now
    LEAVING = "leaving"  # this process shuts down


class JobAttempt:
    """Owns a lease and a grant, and gives both back whatever happens."""

    def __init__(
        self,
        queue: Queue,
        lease: Lease,
        grant: AdmissionGrant,
        count: Callable[[str, str], None],
        settle: Settle = lambda row, is_stored: None,
    ) -> None:
        self.lease = lease
        self.stop_reason: StopReason | None = None
        self._is_leaving = False
        self._queue = queue
        self._grant = grant
        self._count = count  # an event, for a model
        self._settle = settle
        self._row: UsageRow | None = None  # of this attempt, once it has ended; None if it was not admitted
        self._usage: UsageRow | None = None  # the same as a row of the job
        self._running: asyncio.Task[Answer] | None = None
        self._trace: JobTrace | None = None  # once it runs
        grant.resize(lease.request.n)

    def stop(self, reason: StopReason) -> None:
        """Abort the attempt. Later calls do not cancel it again, which would interrupt the wait for what the engine
        computed and lose the usage row; if this process shuts down, the attempt no longer waits for the store."""
        self._is_leaving = self._is_leaving or reason is StopReason.LEAVING
        if self.stop_reason is not None:
            return
        self.stop_reason = reason
        if self._running is not None:
            self._running.cancel()

    async def run(self, service: TaskRunner, principal: Principal) -> None:
        try:
            self._running = asyncio.create_task(self._generate(service, principal))
            if self.stop_reason is not None:
                self._running.cancel()
            await asyncio.wait([self._running])
        finally:
            self._grant.release()  # before the outcome is written: the next job need not wait for that
            self._end_trace()
        is_stored = True  # unless it is known not to be: what is spent must not be less than what is billed
        try:
            is_stored = await self._write_outcome(self._running)
        finally:
            if self._row is not None:
                self._settle(self._row, is_stored)

    async def _generate(self, service: TaskRunner, principal: Principal) -> Answer:
        lease, engine = self.lease, self._grant.engine
        self._trace = JobTrace(trace_context.parse(lease.traceparent), continues=lease.kind == "response")
        trace_context.current.set(self._trace.context)  # of this task
        left_s = (lease.deadline_us - self._queue.now_us()) / 1e6
        request = msgspec.structs.replace(
            lease.request, priority=Priority.BATCH, deadline_s=max(0.001, left_s), reject_if_busy=False
        )
        if request.encode is not None:
            context = JobContext(engine, self._record_usage, attempt=lease.epoch, accepted_us=lease.created_us)
            task = encode_job(request, request.encode)
            encoded = await result_of(service.run(Work(task, principal, context)))
            return Answer([], encoded.usage, encoded)
        if request.predict is not None:
            context = JobContext(engine, self._record_usage, attempt=lease.epoch, accepted_us=lease.created_us)
            prediction = predict_job(request, request.predict)
            return await collect_prediction(service.run(Work(prediction, principal, context)))
        if lease.kind != "response" or request.n > 1:
            context = JobContext(engine, self._record_usage, attempt=lease.epoch, accepted_us=lease.created_us)
            return await collect_answer(service.run(Work(request, principal, context)), request.n)
        transcript = TranscriptWriter(
            self._queue.transcripts, lease, lambda: self.stop(StopReason.LOST), self._queue.limits
        )
        resume_from = await transcript.load()
        context = JobContext(engine, self._record_usage, resume_from, transcript.record, lease.epoch, lease.created_us)
        return await collect_answer(transcript.follow(service.run(Work(request, principal, context))), request.n)

    def _end_trace(self) -> None:
        if self._trace is None or self._running is None or not self._running.done():
            return
        run, lease = self._running, self.lease
        error = None if run.cancelled() else run.exception()
        problem = "cancelled" if run.cancelled() else "" if error is None else type(error).__name__
        self._trace.end(lease.batch_id, lease.number, lease.model, lease.attempts, problem)

    def _record_usage(self, row: UsageRow) -> None:
        self._row = row
        self._usage = msgspec.structs.replace(row, id=self.lease.request_id)  # one row for all attempts

    async def _write_outcome(self, run: asyncio.Task[Answer]) -> bool:
        """Write the outcome to the queue. Returns True if the usage row is stored with it."""
        queue, lease, is_stored = self._queue, self.lease, False
        if run.cancelled():
            if self.stop_reason is StopReason.CANCELLED:
                is_stored = await self._retry(lambda: queue.finish_stopped(lease, self._usage))
            elif self.stop_reason is StopReason.LEAVING:
                await queue.release([lease])
            self._count((self.stop_reason or StopReason.LOST).value, lease.model)
        elif (error := run.exception()) is None:
            is_stored = await self._retry(lambda: queue.complete(lease, run.result(), self._usage))
            self._count("completed" if is_stored else "lost", lease.model)
        elif isinstance(error, DeadlineExceeded):
            is_stored = await self._retry(lambda: queue.finish_stopped(lease, self._usage))
            self._count("expired", lease.model)
        elif isinstance(error, BudgetReserved):  # as soon as running requests have ended there is room
            await self._retry(lambda: queue.postpone(lease))
            self._count("retried", lease.model)
        else:
            is_stored = await self._write_failure(error)
        return is_stored

    async def _write_failure(self, error: BaseException) -> bool:
        """Write that the attempt failed. Returns True if that ends the job, and its usage row is stored."""
        queue, lease = self._queue, self.lease
        if not isinstance(error, EmberlineError):
            log.error("a job failed", exc_info=error, extra={"request_id": lease.request_id})
            error = Internal("the request failed; the log has it under its id")
        info = error.info()
        killed = isinstance(error, EngineLost)
        retry = killed or isinstance(error, _TRANSIENT)
        written = await self._retry(lambda: queue.fail(lease, info, retry=retry, killed=killed, usage=self._usage))
        last = lease.kills + 1 >= queue.limits.max_kills if killed else lease.attempts >= queue.limits.max_attempts
        event = ("dead" if killed else "failed") if last or not retry else "retried"
        self._count(event, lease.model)
        log.warning("%s: %s", event, info.message, extra={"request_id": lease.request_id, "attempt": lease.attempts})
        return written and event == "failed"

    async def _retry(self, write: Callable[[], Awaitable[bool]]) -> bool:
        """Repeat the write until the store accepts it: a computed result is not discarded for an outage."""
        delay_s, last_s = self._queue.limits.store_retry_s
        while True:
            try:
                return await write()
            except Unavailable as error:
                if self._is_leaving or self.stop_reason is StopReason.LOST:
                    return False
                log.warning("the store does not accept a result: %s", error.message)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(last_s, 2 * delay_s)
