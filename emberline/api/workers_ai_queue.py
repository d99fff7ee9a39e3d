"""Workers AI's queue: inputs for later, and the call that asks how far they are."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from emberline.api.batch_lines import results_of
from emberline.api.batch_status import batch_of, told
from emberline.api.byte_stream import gathered, send_bytes
from emberline.api.call import Call
from emberline.api.errors import NoSuchBatch
from emberline.api.idempotency import once
from emberline.api.reply import JSON, HeaderList, Reply, encode, json_reply
from emberline.api.submitting import submit_lines
from emberline.api.workers_ai_answer import envelope
from emberline.api.workers_ai_lines import answer_item
from emberline.api.workers_ai_request import RunRequest
from emberline.jobs.batch import Batch, NewBatch, new_id
from emberline.protocol.errors import BadInput, TooLarge

ENDPOINT = "/ai/run"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Json = dict[str, Any]


async def run_queued(call: Call, model: str, raw: bytes, body: RunRequest) -> Reply | None:
    """`raw` is the body as it was sent: where it has no `requests`, it is itself the one input."""
    if body.request_id is not None:
        return await _poll(call, body.request_id)
    return await _submit(call, model, raw, body)


async def _submit(call: Call, model: str, raw: bytes, body: RunRequest) -> Reply:
    card = call.service.resolve(model)
    requests = _requests(call, raw, body, card.id)
    most = call.batches.queue.limits.max_lines
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

    reply = await once(call, raw, new_id("workers_ai"), submit)
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
        place = await call.batches.queue.place(batch)
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
