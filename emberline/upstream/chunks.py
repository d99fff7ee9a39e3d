"""A server's chunks as text events: what every door but OpenAI's speaks from."""

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)


class Alternative(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class Logprob(Alternative):
    top_logprobs: list[Alternative] | None = None


class Logprobs(msgspec.Struct):
    """Of a chat: `content`; of a text completion: parallel lists."""

    content: list[Logprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: CalledFunction | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's: the stop string or token that ended it


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] = []


decoder = msgspec.json.Decoder(Chunk)


LEAST_LOGPROB = -9999.0
_MAX_CALLS = 128


class Unreadable(Exception):
    """The server sent what no client of its kind could read."""


class _Choice:
    def __init__(self) -> None:
        self.done = False
        self.n_calls = 0


class ChunkReader:
    """Feed it whole lines; every choice ends in one ChoiceDone."""

    def __init__(self, n: int, stops: tuple[str, ...]) -> None:
        self._choices = [_Choice() for _ in range(n)]
        self._stops = stops

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self._choices)

    def feed(self, block: bytes) -> Iterator[TextEvent]:
        for line in block.splitlines():
            payload = line[5:].strip() if line.startswith(b"data:") else b""
            if not payload or payload == b"[DONE]":
                continue
            try:
                chunk = decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                raise Unreadable(f"sent a chunk that cannot be read: {error}") from None
            for choice in chunk.choices:
                yield from self._events(choice)

    def _events(self, choice: ChunkChoice) -> Iterator[TextEvent]:
        if not 0 <= choice.index < len(self._choices):
            raise Unreadable(f"sent choice {choice.index} of {len(self._choices)}")
        state, index = self._choices[choice.index], choice.index
        if state.done:
            return
        delta = choice.delta
        if delta is not None and (thought := delta.reasoning_content or delta.reasoning):
            yield ReasoningDelta(index, thought)
        text = (delta.content if delta is not None else choice.text) or ""
        logprobs = _logprobs(choice.logprobs)
        if text or logprobs:
            yield TextDelta(index, text, logprobs or None)
        for piece in (delta.tool_calls if delta is not None else None) or ():
            yield from self._call(index, state, piece)
        if choice.finish_reason is not None:
            state.done = True
            yield self._ended(choice, state)

    def _call(self, index: int, state: _Choice, piece: CallPiece) -> Iterator[TextEvent]:
        function = piece.function
        if function is None:
            return
        if piece.index == state.n_calls and function.name and state.n_calls < _MAX_CALLS:
            state.n_calls += 1
            yield ToolCallStarted(index, piece.index, piece.id or f"call_{uuid.uuid4().hex[:24]}", function.name)
        if not 0 <= piece.index < state.n_calls:
            raise Unreadable(f"sent arguments of call {piece.index}, which it had not begun")
        if function.arguments:
            yield ToolCallDelta(index, piece.index, function.arguments)

    def _ended(self, choice: ChunkChoice, state: _Choice) -> ChoiceDone:
        reason = choice.finish_reason
        if reason in ("abort", "error"):
            raise Unreadable("gave the answer up")
        if state.n_calls and reason != "length":
            return ChoiceDone(choice.index, "tool_calls")
        stop = choice.stop_reason if choice.stop_reason in self._stops else None
        return ChoiceDone(choice.index, "length" if reason == "length" else "stop", stop)


def _logprobs(found: Logprobs | None) -> list[TextLogprob]:
    if found is None:
        return []
    if found.content is not None:
        return [_one(entry, [_one(other) for other in entry.top_logprobs or ()]) for entry in found.content]
    chosen = zip(found.tokens or (), found.token_logprobs or ())
    tops = found.top_logprobs or []
    made = [_one(Alternative(token, logprob)) for token, logprob in chosen]
    for entry, top in zip(made, tops):
        entry.top = [_one(Alternative(token, logprob)) for token, logprob in (top or {}).items()]
    return made


def _one(entry: Alternative, top: list[TextLogprob] | None = None) -> TextLogprob:
    logprob = LEAST_LOGPROB if entry.logprob is None else entry.logprob
    raw = list(entry.token.encode()) if entry.bytes is None else entry.bytes
    return TextLogprob(entry.token, logprob, raw, top or [])
