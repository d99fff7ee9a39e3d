"""What Cloudflare's older clients read: a flat result, or its pieces."""

from typing import Any, NamedTuple

import msgspec

from emberline.api.common.answer import arguments_of, usage_body
from emberline.api.http.call import Call, encode
from emberline.api.http.errors import JsonModeFailed, error_body
from emberline.api.http.sse import pads
from emberline.protocol.answer import Answer, AnswerChoice
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted, Usage


class Shape(NamedTuple):
    """What the caller asked for that shows in the answer's form."""

    json: bool = False  # `response` is what the text says, not the text
    reasoning: bool = True


def envelope(result: Any, **beside: Any) -> dict[str, Any]:
    return {"result": result, "success": True, "errors": [], "messages": []} | beside


def result_body(answer: Answer, shape: Shape) -> dict[str, Any]:
    choice = answer.choices[0]
    calls = [(call, arguments_of(call)) for call in choice.tool_calls]
    whole = [
        {"name": call.name, "arguments": arguments, "id": call.id} for call, arguments in calls if arguments is not None
    ]
    result: dict[str, Any] = {"response": _response(choice, shape.json), "tool_calls": whole}
    if choice.reasoning and shape.reasoning:
        result["reasoning_content"] = choice.reasoning
    return result | _finish(choice) | {"usage": usage_body(answer.usage)}


def _finish(choice: AnswerChoice | ChoiceDone) -> dict[str, str]:
    """Why it ended, where that is not the plain way: Cloudflare says nothing, and its clients then guess `stop`."""
    return {} if choice.finish == "stop" else {"finish_reason": choice.finish}


def _response(choice: AnswerChoice, as_json: bool) -> msgspec.Raw | str | None:
    text = choice.text
    if not text and choice.tool_calls:
        return None
    if not as_json:
        return text
    if _parses(text):
        return msgspec.Raw(text)
    if choice.finish == "length":
        raise _cut()
    return text


def _parses(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _cut() -> JsonModeFailed:
    return JsonModeFailed(
        "JSON Mode couldn't be met: the token limit came before the end of the JSON; raise `max_tokens`",
        param="max_tokens",
    )


class RunStream:
    """`response` pieces, each padded; the usage; [DONE]."""

    def __init__(self, call: Call, shape: Shape) -> None:
        self._call = call
        self._shape = shape
        self._pads = pads()
        self._texts: list[str] = []  # in JSON mode: what was said, to know at the end whether it is JSON
        self._cut = False
        self._end: dict[str, Any] = {"response": ""}

    def started(self, usage: Usage) -> bytes:
        return b""

    def delta(self, event: TextDelta) -> bytes:
        if self._shape.json:
            self._texts.append(event.text)
        return b'data: {"response":' + encode(event.text) + b',"p":"' + next(self._pads) + b'"}\n\n'

    def reasoning(self, event: ReasoningDelta) -> bytes:
        return self._piece({"response": "", "reasoning_content": event.text}) if self._shape.reasoning else b""

    def call_started(self, event: ToolCallStarted) -> bytes:
        function = {"name": event.name, "arguments": ""}
        return self._call_piece({"id": event.id, "type": "function", "index": event.call, "function": function})

    def call_delta(self, event: ToolCallDelta) -> bytes:
        return self._call_piece({"index": event.call, "function": {"arguments": event.arguments}})

    def done(self, event: ChoiceDone) -> bytes:
        self._cut = self._shape.json and event.finish == "length" and not _parses("".join(self._texts))
        self._end |= _finish(event)
        return b""

    def completed(self, usage: Usage) -> bytes:
        if self._cut:
            return self.failed(_cut())
        return b"data: " + encode(self._end | {"usage": usage_body(usage)}) + b"\n\ndata: [DONE]\n\n"

    def failed(self, error: EmberlineError) -> bytes:
        return b"data: " + encode(error_body(error, self._call.dialect, self._call.id)) + b"\n\n"

    def _call_piece(self, called: dict[str, Any]) -> bytes:
        return self._piece({"tool_calls": [called]})

    def _piece(self, fields: dict[str, Any]) -> bytes:
        return b"data: " + encode(fields | {"p": next(self._pads).decode()}) + b"\n\n"
