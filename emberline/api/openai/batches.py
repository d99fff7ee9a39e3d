"""OpenAI's batches: made from a file, watched, listed, cancelled."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.admin.events import list_of, whole_number
from emberline.api.batches.submission import batch_of, once, standing, stop
from emberline.api.http.body import UnsupportedField, decode, read_body, refuse_unsupported
from emberline.api.http.call import Call, Reply, encode, json_reply
from emberline.api.http.errors import NoSuchFile, codes
from emberline.api.openai.batch_jobs import ENDPOINTS
from emberline.api.openai.files import error_file_id, output_file_id
from emberline.jobs.batches.batch import Batch, NewBatch, new_batch_id
from emberline.protocol.errors import BadInput, NotFound, Unsupported, from_info

MAX_WINDOW_H = 14 * 24
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_LINE = re.compile(r"line ([0-9]+): ")

PAGE = {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100}}

Json = dict[str, Any]


class NewBatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    output_expires_after: UnsupportedField = None


_decoder = msgspec.json.Decoder(NewBatchRequest)


async def create(call: Call) -> Reply:
    """Durable when it is answered; its lines are read afterwards."""
    raw = await read_body(call)
    body = decode(raw, _decoder)
    refuse_unsupported(body)
    await _check(call, body)

    async def submit(batch_id: str) -> bytes:
        batch = await call.batches.queue.create(_new(call, body, batch_id))
        call.batches.loader.wake()
        return encode(await _shown_alone(call, batch))

    return await once(call, raw, new_batch_id("openai"), submit)


async def retrieve(call: Call) -> Reply:
    return json_reply(await _shown_alone(call, await batch_of(call, call.tail, "openai")))


async def list_all(call: Call) -> Reply:
    query = call.query()
    limit = whole_number(query, "limit", 20, 1, 100)
    if after := query.get("after"):
        await batch_of(call, after, "openai")
    found, has_more = await call.batches.queue.batches(call.principal.account, "openai", after=after, limit=limit)
    return json_reply(list_of([shown(batch) for batch in found], has_more))


async def cancel(call: Call) -> Reply:
    batch = await stop(call, await batch_of(call, call.tail, "openai"))
    return json_reply(await _shown_alone(call, batch))


async def delete(call: Call) -> Reply:
    """Not of OpenAI's API: results need not outlive their use."""
    await batch_of(call, call.tail, "openai")
    await call.batches.queue.delete(call.principal.account, call.tail)
    return json_reply({"id": call.tail, "object": "batch", "deleted": True})


async def _check(call: Call, body: NewBatchRequest) -> None:
    if body.endpoint not in ENDPOINTS:
        raise Unsupported(
            f"there are no batches for {body.endpoint[:100]!r}; there are for {', '.join(ENDPOINTS)}", param="endpoint"
        )
    _window_s(body.completion_window)
    try:
        file = await call.batches.queue.files.get(call.principal.account, body.input_file_id)
    except NotFound:
        shown = repr(body.input_file_id[:100])
        raise NoSuchFile(f"there is no file {shown}: upload it first", param="input_file_id") from None
    if file.purpose != "batch":
        raise BadInput(f"{file.id} was uploaded for {file.purpose!r}, not for `batch`", param="input_file_id")
    if not file.n_bytes:
        raise BadInput(f"{file.id} is empty", param="input_file_id")


def _window_s(text: str) -> float:
    found = _WINDOW.fullmatch(text)
    if found is None or (seconds := int(found[1]) * _SECONDS[found[2]]) > MAX_WINDOW_H * 3600:
        raise BadInput(
            f"`completion_window` is a time such as 30m, 24h or 7d, at most {MAX_WINDOW_H}h", param="completion_window"
        )
    return float(seconds)


def _new(call: Call, body: NewBatchRequest, batch_id: str) -> NewBatch:
    return NewBatch(
        id=batch_id,
        account=call.principal.account,
        key_id=call.principal.key_id,
        kind="openai",
        endpoint=body.endpoint,
        window_s=_window_s(body.completion_window),
        metadata=body.metadata or {},
        attributes={"completion_window": body.completion_window},
        input_file_id=body.input_file_id,
    )


async def _shown_alone(call: Call, batch: Batch) -> Json:
    return shown(batch) | {"queue": await standing(call, batch)}


def shown(batch: Batch) -> Json:
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.attributes.get("completion_window", "24h"),
        "status": batch.status,
        "output_file_id": output_file_id(batch),
        "error_file_id": error_file_id(batch),
        "created_at": batch.created_us // 1_000_000,
        "in_progress_at": _seconds(batch.in_progress_us),
        "expires_at": batch.deadline_us // 1_000_000,
        "finalizing_at": _seconds(batch.finalizing_us),
        "completed_at": _seconds(batch.completed_us),
        "failed_at": _seconds(batch.failed_us),
        "expired_at": _seconds(batch.expired_us),
        "cancelling_at": _seconds(batch.cancelling_us),
        "cancelled_at": _seconds(batch.cancelled_us),
        "request_counts": _counts(batch),
        "usage": _usage(batch),
        "metadata": batch.metadata or None,
    }


def _counts(batch: Batch) -> Json:
    """`failed`: all that are in the error file; how many of them never ran is told beside."""
    counts = batch.counts
    told = {"total": counts.total, "completed": counts.completed, "failed": counts.ended - counts.completed}
    return told | {"cancelled": counts.cancelled, "expired": counts.expired}


def _usage(batch: Batch) -> Json:
    n_in, n_out = batch.input_tokens, batch.output_tokens
    return {
        "input_tokens": n_in,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": n_out,
        "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
        "total_tokens": n_in + n_out,
    }


def _errors(batch: Batch) -> Json | None:
    if not batch.errors:
        return None
    told = []
    for info in batch.errors:
        code = codes(from_info(info)).openai_code or "invalid_request"
        line = _LINE.match(info.message)
        told.append(
            {"code": code, "line": int(line[1]) if line else None, "message": info.message, "param": info.param}
        )
    return {"object": "list", "data": told}


def _seconds(at_us: int | None) -> int | None:
    return None if at_us is None else at_us // 1_000_000
