"""Collects the events of one request into a whole answer, and turns an answer back into events."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from emberline.protocol.complete_response import Answer, AnswerChoice, AnswerPart, ReasoningPart, TextPart, ToolCallPart
from emberline.protocol.errors import Internal
from emberline.protocol.events import (
    ChoiceDone,
    ChoiceEvent,
    Completed,
    Opaque,
    OutputIds,
    PromptEcho,
    PromptTokens,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import Marks


class ChoiceCollector:
    """Collects the events of one choice."""

    def __init__(self) -> None:
        self._done = ChoiceDone(0, "stop")
        self._logprobs: list[TextLogprob] = []
        # Texts by what they belong to; a dict is a block of thinking that the provider has signed or encrypted.
        self._parts: list[tuple[type[TextPart | ReasoningPart] | ToolCallStarted | dict[str, Any], list[str]]] = []
        self._n_blocks = 0  # of thinking
        self._arguments: dict[int, list[str]] = {}
        self._marks: dict[int | None, Marks] = {None: {}}  # by tool call; None: of the message
        self._token_ids: list[bytes] = []
        self._prompt: PromptTokens | None = None

    def add(self, event: ChoiceEvent) -> None:
        if isinstance(event, TextDelta):
            self._append(TextPart, event.text)
            self._logprobs += event.logprobs or ()
        elif isinstance(event, ReasoningDelta):
            self._append(ReasoningPart, event.text)
        elif isinstance(event, ToolCallDelta):
            self._arguments[event.call].append(event.arguments)
        elif isinstance(event, ToolCallStarted):
            self._arguments[event.call] = []
            self._parts.append((event, self._arguments[event.call]))
        elif isinstance(event, Opaque):
            self._marks.setdefault(event.call, {})[event.name] = event.value
            for block in event.thinking_blocks[self._n_blocks :]:
                self._n_blocks += 1
                self._place(block)
        elif isinstance(event, OutputIds):
            self._token_ids.append(event.token_ids)
        elif isinstance(event, PromptEcho):
            self._prompt = event.prompt
        else:
            self._done = event

    def choice(self) -> AnswerChoice:
        parts: list[AnswerPart] = []
        for kind, pieces in self._parts:
            text = "".join(pieces)
            if isinstance(kind, ToolCallStarted):
                parts.append(ToolCallPart(kind.id, kind.name, text, self._marks.get(kind.call, {})))
            elif isinstance(kind, dict):
                parts.append(ReasoningPart(text, kind))
            else:
                parts.append(kind(text))
        done, marks, token_ids = self._done, self._marks[None], b"".join(self._token_ids)
        return AnswerChoice(parts, self._logprobs, done.finish, done.stop_sequence, marks, token_ids, self._prompt)

    def _append(self, kind: type[TextPart | ReasoningPart], text: str) -> None:
        if not text:
            return
        if not self._parts or self._parts[-1][0] is not kind:
            self._parts.append((kind, []))
        self._parts[-1][1].append(text)

    def _place(self, block: dict[str, Any]) -> None:
        """Put a block of thinking where its text came, or at the end if it has none."""
        text = str(block.get("thinking") or "")
        reasoning = [at for at, (kind, _) in enumerate(self._parts) if kind is ReasoningPart] if text else []
        if reasoning and reasoning[-1] == len(self._parts) - 1 and "".join(self._parts[-1][1]).endswith(text):
            reasoning = reasoning[-1:]  # the block has just ended: an equal text before is another one's
        for at in reasoning:
            before, found, after = "".join(self._parts[at][1]).rpartition(text)
            if found:
                self._parts[at] = block, [text]
                if after:
                    self._parts.insert(at + 1, (ReasoningPart, [after]))
                if before:
                    self._parts.insert(at, (ReasoningPart, [before]))
                return
        self._parts.append((block, [text]))


class AnswerCollector:
    """Collects the events of one request, of all its choices."""

    def __init__(self, n_choices: int) -> None:
        self._choices = [ChoiceCollector() for _ in range(n_choices)]

    def add(self, event: TextEvent) -> None:
        if not isinstance(event, Started | Completed):
            self._choices[event.index].add(event)

    async def tap(self, event: TextEvent) -> Sequence[TextEvent]:
        """Collect an event on its way to the client."""
        self.add(event)
        return (event,)

    def answer(self, usage: Usage) -> Answer:
        """The answer as far as it was collected."""
        return Answer([choice.choice() for choice in self._choices], usage)


async def collect_answer(events: AsyncGenerator[TextEvent, None], n_choices: int = 1) -> Answer:
    """Run a request to its end. Returns its answer."""
    collector = AnswerCollector(n_choices)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return collector.answer(event.usage)
            collector.add(event)
    raise Internal("the events ended before the answer was complete")


async def result_of(events: AsyncGenerator[Any, None]) -> Any:
    """Run a task whose result comes whole to its end. Returns its result."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return event.result
    raise Internal("the events ended before the result was complete")


async def collect_prediction(events: AsyncGenerator[Any, None]) -> Answer:
    """Run a prediction to its end. Returns its output as an answer."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return Answer([], event.usage, prediction=event.result.whole)
    raise Internal("the events ended before the prediction was complete")


def events_of(answer: Answer) -> Iterator[ChoiceEvent]:
    """The events that would have produced the answer, one delta per part."""
    for index, choice in enumerate(answer.choices):
        yield from _choice_events(index, choice)


def _choice_events(index: int, choice: AnswerChoice) -> Iterator[ChoiceEvent]:
    if choice.prompt is not None:
        yield PromptEcho(index, choice.prompt)
    if choice.token_ids:
        yield OutputIds(index, choice.token_ids)
    n_texts_left = sum(isinstance(part, TextPart) for part in choice.parts)
    logprobs, n_calls = list(choice.logprobs), 0
    blocks: list[dict[str, Any]] = []  # of thinking, so far
    for name, value in choice.marks.items():
        if name != "thinking_blocks":
            yield Opaque(index, name, value)
    for part in choice.parts:
        if isinstance(part, TextPart):
            n_texts_left -= 1
            yield TextDelta(index, part.text, _take_logprobs(part.text, logprobs, last=n_texts_left == 0) or None)
        elif isinstance(part, ReasoningPart):
            if part.text:
                yield ReasoningDelta(index, part.text)
            if part.block is not None:
                blocks.append(part.block)
                yield Opaque(index, "thinking_blocks", [*blocks])
        else:
            yield ToolCallStarted(index, n_calls, part.id, part.name)
            for name, value in part.marks.items():
                yield Opaque(index, name, value, n_calls)
            yield ToolCallDelta(index, n_calls, part.arguments)
            n_calls += 1
    yield ChoiceDone(index, choice.finish, choice.stop_sequence)


def _take_logprobs(text: str, logprobs: list[TextLogprob], last: bool) -> list[TextLogprob]:
    """Remove and return the logprobs of `text`, which are the first of those left; all of them if it is the last."""
    n_taken, n_chars = 0, 0
    while n_taken < len(logprobs) and (last or n_chars < len(text)):
        n_chars += len(logprobs[n_taken].token)
        n_taken += 1
    taken = logprobs[:n_taken]
    del logprobs[:n_taken]
    return taken
