"""Chunks of an upstream stream as text events, or as the body of a reply that is not streamed."""

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.protocol.events import (
    ChoiceDone,
    Opaque,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.sizes import format_limit
from emberline.upstream.dialects.sse import data_of

MAX_BODY_BYTES = 64 << 20
LEAST_LOGPROB = -9999.0
_MAX_CALLS = 128
_MAX_THINKING_BLOCKS = 256
_UNFINISHED = ("abort", "error")  # finish reasons of replies that the server gave up


class UnreadableChunk(Exception):
    """The server sent what no client could read; the message says what."""


# --- text events ------------------------------------------------------------------------------------------------------


class ChunkAlternative(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class ChunkLogprob(ChunkAlternative):
    top_logprobs: list[ChunkAlternative] | None = None


class ChunkLogprobs(msgspec.Struct):
    """Log-probabilities of a chunk. Of a chat: `content`; of a text completion: parallel lists."""

    content: list[ChunkLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class ChunkFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: ChunkFunction | None = None
    extra_content: Any = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChunkToolCall] | None = None
    thinking_blocks: Any = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    logprobs: ChunkLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's: the stop string or token that ended it


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] = []


_decoder = msgspec.json.Decoder(Chunk)


class _ChoiceState:
    def __init__(self) -> None:
        self.done = False
        self.n_calls = 0
        self.told: list[str] = []  # reasoning that is not known to be in a block of thinking
        self._blocks: list[dict[str, Any]] = []  # complete blocks of thinking
        self._pieces: list[str] = []  # text of the block that is not complete

    def thinking(self, index: int, given: Any) -> Iterator[TextEvent]:
        """Read blocks of thinking: whole ones, or pieces of which the last has the signature. Blocks may come again.

        Yields all complete blocks if there are more than before. Text of a block that has not come as reasoning comes
        as such first, since most clients read the reasoning alone."""
        n_before = len(self._blocks)
        for block in given if isinstance(given, list) else ():
            kind = block.get("type") if isinstance(block, dict) else ""
            if kind == "redacted_thinking":
                self._add({"type": kind, "data": str(block.get("data"))})
            elif kind == "thinking":
                text, signature = str(block.get("thinking") or ""), str(block.get("signature") or "")
                if {"type": kind, "thinking": text, "signature": signature} in self._blocks:
                    continue
                self._pieces.append(text)
                if signature:
                    yield from self._complete(index, signature)
        if len(self._blocks) > n_before:
            yield Opaque(index, "thinking_blocks", list(self._blocks))

    def _complete(self, index: int, signature: str) -> Iterator[TextEvent]:
        text, told = "".join(self._pieces), "".join(self.told)
        self._pieces = []
        self._add({"type": "thinking", "thinking": text, "signature": signature})
        if text in told:
            self.told = [told[told.index(text) + len(text) :]]
        else:
            yield ReasoningDelta(index, text)

    def _add(self, block: dict[str, Any]) -> None:
        if block not in self._blocks:
            self._blocks.append(block)
        if len(self._blocks) > _MAX_THINKING_BLOCKS:  # each time all are told again
            raise UnreadableChunk(f"more than {_MAX_THINKING_BLOCKS} blocks of thinking")


class ChunkReader:
    """Called with whole lines, returns text events: Started first, one ChoiceDone per choice."""

    def __init__(self, n: int, stops: tuple[str, ...], input_tokens: int) -> None:
        self._choices = [_ChoiceState() for _ in range(n)]
        self._stops = stops
        self._input_tokens = input_tokens
        self._started = False

    def __call__(self, lines: bytes, last: bool) -> list[TextEvent]:
        events: list[TextEvent] = []
        if lines and not self._started:
            self._started = True
            events.append(Started(Usage(prompt_tokens=self._input_tokens)))
        for line in lines.splitlines():
            if not (data := data_of(line)):
                continue
            try:
                chunk = _decoder.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                raise UnreadableChunk(f"a chunk that cannot be read: {error}") from None
            for choice in chunk.choices:
                events += self._events(choice)
        if last and not all(choice.done for choice in self._choices):
            raise UnreadableChunk("a reply without a finish reason")
        return events

    def _events(self, choice: ChunkChoice) -> Iterator[TextEvent]:
        if not 0 <= choice.index < len(self._choices):
            raise UnreadableChunk(f"choice {choice.index} of {len(self._choices)}")
        state, index = self._choices[choice.index], choice.index
        if state.done:
            return
        delta = choice.delta
        if delta is not None and (reasoning := delta.reasoning_content or delta.reasoning):
            state.told.append(reasoning)
            yield ReasoningDelta(index, reasoning)
        if delta is not None and delta.thinking_blocks is not None:
            yield from state.thinking(index, delta.thinking_blocks)
        text = (delta.content if delta is not None else choice.text) or ""
        logprobs = _logprobs(choice.logprobs)
        if text or logprobs:
            yield TextDelta(index, text, logprobs or None)
        for call in (delta.tool_calls if delta is not None else None) or ():
            yield from self._call(index, state, call)
        if choice.finish_reason is not None:
            state.done = True
            yield self._ended(choice, state)

    def _call(self, index: int, state: _ChoiceState, call: ChunkToolCall) -> Iterator[TextEvent]:
        function = call.function
        if function is None:
            return
        if call.index == state.n_calls and function.name and state.n_calls < _MAX_CALLS:
            state.n_calls += 1
            yield ToolCallStarted(index, call.index, call.id or f"call_{uuid.uuid4().hex[:24]}", function.name)
        if not 0 <= call.index < state.n_calls:
            raise UnreadableChunk(f"arguments of tool call {call.index}, which it had not begun")
        if call.extra_content is not None:
            yield Opaque(index, "extra_content", call.extra_content, call.index)
        if function.arguments:
            yield ToolCallDelta(index, call.index, function.arguments)

    def _ended(self, choice: ChunkChoice, state: _ChoiceState) -> ChoiceDone:
        reason = choice.finish_reason
        if reason in _UNFINISHED:
            raise UnreadableChunk(f"the finish reason {reason}")
        if reason == "content_filter":
            return ChoiceDone(choice.index, "content_filter")
        if state.n_calls and reason != "length":
            return ChoiceDone(choice.index, "tool_calls")
        stop = choice.stop_reason if choice.stop_reason in self._stops else None
        return ChoiceDone(choice.index, "length" if reason == "length" else "stop", stop)


def _logprobs(found: ChunkLogprobs | None) -> list[TextLogprob]:
    if found is None:
        return []
    if found.content is not None:
        return [_one(entry, [_one(other) for other in entry.top_logprobs or ()]) for entry in found.content]
    chosen = zip(found.tokens or (), found.token_logprobs or ())
    tops = found.top_logprobs or []
    made = [_one(ChunkAlternative(token, logprob)) for token, logprob in chosen]
    for entry, top in zip(made, tops):
        entry.top = [_one(ChunkAlternative(token, logprob)) for token, logprob in (top or {}).items()]
    return made


def _one(entry: ChunkAlternative, top: list[TextLogprob] | None = None) -> TextLogprob:
    logprob = LEAST_LOGPROB if entry.logprob is None else entry.logprob
    raw = list(entry.token.encode()) if entry.bytes is None else entry.bytes
    return TextLogprob(entry.token, logprob, raw, top or [])


# --- a whole body -----------------------------------------------------------------------------------------------------

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "arguments", "text")  # concatenated


