"""One response while it is made: its object, and the typed events that a stream tells it by."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.api.batches.job_format import LineCall
from emberline.api.common.answer import pieces_of
from emberline.api.common.unsupported import refuse_unsupported
from emberline.api.http.call import Call
from emberline.api.http.errors import codes
from emberline.api.http.reply import encode
from emberline.api.http.sse import pads
from emberline.api.openai.responses.items import Item, ItemReference, parse, settle
from emberline.api.openai.responses.output import Composer, Event
from emberline.api.openai.responses.request import SEALED, ResponsesRequest, response_id
from emberline.api.openai.responses.tools import offered
from emberline.protocol.answer import Answer
from emberline.protocol.errors import BadInput, ContextExceeded, EmberlineError
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted, Usage
from emberline.protocol.request import GenerateRequest

Json = dict[str, Any]
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
