"""Workers AI's queue: inputs for later, and the call that asks how far they are."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from emberline.api.batches.job_format import FileLine, LineCall, Result, results_of, runnable
from emberline.api.batches.submission import batch_of, once, submit_lines, told
from emberline.api.common.answer import collect
from emberline.api.common.chat_fields import is_json
from emberline.api.http.body import decode, read_body
from emberline.api.http.call import JSON, Backend, Call, HeaderList, Reply, encode, json_reply
from emberline.api.http.errors import Dialect, NoSuchBatch, error_body
from emberline.api.http.sse import gathered, send_bytes, stream
from emberline.api.openai.batch_jobs import failure_of
from emberline.api.workers_ai.answer import RunStream, Shape, envelope, result_body
from emberline.api.workers_ai.run_request import RunRequest, UniversalRequest
from emberline.jobs.batches.batch import Batch, NewBatch, new_batch_id
from emberline.jobs.queue.job import NewJob
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge

Json = dict[str, Any]


class _Referred(msgspec.Struct):
    external_reference: Any = None


class _Item(RunRequest, kw_only=True):
    external_reference: Any = None


_item_decoder = msgspec.json.Decoder(_Item)
_reference_decoder = msgspec.json.Decoder(_Referred)


class WorkersAILines:
    def __init__(self, service: Backend, model: str) -> None:
        self._service = service
        self._model = model
        self._call = LineCall("", Dialect.NATIVE)

    def read(self, line: FileLine) -> NewJob:
        reference = ""
        try:
            if line.data is None:
                raise TooLarge("the input is larger than one of a batch may be")
            item = decode(line.data, _item_decoder)
            if isinstance(item.external_reference, str):
                reference = item.external_reference[:512]
            if item.stream:
                raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
            if item.requests is not None or item.request_id is not None:
                raise BadInput("an input in `requests` is a `prompt` or `messages`", param="requests")
            return NewJob(reference, runnable(item.to_request(self._call, self._model), self._service))
        except EmberlineError as error:
            return NewJob(reference, None, error.info())

    def skip(self, line: FileLine) -> None:
        """Nothing to remember."""


def answer_item(result: Result) -> bytes:
    line = result.line
    item: Json = {"id": line.number}
    try:
        item |= {"result": _shown(result), "success": True}
    except EmberlineError as error:
        item |= {"success": False, "error": error_body(error, Dialect.NATIVE, line.request_id)["errors"][0]}
    reference = _reference(result.given)
    if reference is not None:
        item["external_reference"] = reference
    return encode(item)


def _shown(result: Result) -> Json:
    line = result.line
    if line.state != "succeeded" or line.answer is None:
        raise failure_of(line)
    item = decode(result.given, _item_decoder)
    shape = Shape(json=is_json(item.output()[0]), reasoning=not item.hides_reasoning)
    return result_body(line.answer, shape)


def _reference(given: bytes) -> Any:
    try:
        return decode(given, _reference_decoder).external_reference
    except EmberlineError:
        return None


ENDPOINT = "/ai/run"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def run_queued(call: Call, model: str, raw: bytes, body: RunRequest) -> Reply | None:
    """`raw` is the body as it was sent: where it has no `requests`, it is itself the one input."""
    if body.request_id is not None:
        return await _poll(call, body.request_id)
    return await _submit(call, model, raw, body)


async def _submit(call: Call, model: str, raw: bytes, body: RunRequest) -> Reply:
    card = call.service.resolve(model)
    requests = _requests(call, raw, body, card.id)
    most = call.batches.queue.limits.max_jobs
    if len(requests) > most:
        raise TooLarge(f"{len(requests):,} requests are too many for one call, which takes {most:,}", param="requests")

    async def submit(batch_id: str) -> bytes:
        new = NewBatch(
            id=batch_id,
            account=call.principal.account,
            key_id=call.principal.key_id,
            kind="workers_ai",
            endpoint=ENDPOINT,
            model=card.id,
        )
        batch = await submit_lines(call, new, requests)
        return encode(envelope({"status": "queued", "request_id": batch.id, "model": model}))

    reply = await once(call, raw, new_batch_id("workers_ai"), submit)
    return reply._replace(headers=[*reply.headers, *_headers(call)])


def _requests(call: Call, raw: bytes, body: RunRequest, model: str) -> list[msgspec.Raw]:
    if body.requests is None:
        body.to_request(call, model)  # a single input that is wrong is refused at once
        if body.stream:
            raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
        return [msgspec.Raw(raw)]
    if body.prompt is not None or body.messages is not None:
        raise BadInput("`requests` comes alone: each of them is an input", param="requests")
    return body.requests


async def _poll(call: Call, request_id: str) -> Reply | None:
    if not _UUID.fullmatch(request_id):
        raise NoSuchBatch(f"{request_id[:80]!r} is not a request's id", param="request_id")
    batch = await batch_of(call, request_id, "workers_ai")
    if not batch.ended:
        place = await call.batches.queue.position(batch)
        running = place.running or batch.counts.ended
        status: Json = {"status": "running" if running else "queued", "request_id": batch.id, "model": batch.model}
        return json_reply(envelope(status | told(place)), headers=_headers(call))
    await send_bytes(call, gathered(_answer(call, batch)), JSON, _headers(call))
    return None


async def _answer(call: Call, batch: Batch) -> AsyncIterator[bytes]:
    """The envelope, written around items as they are read."""
    yield b'{"result":{"responses":['
    between = b""
    if batch.counts.total:
        async for result in results_of(call.batches.queue, batch):
            yield between + answer_item(result)
            between = b","
    n_in, n_out = batch.input_tokens, batch.output_tokens
    usage = {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}
    rest = encode(envelope({"usage": usage, "request_id": batch.id, "model": batch.model}))
    yield b"]," + rest.removeprefix(b'{"result":{')


def _headers(call: Call) -> HeaderList:
    return [(b"cf-ai-req-id", call.id.encode())]


class _Universal(msgspec.Struct):
    """The input as it was sent: the queue keeps it."""

    input: msgspec.Raw


_run_decoder = msgspec.json.Decoder(RunRequest)
_universal_decoder = msgspec.json.Decoder(UniversalRequest)
_raw_decoder = msgspec.json.Decoder(_Universal)


async def run(call: Call) -> Reply | None:
    raw = await read_body(call)
    body = decode(raw, _run_decoder)
    if body.queued or _queue_asked(call):
        return await run_queued(call, call.tail, raw, body)
    return await _run(call, call.tail, body)


async def run_universal(call: Call) -> Reply | None:
    raw = await read_body(call)
    body = decode(raw, _universal_decoder)
    if body.input.queued or _queue_asked(call):
        return await run_queued(call, body.model, bytes(decode(raw, _raw_decoder).input), body.input)
    return await _run(call, body.model, body.input)


def _queue_asked(call: Call) -> bool:
    said = call.query().get("queueRequest", "false").lower()
    if said not in ("true", "false"):
        raise BadInput("`queueRequest` may be true or false", param="queueRequest")
    return said == "true"


async def _run(call: Call, model: str, body: RunRequest) -> Reply | None:
    request = body.to_request(call, model)
    events = call.service.generate(request, call.principal)
    shape = Shape(json=is_json(request.output), reasoning=not body.hides_reasoning)
    # Nothing has a price yet, so nothing costs neurons.
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode()), (b"cf-ai-neurons", b"0")]
    if body.stream:
        await stream(call, events, RunStream(call, shape), headers)
        return None
    return json_reply(envelope(result_body(await collect(call, events), shape)), headers=headers)
