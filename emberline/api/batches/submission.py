"""A submission with an Idempotency-Key: done once, answered as often as it is sent."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.api.admin.events import whole_number
from emberline.api.batches.job_format import Steps
from emberline.api.http.call import Call, HeaderList, Reply
from emberline.api.http.errors import NoSuchBatch
from emberline.api.http.sse import gathered
from emberline.jobs.batches.batch import Batch, BatchKind, NewBatch
from emberline.jobs.batches.files import File
from emberline.jobs.batches.idempotency_keys import StoredAnswer
from emberline.jobs.queue.reader import QueuePosition
from emberline.protocol.errors import NotFound

HEADER = "idempotency-key"
_REPLAYED: HeaderList = [(b"idempotent-replayed", b"true")]


def digest_of(call: Call, *parts: bytes) -> bytes:
    """Of all that makes a submission what it is: where it goes, and what it says."""
    digest = blake2b(call.scope.get("raw_path", b"") + b"?" + call.scope["query_string"], digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


async def once(call: Call, body: bytes, fresh_id: str, submit: Callable[[str], Awaitable[bytes]]) -> Reply:
    """The answer of `submit`, which is given the id to submit under; of an earlier one, where the key is known."""
    key = call.headers.get(HEADER)
    if key is None:
        return Reply(200, await submit(fresh_id))
    keys, account = call.batches.queue.idempotency_keys, call.principal.account
    begun = await keys.begin(account, key, digest_of(call, body), fresh_id)
    if isinstance(begun, StoredAnswer):
        return Reply(200, begun.answer, headers=_REPLAYED)
    try:
        answer = await submit(begun.id)
    except BaseException:
        await keys.abandon(account, key)
        raise
    await keys.finish(account, key, answer)
    return Reply(200, answer)


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


_PURPOSE = "queue"
_FORGET_S = 3600.0  # the file's row, should we die before the batch has taken what is in it
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # JSON has line ends only between its tokens


async def submit_lines(call: Call, new: NewBatch, requests: Iterable[msgspec.Raw]) -> Batch:
    """Durable when it returns."""
    file = await store_lines(call, new.id, requests)
    new.input_file_id = file.id
    try:
        batch = await call.batches.queue.create(new)
    finally:
        await call.batches.queue.files.delete(new.account, file.id)
    call.batches.loader.wake()
    return batch


async def store_lines(call: Call, name: str, requests: Iterable[msgspec.Raw]) -> File:
    """For a moment it is a file of the account; whoever needs it for longer refers to what is in it."""
    files = call.batches.queue.files
    return await files.add(call.principal.account, name, _PURPOSE, gathered(_lines(requests)), _FORGET_S)


async def _lines(requests: Iterable[msgspec.Raw]) -> AsyncIterator[bytes]:
    steps = Steps()
    for request in requests:
        line = bytes(request).translate(_ONE_LINE) + b"\n"
        yield line
        await steps.took(len(line) // 8)  # copying is quicker than reading
