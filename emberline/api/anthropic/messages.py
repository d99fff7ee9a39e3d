"""A message as Anthropic's events: its start, its blocks one after another, its end with the final usage."""

from typing import Any

import msgspec

from emberline.api.anthropic.message_request import CountRequest, MessagesRequest
from emberline.api.common.answer import arguments_of, collect
from emberline.api.http.body import read_json
from emberline.api.http.call import Call, HeaderList, Reply, encode, json_reply
from emberline.api.http.errors import error_body
from emberline.api.http.sse import stream
from emberline.protocol.answer import Answer, AnswerChoice, AnswerPart, ReasoningPart, TextPart
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted, Usage

# Clients send a thought back only with its signature. Ours signs nothing: what comes back is the caller's own word.
SIGNATURE = "ZW1iZXJsaW5l"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts apart what came from the cache: the prompt is the sum of all input fields."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def stop_reason(choice: AnswerChoice | ChoiceDone) -> str:
    if choice.finish == "length":
        return "max_tokens"
    if choice.finish == "tool_calls":
        return "tool_use"
    return "end_turn" if choice.stop_sequence is None else "stop_sequence"


def head(call: Call, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model}


def message_body(call: Call, model: str, answer: Answer, hides_thinking: bool = False) -> dict[str, Any]:
    choice = answer.choices[0]
    blocks = [_block(part, hides_thinking) for part in choice.parts]
    return {
        **head(call, model),
        "content": [block for block in blocks if block] or [{"type": "text", "text": ""}],
        "stop_reason": stop_reason(choice),
        "stop_sequence": choice.stop_sequence,
        "usage": usage_body(answer.usage),
    }


def _block(part: AnswerPart, hides_thinking: bool) -> dict[str, Any] | None:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ReasoningPart):
        return {"type": "thinking", "thinking": "" if hides_thinking else part.text, "signature": SIGNATURE}
    arguments = arguments_of(part)
    if arguments is None:
        return None
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


_NOT_ENDED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_TEXT = b'{"type":"text_delta","text":'
_THINKING = b'{"type":"thinking_delta","thinking":'
_INPUT = b'{"type":"input_json_delta","partial_json":'
_DELTA_END = b"}}\n\n"


class MessageStream:
    def __init__(self, call: Call, model: str, hides_thinking: bool = False) -> None:
        self._call = call
        self._model = model
        self._hides_thinking = hides_thinking
        self._end: dict[str, Any] = {}
        self._block = -1  # the index of the block that is or was open
        self._open = ""  # its type, while it is
        self._delta = b""  # how a delta of it begins

    def started(self, usage: Usage) -> bytes:
        message = head(self._call, self._model) | {"content": [], "usage": usage_body(usage)} | _NOT_ENDED
        return _event("message_start", {"message": message})

    def delta(self, event: TextDelta) -> bytes:
        if not event.text:
            return b""
        opening = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
        return opening + self._delta + _TEXT + encode(event.text) + _DELTA_END

    def reasoning(self, event: ReasoningDelta) -> bytes:
        if not event.text:
            return b""
        block = {"type": "thinking", "thinking": "", "signature": ""}
        opening = b"" if self._open == "thinking" else self._begin(block)
        return opening if self._hides_thinking else opening + self._delta + _THINKING + encode(event.text) + _DELTA_END

    def call_started(self, event: ToolCallStarted) -> bytes:
        block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        return self._begin(block) + self._delta + _INPUT + b'""' + _DELTA_END

    def call_delta(self, event: ToolCallDelta) -> bytes:
        return self._delta + _INPUT + encode(event.arguments) + _DELTA_END

    def done(self, event: ChoiceDone) -> bytes:
        self._end = {"stop_reason": stop_reason(event), "stop_sequence": event.stop_sequence}
        opening = self._begin({"type": "text", "text": ""}) if self._block < 0 else b""
        return opening + self._close()

    def completed(self, usage: Usage) -> bytes:
        return _event("message_delta", {"delta": self._end, "usage": usage_body(usage)}) + _MESSAGE_STOP

    def failed(self, error: EmberlineError) -> bytes:
        body = error_body(error, self._call.dialect, self._call.id)
        return b"event: error\ndata: " + encode(body) + b"\n\n"

    def _begin(self, block: dict[str, Any]) -> bytes:
        closing = self._close()
        self._block += 1
        self._open = block["type"]
        self._delta = _DELTA % self._block
        opening = _event("content_block_start", {"index": self._block, "content_block": block})
        return closing + opening + (b"" if self._block else _PING)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta + encode({"type": "signature_delta", "signature": SIGNATURE}) + _DELTA_END[1:]
        self._open = ""
        return signature + _event("content_block_stop", {"index": self._block})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | fields) + b"\n\n"


_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


async def messages(call: Call) -> Reply | None:
    body = await read_json(call, _messages_decoder)
    events = call.service.generate(body.to_request(call), call.principal)
    headers = _headers(call)
    if body.stream:
        await stream(call, events, MessageStream(call, body.model, body.hides_thinking), headers)
        return None
    answer = await collect(call, events)
    return json_reply(message_body(call, body.model, answer, body.hides_thinking), headers=headers)


async def count_tokens(call: Call) -> Reply:
    body = await read_json(call, _count_decoder)
    tokens = await call.service.count_tokens(body.to_request(call), call.principal)
    return json_reply({"input_tokens": tokens}, headers=_headers(call))


def _headers(call: Call) -> HeaderList:
    return [(b"request-id", call.id.encode()), (b"cf-ai-req-id", call.id.encode())]
