"""The Anthropic Messages API: messages, streamed or whole, and token counting."""

from collections.abc import Awaitable
from typing import Any

import msgspec

from emberline.api.anthropic.message_request import SIGNATURE, CountRequest, MessagesRequest
from emberline.api.anthropic.upstream_passthrough import forward_message
from emberline.api.common.form import Form
from emberline.api.common.response_body import cost_field, drafts_field, images_field, json_arguments, tiers_field
from emberline.api.http.body import read_wire
from emberline.api.http.errors import Dialect, HeaderList, error_body
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply
from emberline.api.http.sse import EventEncoder, named_event
from emberline.api.http.streaming import Response
from emberline.api.http.wire import Wire
from emberline.protocol.complete_response import Answer, AnswerChoice, AnswerPart, ReasoningPart, TextPart
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)

Json = dict[str, Any]


def _relay(call: HttpExchange, wire: Wire) -> Awaitable[Response] | None:
    """Relay the request if Anthropic's API serves the model and no gateway has to read what is sent."""
    if call.card is None or call.gateway is not None or not call.service.models.is_upstream(call.card):
        return None
    target = call.target = call.service.models.target(call.card, call.principal)
    return forward_message(call, wire, _headers) if target.kind == "anthropic" else None


def _headers(call: HttpExchange) -> HeaderList:
    return [(b"request-id", call.id.encode()), *call.id_headers]


def _usage_body(usage: Usage) -> Json:
    """Anthropic counts cached tokens separately: the prompt is the sum of all input fields."""
    body: Json = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        **tiers_field(usage, "cache_read_input_tokens"),
        "output_tokens": usage.completion_tokens,
        **cost_field(usage),
        **drafts_field(usage),
    }
    if usage.image_tokens:
        body["input_tokens_details"] = images_field(usage)
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def _stop_reason(choice: AnswerChoice | ChoiceDone) -> str:
    if choice.finish == "length":
        return "max_tokens"
    if choice.finish == "tool_calls":
        return "tool_use"
    if choice.finish == "content_filter":
        return "refusal"
    return "end_turn" if choice.stop_sequence is None else "stop_sequence"


def _head(request_id: str, model: str) -> Json:
    return {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}


def message_body(request_id: str, body: MessagesRequest, created: int, answer: Answer) -> Json:
    choice = answer.choices[0]
    blocks = [_block(part, body.hides_thinking, choice.finish == "length") for part in choice.parts]
    return {
        **_head(request_id, body.model),
        "content": [block for block in blocks if block] or [{"type": "text", "text": ""}],
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop_sequence,
        "usage": _usage_body(answer.usage),
    }


def _block(part: AnswerPart, hides_thinking: bool, cut: bool) -> Json | None:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ReasoningPart):
        block = part.block or {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        return block | {"thinking": ""} if hides_thinking and block["type"] == "thinking" else block
    arguments = json_arguments(part)
    if arguments is None and not cut:
        return None
    # Clients read a call in a message that stopped at `max_tokens` as incomplete.
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {} if arguments is None else arguments}


_NOT_STOPPED: Json = {"stop_reason": None, "stop_sequence": None}
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_TEXT = b'{"type":"text_delta","text":'
_THINKING = b'{"type":"thinking_delta","thinking":'
_INPUT = b'{"type":"input_json_delta","partial_json":'
_DELTA_END = b"}}\n\n"


class MessageStream(EventEncoder):
    """The message's start, its content blocks one after another, its end with the final usage."""

    def __init__(self, request_id: str, dialect: Dialect, body: MessagesRequest, created: int) -> None:
        super().__init__(request_id, dialect)
        self._model = body.model
        self._hides_thinking = body.hides_thinking
        self._stop: Json = {}
        self._index = -1  # of the last block
        self._open = ""  # the type of the open block; empty if there is none
        self._delta = b""  # how a delta of it begins
        self._n_signed = 0  # blocks of thinking whose signatures have come

    def started(self, usage: Usage) -> bytes:
        fields = {"content": [], "usage": _usage_body(usage)}
        return _event("message_start", {"message": _head(self._request_id, self._model) | fields | _NOT_STOPPED})

    def text_delta(self, event: TextDelta) -> bytes:
        if not event.text:
            return b""
        opening = b"" if self._open == "text" else self._open_block({"type": "text", "text": ""})
        return opening + self._delta + _TEXT + encode(event.text) + _DELTA_END

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        return self._thinking(event.text) if event.text else b""

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        return self._open_block(block) + self._delta + _INPUT + b'""' + _DELTA_END

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        return self._delta + _INPUT + encode(event.arguments) + _DELTA_END

    def opaque(self, event: Opaque) -> bytes:
        """Sign the thinking that was sent, or send it."""
        blocks = event.thinking_blocks[self._n_signed :]
        self._n_signed += len(blocks)
        sent = b""
        for block in blocks:
            if block["type"] == "redacted_thinking":
                sent += self._open_block(block) + self._close_block()
                continue
            if self._open != "thinking":
                sent += self._thinking(str(block.get("thinking", "")))
            sent += self._close_block(str(block.get("signature", "")))
        return sent

    def choice_done(self, event: ChoiceDone) -> bytes:
        self._stop = {"stop_reason": _stop_reason(event), "stop_sequence": event.stop_sequence}
        opening = self._open_block({"type": "text", "text": ""}) if self._index < 0 else b""
        return opening + self._close_block()

    def completed(self, usage: Usage) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": _usage_body(usage)}) + _MESSAGE_STOP

    def failed(self, error: EmberlineError) -> bytes:
        return named_event("error", error_body(error, self._dialect, self._request_id))

    def _thinking(self, text: str) -> bytes:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        opening = b"" if self._open == "thinking" else self._open_block(block)
        return opening if self._hides_thinking else opening + self._delta + _THINKING + encode(text) + _DELTA_END

    def _open_block(self, block: Json) -> bytes:
        closing = self._close_block()
        self._index += 1
        self._open = block["type"]
        self._delta = _DELTA % self._index
        opening = _event("content_block_start", {"index": self._index, "content_block": block})
        return closing + opening + (b"" if self._index else _PING)

    def _close_block(self, signature: str = SIGNATURE) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta + encode({"type": "signature_delta", "signature": signature}) + _DELTA_END[1:]
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: Json) -> bytes:
    return named_event(kind, {"type": kind} | fields)


MESSAGES = Form(
    decoder=msgspec.json.Decoder(MessagesRequest),
    to_task=MessagesRequest.to_request,
    to_body=message_body,
    to_stream=MessageStream,
    relay=_relay,
    session_fields=("metadata",),
    headers=_headers,
)
_count_decoder = msgspec.json.Decoder(CountRequest)


async def count_tokens(call: HttpExchange) -> Reply:
    body = (await read_wire(call, MESSAGES.session_fields)).decode(_count_decoder)
    request, call.field_names = body.to_request(call.id, call.session)
    n_tokens = await call.count_tokens(request)
    return json_reply({"input_tokens": n_tokens}, headers=_headers(call))
