"""A response's output items, made of the service's events, and the events that tell of them as they grow.

The same object serves a stream and a whole answer, so that both end in the same items.
"""

from collections.abc import Mapping
from typing import Any

from emberline.api.openai.chat import logprobs_body
from emberline.api.openai.responses.items import Status, item_id, seal
from emberline.api.openai.responses.tools import ArgumentText, Called
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta, ToolCallStarted

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
