"""One attempt at one line: through the service to an engine, and what became of it into the queue."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum
from typing import Protocol

import msgspec

from emberline.accounts.usage_ledger import UsageRow
from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.queue import Queue
from emberline.jobs.queue.transcript import TranscriptWriter
from emberline.protocol.answer import Answer
from emberline.protocol.errors import (
    DeadlineExceeded,
    EmberlineError,
    EngineLost,
    Internal,
    Overloaded,
    Unavailable,
)
from emberline.protocol.events import TextEvent
from emberline.protocol.request import GenerateRequest, Principal, Priority
from emberline.service.answer import gather
from emberline.service.job_context import JobContext

_PASSING = (Unavailable, Overloaded, Internal)  # another attempt may do better
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0  # of writing to a store that does not answer

log = logging.getLogger("emberline.jobs")


class GenerationService(Protocol):
    """What a line needs of the service."""

    def generate(
        self, request: GenerateRequest, principal: Principal, errand: JobContext | None = None
    ) -> AsyncGenerator[TextEvent, None]: ...


class AdmissionGrant(Protocol):
    """Room on an engine for one line, as admission grants it."""

    @property
    def engine(self) -> str: ...

    def widen(self, n: int) -> None:
        """The line wants `n` sequences."""

    def give_back(self) -> None: ...


class StopReason(Enum):
    """Why a running attempt is to stop."""

    CANCELLED = "cancelled"  # or its time is over
    LOST = "lost"  # the line is another's now
    LEAVING = "leaving"  # we shut down


class JobAttempt:
    """Holds a lease and a grant; gives both back, whatever happens."""

    def __init__(self, queue: Queue, lease: Lease, grant: AdmissionGrant, count: Callable[[str, str], None]) -> None:
        self.lease = lease
        self.why: StopReason | None = None
        self._queue = queue
        self._grant: AdmissionGrant | None = grant
        self._count = count  # what happened, for which model
        self._rows: list[UsageRow] = []
        self._running: asyncio.Task[Answer] | None = None
        grant.widen(lease.request.n)

    def stop(self, why: StopReason) -> None:
        self.why = self.why or why
        if self._running is not None:
            self._running.cancel()

    async def run(self, service: GenerationService, principal: Principal) -> None:
        assert self._grant is not None
        try:
            self._running = asyncio.create_task(self._answer(service, principal, self._grant.engine))
            if self.why is not None:
                self._running.cancel()
            await asyncio.wait([self._running])
        finally:
            self._free()
        await self._tell(self._running)

    async def _answer(self, service: GenerationService, principal: Principal, engine: str) -> Answer:
        n = self.lease.request.n
        if self.lease.kind != "response" or n > 1:
            return await gather(service.generate(self._request(), principal, JobContext(engine, self._rows.append)), n)
        scribe = TranscriptWriter(self._queue.transcripts, self.lease, lambda: self.stop(StopReason.LOST))
        errand = JobContext(engine, self._rows.append, await scribe.open(), scribe.heard)
        return await gather(scribe.follow(service.generate(self._request(), principal, errand)), n)

    def _request(self) -> GenerateRequest:
        left_s = (self.lease.deadline_us - self._queue.now_us()) / 1e6
        return msgspec.structs.replace(
            self.lease.request, priority=Priority.BATCH, deadline_s=max(0.001, left_s), reject_if_busy=False
        )

    def _free(self) -> None:
        """The engine is done with it: the next line need not wait until this one is written down."""
        if self._grant is not None:
            self._grant.give_back()
            self._grant = None

    async def _tell(self, run: asyncio.Task[Answer]) -> None:
        queue, lease = self._queue, self.lease
        usage = self._rows[-1] if self._rows else None
        if run.cancelled():
            if self.why is StopReason.CANCELLED:
                await self._write(lambda: queue.finish_stopped(lease, usage))
            elif self.why is StopReason.LEAVING:
                await queue.release([lease])
            self._count(self.why.value if self.why is not None else "lost", lease.model)
        elif (error := run.exception()) is None:
            done = await self._write(lambda: queue.complete(lease, run.result(), usage))
            self._count("completed" if done else "lost", lease.model)
        else:
            await self._failed(error, usage)

    async def _failed(self, error: BaseException, usage: UsageRow | None) -> None:
        queue, lease = self._queue, self.lease
        if not isinstance(error, EmberlineError):
            log.error("a line failed", exc_info=error, extra={"request_id": lease.request_id})
            error = Internal("the request failed; the log has it under its id")
        info = error.info()
        if isinstance(error, DeadlineExceeded):
            await self._write(lambda: queue.finish_stopped(lease, usage))
            self._count("expired", lease.model)
            return
        killed = isinstance(error, EngineLost)
        retry = killed or isinstance(error, _PASSING)
        await self._write(lambda: queue.fail(lease, info, retry=retry, killed=killed, usage=usage))
        last = lease.kills + 1 >= queue.limits.max_kills if killed else lease.attempts >= queue.limits.max_attempts
        what = ("dead" if killed else "failed") if last or not retry else "retried"
        self._count(what, lease.model)
        log.warning("%s: %s", what, info.message, extra={"request_id": lease.request_id, "attempt": lease.attempts})

    async def _write(self, write: Callable[[], Awaitable[bool]]) -> bool:
        """Until the store has it, or the line is no longer ours. What was computed is not thrown away for a hiccup."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                return await write()
            except Unavailable as error:
                if self.why is not None and self.why is not StopReason.CANCELLED:
                    return False
                log.warning("the store does not take a result: %s", error.message)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(_LAST_RETRY_S, 2 * delay_s)
