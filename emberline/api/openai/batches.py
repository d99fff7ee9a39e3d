"""OpenAI's batches: created from a file, retrieved, listed, cancelled, deleted."""

import re
from typing import Any

import msgspec

from emberline.api.batches.submission import cancel_batch, find_batch, new_batch, queue_position, submit_once
from emberline.api.common.sampling_fields import Metadata
from emberline.api.common.unsupported_fields import UnsupportedField, refuse_unsupported
from emberline.api.http.body import read_body
from emberline.api.http.errors import codes
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply, list_reply
from emberline.api.http.wire import decode
from emberline.api.openai.batch_jobs import FORMS
from emberline.api.openai.files import error_file_id, output_file_id
from emberline.jobs.batches.batch import Batch, new_batch_id
from emberline.protocol.errors import BadInput, ErrorInfo, NoSuchFile, NotFound, Unsupported, from_info

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
    metadata: Metadata | None = None
    output_expires_after: UnsupportedField = None


_decoder = msgspec.json.Decoder(NewBatchRequest)


async def create(call: HttpExchange) -> Reply:
    """The batch is durable before the response; its lines are read afterwards."""
    raw = await read_body(call)
    body = decode(raw, _decoder)
    refuse_unsupported(body)
    await _check(call, body)

    async def submit(batch_id: str) -> bytes:
        new = new_batch(
            call,
            batch_id,
            "openai",
            body.endpoint,
            window_s=_window_s(body.completion_window),
            metadata=body.metadata or {},
            attributes={"completion_window": body.completion_window},
            input_file_id=body.input_file_id,
        )
        batch = await call.queue.create(new)
        call.batches.wake()
        return encode(await _batch_with_position(call, batch))

    return await submit_once(call, raw, new_batch_id("openai"), submit)


async def retrieve(call: HttpExchange) -> Reply:
    return json_reply(await _batch_with_position(call, await find_batch(call, call.path_param, "openai")))


async def list_all(call: HttpExchange) -> Reply:
    limit = call.int_param("limit", 20, 1, 100)
    if after := call.query.get("after"):
        await find_batch(call, after, "openai")
    found, has_more = await call.queue.batches(call.principal.account, "openai", after=after, limit=limit)
    return list_reply([_batch_body(batch) for batch in found], has_more)


async def cancel(call: HttpExchange) -> Reply:
    batch = await cancel_batch(call, await find_batch(call, call.path_param, "openai"))
    return json_reply(await _batch_with_position(call, batch))


async def delete(call: HttpExchange) -> Reply:
    """Not part of OpenAI's API: results need not be kept until they expire."""
    await find_batch(call, call.path_param, "openai")
    await call.queue.delete(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "object": "batch", "deleted": True})


async def _check(call: HttpExchange, body: NewBatchRequest) -> None:
    if body.endpoint not in FORMS:
        supported = ", ".join(FORMS)
        raise Unsupported(f"there are no batches for {body.endpoint[:100]!r}, only for {supported}", param="endpoint")
    _window_s(body.completion_window)
    try:
        file = await call.queue.files.get(call.principal.account, body.input_file_id)
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
            f"`completion_window` is a duration such as 30m, 24h or 7d, at most {MAX_WINDOW_H}h",
            param="completion_window",
        )
    return float(seconds)


async def _batch_with_position(call: HttpExchange, batch: Batch) -> Json:
    return _batch_body(batch) | {"queue": await queue_position(call, batch)}


def _batch_body(batch: Batch) -> Json:
    counts = batch.counts
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": [_error(info) for info in batch.errors]} if batch.errors else None,
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
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.ended - counts.completed,  # every line of the error file, also those that never ran:
            "cancelled": counts.cancelled,
            "expired": counts.expired,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata or None,
    }


def _error(info: ErrorInfo) -> Json:
    code = codes(from_info(info)).openai_code or "invalid_request"
    line = _LINE.match(info.message)
    return {"code": code, "line": int(line[1]) if line else None, "message": info.message, "param": info.param}


def _seconds(at_us: int | None) -> int | None:
    return None if at_us is None else at_us // 1_000_000
