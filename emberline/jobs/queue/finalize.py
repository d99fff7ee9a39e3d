"""Ending a batch: its final status is set, and its event written, in the transaction that ends its last job."""

from emberline.jobs.batches.batch import Batch, BatchStatus, batch_from_row
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.webhooks.events import batch_event, event_statements
from emberline.protocol.errors import ErrorInfo
from emberline.store import Query, Transaction
from emberline.store.database import in_order

_DAY_US = 86_400_000_000


def finalize_if_done(batch_id: str, now_us: int, limits: QueueLimits) -> Transaction[bool]:
    """Set the final status, once, if all jobs have ended."""
    rows = yield Query(sql.BATCH, (batch_id,))
    if not rows:
        return False
    batch = batch_from_row(rows[0])
    if batch.counts.left or batch.status not in ("in_progress", "cancelling"):
        return False
    status = _final_status(batch)
    expires_us = now_us + int(limits.retention_days * _DAY_US)
    stamps = [now_us if status == name else None for name in ("completed", "failed", "expired", "cancelled")]
    if not (yield Query(sql.FINALIZE_BATCH, (status, now_us, *stamps, expires_us, batch_id))):
        return False
    # Workers AI has events for success and failure only: a batch failed when none of its jobs succeeded.
    nothing_succeeded = batch.kind == "workers_ai" and not batch.counts.completed
    event_status = "failed" if nothing_succeeded and status == "completed" else status
    yield from write_event(batch_id, event_status, now_us)
    return True


def reject_batch(
    batch_id: str, status: BatchStatus, errors: str, now_us: int, limits: QueueLimits
) -> Transaction[bool]:
    """End a batch that is still validating: none of its jobs will run."""
    expires_us = now_us + int(limits.retention_days * _DAY_US)
    stamps = [now_us if status == name else None for name in ("failed", "expired", "cancelled")]
    if not (yield Query(sql.REJECT_BATCH, (status, errors, *stamps, expires_us, batch_id))):
        return False
    yield from write_event(batch_id, status, now_us)
    return True


def write_event(batch_id: str, status: str, now_us: int) -> Transaction[None]:
    """Write the batch's event. Last in a transaction, since it locks the account's event counter."""
    (row,) = yield Query(sql.BATCH, (batch_id,))
    batch = batch_from_row(row)
    event = batch_event(
        batch.kind,
        status,
        account=batch.account,
        batch_id=batch.id,
        model=batch.model,
        now_us=now_us,
        error=None if status in ("completed", "queued") else _error(batch, status),
    )
    if event is not None:
        yield from in_order(event_statements(event))


def _final_status(batch: Batch) -> BatchStatus:
    if batch.status == "cancelling":
        return "cancelled"
    if batch.counts.expired:
        return "expired"
    if batch.kind == "response" and not batch.counts.completed:
        return "cancelled" if batch.counts.cancelled else "failed"
    return "completed"


def _error(batch: Batch, status: str) -> ErrorInfo:
    if batch.errors:
        return batch.errors[0]
    if status == "cancelled":
        return ErrorInfo("cancelled", "the batch was cancelled")
    if status == "expired":
        return ErrorInfo("deadline_exceeded", "the batch expired before all of its requests were done")
    return ErrorInfo("internal", "no request of the batch succeeded")
