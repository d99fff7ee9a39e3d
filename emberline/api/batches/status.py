"""What every dialect tells of a batch beside its own form: where it stands in the queue."""

from typing import Any

from emberline.api.admin.events import whole_number
from emberline.api.http.call import Call
from emberline.api.http.errors import NoSuchBatch
from emberline.jobs.batches.batch import Batch, BatchKind
from emberline.jobs.queue.reader import QueuePosition
from emberline.protocol.errors import NotFound

LINE = {"line": {"type": "integer", "minimum": 0}}


async def batch_of(call: Call, batch_id: str, kind: BatchKind) -> Batch:
    """The account's batch of that kind."""
    try:
        batch = await call.batches.queue.batch(call.principal.account, batch_id)
    except NotFound:
        batch = None
    if batch is None or batch.kind != kind:
        raise NoSuchBatch(f"there is no batch {batch_id[:100]!r}: it was deleted or has expired, or never was")
    return batch


async def stop(call: Call, batch: Batch) -> Batch:
    """Cancel the batch; or, with `line` in the query, the one request whose id ends in that number."""
    queue, account, query = call.batches.queue, call.principal.account, call.query()
    if "line" not in query:
        return await queue.cancel(account, batch.id)
    number = whole_number(query, "line", 0, 0, max(0, batch.counts.total - 1))
    await queue.cancel_job(account, batch.id, number)
    return await queue.batch(account, batch.id)


async def standing(call: Call, batch: Batch) -> dict[str, Any]:
    """How many lines go before its next one, and when it should be done; None: nobody can tell yet."""
    return told(await call.batches.queue.position(batch))


def told(place: QueuePosition) -> dict[str, Any]:
    eta_s = None if place.eta_s is None else round(place.eta_s, 1)
    return {"position": place.position, "estimated_wait_s": eta_s}
