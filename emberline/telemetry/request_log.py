"""Companions of a request in the pipeline: its clock, its job if it has one, its log line at the end."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import TokenDelta
from emberline.protocol.media import MediaRequest
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, SpeechRequest
from emberline.protocol.route_request import RouteTerms


@dataclass(frozen=True, slots=True)
class JobContext:
    """One attempt at a queued job.

    engine: the worker that admission granted. The request is not rerouted, so that a worker that dies under a job is
        noticed and counted against the job.
    record_usage: receives the usage row when the request ends. The queue writes it in the transaction that stores the
        result, so an attempt whose result is discarded is not billed. The row has the attempt's own id.
    resume_from: tokens that earlier attempts generated. Generation continues behind them; their events are not
        emitted again.
    on_delta: receives each delta of the engine right before the events made from it.
    attempt: the lease's fencing token. Attempts at one job overlap when a lease has expired, so each is in flight under
        an id of its own.
    accepted_us: when the job was queued: the price of then is charged.
    """

    engine: str
    record_usage: Callable[[UsageRow], None]
    resume_from: TokenDelta | None = None
    on_delta: Callable[[TokenDelta], None] | None = None
    attempt: int = 0
    accepted_us: int = 0


class AttemptContext(NamedTuple):
    """One attempt at a request. A gateway may make several; any other request has one."""

    id: str = ""  # under which it is in flight, and of its usage row; empty: the request's own
    is_retry: bool = False  # not the first: it counts for no limit on requests
    max_failovers: int | None = None  # between workers; None: as for any request
    bills_failure: bool = True  # False: a failure of ours counts no tokens, as nobody has seen anything of the reply
    on_began: Callable[[], None] | None = None  # called where a reply has begun that comes whole; perhaps several times
    # Returns True once the operator's timeout, and not the client, has cancelled the attempt. None: there is none.
    timed_out: Callable[[], bool] | None = None
    on_end: Callable[[UsageRow], None] | None = None  # called once with the usage row of an attempt that was admitted


ONLY_ATTEMPT = AttemptContext()


def route_terms(
    request: GenerateRequest | EncodeRequest | SpeechRequest | MediaRequest | PredictRequest,
    clock: "Clock",
    job: JobContext | None = None,
) -> RouteTerms:
    """State how a canonical request is to be routed."""
    return RouteTerms(
        id=in_flight_id(request.id, job),
        api=request.api,
        priority=request.priority,
        session=request.session,
        n=request.n if isinstance(request, GenerateRequest) else 1,
        reject_if_busy=not isinstance(request, MediaRequest) and request.reject_if_busy,
        deadline_s=None if isinstance(request, MediaRequest) else request.deadline_s,
        engine="" if job is None else job.engine,
        accepted_us=0 if job is None else job.accepted_us,
        created_us=clock.created_us,
        keep_alive_s=None if isinstance(request, SpeechRequest | MediaRequest) else request.keep_alive_s,
    )


def in_flight_id(request_id: str, job: JobContext | None) -> str:
    """The id under which the balancer and the engines know a request."""
    return request_id if job is None or not job.attempt else f"{request_id}.{job.attempt}"


log = logging.getLogger("emberline.request")


def log_end(engine: str, row: UsageRow, error: Exception | None, finalizing: "asyncio.Task[None]") -> None:
    """One log line per request, after it was finalized: so it also tells when the usage row was not written."""
    unfinalized = None if finalizing.cancelled() else finalizing.exception()
    problem = error or unfinalized
    level = logging.ERROR if unfinalized is not None else logging.WARNING if problem is not None else logging.INFO
    if not log.isEnabledFor(level):
        return
    first_us = row.first_token_us
    log.log(
        level,
        "%s",
        row.status if problem is None else f"{row.status}: {problem}",
        extra={
            "request_id": row.id,
            "status": row.status,
            "error": problem.kind if isinstance(problem, EmberlineError) else problem and type(problem).__name__,
            "api": row.api,
            "account": row.account,
            "model": row.model,
            "engine": engine,
            "prompt_tokens": row.input_tokens,
            "cached_tokens": row.cached_tokens,
            "completion_tokens": row.output_tokens,
            "ttft_ms": None if first_us is None else (first_us - row.created_us) // 1000,
            "duration_ms": (row.finished_us - row.created_us) // 1000,
        },
    )


class Clock:
    """Unix time that does not jump: taken once, then advanced by the monotonic clock."""

    __slots__ = ("_started_s", "created_us")

    def __init__(self) -> None:
        self.created_us = time.time_ns() // 1000  # Unix time
        self._started_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def now_us(self) -> int:
        return self.created_us + int(1e6 * (time.monotonic() - self._started_s))

    def at_us(self, monotonic_s: float) -> int:
        return self.created_us + int(1e6 * (monotonic_s - self._started_s))
