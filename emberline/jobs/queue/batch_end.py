"""The end of a batch: decided in the transaction that ends its last line, told in the same."""

from emberline.jobs.batches.batch import Batch, BatchStatus, batch_from_row
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.webhooks.events import batch_event, event_statements
from emberline.protocol.errors import ErrorInfo
from emberline.store import Step, Work
from emberline.store.database import in_order

_DAY_US = 86_400_000_000


def finish_if_done(batch_id: str, now_us: int, limits: QueueLimits) -> Work[bool]:
    """Give the batch its final status, once, if all its lines have ended."""
    rows = yield Step(sql.BATCH, (batch_id,))
    if not rows:
        return False
    batch = batch_from_row(rows[0])
    if batch.counts.left or batch.status not in ("in_progress", "cancelling"):
        return False
    status = _final(batch)
    expires_us = now_us + int(limits.retention_days * _DAY_US)
    stamps = [now_us if status == name else None for name in ("completed", "failed", "expired", "cancelled")]
    if not (yield Step(sql.FINISH, (status, now_us, *stamps, expires_us, batch_id))):
        return False
    yield from tell(batch_id, _told(batch, status), now_us)
    return True


def reject(batch_id: str, status: BatchStatus, errors: str, now_us: int, limits: QueueLimits) -> Work[bool]:
    """End a batch whose lines are not all read: none of them will run."""
    expires_us = now_us + int(limits.retention_days * _DAY_US)
    stamps = [now_us if status == name else None for name in ("failed", "expired", "cancelled")]
    if not (yield Step(sql.REJECT, (status, errors, *stamps, expires_us, batch_id))):
        return False
    yield from tell(batch_id, status, now_us)
    return True


def tell(batch_id: str, status: str, now_us: int) -> Work[None]:
    """Write the event, as the last of its transaction."""
    ((*row,),) = yield Step(sql.BATCH, (batch_id,))
    batch = batch_from_row(tuple(row))
    error = None if status in ("completed", "queued") else _why(batch, status)
    event = batch_event(
        batch.kind,
        status,
        account=batch.account,
        batch_id=batch.id,
        model=batch.model,
        now_us=now_us,
        error=error,
    )
    if event is not None:
        yield from in_order(event_statements(event))


def _final(batch: Batch) -> BatchStatus:
    if batch.status == "cancelling":
        return "cancelled"
    if batch.counts.expired:
        return "expired"
    if batch.kind == "response" and not batch.counts.completed:
        return "cancelled" if batch.counts.cancelled else "failed"
    return "completed"


def _told(batch: Batch, status: BatchStatus) -> str:
    """Workers AI's subscribers hear of success or failure only: it failed when nothing in it succeeded."""
    nothing = batch.kind == "workers_ai" and not batch.counts.completed
    return "failed" if nothing and status == "completed" else status


def _why(batch: Batch, status: str) -> ErrorInfo:
    if batch.errors:
        return batch.errors[0]
    if status == "cancelled":
        return ErrorInfo("cancelled", "the batch was cancelled")
    if status == "expired":
        return ErrorInfo("deadline_exceeded", "the batch's time ran out before all of its lines were done")
    return ErrorInfo("internal", "no line of the batch succeeded")
