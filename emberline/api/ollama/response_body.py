"""Ollama's replies: one JSON object, or a line of JSON for each piece; the last has counts, and durations in
nanoseconds."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec

from emberline.api.common.response_body import MIN_LOGPROB, json_arguments
from emberline.api.http.errors import Dialect, error_body
from emberline.api.http.exchange import Events, HttpExchange, encode
from emberline.api.http.sse import EventEncoder
from emberline.api.ollama.context import encode_context
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import ToolCall

NDJSON = b"application/x-ndjson"

Json = dict[str, Any]


class Stopwatch:
    """Times of a request: its begin, the moment when a loaded model took it, and its first token."""

    def __init__(self, call: HttpExchange, has_context: bool = False) -> None:
        """`has_context`: the reply has the field `context`, if an engine of ours computes it."""
        self._call = call
        self._has_context = has_context
        self._began_ns = time.monotonic_ns()
        self._first_ns = 0

    def started(self) -> None:
        self._first_ns = time.monotonic_ns()

    async def watch(self, events: Events) -> AsyncGenerator[TextEvent, None]:
        async with aclosing(events):
            async for event in events:
                if type(event) is Started:
                    self.started()
                yield event

    @property
    def total_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    @property
    def load_ns(self) -> int:
        """Nanoseconds until a loaded model took the request: it is prepared, and its model loaded if need be."""
        return max(self._call.admitted_ns - self._began_ns, 1)

    @property
    def context(self) -> Json:
        """The field `context`; empty for a reply without."""
        card, ids = self._call.card, self._call.sequence_ids
        if not self._has_context or card is None or ids is None:
            return {}
        return {"context": encode_context(card, ids.prompt + ids.reply)}

    def counts(self, usage: Usage) -> Json:
        total_ns, load_ns = self.total_ns, self.load_ns
        prompt_ns = max(self._first_ns - self._began_ns - load_ns, 1)
        return {
            "total_duration": total_ns,
            "load_duration": load_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": max(total_ns - load_ns - prompt_ns, 1),
        }


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def reply_body(model: str, is_chat: bool, answer: Answer, watch: Stopwatch) -> Json:
    choice = answer.choices[0]
    calls = [body for call in choice.tool_calls if (body := _call_body(call)) is not None]
    reply = _reply(is_chat, choice.text, choice.reasoning, calls)
    if choice.logprobs:
        reply["logprobs"] = _logprobs(choice.logprobs)
    end = {"done": True, "done_reason": _done_reason(choice.finish)} | watch.context
    return {"model": model, "created_at": now()} | reply | end | watch.counts(answer.usage)


def empty_body(model: str, is_chat: bool, done_reason: str) -> Json:
    """Return the body for a request that only loads or unloads a model."""
    return {"model": model, "created_at": now()} | _reply(is_chat, "") | {"done": True, "done_reason": done_reason}


def _reply(is_chat: bool, text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
    """Generate has text and thinking at the top level, chat has them in a message."""
    rest: Json = {"thinking": thinking} if thinking else {}
    if not is_chat:
        return {"response": text} | rest
    if calls:
        rest["tool_calls"] = calls
    return {"message": {"role": "assistant", "content": text} | rest}


def _call_body(call: ToolCall) -> Json | None:
    """None where the token limit cut the arguments off."""
    arguments = json_arguments(call)
    return None if arguments is None else {"id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _done_reason(finish: str) -> str:
    return "length" if finish == "length" else "stop"


def _logprobs(tokens: list[TextLogprob]) -> list[Json]:
    return [_token(token) | {"top_logprobs": [_token(other) for other in token.top]} for token in tokens]


def _token(token: TextLogprob) -> Json:
    return {"token": token.token, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": token.bytes}


class ReplyStream(EventEncoder):
    """A line for each piece. A tool call is one piece: its arguments are an object and cannot come in parts."""

    content_type = NDJSON

    def __init__(self, request_id: str, dialect: Dialect, model: str, is_chat: bool, watch: Stopwatch) -> None:
        super().__init__(request_id, dialect)
        self._head = encode({"model": model})[:-1] + b',"created_at":"'
        self._is_chat = is_chat
        self._watch = watch
        self._before_text = b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        self._after_text = b'},"done":false}\n' if is_chat else b',"done":false}\n'
        self._call: ToolCallStarted | None = None  # whose arguments are arriving
        self._arguments: list[str] = []
        self._done_reason = "stop"

    def started(self, usage: Usage) -> bytes:
        self._watch.started()
        return b""

    def text_delta(self, event: TextDelta) -> bytes:
        if event.logprobs is None:
            return self._head + now().encode() + self._before_text + encode(event.text) + self._after_text
        return self._line(_reply(self._is_chat, event.text) | {"logprobs": _logprobs(event.logprobs)})

    def reasoning_delta(self, event: ReasoningDelta) -> bytes:
        return self._line(_reply(self._is_chat, "", event.text))

    def tool_call_started(self, event: ToolCallStarted) -> bytes:
        finished = self._finished_call()
        self._call, self._arguments = event, []
        return finished

    def tool_call_delta(self, event: ToolCallDelta) -> bytes:
        self._arguments.append(event.arguments)
        return b""

    def choice_done(self, event: ChoiceDone) -> bytes:
        self._done_reason = _done_reason(event.finish)
        return self._finished_call()

    def completed(self, usage: Usage) -> bytes:
        end = {"done": True, "done_reason": self._done_reason} | self._watch.context | self._watch.counts(usage)
        return self._line(_reply(self._is_chat, "") | end)

    def failed(self, error: EmberlineError) -> bytes:
        return encode(error_body(error, self._dialect, self._request_id)) + b"\n"

    def _finished_call(self) -> bytes:
        call, self._call = self._call, None
        if call is None:
            return b""
        body = _call_body(ToolCall(call.id, call.name, "".join(self._arguments)))
        return b"" if body is None else self._line(_reply(self._is_chat, "", calls=[body]))

    def _line(self, fields: Json) -> bytes:
        rest = encode({"done": False} | fields)
        return self._head + now().encode() + b'",' + rest[1:] + b"\n"


def embed_body(model: str, vectors: list[msgspec.Raw], usage: Usage, watch: Stopwatch) -> Json:
    times = {"total_duration": watch.total_ns, "load_duration": watch.load_ns}
    return {"model": model, "embeddings": vectors} | times | {"prompt_eval_count": usage.prompt_tokens}
