"""Submitting, finding and cancelling batches, as every API needs it; idempotent submission."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.api.batches.job_format import CooperativeYield
from emberline.api.http.errors import HeaderList, NoSuchBatch
from emberline.api.http.exchange import HttpExchange, Reply
from emberline.api.http.streaming import coalesce
from emberline.jobs.batches.batch import Batch, BatchKind, NewBatch
from emberline.jobs.batches.files import File
from emberline.jobs.batches.idempotency_keys import StoredAnswer
from emberline.jobs.queue.reader import QueuePosition
from emberline.protocol.errors import NotFound

IDEMPOTENCY_KEY = "idempotency-key"
REPLAYED: HeaderList = [(b"idempotent-replayed", b"true")]
JOB_QUERY = {"line": {"type": "integer", "minimum": 0}}
_PURPOSE = "queue"
_FILE_EXPIRES_S = 3600.0  # should this process die before the batch has taken over the file's content
_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")  # JSON has line ends only between its tokens


def request_digest(call: HttpExchange, *parts: bytes) -> bytes:
    """Identifies a submission: its URL and its content."""
    digest = blake2b(call.scope.get("raw_path", b"") + b"?" + call.scope["query_string"], digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


async def submit_once(call: HttpExchange, body: bytes, new_id: str, submit: Callable[[str], Awaitable[bytes]]) -> Reply:
    """The body that `submit` returns for the id to submit under. A repeated Idempotency-Key gets the stored body."""
    key = call.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return Reply(200, await submit(new_id))
    keys, account = call.queue.idempotency_keys, call.principal.account
    begun = await keys.begin(account, key, request_digest(call, body), new_id)
    if isinstance(begun, StoredAnswer):
        return Reply(200, begun.answer, headers=REPLAYED)
    try:
        answer = await submit(begun.id)
    except BaseException:
        await keys.abandon(account, key)
        raise
    await keys.finish(account, key, answer)
    return Reply(200, answer)


def new_batch(call: HttpExchange, batch_id: str, kind: BatchKind, endpoint: str, **fields: Any) -> NewBatch:
    principal = call.principal
    return NewBatch(
        id=batch_id,
        account=principal.account,
        key_id=principal.key_id,
        kind=kind,
        endpoint=endpoint,
        traceparent=call.traceparent,
        **fields,
    )


async def submit_requests(call: HttpExchange, new: NewBatch, requests: Iterable[msgspec.Raw]) -> Batch:
    """Submit a batch whose requests came in the body: they are stored as a file of lines. Durable on return."""
    file = await store_requests(call, new.id, requests)
    new.input_file_id = file.id
    try:
        batch = await call.queue.create(new)
    finally:
        await call.queue.files.delete(new.account, file.id)
    call.batches.wake()
    return batch


async def store_requests(call: HttpExchange, name: str, requests: Iterable[msgspec.Raw]) -> File:
    """A temporary file of the account, one request per line; a batch created from it keeps its content."""
    lines = coalesce(_lines(requests))
    return await call.queue.files.add(call.principal.account, name, _PURPOSE, lines, _FILE_EXPIRES_S)


async def _lines(requests: Iterable[msgspec.Raw]) -> AsyncIterator[bytes]:
    yielding = CooperativeYield()
    for request in requests:
        line = bytes(request).translate(_LINE_ENDS) + b"\n"
        yield line
        await yielding.after(len(line) // 8)  # copying is cheaper than parsing


async def find_batch(call: HttpExchange, batch_id: str, kind: BatchKind) -> Batch:
    """The account's batch of that kind."""
    try:
        batch = await call.queue.batch(call.principal.account, batch_id)
    except NotFound:
        batch = None
    if batch is None or batch.kind != kind:
        raise NoSuchBatch(f"there is no batch {batch_id[:100]!r}: it never existed, was deleted or has expired")
    return batch


async def cancel_batch(call: HttpExchange, batch: Batch) -> Batch:
    """Cancel the batch; with `line` in the query, only the job of that number."""
    account = call.principal.account
    if "line" not in call.query:
        return await call.queue.cancel(account, batch.id)
    number = call.int_param("line", 0, 0, max(0, batch.counts.total - 1))
    await call.queue.cancel_job(account, batch.id, number)
    return await call.queue.batch(account, batch.id)


async def queue_position(call: HttpExchange, batch: Batch) -> dict[str, Any]:
    return position_body(await call.queue.position(batch))


def position_body(position: QueuePosition) -> dict[str, Any]:
    """Return the number of jobs that run before the batch's next one, and its estimated wait, or None if that is not
    known yet."""
    eta_s = None if position.eta_s is None else round(position.eta_s, 1)
    return {"position": position.position, "estimated_wait_s": eta_s}
