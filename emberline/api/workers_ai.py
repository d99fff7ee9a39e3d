"""Cloudflare's own door: run a model, search the catalog."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.body import read_json
from emberline.api.call import Call
from emberline.api.collect import Answer, collect
from emberline.api.errors import error_body
from emberline.api.fields import Generation, Unbuilt, session_name, unsupported
from emberline.api.messages import ChatMessage, canonical
from emberline.api.padding import pads
from emberline.api.reply import HeaderList, Reply, encode, json_reply
from emberline.api.sse import stream
from emberline.api.usage import usage_body
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.events import ChoiceDone, TextDelta, Usage
from emberline.protocol.request import GenerateRequest, Message

DEFAULT_TEMPERATURE = 0.6


class RunOptions(msgspec.Struct):
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")


class RunRequest(Generation, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    raw: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    options: RunOptions | None = None
    requests: Unbuilt = None
    request_id: Unbuilt = None
    logprobs: Unbuilt = None
    top_logprobs: Unbuilt = None
    image: Unbuilt = None
    audio: Unbuilt = None

    def to_request(self, call: Call, model: str) -> GenerateRequest:
        self.check()
        if self.n not in (None, 1):
            raise unsupported("n")
        messages, prompt = self._input()
        return GenerateRequest(
            id=call.id,
            model=model,
            messages=messages,
            prompt=prompt,
            sampling=self.sampling(DEFAULT_TEMPERATURE),
            session=session_name(call, self.prompt_cache_key, self.user),
            priority=self.priority,
            reject_if_busy=bool(self.options and self.options.reject_if_busy),
            template_kwargs=self.template_kwargs,
        )

    def _input(self) -> tuple[tuple[Message, ...] | None, str | None]:
        """A prompt is the user's first message, unless `raw` says that it has been through a template already."""
        if (self.prompt is None) == (self.messages is None):
            raise BadInput("exactly one of `prompt` and `messages` is needed", param="prompt")
        if self.messages is not None:
            if self.raw:
                raise BadInput("`raw` needs `prompt`: messages always go through the chat template", param="raw")
            return canonical(self.messages), None
        if self.raw:
            return None, self.prompt
        return (Message("user", self.prompt or ""),), None


class UniversalRequest(msgspec.Struct):
    model: str
    input: RunRequest


_run_decoder = msgspec.json.Decoder(RunRequest)
_universal_decoder = msgspec.json.Decoder(UniversalRequest)


async def run(call: Call) -> Reply | None:
    if call.query().get("queueRequest") == "true":
        raise unsupported("queueRequest")
    return await _run(call, call.tail, await read_json(call, _run_decoder))


async def run_universal(call: Call) -> Reply | None:
    body = await read_json(call, _universal_decoder)
    return await _run(call, body.model, body.input)


async def _run(call: Call, model: str, body: RunRequest) -> Reply | None:
    events = call.service.generate(body.to_request(call, model), call.principal)
    # Nothing has a price yet, so nothing costs neurons.
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode()), (b"cf-ai-neurons", b"0")]
    if body.stream:
        await stream(call, events, RunStream(call), headers)
        return None
    return json_reply(envelope(_result(await collect(call, events))), headers=headers)


def envelope(result: Any, **beside: Any) -> dict[str, Any]:
    return {"result": result, "success": True, "errors": [], "messages": []} | beside


def _result(answer: Answer) -> dict[str, Any]:
    return {"response": answer.choices[0].text, "tool_calls": [], "usage": usage_body(answer.usage)}


class RunStream:
    """`response` pieces, each padded; the usage; [DONE]."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._pads = pads()

    def started(self, usage: Usage) -> bytes:
        return b""

    def delta(self, event: TextDelta) -> bytes:
        return b'data: {"response":' + encode(event.text) + b',"p":"' + next(self._pads) + b'"}\n\n'

    def done(self, event: ChoiceDone) -> bytes:
        return b""

    def completed(self, usage: Usage) -> bytes:
        return b'data: {"response":"","usage":' + encode(usage_body(usage)) + b"}\n\ndata: [DONE]\n\n"

    def failed(self, error: EmberlineError) -> bytes:
        return b"data: " + encode(error_body(error, self._call.dialect, self._call.id)) + b"\n\n"
