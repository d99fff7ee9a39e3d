"""The events of one request gathered into a whole answer."""

from contextlib import aclosing
from typing import Any

import msgspec

from emberline.api.call import Call
from emberline.api.departure import while_connected
from emberline.api.ports import Events
from emberline.protocol.answer import Answer, Called, Choice, Part, Said, Thought
from emberline.protocol.errors import Internal
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.request import ToolCall


class Draft:
    """One choice while it is written."""

    def __init__(self) -> None:
        self._done = ChoiceDone(0, "stop")
        self._logprobs: list[TextLogprob] = []
        self._parts: list[tuple[type[Said | Thought] | ToolCallStarted, list[str]]] = []
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone) -> None:
        if isinstance(event, TextDelta):
            self._say(Said, event.text)
            self._logprobs += event.logprobs or ()
        elif isinstance(event, ReasoningDelta):
            self._say(Thought, event.text)
        elif isinstance(event, ToolCallDelta):
            self._arguments[event.call].append(event.arguments)
        elif isinstance(event, ToolCallStarted):
            self._arguments[event.call] = []
            self._parts.append((event, self._arguments[event.call]))
        else:
            self._done = event

    def choice(self) -> Choice:
        parts: list[Part] = []
        for kind, pieces in self._parts:
            text = "".join(pieces)
            parts.append(Called(kind.id, kind.name, text) if isinstance(kind, ToolCallStarted) else kind(text))
        return Choice(parts, self._logprobs, self._done.finish, self._done.stop_sequence)

    def _say(self, kind: type[Said | Thought], text: str) -> None:
        if not text:
            return
        if not self._parts or self._parts[-1][0] is not kind:
            self._parts.append((kind, []))
        self._parts[-1][1].append(text)


async def collect(call: Call, events: Events, n_choices: int = 1) -> Answer:
    """Wait for the end of `events`; a client that leaves ends them."""
    return await while_connected(call.receive, gather(events, n_choices))


async def gather(events: Events, n_choices: int = 1) -> Answer:
    drafts = [Draft() for _ in range(n_choices)]
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return Answer([draft.choice() for draft in drafts], event.usage)
            if not isinstance(event, Started):
                drafts[event.index].add(event)
    raise Internal("the answer ended before it was complete")


def arguments_of(call: ToolCall) -> msgspec.Raw | None:
    """A call's arguments as a JSON object, byte for byte; None: the token limit cut them, so that it is no call."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(call.arguments or "{}")
