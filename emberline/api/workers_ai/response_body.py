"""The results of the Workers AI API: the envelope, a flat result, and the stream of its chunks."""

from typing import Any

import msgspec

from emberline.api.common.chat_fields import is_json
from emberline.api.common.response_body import json_arguments, usage_body
from emberline.api.http.errors import Dialect, JsonModeFailed
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply
from emberline.api.http.sse import EventEncoder, data_event, random_padding
from emberline.api.workers_ai.run_request import RunRequest
from emberline.protocol.complete_response import Answer, AnswerChoice
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted, Usage

Json = dict[str, Any]


def envelope(result: Any, **fields: Any) -> Json:
    return {"result": result, "success": True, "errors": [], "messages": []} | fields


def enveloped(call: HttpExchange, result: Any) -> Any:
    """The result in the form that the caller expects: the binding of a Worker has no envelope."""
    return result if call.dialect is Dialect.BINDING else envelope(result)


def result_reply(call: HttpExchange, result: Any) -> Reply:
    return json_reply(enveloped(call, result), headers=call.id_headers)


def result_body(request_id: str, body: RunRequest, created: int, answer: Answer) -> Json:
    choice = answer.choices[0]
    calls = [(call, json_arguments(call)) for call in choice.tool_calls]
    complete = [
        {"name": call.name, "arguments": arguments, "id": call.id} for call, arguments in calls if arguments is not None
    ]
    result: Json = {"response": _response(choice, is_json(body.output().format)), "tool_calls": complete}
    if choice.reasoning and not body.hides_reasoning:
        result["reasoning_content"] = choice.reasoning
    return result | _finish_reason(choice) | {"usage": usage_body(answer.usage)}


def _finish_reason(choice: AnswerChoice | ChoiceDone) -> dict[str, str]:
    """Sent unless it is `stop`: Cloudflare never sends it, and clients then assume `stop`."""
    return {} if choice.finish == "stop" else {"finish_reason": choice.finish}


def _response(choice: AnswerChoice, as_json: bool) -> msgspec.Raw | str | None:
    text = choice.text
    if not text and choice.tool_calls:
        return None
    if as_json and _is_json(text):
        return msgspec.Raw(text)
    if as_json and choice.finish == "length":
        raise _truncated_json()
    return text


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _truncated_json() -> JsonModeFailed:
    return JsonModeFailed(
        "JSON Mode couldn't be met: the token limit came before the end of the JSON; raise `max_tokens`",
        param="max_tokens",
    )


class RunStream(EventEncoder):
    """Chunks of `response`, each padded; then the usage and [DONE]."""

    def __init__(self, request_id: str, dialect: Dialect, body: RunRequest, created: int) -> None:
        super().__init__(request_id, dialect)
        self._is_json = is_json(body.output().format)
        self._hides_reasoning = body.hides_reasoning
        self._paddings = random_padding()
        self._texts: list[str] = []  # in JSON mode, to check at the end whether the text is JSON
        self._truncated = False
        self._end: Json = {"response": ""}

    def text_delta(self, event: TextDelta) -> bytes:
        if self._is_json:
            self._texts.append(event.text)
        return b'data: {"response":' + encode(event.text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        if self._hides_reasoning:
            return b""
        return self._padded({"response": "", "reasoning_content": event.text})

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        function = {"name": event.name, "arguments": ""}
        call = {"id": event.id, "type": "function", "index": event.call, "function": function}
        return self._padded({"tool_calls": [call]})

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        return self._padded({"tool_calls": [{"index": event.call, "function": {"arguments": event.arguments}}]})

    def choice_done(self, event: ChoiceDone) -> bytes:
        self._truncated = self._is_json and event.finish == "length" and not _is_json("".join(self._texts))
        self._end |= _finish_reason(event)
        return b""

    def completed(self, usage: Usage) -> bytes:
        if self._truncated:
            return self.failed(_truncated_json())
        return data_event(self._end | {"usage": usage_body(usage)}) + b"data: [DONE]\n\n"

    def _padded(self, fields: Json) -> bytes:
        return data_event(fields | {"p": next(self._paddings).decode()})
