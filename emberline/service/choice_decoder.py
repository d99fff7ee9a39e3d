"""One sequence's way from token ids to the text a client sees."""

import time
from collections.abc import Sequence
from typing import Literal

from emberline.protocol import token_ids as tokens
from emberline.protocol.events import (
    ChoiceDone,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TextLogprob,
    TokenDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.protocol.request import Message, ToolCall
from emberline.service.metrics import Histogram
from emberline.service.prepare import Prepared
from emberline.text.detokenizer import StopMatcher
from emberline.text.tool_calls.parser import Argued, CallBegun, CallEnded, Piece, Reply, ReplyParser, Said, Thought


class ChoiceDecoder:
    """Detokenises, looks for stop strings, and keeps what the session and the usage row need."""

    __slots__ = (
        "_asked_stops",
        "_detokenizer",
        "_end_ids",
        "_inter_token",
        "_last_s",
        "_logprobs",
        "_min_tokens",
        "_stops",
        "_text",
        "done",
        "index",
        "output_ids",
        "pieces",
    )

    def __init__(self, index: int, prepared: Prepared, inter_token: Histogram) -> None:
        text, sampling = prepared.served.text, prepared.sampling
        self.index = index
        self.output_ids = bytearray()  # u32 LE, all that the engine gave
        self.pieces: list[str] = []  # the reply's text so far
        self.done: ChoiceDone | None = None
        self._text = text
        self._detokenizer = text.detokenizer(prepared.prompt.ids)
        self._asked_stops = sampling.stop
        # A chat template may end turns with text that is no special token.
        stops = sampling.stop if prepared.request.messages is None else (*sampling.stop, *text.chat_stops)
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = sampling.min_tokens
        # Tokens that end a sequence and are no part of its text.
        self._end_ids = frozenset((*prepared.info.eos_ids, *sampling.stop_ids))
        self._inter_token = inter_token
        self._last_s = 0.0
        self._logprobs: list[TextLogprob] = []  # of tokens whose text is still held back

    @property
    def n_tokens(self) -> int:
        return len(self.output_ids) // 4

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def n_reasoning(self) -> int:
        """How many of the tokens are reasoning."""
        return 0

    @property
    def message(self) -> Message:
        """The reply as the client will send it back."""
        return Message("assistant", self.text)

    def push(self, delta: TokenDelta) -> list[TextEvent]:
        """What a client sees of this delta: of plain text at most one TextDelta, and ChoiceDone at the end."""
        assert self.done is None
        ids = tokens.unpack(delta.token_ids)
        n_free = self._min_tokens - self.n_tokens  # of these, so many are not searched for stop strings
        self.output_ids += delta.token_ids
        self._measure(len(ids))
        if delta.finish == "stop" and ids and ids[-1] in self._end_ids:
            ids.pop()
        if delta.logprobs is not None:
            self._logprobs += [self._text_logprob(entry) for entry in delta.logprobs[: len(ids)]]
        return self._read(ids, delta.finish, n_free)

    def _read(self, ids: list[int], finish: str | None, n_free: int) -> list[TextEvent]:
        if self._stops is None:
            return self._events(self._detokenise(ids, finish), finish, None)
        free = self._detokenizer.push(ids[:n_free]) if n_free > 0 else ""
        text, stop = self._stops.push(self._detokenise(ids[max(0, n_free) :], finish))
        if stop is not None:
            return self._events(free + text, "stop", stop)
        if finish is not None:
            text += self._stops.finish()
        return self._events(free + text, finish, None)

    def _detokenise(self, ids: list[int], finish: str | None) -> str:
        text = self._detokenizer.push(ids)
        return text if finish is None else text + self._detokenizer.finish()

    def _events(self, text: str, finish: str | None, stop: str | None) -> list[TextEvent]:
        events: list[TextEvent] = []
        if text or (finish is not None and self._logprobs):
            self.pieces.append(text)
            events.append(TextDelta(self.index, text, self._logprobs or None))
            if self._logprobs:
                self._logprobs = []
        if finish is not None:
            self.done = ChoiceDone(self.index, self._reason(finish), stop if stop in self._asked_stops else None)
            events.append(self.done)
        return events

    def _reason(self, finish: str) -> Literal["stop", "length", "tool_calls"]:
        return "length" if finish == "length" else "stop"

    def _measure(self, n: int) -> None:
        """The time since the tokens before, shared out among the new ones."""
        now_s = time.monotonic()
        if self._last_s and n:
            self._inter_token.observe((now_s - self._last_s) / n, n)
        self._last_s = now_s

    def _text_logprob(self, entry: TokenLogprobs) -> TextLogprob:
        chosen = self._one_logprob(entry.token_id, entry.logprob)
        chosen.top = [self._one_logprob(token_id, logprob) for token_id, logprob in entry.top]
        return chosen

    def _one_logprob(self, token_id: int, logprob: float) -> TextLogprob:
        raw = self._text.token_text(token_id)
        return TextLogprob(raw.decode("utf-8", "replace"), logprob, list(raw))


class ParsingChoiceDecoder(ChoiceDecoder):
    """Stop strings are looked for in text only. Once only text can follow, it is a plain choice again."""

    __slots__ = ("_call_ids", "_form", "_n_reasoning", "_origin", "_parser", "_reply", "_whole")

    def __init__(self, index: int, prepared: Prepared, inter_token: Histogram) -> None:
        super().__init__(index, prepared, inter_token)
        text, request = prepared.served.text, prepared.request
        parser = text.reply_parser(prepared.prompt.ids, request.tools, prepared.thinking, self._detokenizer)
        self._parser: ReplyParser | None = parser
        self._form = text.tool_form
        self._origin = f"{request.id}/{index}"
        self._reply = Reply()  # its reasoning and calls; the text is in `pieces`
        self._call_ids: list[str] = []
        self._n_reasoning = 0
        self._whole = False  # a call has just ended

    @property
    def n_reasoning(self) -> int:
        return self._n_reasoning

    @property
    def message(self) -> Message:
        calls = [
            ToolCall(call_id, call.name, call.arguments)
            for call_id, call in zip(self._call_ids, self._reply.calls, strict=True)
        ]
        return Message("assistant", self.text, tool_calls=tuple(calls), reasoning=self._reply.reasoning or None)

    def _read(self, ids: list[int], finish: str | None, n_free: int) -> list[TextEvent]:
        if self._parser is None:
            return super()._read(ids, finish, n_free)
        spoken: list[bool] = []
        free = self._parse(self._parser, ids[: max(0, n_free)], spoken)
        rest = self._parse(self._parser, ids[max(0, n_free) :], spoken)
        if self._logprobs:
            self._keep_logprobs(spoken)
        events: list[TextEvent] = []
        self._absorb(free, events, searched=False)
        stop = self._absorb(rest, events)
        if stop is None and finish is not None:
            stop = self._absorb(self._parser.finish(cut=finish == "length"), events)
            self._whole = self._whole and not self._parser.lost_call
        if stop is not None:
            return [*events, *self._events("", "stop", stop)]
        if finish is not None:
            self._flush(events)
            events += self._events("", finish, None)
        elif self._parser.plain:
            self._parser = None
        return events

    def _parse(self, parser: ReplyParser, ids: Sequence[int], spoken: list[bool]) -> list[Piece]:
        """Token by token where each must be told apart: reasoning is counted, and only text has log-probabilities.
        `spoken` then learns which tokens are text."""
        if not self._logprobs and not parser.thinking and parser.decided:
            return parser.push(ids)
        pieces: list[Piece] = []
        for token_id in ids:
            was_thinking, was_text = parser.thinking, parser.in_text
            new = parser.push((token_id,))
            pieces += new
            self._n_reasoning += was_thinking or parser.thinking
            spoken.append((was_text and parser.in_text) or any(type(piece) is Said for piece in new))
        return pieces

    def _keep_logprobs(self, spoken: list[bool]) -> None:
        """Of the new tokens, which come last, those that are text."""
        n_before = max(0, len(self._logprobs) - len(spoken))
        new = self._logprobs[n_before:]
        kept = [entry for entry, is_text in zip(new, spoken, strict=False) if is_text]
        self._logprobs = self._logprobs[:n_before] + kept

    def _absorb(self, pieces: list[Piece], events: list[TextEvent], *, searched: bool = True) -> str | None:
        """Appends the pieces' events; the stop string that ended the text, if one did."""
        for piece in pieces:
            if isinstance(piece, Said):
                text, stop = piece.text, None
                if searched and self._stops is not None:
                    text, stop = self._stops.push(text)
                events += self._events(text, None, None)
                self._whole = False
                if stop is not None:
                    return stop
                continue
            self._flush(events)
            self._reply.add((piece,))
            self._whole = isinstance(piece, CallEnded)
            if isinstance(piece, Thought):
                events.append(ReasoningDelta(self.index, piece.text))
            elif isinstance(piece, CallBegun):
                events.append(self._started(piece))
            elif isinstance(piece, Argued):
                events.append(ToolCallDelta(self.index, len(self._call_ids) - 1, piece.text))
        return None

    def _flush(self, events: list[TextEvent]) -> None:
        """Text that was held back as a stop string's beginning, now that it is none."""
        if self._stops is not None:
            events += self._events(self._stops.finish(), None, None)

    def _started(self, call: CallBegun) -> ToolCallStarted:
        n_calls, number = len(self._call_ids), call.number
        call_id = self._form.call_id(f"{self._origin}/{n_calls}", call.name, number)
        while call_id in self._call_ids:  # a model that counts wrongly
            number = str(int(number) + 1)
            call_id = self._form.call_id(f"{self._origin}/{n_calls}", call.name, number)
        self._call_ids.append(call_id)
        return ToolCallStarted(self.index, n_calls, call_id, call.name)

    def _reason(self, finish: str) -> Literal["stop", "length", "tool_calls"]:
        """Tokens that run out right behind a call have cut nothing that a client would miss."""
        if self._call_ids and (finish != "length" or self._whole):
            return "tool_calls"
        return super()._reason(finish)
