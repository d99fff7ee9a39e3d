"""A response's output items, made of the service's events, and the events that tell of them as they grow.

The same object serves a stream and a whole answer, so that both end in the same items.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from emberline.api.batches.job_format import LineCall
from emberline.api.common.answer import pieces_of
from emberline.api.http.body import refuse_unsupported
from emberline.api.http.call import Call, encode
from emberline.api.http.errors import codes
from emberline.api.http.sse import pads
from emberline.api.openai.chat import logprobs_body
from emberline.api.openai.responses.items import Item, ItemReference, Status, item_id, parse, seal, settle
from emberline.api.openai.responses.request import SEALED, ResponsesRequest, response_id
from emberline.api.openai.responses.tools import ArgumentText, Called, offered
from emberline.protocol.answer import Answer
from emberline.protocol.errors import BadInput, ContextExceeded, EmberlineError
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import GenerateRequest

Event = dict[str, Any]
Json = dict[str, Any]


class Composer:
    """Items are written one after the other; what begins the next ends the last."""

    def __init__(self, key: str, called: Mapping[str, Called], *, summarise: bool, sealed: bool) -> None:
        self.items: list[Json] = []  # the last may still grow
        self._key = key
        self._called = called
        self._summarise = summarise  # whether reasoning is told as its summary
        self._sealed = sealed  # whether reasoning is given in a form to be sent back
        self._open = ""  # the type of the item that grows; empty: none does
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._text = ArgumentText()

    def delta(self, event: TextDelta) -> list[Event]:
        if not event.text and not event.logprobs:
            return []
        events = [] if self._open == "message" else self._begin_message()
        self._pieces.append(event.text)
        logprobs = _logprobs(event.logprobs)
        self._logprobs += logprobs
        events.append(self._event("output_text.delta", content_index=0, delta=event.text, logprobs=logprobs))
        return events

    def reasoning(self, event: ReasoningDelta) -> list[Event]:
        if not event.text:
            return []
        events = [] if self._open == "reasoning" else self._begin_reasoning()
        self._pieces.append(event.text)
        if self._summarise:
            events.append(self._event("reasoning_summary_text.delta", summary_index=0, delta=event.text))
        else:
            events.append(self._event("reasoning_text.delta", content_index=0, delta=event.text))
        return events

    def call_started(self, event: ToolCallStarted) -> list[Event]:
        tool = self._called.get(event.name, Called(event.name, None, custom=False))
        item: Json = {"call_id": event.id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self._text = ArgumentText()
        if tool.custom:
            return self._begin("custom_tool_call", item | {"input": ""})
        return self._begin("function_call", item | {"arguments": ""})

    def call_delta(self, event: ToolCallDelta) -> list[Event]:
        if self._open == "custom_tool_call":
            kind, piece = "custom_tool_call_input.delta", self._text.push(event.arguments)
        else:
            kind, piece = "function_call_arguments.delta", event.arguments
        if not piece:
            return []
        self._pieces.append(piece)
        return [self._event(kind, delta=piece)]

    def done(self, event: ChoiceDone) -> list[Event]:
        """The end of the last item. An answer without any says so with an empty message."""
        cut = event.finish == "length"
        events: list[Event] = []
        if not cut and all(item["type"] == "reasoning" for item in self.items):
            events += self._begin_message()
        return events + self.end("incomplete" if cut else "completed")

    def end(self, status: Status = "completed") -> list[Event]:
        """Close the item that grows, if one does."""
        kind, text = self._open, "".join(self._pieces)
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind == "message":
            events = self._end_message(item, text)
        elif kind == "reasoning":
            events = self._end_reasoning(item, text)
        elif kind == "function_call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            item["input"] = text
            events = [self._event("custom_tool_call_input.done", input=text)]
        self._open, self._pieces, self._logprobs = "", [], []
        return [*events, self._item_event("output_item.done")]

    def _begin(self, kind: str, fields: Json) -> list[Event]:
        events = self.end()
        own_id = item_id(kind, self._key, f"o{len(self.items)}")
        self.items.append({"id": own_id, "type": kind, "status": "in_progress", **fields})
        self._open = kind
        return [*events, self._item_event("output_item.added")]

    def _begin_message(self) -> list[Event]:
        events = self._begin("message", {"role": "assistant", "content": []})
        return [*events, self._event("content_part.added", content_index=0, part=_output_text("", []))]

    def _end_message(self, item: Json, text: str) -> list[Event]:
        part = _output_text(text, self._logprobs)
        item["content"] = [part]
        return [
            self._event("output_text.done", content_index=0, text=text, logprobs=self._logprobs),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _begin_reasoning(self) -> list[Event]:
        fields: Json = {"summary": []} if self._summarise else {"summary": [], "content": []}
        events = self._begin("reasoning", fields | ({"encrypted_content": ""} if self._sealed else {}))
        return [*events, self._reasoning_part("added", "")]

    def _end_reasoning(self, item: Json, text: str) -> list[Event]:
        if self._summarise:
            item["summary"] = [{"type": "summary_text", "text": text}]
            done = self._event("reasoning_summary_text.done", summary_index=0, text=text)
        else:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            done = self._event("reasoning_text.done", content_index=0, text=text)
        if self._sealed:
            item["encrypted_content"] = seal(text)
        return [done, self._reasoning_part("done", text)]

    def _reasoning_part(self, what: str, text: str) -> Event:
        if self._summarise:
            part = {"type": "summary_text", "text": text}
            return self._event(f"reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._event(f"content_part.{what}", content_index=0, part={"type": "reasoning_text", "text": text})

    def _event(self, kind: str, **fields: Any) -> Event:
        place = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[place]["id"], "output_index": place, **fields}

    def _item_event(self, kind: str) -> Event:
        # A copy: the item may grow before whoever collects events reads this one.
        place = len(self.items) - 1
        return {"type": f"response.{kind}", "output_index": place, "item": dict(self.items[place])}


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def _logprobs(tokens: list[TextLogprob] | None) -> list[Json]:
    content: list[Json] = logprobs_body(tokens)["content"] if tokens else []
    return content


Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone


class Draft:
    """A response object that fills up. `whole` is final once `complete` was called."""

    def __init__(self, echo: Json, composer: Composer) -> None:
        self.composer = composer
        self.whole = echo
        self._cut = False

    def take(self, event: Piece) -> list[Event]:
        """What one event of the service adds, as the events that tell of it."""
        composer = self.composer
        if isinstance(event, TextDelta):
            return composer.delta(event)
        if isinstance(event, ReasoningDelta):
            return composer.reasoning(event)
        if isinstance(event, ToolCallDelta):
            return composer.call_delta(event)
        if isinstance(event, ToolCallStarted):
            return composer.call_started(event)
        return self.done(event)

    def done(self, event: ChoiceDone) -> list[Event]:
        self._cut = event.finish == "length"
        return self.composer.done(event)

    def complete(self, usage: Usage, at: int | None = None) -> None:
        """`at`: when it was, in Unix seconds; None: now."""
        self.whole |= {"output": self.composer.items, "usage": usage_body(usage)}
        if self._cut:
            self.whole |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.whole |= {"status": "completed", "completed_at": int(time.time()) if at is None else at}

    def fail(self, error: EmberlineError) -> None:
        self.composer.end("incomplete")
        problem = {"code": _failure(error), "message": error.message}
        self.whole |= {"completed_at": None, "incomplete_details": None, "usage": None}
        self.whole |= {"status": "failed", "output": self.composer.items, "error": problem}


class ResponseStream:
    """The encoder of one stream: every event has its name and its number. Nothing follows the last one."""

    def __init__(self, call: Call, draft: Draft, *, padded: bool) -> None:
        self._call = call
        self._draft = draft
        self._composer = draft.composer
        self._n_sent = 0
        self._pads: Iterator[bytes] | None = pads() if padded else None

    def started(self, usage: Usage) -> bytes:
        whole = self._draft.whole
        return self._told(
            [{"type": "response.created", "response": whole}, {"type": "response.in_progress", "response": whole}]
        )

    def delta(self, event: TextDelta) -> bytes:
        return self._told(self._composer.delta(event))

    def reasoning(self, event: ReasoningDelta) -> bytes:
        return self._told(self._composer.reasoning(event))

    def call_started(self, event: ToolCallStarted) -> bytes:
        return self._told(self._composer.call_started(event))

    def call_delta(self, event: ToolCallDelta) -> bytes:
        return self._told(self._composer.call_delta(event))

    def done(self, event: ChoiceDone) -> bytes:
        return self._told(self._draft.done(event))

    def completed(self, usage: Usage) -> bytes:
        whole = self._draft.whole
        return self._told([{"type": f"response.{whole['status']}", "response": whole}])

    def failed(self, error: EmberlineError) -> bytes:
        """Some clients read the one, some the other."""
        self._call.names.retell(error)
        self._draft.fail(error)
        code = codes(error).openai_code or _failure(error)
        said = {"code": code, "message": error.message, "param": error.param}
        told = {"type": "error", **said, "error": {"type": codes(error).openai_type, **said}}
        return self._told([told, {"type": "response.failed", "response": self._draft.whole}])

    def _told(self, events: list[Event]) -> bytes:
        told = b""
        for event in events:
            kind: str = event["type"]
            event["sequence_number"] = self._n_sent
            self._n_sent += 1
            if self._pads is not None and kind.endswith(".delta"):
                event["obfuscation"] = next(self._pads).decode()
            told += b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))
        return told


def usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _failure(error: EmberlineError) -> str:
    """The few words that a failed response knows for what went wrong."""
    if isinstance(error, ContextExceeded):
        return "context_length_exceeded"
    if isinstance(error, BadInput):
        return "invalid_prompt"
    return "rate_limit_exceeded" if error.kind == "overloaded" else "server_error"


def draft_of(body: ResponsesRequest, own_id: str, created: int) -> Draft:
    """A response of which nothing has been said yet."""
    called = offered(body.tools, body.tool_choice).called
    composer = Composer(own_id.removeprefix("resp_"), called, summarise=body.summarises, sealed=body.includes(SEALED))
    return Draft(body.echo(own_id, created), composer)


def fill(draft: Draft, answer: Answer, at: int) -> list[Event]:
    """The draft is the whole response then; the events between its beginning and its last."""
    events = [event for piece in pieces_of(answer) for event in draft.take(piece)]
    draft.complete(answer.usage, at)
    return events


class LineResponse(ResponsesRequest, kw_only=True):
    """The body of a batch's line. Lines know nothing of each other, nor of what is stored: each brings all it needs."""

    def ask(self, call: LineCall) -> GenerateRequest:
        refuse_unsupported(self)
        if self.background:
            raise BadInput("`background` has no meaning in a batch: leave it out", param="background")
        if self.previous_response_id is not None:
            raise BadInput("a line of a batch continues no response: send its items", param="previous_response_id")
        items: list[Item] = []
        for item in parse(self.input):
            if isinstance(item, ItemReference):
                raise BadInput("a line of a batch refers to no stored item: send the item itself", param="input")
            items.append(item)
        items = settle(items, call.id)
        where = [f"input[{i}]" for i in range(len(items))]
        request = self.to_request(call, items, where, offered(self.tools, self.tool_choice))
        if request.session == response_id(call):  # the name of a conversation that nobody will continue
            request = msgspec.structs.replace(request, session=None)
        return request

    def show(self, call: LineCall, created: int, answer: Answer) -> Json:
        draft = draft_of(self, response_id(call), created)
        fill(draft, answer, created)
        return draft.whole | {"store": False}
