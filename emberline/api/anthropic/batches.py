"""Anthropic's message batches: created from a list, retrieved, listed, cancelled, deleted; results as JSON lines."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.anthropic.message_form import MESSAGES
from emberline.api.batches.job_format import (
    CooperativeYield,
    FileLine,
    Result,
    batch_results,
    job_error,
    line_request,
)
from emberline.api.batches.submission import (
    cancel_batch,
    find_batch,
    new_batch,
    queue_position,
    submit_once,
    submit_requests,
)
from emberline.api.http.body import read_body
from emberline.api.http.errors import Dialect, error_body
from emberline.api.http.exchange import HttpExchange, Reply, Services, encode, json_reply
from emberline.api.http.streaming import JSONL, ByteStream, Chunks
from emberline.api.http.unknown_fields import unknown_field_log
from emberline.api.http.wire import Wire, decode
from emberline.jobs.batches.batch import Batch, new_batch_id
from emberline.jobs.queue.job import NewJob
from emberline.jobs.webhooks.events import timestamp
from emberline.protocol.errors import BadInput, EmberlineError

MAX_BYTES = 128 << 20  # held in memory until stored
MAX_REQUESTS = 100_000
ENDPOINT = "/v1/messages"

PAGE = {
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
}

Json = dict[str, Any]


class BatchRequest(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class NewMessageBatch(msgspec.Struct):
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_REQUESTS)]


_batch_decoder = msgspec.json.Decoder(NewMessageBatch)
_request_decoder = msgspec.json.Decoder(BatchRequest)


def read_message_job(service: Services, batch: Batch, line: FileLine) -> NewJob:
    """The job of one line. Custom ids were checked when the batch was created."""
    custom_id = ""
    try:
        given = decode(line.content(), _request_decoder)
        custom_id = given.custom_id
        wire = Wire(bytes(given.params))
        params = wire.decode(MESSAGES.decoder)
        unknown_field_log.add("/v1/messages in a batch", wire.unknown)
        if params.stream:
            raise BadInput("`stream` has no meaning in a batch: leave it out", param="params.stream")
        return NewJob(custom_id, line_request(MESSAGES.to_task(params, "", None)[0], service, batch))
    except EmberlineError as error:
        return NewJob(custom_id, None, error.info())


def _result_line(result: Result) -> bytes:
    return encode({"custom_id": result.job.custom_id, "result": _result_body(result)}) + b"\n"


def _result_body(result: Result) -> Json:
    job = result.job
    if job.state == "expired":
        return {"type": "expired"}
    if job.state == "cancelled":
        return {"type": "canceled"}
    if job.state != "succeeded" or job.answer is None:
        error = result.renamed(job_error(job), lambda: MESSAGES.to_task(_params(result), job.request_id, None)[1])
        return {"type": "errored", "error": error_body(error, Dialect.ANTHROPIC, job.request_id)}
    message = MESSAGES.to_body(job.request_id, _params(result), 0, job.answer)
    return {"type": "succeeded", "message": message}


def _params(result: Result) -> Any:
    return decode(bytes(decode(result.line, _request_decoder).params), MESSAGES.decoder)


async def create(call: HttpExchange) -> Reply:
    """Requests are parsed afterwards: an invalid one ends as `errored`, the others run."""
    raw = await read_body(call, MAX_BYTES)
    requests = decode(raw, _batch_decoder, MAX_BYTES).requests
    await _check_ids(requests)

    async def submit(batch_id: str) -> bytes:
        new = new_batch(call, batch_id, "anthropic", ENDPOINT, attributes={"n_requests": len(requests)})
        return encode(await _batch_with_position(call, await submit_requests(call, new, requests)))

    return await submit_once(call, raw, new_batch_id("anthropic"), submit)


async def retrieve(call: HttpExchange) -> Reply:
    return json_reply(await _batch_with_position(call, await find_batch(call, call.path_param, "anthropic")))


async def list_all(call: HttpExchange) -> Reply:
    limit = call.int_param("limit", 20, 1, 1000)
    after, before = call.query.get("after_id"), call.query.get("before_id")
    for cursor in (after, before):
        if cursor:
            await find_batch(call, cursor, "anthropic")
    found, has_more = await call.queue.batches(
        call.principal.account, "anthropic", after=after, before=before, limit=limit
    )
    rows = [_batch_body(call, batch) for batch in found]
    ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
    return json_reply({"data": rows, "has_more": has_more, **ends})


async def cancel(call: HttpExchange) -> Reply:
    batch = await cancel_batch(call, await find_batch(call, call.path_param, "anthropic"))
    return json_reply(await _batch_with_position(call, batch))


async def delete(call: HttpExchange) -> Reply:
    await find_batch(call, call.path_param, "anthropic")
    await call.queue.delete(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "type": "message_batch_deleted"})


async def results(call: HttpExchange) -> ByteStream:
    batch = await find_batch(call, call.path_param, "anthropic")
    if not batch.ended:
        raise BadInput("the batch has not ended: its results can be read when `processing_status` is `ended`")
    return ByteStream(_result_lines(call, batch), JSONL)


async def _result_lines(call: HttpExchange, batch: Batch) -> Chunks:
    if not batch.counts.total:  # cancelled before its requests were read
        return
    async for result in batch_results(call.queue, batch):
        yield _result_line(result)


async def _check_ids(requests: list[msgspec.Raw]) -> None:
    """Every request has a custom id, and no two have the same."""
    first: dict[str, int] = {}
    yielding = CooperativeYield()
    for number, request in enumerate(requests):
        try:
            custom_id = decode(bytes(request), _request_decoder).custom_id
        except BadInput as error:
            error.param = f"requests.{number}" + (f".{error.param}" if error.param else "")
            error.message = f"{error.param}: {error.message}"
            raise
        if (other := first.setdefault(custom_id, number)) != number:
            field = f"requests.{number}.custom_id"
            raise BadInput(f"{field}: {custom_id!r} is that of requests.{other} too", param=field)
        await yielding.after(len(bytes(request)) // 4)


async def _batch_with_position(call: HttpExchange, batch: Batch) -> Json:
    return _batch_body(call, batch) | {"queue": await queue_position(call, batch)}


def _batch_body(call: HttpExchange, batch: Batch) -> Json:
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
    """Count the requests by state. The counts add up to the number of submitted requests, read or not."""
    counts, total = batch.counts, max(batch.counts.total, int(batch.attributes.get("n_requests", 0)))
    unread = total - counts.total if batch.ended else 0  # the batch ended while they were read
    return {
        "processing": 0 if batch.ended else total - counts.ended,
        "succeeded": counts.completed,
        "errored": counts.failed + (unread if batch.status == "failed" else 0),
        "canceled": counts.cancelled + (unread if batch.status == "cancelled" else 0),
        "expired": counts.expired + (unread if batch.status == "expired" else 0),
    }


def _results_url(call: HttpExchange, batch: Batch) -> str:
    """Under the host and path prefix that this client uses."""
    path = call.scope["path"]
    prefix = path[: path.index("/messages/batches")]
    return f"{call.scope.get('scheme', 'http')}://{call.headers['host']}{prefix}/messages/batches/{batch.id}/results"


def _time(at_us: int | None) -> str | None:
    return None if at_us is None else timestamp(at_us)
