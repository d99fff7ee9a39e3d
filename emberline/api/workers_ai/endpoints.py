"""Cloudflare's own door: run a model, now or in the queue."""

import msgspec

from emberline.api.common.answer import collect
from emberline.api.common.chat_fields import is_json
from emberline.api.http.body import decode, read_body
from emberline.api.http.call import Call
from emberline.api.http.reply import HeaderList, Reply, json_reply
from emberline.api.http.sse import stream
from emberline.api.workers_ai.answer import RunStream, Shape, envelope, result_body
from emberline.api.workers_ai.queue import run_queued
from emberline.api.workers_ai.run_request import RunRequest, UniversalRequest
from emberline.protocol.errors import BadInput


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
