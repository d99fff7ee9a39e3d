"""Anthropic's message batches: made from a list, watched, listed, cancelled, read as lines, deleted."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.admin.events import whole_number
from emberline.api.anthropic.message_request import MessagesRequest
from emberline.api.anthropic.messages import message_body
from emberline.api.batches.job_format import FileLine, LineCall, Result, Steps, results_of, runnable
from emberline.api.batches.submission import batch_of, once, standing, stop, submit_lines
from emberline.api.http.body import decode, read_body
from emberline.api.http.call import Backend, Call, Reply, encode, json_reply
from emberline.api.http.errors import Dialect, error_body
from emberline.api.http.sse import JSONL, gathered, send_bytes
from emberline.api.openai.batch_jobs import failure_of
from emberline.jobs.batches.batch import Batch, NewBatch, new_batch_id
from emberline.jobs.queue.job import NewJob
from emberline.jobs.webhooks.events import timestamp
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge

Json = dict[str, Any]


class BatchRequest(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


_request_decoder = msgspec.json.Decoder(BatchRequest)
_params_decoder = msgspec.json.Decoder(MessagesRequest)


class AnthropicLines:
    """The door has seen to it that ids are there and differ."""

    def __init__(self, service: Backend) -> None:
        self._service = service
        self._call = LineCall("", Dialect.ANTHROPIC)

    def read(self, line: FileLine) -> NewJob:
        custom_id = ""
        try:
            if line.data is None:
                raise TooLarge("the request is larger than one of a batch may be")
            given = decode(line.data, _request_decoder)
            custom_id = given.custom_id
            params = decode(bytes(given.params), _params_decoder)
            if params.stream:
                raise BadInput("`stream` has no meaning in a batch: leave it out", param="params.stream")
            return NewJob(custom_id, runnable(params.to_request(self._call), self._service))
        except EmberlineError as error:
            return NewJob(custom_id, None, error.info())

    def skip(self, line: FileLine) -> None:
        """Nothing to remember."""


def result_line(result: Result) -> bytes:
    line = result.line
    return encode({"custom_id": line.custom_id, "result": _result(result)}) + b"\n"


def _result(result: Result) -> Json:
    line = result.line
    if line.state == "expired":
        return {"type": "expired"}
    if line.state == "cancelled":
        return {"type": "canceled"}
    call = LineCall(line.request_id, Dialect.ANTHROPIC)
    if line.state != "succeeded" or line.answer is None:
        return {"type": "errored", "error": error_body(_retold(result, call), Dialect.ANTHROPIC, line.request_id)}
    params = decode(bytes(decode(result.given, _request_decoder).params), _params_decoder)
    return {"type": "succeeded", "message": message_body(call, params.model, line.answer, params.hides_thinking)}


def _retold(result: Result, call: LineCall) -> EmberlineError:
    error = failure_of(result.line)
    if result.line.started_us is None:
        return error
    try:
        decode(bytes(decode(result.given, _request_decoder).params), _params_decoder).to_request(call)
    except EmberlineError:
        return error
    return call.names.retell(error)


MAX_BYTES = 128 << 20  # in memory until it is stored
MAX_REQUESTS = 100_000
ENDPOINT = "/v1/messages"

PAGE = {
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
}


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

    return await once(call, raw, new_batch_id("anthropic"), submit)


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
