"""`GET /api/status`: the state of the whole server in one document, cheap enough to be polled every second."""

from typing import Any

import msgspec

from emberline import __version__
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.queue import Queue
from emberline.telemetry.history import N_RECENT
from emberline.telemetry.status import MAX_REQUESTS, StatusQuery

MAX_BATCHES = 20
QUERY = {
    "requests": {"type": "integer", "minimum": 0, "maximum": MAX_REQUESTS},
    "recent": {"type": "integer", "minimum": 0, "maximum": N_RECENT},
    "since": {"type": "integer", "minimum": 0},
}


async def show(call: HttpExchange) -> Reply:
    query = StatusQuery(
        requests=call.int_param("requests", 50, 0, MAX_REQUESTS),
        recent=call.int_param("recent", 20, 0, N_RECENT),
        since_s=call.int_param("since", 0, 0, 1 << 36),
    )
    found = msgspec.structs.asdict(await call.service.operations.status(query))
    queue = await _queue(call.queue) if call.has_queue else None
    body = {"version": __version__, **found, "queue": queue}
    return json_reply(body, headers=[(b"cache-control", b"no-store")])


async def _queue(queue: Queue) -> dict[str, Any]:
    """The durable queue: jobs by model, dead letters, and the open batches that end first."""
    now_us, by_model = queue.now_us(), dict[str, dict[str, Any]]()
    for depth in await queue.depths():
        model = by_model.setdefault(
            depth.model, {"model": depth.model, "queued": 0, "running": 0, "quarantined": 0, "age_s": None}
        )
        model["queued"] += depth.n_queued
        model["running"] += depth.n_leased
        model["quarantined"] += depth.n_quarantined
        if depth.oldest_us is not None:
            model["age_s"] = round(max(model["age_s"] or 0.0, (now_us - depth.oldest_us) / 1e6), 1)
    batches = [_batch(batch) for batch in await queue.open_batches(MAX_BATCHES)]
    return {"models": list(by_model.values()), "dead": await queue.count_dead_letters(), "batches": batches}


def _batch(batch: Batch) -> dict[str, Any]:
    counts = batch.counts
    return {
        "id": batch.id,
        "account": batch.account,
        "kind": batch.kind,
        "model": batch.model,
        "status": batch.status,
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed + counts.cancelled + counts.expired,
        "created_s": batch.created_us / 1e6,
        "deadline_s": batch.deadline_us / 1e6,
    }
