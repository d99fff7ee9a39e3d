"""The events of one request gathered into a whole answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from emberline.protocol.answer import Answer, AnswerChoice, AnswerPart, ReasoningPart, TextPart, ToolCallPart
from emberline.protocol.errors import Internal
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)


class Draft:
    """One choice while it is written."""

    def __init__(self) -> None:
        self._done = ChoiceDone(0, "stop")
        self._logprobs: list[TextLogprob] = []
        self._parts: list[tuple[type[TextPart | ReasoningPart] | ToolCallStarted, list[str]]] = []
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone) -> None:
        if isinstance(event, TextDelta):
            self._say(TextPart, event.text)
            self._logprobs += event.logprobs or ()
        elif isinstance(event, ReasoningDelta):
            self._say(ReasoningPart, event.text)
        elif isinstance(event, ToolCallDelta):
            self._arguments[event.call].append(event.arguments)
        elif isinstance(event, ToolCallStarted):
            self._arguments[event.call] = []
            self._parts.append((event, self._arguments[event.call]))
        else:
            self._done = event

    def choice(self) -> AnswerChoice:
        parts: list[AnswerPart] = []
        for kind, pieces in self._parts:
            text = "".join(pieces)
            parts.append(ToolCallPart(kind.id, kind.name, text) if isinstance(kind, ToolCallStarted) else kind(text))
        return AnswerChoice(parts, self._logprobs, self._done.finish, self._done.stop_sequence)

    def _say(self, kind: type[TextPart | ReasoningPart], text: str) -> None:
        if not text:
            return
        if not self._parts or self._parts[-1][0] is not kind:
            self._parts.append((kind, []))
        self._parts[-1][1].append(text)


async def gather(events: AsyncGenerator[TextEvent, None], n_choices: int = 1) -> Answer:
    drafts = [Draft() for _ in range(n_choices)]
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return Answer([draft.choice() for draft in drafts], event.usage)
            if not isinstance(event, Started):
                drafts[event.index].add(event)
    raise Internal("the answer ended before it was complete")