class BodyAssembler:
    """Called with whole lines, returns nothing until the last of them: then the body of a chat or text completion.

    Of fields that it does not know, those of the body are kept as sent first, those of a choice as sent last.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._n_bytes = 0

    def __call__(self, lines: bytes, last: bool) -> bytes:
        self._n_bytes += len(lines)
        if self._n_bytes > self._max_bytes:
            raise UnreadableChunk(f"more than {format_limit(self._max_bytes)}")
        for line in lines.splitlines():
            if data := data_of(line):
                self._add(data)
        return _body_encoder.encode(self._whole()) if last else b""

    def _add(self, data: bytes) -> None:
        try:
            chunk = msgspec.json.decode(data)
            for name, value in chunk.items():
                if name in ("choices", "kv_transfer_params"):
                    continue
                if self._body.get(name) is None or (name == "usage" and value):
                    self._body[name] = value
            for choice in chunk.get("choices") or ():
                if type(choice["index"]) is not int:
                    raise TypeError("the index of a choice is no number")
                self._add_choice(choice)
        except (msgspec.DecodeError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise UnreadableChunk(f"a chunk that cannot be read: {error!r}") from None

    def _add_choice(self, chunk: dict[str, Any]) -> None:
        choice = self._choices.setdefault(chunk["index"], {})
        for name, value in chunk.items():
            if name == "delta":
                _merge(choice.setdefault("message", {}), value or {})
            elif name == "logprobs" and value:
                logprobs = choice.setdefault("logprobs", {}) or {}
                for part, entries in value.items():
                    if logprobs.get(part) is None:
                        logprobs[part] = entries
                    elif entries:
                        logprobs[part] += entries
                choice["logprobs"] = logprobs
            else:
                _merge(choice, {name: value})

    def _whole(self) -> dict[str, Any]:
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices:
            raise UnreadableChunk("a reply without choices")
        for choice in choices:
            reason = choice.get("finish_reason")
            if not isinstance(reason, str) or reason in _UNFINISHED:
                raise UnreadableChunk(f"the finish reason {reason}" if reason else "a reply without a finish reason")
            if (message := choice.get("message")) is not None:
                message.setdefault("content", None)
                if (calls := message.get("tool_calls")) is not None:
                    message["tool_calls"] = [calls[index] for index in sorted(calls)]
                    if calls:
                        message["content"] = message["content"] or None
        if self._body.get("object") == "chat.completion.chunk":
            self._body["object"] = "chat.completion"
        return {**self._body, "choices": choices}


def _merge(known: dict[str, Any], delta: dict[str, Any]) -> None:
    """Texts are concatenated, tool calls merged by their index, of all other fields the last value counts."""
    for name, value in delta.items():
        if value is None:
            known.setdefault(name, None)
        elif name in _TEXTS:
            _append_text(known, name, value)
        elif name == "tool_calls":
            calls = known.setdefault(name, {}) or {}
            known[name] = calls
            for call in value:
                index = call.get("index")
                if index is None:  # then a call comes whole, or its pieces follow each other
                    index = len(calls) if call.get("id") or not calls else len(calls) - 1
                _merge(calls.setdefault(index, {}), {part: call[part] for part in call if part != "index"})
        elif isinstance(value, dict) and isinstance(known.get(name), dict):
            _merge(known[name], value)
        else:
            known[name] = value


class _LongText:
    """A text in the pieces in which it came: joined once, when the body is encoded."""

    __slots__ = ("pieces",)

    def __init__(self, *pieces: str) -> None:
        self.pieces = list(pieces)


def _append_text(known: dict[str, Any], name: str, piece: Any) -> None:
    if not isinstance(piece, str):
        raise TypeError(f"{name} is no text")
    before = known.get(name)
    if isinstance(before, _LongText):
        before.pieces.append(piece)
    else:
        known[name] = _LongText(before, piece) if before else piece


def _join(value: Any) -> str:
    assert isinstance(value, _LongText)
    return "".join(value.pieces)


_body_encoder = msgspec.json.Encoder(enc_hook=_join)
