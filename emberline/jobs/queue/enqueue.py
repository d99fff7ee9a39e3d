"""Lines on their way in: encoded, written in chunks while nobody sees them, then released to the queue."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import INSERT_CHUNK, UPDATE_CHUNK, QueueLimits
from emberline.jobs.queue import sql
from emberline.jobs.queue.batch_end import finish_if_done, tell
from emberline.jobs.queue.job import NewJob, cost_of, prefix_of, request_id
from emberline.protocol.errors import Conflict, ErrorInfo
from emberline.store import Many, Step, Work
from emberline.store.database import Row

REQUEST, RESULT = 0, 1  # kinds of bodies
_to_bytes = msgspec.msgpack.Encoder().encode


class EncodedJob(msgspec.Struct, frozen=True):
    """A line in the form of its rows."""

    number: int
    custom_id: str
    model: str
    prefix: int
    cost: int
    data: bytes | None
    blob: str | None
    error: bytes | None  # of one that cannot run
    n_bytes: int


async def encode(
    batch_id: str, first: int, lines: Sequence[NewJob], blobs: BlobStore, limits: QueueLimits
) -> list[EncodedJob]:
    return [await _encode(batch_id, first + i, line, blobs, limits) for i, line in enumerate(lines)]


async def _encode(batch_id: str, number: int, line: NewJob, blobs: BlobStore, limits: QueueLimits) -> EncodedJob:
    custom_id = line.custom_id.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL's text cannot hold it
    if line.request is None or line.error is not None:
        error = line.error or ErrorInfo("bad_input", "the line has no request")
        return _refused(number, custom_id, line, error)
    request = msgspec.structs.replace(line.request, id=request_id(batch_id, number))
    data = _to_bytes(request)
    if len(data) > limits.max_job_bytes:
        told = f"the request has {len(data):,} bytes, a line of a batch at most {limits.max_job_bytes:,}"
        return _refused(number, custom_id, line, ErrorInfo("too_large", told))
    blob = await blobs.put(data) if len(data) > limits.blob_bytes else None
    prefix = line.prefix or prefix_of(request)
    inline = None if blob else data
    return EncodedJob(
        number, custom_id, request.model, prefix, cost_of(request, len(data)), inline, blob, None, len(data)
    )


def _refused(number: int, custom_id: str, line: NewJob, error: ErrorInfo) -> EncodedJob:
    data = _to_bytes(error)
    model = line.request.model if line.request is not None else ""
    return EncodedJob(number, custom_id, model, 0, 0, None, None, data, len(data))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the transactions of one batch's loading need to know of it."""

    batch_id: str
    account: str
    loader: str
    deadline_us: int
    now_us: int
    until_us: int  # of the loader's lease


def add(load: Load, lines: Sequence[EncodedJob], state: str = "held") -> Work[None]:
    """Write the lines; Conflict when another has loaded meanwhile."""
    n_failed = sum(line.error is not None for line in lines)
    n_bytes = sum(line.n_bytes for line in lines)
    fence = (load.until_us, load.batch_id, load.loader, lines[0].number)
    if not (yield Step(sql.LOADED, (len(lines), n_failed, n_bytes, *fence))):
        raise Conflict(f"the lines of {load.batch_id} are loaded by another, or it was cancelled")
    yield Many(sql.INSERT_LINE, [_line_row(load, line, state) for line in lines])
    bodies: list[Row] = [
        (load.batch_id, line.number, REQUEST, line.data, line.blob) for line in lines if line.error is None
    ]
    errors: list[Row] = [
        (load.batch_id, line.number, RESULT, line.error, None) for line in lines if line.error is not None
    ]
    yield Many(sql.INSERT_BODY, bodies + errors)
    yield Step(sql.HOLD, (load.account, n_bytes))


def _line_row(load: Load, line: EncodedJob, state: str) -> tuple[str | int | None, ...]:
    key = (load.batch_id, line.number, load.account, line.custom_id, line.model)
    rest = (load.deadline_us, line.prefix, line.cost, load.now_us)
    if line.error is not None:
        return (*key, "failed", *rest, load.now_us)
    return (*key, state, *rest, None)


def start(load: Load, limits: QueueLimits) -> Work[None]:
    """From here on it is shown and will be run. Where no line can run, it ends at once."""
    if not (yield Step(sql.START, (load.now_us, load.batch_id, load.loader))):
        raise Conflict(f"{load.batch_id} is loaded by another, or it was cancelled")
    yield from tell(load.batch_id, "queued", load.now_us)
    yield from finish_if_done(load.batch_id, load.now_us, limits)


def all_at_once(load: Load, insert: Step, lines: Sequence[EncodedJob], limits: QueueLimits) -> Work[bool]:
    """A small batch, whole, in one transaction. False: there is one with its id."""
    assert len(lines) <= INSERT_CHUNK, "larger ones are loaded in chunks"
    if not (yield insert):
        return False
    yield from add(load, lines, "queued")
    runnable = [(line.model, line.cost) for line in lines if line.error is None]
    yield from enter_lanes(load.account, runnable)
    yield Step(sql.RELEASED, (len(lines), load.batch_id, 0))
    yield from start(load, limits)
    return True


def release(batch_id: str, account: str, released: int, total: int) -> Work[int]:
    """Let the next lines be claimed; how many have been by then."""
    upto = min(released + UPDATE_CHUNK, total)
    rows = yield Step(sql.RELEASE_LINES, (batch_id, released, upto))
    yield from enter_lanes(account, [(str(model), int(cost or 0)) for model, cost in rows])
    if not (yield Step(sql.RELEASED, (upto, batch_id, released))):
        raise Conflict(f"{batch_id} is released by another")
    return upto


def enter_lanes(account: str, lines: Sequence[tuple[str, int]]) -> Work[None]:
    n_queued, cost = Counter[str](), Counter[str]()
    for model, tokens in lines:
        n_queued[model] += 1
        cost[model] += tokens
    for model in sorted(n_queued):
        yield Step(sql.ENTER_LANE, (model, account, n_queued[model], cost[model], model))
