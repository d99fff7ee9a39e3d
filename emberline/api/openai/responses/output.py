"""A response while it is generated: its object, its output items, and the typed events of its stream.

One builder serves streams, whole responses and background responses, so that all end in the same object.
"""

import time
from collections.abc import Iterator
from typing import Any

from emberline.api.common.response_body import cost_field, drafts_field, images_field, logprobs_body, tiers_field
from emberline.api.http.errors import Dialect, FieldNames, codes
from emberline.api.http.sse import EventEncoder, named_event, random_padding
from emberline.api.openai.responses.items import Status, item_id, seal
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.api.openai.responses.tools import ArgumentTextDecoder, ClientTool, ParsedTools
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput, ContextExceeded, EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    ChoiceEvent,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import SamplingDefaults
from emberline.service.event_collector import events_of

Json = dict[str, Any]
StreamEvent = dict[str, Any]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseBuilder:
    """Builds the response object from events. Items are written one after another: a new one closes the last.

    `response` is final once `complete` or `fail` was called.
    """

    def __init__(
        self, body: ResponsesRequest, tools: ParsedTools, own_id: str, created: int, defaults: SamplingDefaults
    ) -> None:
        """`defaults` are the model's sampling parameters, for those that the request leaves out."""
        self.response: Json = body.initial_body(own_id, created, defaults)
        self.items: list[Json] = []  # the last one may be open
        self._key = own_id.removeprefix("resp_")
        self._client_tools = tools.client_tools
        self._as_summary = body.wants_summary
        self._encrypted = body.wants_encrypted_reasoning
        self._open = ""  # the type of the open item; empty if there is none
        self._pieces: list[str] = []  # of its text
        self._logprobs: list[Json] = []
        self._argument_text = ArgumentTextDecoder()
        self._incomplete = ""  # why the answer is not complete; empty: it is

    def add(self, event: ChoiceEvent) -> list[StreamEvent]:
        """Returns the stream events for one event of the service. This API has no place for a provider's marks."""
        if type(event) is TextDelta:
            return self._text(event)
        if type(event) is ReasoningDelta:
            return self._reasoning(event)
        if type(event) is ToolCallDelta:
            return self._arguments(event)
        if type(event) is ToolCallStarted:
            return self._call(event)
        return self._finish(event) if type(event) is ChoiceDone else []

    def complete(self, usage: Usage, at: int | None = None) -> None:
        """`at` is the Unix time of completion; None: now."""
        self.response |= {"output": self.items, "usage": usage_body(usage)}
        if self._incomplete:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": self._incomplete}}
        else:
            self.response |= {"status": "completed", "completed_at": int(time.time()) if at is None else at}

    def fail(self, error: EmberlineError) -> None:
        self.close("incomplete")
        problem = {"code": _failure_code(error), "message": error.message}
        self.response |= {"completed_at": None, "incomplete_details": None, "usage": None}
        self.response |= {"status": "failed", "output": self.items, "error": problem}

    def close(self, status: Status = "completed") -> list[StreamEvent]:
        """Close the open item, if there is one."""
        kind, text = self._open, "".join(self._pieces)
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind == "message":
            events = self._close_message(item, text)
        elif kind == "reasoning":
            events = self._close_reasoning(item, text)
        elif kind == "function_call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            item["input"] = text
            events = [self._event("custom_tool_call_input.done", input=text)]
        self._open, self._pieces, self._logprobs = "", [], []
        return [*events, self._item_event("output_item.done")]

    def _text(self, event: TextDelta) -> list[StreamEvent]:
        if not event.text and not event.logprobs:
            return []
        events = [] if self._open == "message" else self._open_message()
        self._pieces.append(event.text)
        logprobs = _logprobs(event.logprobs)
        self._logprobs += logprobs
        events.append(self._event("output_text.delta", content_index=0, delta=event.text, logprobs=logprobs))
        return events

    def _reasoning(self, event: ReasoningDelta) -> list[StreamEvent]:
        if not event.text:
            return []
        events = [] if self._open == "reasoning" else self._open_reasoning()
        self._pieces.append(event.text)
        return [*events, self._reasoning_event("text.delta", delta=event.text)]

    def _call(self, event: ToolCallStarted) -> list[StreamEvent]:
        tool = self._client_tools.get(event.name, ClientTool(event.name, None, custom=False))
        item: Json = {"call_id": event.id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self._argument_text = ArgumentTextDecoder()
        if tool.custom:
            return self._open_item("custom_tool_call", item | {"input": ""})
        return self._open_item("function_call", item | {"arguments": ""})

    def _arguments(self, event: ToolCallDelta) -> list[StreamEvent]:
        if self._open == "custom_tool_call":
            kind, piece = "custom_tool_call_input.delta", self._argument_text.push(event.arguments)
        else:
            kind, piece = "function_call_arguments.delta", event.arguments
        if not piece:
            return []
        self._pieces.append(piece)
        return [self._event(kind, delta=piece)]

    def _finish(self, event: ChoiceDone) -> list[StreamEvent]:
        """Close the last item. An answer with neither text nor calls gets an empty message, whose status tells whether
        the answer was cut off."""
        self._incomplete = _INCOMPLETE.get(event.finish, "")
        empty = not self.items if self._incomplete else all(item["type"] == "reasoning" for item in self.items)
        events = self._open_message() if empty else []
        return events + self.close("incomplete" if self._incomplete else "completed")

    def _open_item(self, kind: str, fields: Json) -> list[StreamEvent]:
        events = self.close()
        own_id = item_id(kind, self._key, f"o{len(self.items)}")
        self.items.append({"id": own_id, "type": kind, "status": "in_progress", **fields})
        self._open = kind
        return [*events, self._item_event("output_item.added")]

    def _open_message(self) -> list[StreamEvent]:
        events = self._open_item("message", {"role": "assistant", "content": []})
        return [*events, self._event("content_part.added", content_index=0, part=_output_text("", []))]

    def _close_message(self, item: Json, text: str) -> list[StreamEvent]:
        part = _output_text(text, self._logprobs)
        item["content"] = [part]
        return [
            self._event("output_text.done", content_index=0, text=text, logprobs=self._logprobs),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _open_reasoning(self) -> list[StreamEvent]:
        fields: Json = {"summary": []} if self._as_summary else {"summary": [], "content": []}
        events = self._open_item("reasoning", fields | ({"encrypted_content": ""} if self._encrypted else {}))
        return [*events, self._reasoning_event("part.added", part=self._reasoning_part(""))]

    def _close_reasoning(self, item: Json, text: str) -> list[StreamEvent]:
        part = self._reasoning_part(text)
        item["summary" if self._as_summary else "content"] = [part]
        if self._encrypted:
            item["encrypted_content"] = seal(text)
        return [self._reasoning_event("text.done", text=text), self._reasoning_event("part.done", part=part)]

    def _reasoning_part(self, text: str) -> Json:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}

    def _reasoning_event(self, kind: str, **fields: Any) -> StreamEvent:
        """Reasoning is sent either as the item's summary or as its content."""
        if self._as_summary:
            return self._event(f"reasoning_summary_{kind}", summary_index=0, **fields)
        prefix = "content_" if kind.startswith("part") else "reasoning_"
        return self._event(prefix + kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        index = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[index]["id"], "output_index": index, **fields}

    def _item_event(self, kind: str) -> StreamEvent:
        # A copy: the item may grow before the event is encoded.
        index = len(self.items) - 1
        return {"type": f"response.{kind}", "output_index": index, "item": dict(self.items[index])}


def response_body(body: ResponsesRequest, own_id: str, created: int, answer: Answer) -> Json:
    """The response object of a complete answer, whose model's defaults are not known any more."""
    builder = ResponseBuilder(body, body.parse_tools(), own_id, created, SamplingDefaults())
    for event in events_of(answer):
        builder.add(event)
    builder.complete(answer.usage, created)
    return builder.response


class ResponseStream(EventEncoder):
    """Every event has a name and a sequence number. Nothing follows the last one."""

    def __init__(
        self, request_id: str, dialect: Dialect, builder: ResponseBuilder, names: FieldNames, *, padded: bool
    ) -> None:
        super().__init__(request_id, dialect)
        self._builder = builder
        self._names = names
        self._n_sent = 0
        self._paddings: Iterator[bytes] | None = random_padding() if padded else None

    def started(self, usage: Usage) -> bytes:
        response = self._builder.response
        kinds = ("response.created", "response.in_progress")
        return self._encode([{"type": kind, "response": response} for kind in kinds])

    def _choice_event(self, event: ChoiceEvent) -> bytes:
        return self._encode(self._builder.add(event))

    text_delta = reasoning_delta = tool_call_started = tool_call_delta = choice_done = _choice_event

    def completed(self, usage: Usage) -> bytes:
        response = self._builder.response
        return self._encode([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: EmberlineError) -> bytes:
        """Two events: some clients read `error`, some `response.failed`."""
        self._names.rename(error)
        self._builder.fail(error)
        code = codes(error).openai_code or _failure_code(error)
        fields = {"code": code, "message": error.message, "param": error.param}
        event = {"type": "error", **fields, "error": {"type": codes(error).openai_type, **fields}}
        return self._encode([event, {"type": "response.failed", "response": self._builder.response}])

    def _encode(self, events: list[StreamEvent]) -> bytes:
        encoded = b""
        for event in events:
            kind: str = event["type"]
            event["sequence_number"] = self._n_sent
            self._n_sent += 1
            if self._paddings is not None and kind.endswith(".delta"):
                event["obfuscation"] = next(self._paddings).decode()
            encoded += named_event(kind, event)
        return encoded


def usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            **tiers_field(usage, "cached_tokens"),
            "cache_write_tokens": 0,
            **images_field(usage),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
        **cost_field(usage),
        **drafts_field(usage),
    }


def _failure_code(error: EmberlineError) -> str:
    """One of the few codes that a failed response may have."""
    if isinstance(error, ContextExceeded):
        return "context_length_exceeded"
    if isinstance(error, BadInput):
        return "invalid_prompt"
    is_limit = error.kind in ("overloaded", "rate_limited", "budget_exceeded", "budget_reserved")
    return "rate_limit_exceeded" if is_limit else "server_error"


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def _logprobs(tokens: list[TextLogprob] | None) -> list[Json]:
    content: list[Json] = logprobs_body(tokens)["content"] if tokens else []
    return content
