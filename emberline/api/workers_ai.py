"""Cloudflare's own door: run a model, search the catalog."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.body import read_json
from emberline.api.call import Call
from emberline.api.collect import collect
from emberline.api.conversation import Conversation, is_json
from emberline.api.fields import session_name
from emberline.api.messages import ChatMessage, canonical
from emberline.api.reply import HeaderList, Reply, json_reply
from emberline.api.sse import stream
from emberline.api.unbuilt import Unbuilt, unsupported
from emberline.api.workers_ai_answer import RunStream, Shape, result_body
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message

DEFAULT_TEMPERATURE = 0.6


class RunOptions(msgspec.Struct):
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")


class RunRequest(Conversation, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    raw: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    options: RunOptions | None = None
    functions: Unbuilt = None  # Cloudflare's: code to run there, not OpenAI's older tools
    requests: Unbuilt = None
    request_id: Unbuilt = None
    logprobs: Unbuilt = None
    top_logprobs: Unbuilt = None
    image: Unbuilt = None
    audio: Unbuilt = None

    def to_request(self, call: Call, model: str) -> GenerateRequest:
        agency = self.agency(call)
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
            **agency,
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
            if self.tools:
                raise BadInput("`tools` need the chat template, which `raw` leaves out", param="tools")
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
    request = body.to_request(call, model)
    events = call.service.generate(request, call.principal)
    shape = Shape(json=is_json(request.output), reasoning=not body.hides_reasoning)
    # Nothing has a price yet, so nothing costs neurons.
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode()), (b"cf-ai-neurons", b"0")]
    if body.stream:
        await stream(call, events, RunStream(call, shape), headers)
        return None
    return json_reply(envelope(result_body(await collect(call, events), shape)), headers=headers)


def envelope(result: Any, **beside: Any) -> dict[str, Any]:
    return {"result": result, "success": True, "errors": [], "messages": []} | beside
