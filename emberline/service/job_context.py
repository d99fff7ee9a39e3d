"""What the job queue passes to the service together with a request."""

from collections.abc import Callable
from dataclasses import dataclass

from emberline.accounts.usage_ledger import UsageRow
from emberline.protocol.events import TokenDelta


@dataclass(frozen=True, slots=True)
class JobContext:
    """One attempt at a queued job.

    engine: the worker that admission granted. The request is not rerouted, so that a worker that dies under a job is
        noticed and counted against the job.
    record_usage: receives the usage row when the request ends. The queue writes it in the transaction that stores the
        result, so an attempt whose result is discarded is not billed.
    resume_from: tokens that earlier attempts generated. Generation continues behind them; their events are not
        emitted again.
    on_delta: receives each delta of the engine right before the events made from it.
    """

    engine: str
    record_usage: Callable[[UsageRow], None]
    resume_from: TokenDelta | None = None
    on_delta: Callable[[TokenDelta], None] | None = None
