"""Anthropic's message batches: made from a list, watched, listed, cancelled, read as lines, deleted."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.anthropic_batch_lines import result_line
from emberline.api.batch_lines import results_of
from emberline.api.batch_status import batch_of, standing, stop
from emberline.api.body import decode, read_body
from emberline.api.byte_stream import JSONL, gathered, send_bytes
from emberline.api.call import Call
from emberline.api.events import whole_number
from emberline.api.idempotency import once
from emberline.api.reply import Reply, encode, json_reply
from emberline.api.stepping import Steps
from emberline.api.submitting import submit_lines
from emberline.jobs.batch import Batch, NewBatch, new_id
from emberline.jobs.events import timestamp
from emberline.protocol.errors import BadInput

MAX_BYTES = 128 << 20  # in memory until it is stored
MAX_REQUESTS = 100_000
ENDPOINT = "/v1/messages"

PAGE = {
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
}

Json = dict[str, Any]


class NewMessageBatch(msgspec.Struct):
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_REQUESTS)]


class _Named(msgspec.Struct):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


_decoder = msgspec.json.Decoder(NewMessageBatch)
_named_decoder = msgspec.json.Decoder(_Named)


async def create(call: Call) -> Reply:
    """What each request asks for is looked at afterwards; a bad one ends `errored`, the others run."""
    raw = await read_body(call, MAX_BYTES)
    requests = decode(raw, _decoder).requests
    await _check_names(requests)

    async def submit(batch_id: str) -> bytes:
        new = NewBatch(
            id=batch_id,
            account=call.principal.account,
            key_id=call.principal.key_id,
            kind="anthropic",
            endpoint=ENDPOINT,
            attributes={"n_requests": len(requests)},
        )
        return encode(await _shown_alone(call, await submit_lines(call, new, requests)))

    return await once(call, raw, new_id("anthropic"), submit)


async def retrieve(call: Call) -> Reply:
    return json_reply(await _shown_alone(call, await batch_of(call, call.tail, "anthropic")))


async def list_all(call: Call) -> Reply:
    query = call.query()
    limit = whole_number(query, "limit", 20, 1, 1000)
    after, before = query.get("after_id"), query.get("before_id")
    for cursor in (after, before):
        if cursor:
            await batch_of(call, cursor, "anthropic")
    found, has_more = await call.batches.queue.batches(
        call.principal.account, "anthropic", after=after, before=before, limit=limit
    )
    rows = [_shown(call, batch) for batch in found]
    ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
    return json_reply({"data": rows, "has_more": has_more, **ends})


async def cancel(call: Call) -> Reply:
    batch = await stop(call, await batch_of(call, call.tail, "anthropic"))
    return json_reply(await _shown_alone(call, batch))


async def delete(call: Call) -> Reply:
    await batch_of(call, call.tail, "anthropic")
    await call.batches.queue.delete(call.principal.account, call.tail)
    return json_reply({"id": call.tail, "type": "message_batch_deleted"})


async def results(call: Call) -> None:
    batch = await batch_of(call, call.tail, "anthropic")
    if not batch.ended:
        raise BadInput("the batch has not ended: its results can be read when `processing_status` is `ended`")
    await send_bytes(call, gathered(_result_lines(call, batch)), JSONL)


async def _result_lines(call: Call, batch: Batch) -> AsyncIterator[bytes]:
    if not batch.counts.total:  # it was cancelled before its requests were read
        return
    async for result in results_of(call.batches.queue, batch):
        yield result_line(result)


async def _check_names(requests: list[msgspec.Raw]) -> None:
    first: dict[str, int] = {}
    steps = Steps()
    for number, request in enumerate(requests):
        try:
            name = decode(bytes(request), _named_decoder).custom_id
        except BadInput as error:
            error.param = f"requests.{number}" + (f".{error.param}" if error.param else "")
            error.message = f"{error.param}: {error.message}"
            raise
        if (other := first.setdefault(name, number)) != number:
            where = f"requests.{number}.custom_id"
            raise BadInput(f"{where}: {name!r} is that of requests.{other} too", param=where)
        await steps.took(len(bytes(request)) // 4)


async def _shown_alone(call: Call, batch: Batch) -> Json:
    return _shown(call, batch) | {"queue": await standing(call, batch)}


def _shown(call: Call, batch: Batch) -> Json:
    status = "ended" if batch.ended else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": timestamp(batch.created_us),
        "expires_at": timestamp(batch.deadline_us),
        "ended_at": _time(batch.ended_us),
        "cancel_initiated_at": _time(batch.cancelling_us or batch.cancelled_us),
        "archived_at": None,
        "results_url": _results_url(call, batch) if batch.ended else None,
    }


def _counts(batch: Batch) -> Json:
    """They add up to the number of requests at any time, also before these were read."""
    counts, total = batch.counts, max(batch.counts.total, int(batch.attributes.get("n_requests", 0)))
    if not batch.ended:
        return {
            "processing": total - counts.ended,
            "succeeded": counts.completed,
            "errored": counts.failed,
            "canceled": counts.cancelled,
            "expired": counts.expired,
        }
    unread = total - counts.total  # it ended while they were read
    return {
        "processing": 0,
        "succeeded": counts.completed,
        "errored": counts.failed + (unread if batch.status == "failed" else 0),
        "canceled": counts.cancelled + (unread if batch.status == "cancelled" else 0),
        "expired": counts.expired + (unread if batch.status == "expired" else 0),
    }


def _results_url(call: Call, batch: Batch) -> str:
    """Where this client reads the results: under the address and the prefix that it uses itself."""
    path = call.scope["path"]
    prefix = path[: path.index("/messages/batches")]
    return f"{call.scope.get('scheme', 'http')}://{call.headers['host']}{prefix}/messages/batches/{batch.id}/results"


def _time(at_us: int | None) -> str | None:
    return None if at_us is None else timestamp(at_us)
