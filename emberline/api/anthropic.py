"""Anthropic's door: messages, streamed and not, and token counting."""

from typing import Any

import msgspec

from emberline.api.anthropic_messages import CountRequest, MessagesRequest
from emberline.api.body import read_json
from emberline.api.call import Call
from emberline.api.collect import Answer, Choice, collect
from emberline.api.errors import error_body
from emberline.api.reply import HeaderList, Reply, encode, json_reply
from emberline.api.sse import stream
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import ChoiceDone, TextDelta, Usage

_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_DELTA_END = b"}}\n\n"
_BLOCK_START = (
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
    b'event: ping\ndata: {"type":"ping"}\n\n'
)
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
_NOT_ENDED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


async def messages(call: Call) -> Reply | None:
    body = await read_json(call, _messages_decoder)
    events = call.service.generate(body.to_request(call), call.principal)
    headers = _headers(call)
    if body.stream:
        await stream(call, events, MessageStream(call, body.model), headers)
        return None
    answer = await collect(call, events)
    return json_reply(_message(call, body.model, answer), headers=headers)


async def count_tokens(call: Call) -> Reply:
    body = await read_json(call, _count_decoder)
    tokens = await call.service.count_tokens(body.to_request(call), call.principal)
    return json_reply({"input_tokens": tokens}, headers=_headers(call))


def _headers(call: Call) -> HeaderList:
    return [(b"request-id", call.id.encode()), (b"cf-ai-req-id", call.id.encode())]


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts apart what came from the cache: the prompt is the sum of all input fields."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop_reason(choice: Choice | ChoiceDone) -> str:
    if choice.finish == "length":
        return "max_tokens"
    return "end_turn" if choice.stop_sequence is None else "stop_sequence"


def _head(call: Call, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model}


def _message(call: Call, model: str, answer: Answer) -> dict[str, Any]:
    choice = answer.choices[0]
    return {
        **_head(call, model),
        "content": [{"type": "text", "text": choice.text}],
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop_sequence,
        "usage": _usage(answer.usage),
    }


class MessageStream:
    """A message as events: its start, one text block, its end with the final usage."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._model = model
        self._end: dict[str, Any] = {}

    def started(self, usage: Usage) -> bytes:
        message = _head(self._call, self._model) | {"content": [], "usage": _usage(usage)} | _NOT_ENDED
        return _event("message_start", {"message": message}) + _BLOCK_START

    def delta(self, event: TextDelta) -> bytes:
        return _DELTA + encode(event.text) + _DELTA_END

    def done(self, event: ChoiceDone) -> bytes:
        self._end = {"stop_reason": _stop_reason(event), "stop_sequence": event.stop_sequence}
        return _BLOCK_STOP

    def completed(self, usage: Usage) -> bytes:
        return _event("message_delta", {"delta": self._end, "usage": _usage(usage)}) + _MESSAGE_STOP

    def failed(self, error: EmberlineError) -> bytes:
        body = error_body(error, self._call.dialect, self._call.id)
        return b"event: error\ndata: " + encode(body) + b"\n\n"


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | fields) + b"\n\n"
