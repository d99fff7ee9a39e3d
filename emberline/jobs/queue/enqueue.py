"""Enqueueing jobs: encoded, inserted in chunks while the batch is not visible, then released to the queue."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from emberline.jobs.batches.blobs import Blobs
from emberline.jobs.batches.files import add_stored_bytes
from emberline.jobs.limits import INSERT_CHUNK, UPDATE_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.finalize import finalize_if_done, write_event
from emberline.jobs.queue.job import NewJob, estimate_cost, prefix_of, request_id
from emberline.protocol.errors import Conflict, ErrorInfo
from emberline.store import BulkQuery, Query, Transaction
from emberline.store.database import Row

REQUEST, RESULT = 0, 1  # bodies.kind
_to_bytes = msgspec.msgpack.Encoder().encode


class EncodedJob(msgspec.Struct, frozen=True):
    """A job in the form of its rows."""

    number: int
    custom_id: str
    model: str
    prefix: int
    cost: int
    data: bytes | None
    blob: str | None
    error: bytes | None  # of an invalid request
    n_bytes: int


async def encode_jobs(
    batch_id: str, first: int, jobs: Sequence[NewJob], blobs: Blobs, limits: QueueLimits
) -> list[EncodedJob]:
    return [await _encode(batch_id, number, job, blobs, limits) for number, job in enumerate(jobs, first)]


async def _encode(batch_id: str, number: int, job: NewJob, blobs: Blobs, limits: QueueLimits) -> EncodedJob:
    custom_id = job.custom_id.replace("\0", "\N{REPLACEMENT CHARACTER}")  # not allowed in PostgreSQL's text
    if job.request is None or job.error is not None:
        return _invalid(number, custom_id, job, job.error or ErrorInfo("bad_input", "the line has no request"))
    request = msgspec.structs.replace(job.request, id=request_id(batch_id, number))
    data = _to_bytes(request)
    size, limit = len(data), limits.max_job_bytes
    if size > limit:
        text = f"the request has {size:,} bytes, a line of a batch at most {limit:,}"
        return _invalid(number, custom_id, job, ErrorInfo("too_large", text))
    blob = await blobs.put(data) if size > limits.blob_bytes else None
    prefix, cost = job.prefix or prefix_of(request), estimate_cost(request, size)
    return EncodedJob(number, custom_id, request.model, prefix, cost, None if blob else data, blob, None, size)


def _invalid(number: int, custom_id: str, job: NewJob, error: ErrorInfo) -> EncodedJob:
    data = _to_bytes(error)
    model = job.request.model if job.request is not None else ""
    return EncodedJob(number, custom_id, model, 0, 0, None, None, data, len(data))


class BatchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the transactions of loading one batch need."""

    batch_id: str
    account: str
    loader: str
    deadline_us: int
    now_us: int
    until_us: int  # end of the loader's lease


def insert_jobs(load: BatchLoad, jobs: Sequence[EncodedJob], state: str = "held") -> Transaction[None]:
    """Conflict when another loader has taken over, or the batch was cancelled."""
    n_failed = sum(job.error is not None for job in jobs)
    n_bytes = sum(job.n_bytes for job in jobs)
    fence = (load.until_us, load.batch_id, load.loader, jobs[0].number)
    if not (yield Query(sql.COUNT_LOADED, (len(jobs), n_failed, n_bytes, *fence))):
        raise Conflict(f"the jobs of {load.batch_id} are loaded by another process, or it was cancelled")
    yield BulkQuery(sql.INSERT_JOB, [_job_row(load, job, state) for job in jobs])
    bodies: list[Row] = [
        (load.batch_id, job.number, REQUEST, job.data, job.blob)
        if job.error is None
        else (load.batch_id, job.number, RESULT, job.error, None)
        for job in jobs
    ]
    yield BulkQuery(sql.INSERT_BODY, bodies)
    yield add_stored_bytes(load.account, n_bytes)


def _job_row(load: BatchLoad, job: EncodedJob, state: str) -> Row:
    state, ended_us = ("failed", load.now_us) if job.error is not None else (state, None)
    key = (load.batch_id, job.number, load.account, job.custom_id, job.model)
    return (*key, state, load.deadline_us, job.prefix, job.cost, load.now_us, ended_us)


def start_batch(load: BatchLoad, limits: QueueLimits) -> Transaction[None]:
    """Make the batch visible and runnable. If none of its requests is valid, it ends at once."""
    if not (yield Query(sql.START_BATCH, (load.now_us, load.batch_id, load.loader))):
        raise Conflict(f"{load.batch_id} is loaded by another process, or it was cancelled")
    yield from write_event(load.batch_id, "queued", load.now_us)
    yield from finalize_if_done(load.batch_id, load.now_us, limits)


def insert_small_batch(
    load: BatchLoad, insert: Query, jobs: Sequence[EncodedJob], limits: QueueLimits
) -> Transaction[bool]:
    """A whole batch in one transaction. False: its id is taken."""
    assert len(jobs) <= INSERT_CHUNK, "larger batches are inserted in chunks"
    if not (yield insert):
        return False
    yield from insert_jobs(load, jobs, "queued")
    yield from add_to_lanes(load.account, [(job.model, job.cost) for job in jobs if job.error is None])
    yield Query(sql.SET_RELEASED, (len(jobs), load.batch_id, 0))
    yield from start_batch(load, limits)
    return True


def release_jobs(batch_id: str, account: str, n_released: int, total: int) -> Transaction[int]:
    """Let the next held jobs be claimed; returns how many of the batch have been released by then."""
    end = min(n_released + UPDATE_CHUNK, total)
    rows = yield Query(sql.RELEASE_JOBS, (batch_id, n_released, end))
    yield from add_to_lanes(account, [(str(model), int(cost or 0)) for model, cost in rows])
    if not (yield Query(sql.SET_RELEASED, (end, batch_id, n_released))):
        raise Conflict(f"{batch_id} is released by another process")
    return end


def add_to_lanes(account: str, jobs: Sequence[tuple[str, int]]) -> Transaction[None]:
    """Count newly queued jobs, given as (model, cost)."""
    n_queued, cost = Counter[str](), Counter[str]()
    for model, tokens in jobs:
        n_queued[model] += 1
        cost[model] += tokens
    for model in sorted(n_queued):
        yield Query(sql.ADD_TO_LANE, (model, account, n_queued[model], cost[model], model))
