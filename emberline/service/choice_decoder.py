"""Decoding one choice: token ids in; text, reasoning and tool-call events out."""

import time
from collections.abc import Sequence
from typing import Literal

from emberline.protocol import token_ids as tokens
from emberline.protocol.events import (
    ChoiceDone,
    OutputIds,
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
from emberline.protocol.trace_context import Phase
from emberline.service.prepare import Prepared
from emberline.telemetry.metrics import Histogram
from emberline.text.tokenizers.detokenizer import StopMatcher
from emberline.text.tool_calls.harmony import HarmonyParser
from emberline.text.tool_calls.parser import (
    ArgumentsPiece,
    CallEnd,
    CallStart,
    ReasoningPiece,
    Reply,
    ReplyParser,
    ReplyPiece,
    TextPiece,
)


class ChoiceDecoder:
    """A choice of plain text. Keeps what the session and the usage row need."""

    def __init__(self, index: int, prepared: Prepared, inter_token: Histogram) -> None:
        text, sampling = prepared.served.text, prepared.sampling
        self.index = index
        self.output_ids = bytearray()  # u32 little-endian, every token of the engine
        self.pieces: list[str] = []  # of the reply's text
        self.done: ChoiceDone | None = None
        self._text = text
        self._detokenizer = text.detokenizer(prepared.prompt.ids)
        self._client_stops = sampling.stop
        self._includes_stop = sampling.include_stop
        # A chat template may end turns with text that is no special token; clients are not told of such a stop.
        stops = sampling.stop if prepared.request.messages is None else (*sampling.stop, *text.chat_stops)
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = sampling.min_tokens
        # Tokens that end a sequence and are no part of its text.
        stop_ids = () if sampling.include_stop else sampling.stop_ids
        self._end_ids = frozenset((*prepared.info.eos_ids, *stop_ids))
        self._inter_token = inter_token
        self._last_s = 0.0  # monotonic, of the last tokens
        self._logprobs: list[TextLogprob] = []  # of tokens whose text is still held back
        self._returns_ids = prepared.request.return_ids

    @property
    def n_tokens(self) -> int:
        return len(self.output_ids) // 4

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def n_reasoning(self) -> int:
        """Tokens of the reply that are reasoning."""
        return 0

    @property
    def tool_phase(self) -> Phase | None:
        """Return the phase from the beginning of the first tool call to its last token, or None if there is no call."""
        return None

    @property
    def message(self) -> Message:
        """The reply as the client will send it back."""
        return Message("assistant", self.text)

    def push(self, delta: TokenDelta) -> list[TextEvent]:
        """The events of this delta: for plain text at most one TextDelta, and ChoiceDone at the end. Its ids come
        first, if the client wants to have them."""
        if not self._returns_ids:
            return self._push_delta(delta)
        n_bytes = len(self.output_ids)
        events = self._push_delta(delta)
        return [OutputIds(self.index, bytes(self.output_ids[n_bytes:])), *events]

    def _push_delta(self, delta: TokenDelta) -> list[TextEvent]:
        assert self.done is None
        ids = tokens.unpack(delta.token_ids)
        self._observe_latency(len(ids))
        if self._stops is None or len(ids) <= 1:
            return self._push(ids, delta.logprobs, delta.finish)
        events: list[TextEvent] = []
        for n, token_id in enumerate(ids, 1):  # the reply ends with the token that completes a stop string
            logprobs = None if delta.logprobs is None else delta.logprobs[n - 1 : n]
            events += self._push([token_id], logprobs, delta.finish if n == len(ids) else None)
            if self.done is not None:
                break
        return _joined(events)

    def _push(self, ids: list[int], logprobs: list[TokenLogprobs] | None, finish: str | None) -> list[TextEvent]:
        n_exempt = self._min_tokens - self.n_tokens  # so many of these are not searched for stop strings
        self.output_ids += tokens.pack(ids)
        if finish == "stop" and ids and ids[-1] in self._end_ids:
            ids.pop()
        if logprobs is not None:
            self._logprobs += [self._text_logprob(entry) for entry in logprobs[: len(ids)]]
        return self._decode(ids, finish, n_exempt)

    def _decode(self, ids: list[int], finish: str | None, n_exempt: int) -> list[TextEvent]:
        if self._stops is None:
            return self._events(self._detokenize(ids, finish), finish, None)
        exempt = self._detokenizer.push(ids[:n_exempt]) if n_exempt > 0 else ""
        text, stop = self._search(self._detokenize(ids[max(0, n_exempt) :], finish))
        if stop is not None:
            return self._events(exempt + text, "stop", stop)
        if finish is not None:
            text += self._stops.finish()
        return self._events(exempt + text, finish, None)

    def _search(self, text: str) -> tuple[str, str | None]:
        """The text to send, and the stop string that ended it."""
        assert self._stops is not None
        text, stop = self._stops.push(text)
        return (text + stop if self._includes_stop and stop in self._client_stops else text), stop

    def _detokenize(self, ids: list[int], finish: str | None) -> str:
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
            self.done = ChoiceDone(self.index, self._reason(finish), stop if stop in self._client_stops else None)
            events.append(self.done)
        return events

    def _reason(self, finish: str) -> Literal["stop", "length", "tool_calls"]:
        return "length" if finish == "length" else "stop"

    def _observe_latency(self, n: int) -> None:
        """The time since the last tokens, divided among the new ones."""
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


def _joined(events: list[TextEvent]) -> list[TextEvent]:
    """Pieces of the same text, reasoning or arguments as one."""
    joined: list[TextEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            last.text += event.text
            last.logprobs = [*(last.logprobs or []), *(event.logprobs or [])] or None
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            last.text += event.text
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and event.call == last.call:
            last.arguments += event.arguments
        else:
            joined.append(event)
    return joined


class ParsingChoiceDecoder(ChoiceDecoder):
    """A choice that may have reasoning and tool calls. Stop strings apply to its text only."""

    def __init__(self, index: int, prepared: Prepared, inter_token: Histogram) -> None:
        super().__init__(index, prepared, inter_token)
        text, request = prepared.served.text, prepared.request
        callable_tools = request.tools if request.tool_choice.mode != "none" else ()
        parser = text.reply_parser(
            prepared.prompt.ids,
            callable_tools,
            prepared.thinking,
            self._detokenizer,
            loose=request.output is None,
        )
        self._parser: ReplyParser | HarmonyParser | None = parser
        self._callable = [tool.name for tool in callable_tools if request.tool_choice.name in (None, tool.name)]
        self._forced = request.tool_choice.mode == "required"
        self._tool_format = text.tool_format
        self._origin = f"{request.id}/{index}"
        self._reply = Reply()  # reasoning and tool calls; the text is in `pieces`
        self._call_ids: list[str] = []
        self._n_reasoning = 0
        self._at_call_end = False  # nothing follows a complete tool call yet
        self._first_call_s = 0.0  # when the first one began; monotonic

    @property
    def n_reasoning(self) -> int:
        return self._n_reasoning

    @property
    def tool_phase(self) -> Phase | None:
        if not self._first_call_s:
            return None
        names = [call.name for call in self._reply.calls]
        return Phase("tool_parse", self._first_call_s, self._last_s, {"gen_ai.tool.name": names})

    @property
    def message(self) -> Message:
        calls = [
            ToolCall(call_id, call.name, call.arguments)
            for call_id, call in zip(self._call_ids, self._reply.calls, strict=True)
        ]
        return Message("assistant", self.text, tool_calls=tuple(calls), reasoning=self._reply.reasoning or None)

    def _decode(self, ids: list[int], finish: str | None, n_exempt: int) -> list[TextEvent]:
        if self._parser is None:
            return super()._decode(ids, finish, n_exempt)
        is_text: list[bool] = []
        exempt = self._parse(self._parser, ids[: max(0, n_exempt)], is_text)
        rest = self._parse(self._parser, ids[max(0, n_exempt) :], is_text)
        if self._logprobs:
            self._keep_logprobs(is_text)
        events: list[TextEvent] = []
        self._absorb(exempt, events, searched=False)
        stop = self._absorb(rest, events)
        if stop is None and finish is not None:
            stop = self._absorb(self._last_pieces(self._parser, cut=finish == "length"), events)
        if stop is not None:
            return [*events, *self._events("", "stop", stop)]
        if finish is not None:
            self._flush(events)
            events += self._events("", finish, None)
        elif self._parser.plain:  # only text can follow
            self._parser = None
        return events

    def _last_pieces(self, parser: ReplyParser | HarmonyParser, *, cut: bool) -> list[ReplyPiece]:
        """The rest of the reply. Of a forced call that was cut off before its arguments, nothing is text: such a call
        begins and never ends, if only one tool may be called."""
        pieces = parser.finish(cut=cut)
        self._at_call_end = self._at_call_end and not parser.lost_tool_call
        in_reasoning = parser.reasoning or any(isinstance(piece, ReasoningPiece) for piece in pieces)
        if not cut or not self._forced or in_reasoning or self._call_ids or CallStart in map(type, pieces):
            return pieces
        return [CallStart(self._callable[0], "")] if len(self._callable) == 1 else []

    def _parse(self, parser: ReplyParser | HarmonyParser, ids: Sequence[int], is_text: list[bool]) -> list[ReplyPiece]:
        """Token by token where each must be classified: reasoning is counted, and only text has log-probabilities.
        `is_text` then gets one entry per token."""
        if not self._logprobs and not parser.reasoning and parser.decided:
            return parser.push(ids)
        pieces: list[ReplyPiece] = []
        for token_id in ids:
            was_reasoning, was_text = parser.reasoning, parser.in_text
            new = parser.push((token_id,))
            pieces += new
            self._n_reasoning += was_reasoning or parser.reasoning
            is_text.append((was_text and parser.in_text) or any(type(piece) is TextPiece for piece in new))
        return pieces

    def _keep_logprobs(self, is_text: list[bool]) -> None:
        """Drop the new tokens, the last in the list, that are not text."""
        n_before = max(0, len(self._logprobs) - len(is_text))
        new = self._logprobs[n_before:]
        self._logprobs = self._logprobs[:n_before] + [entry for entry, keep in zip(new, is_text, strict=False) if keep]

    def _absorb(self, pieces: list[ReplyPiece], events: list[TextEvent], *, searched: bool = True) -> str | None:
        """Append the pieces' events; returns the stop string that ended the text, if one did."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                text, stop = piece.text, None
                if searched and self._stops is not None:
                    text, stop = self._search(text)
                events += self._events(text, None, None)
                self._at_call_end = False
                if stop is not None:
                    return stop
                continue
            self._flush(events)
            self._reply.add((piece,))
            self._at_call_end = isinstance(piece, CallEnd)
            if isinstance(piece, ReasoningPiece):
                events.append(ReasoningDelta(self.index, piece.text))
            elif isinstance(piece, CallStart):
                events.append(self._started(piece))
            elif isinstance(piece, ArgumentsPiece):
                events.append(ToolCallDelta(self.index, len(self._call_ids) - 1, piece.text))
        return None

    def _flush(self, events: list[TextEvent]) -> None:
        """Text that was held back because a stop string might begin in it."""
        if self._stops is not None:
            events += self._events(self._stops.finish(), None, None)

    def _started(self, call: CallStart) -> ToolCallStarted:
        n_calls, number = len(self._call_ids), call.number
        call_id = self._tool_format.call_id(f"{self._origin}/{n_calls}", call.name, number)
        while call_id in self._call_ids:  # the model has numbered two calls alike
            number = str(int(number) + 1)
            call_id = self._tool_format.call_id(f"{self._origin}/{n_calls}", call.name, number)
        self._call_ids.append(call_id)
        self._first_call_s = self._first_call_s or time.monotonic()
        return ToolCallStarted(self.index, n_calls, call_id, call.name)

    def _reason(self, finish: str) -> Literal["stop", "length", "tool_calls"]:
        """A token limit reached right behind a complete call has cut nothing off."""
        if self._call_ids and (finish != "length" or self._at_call_end):
            return "tool_calls"
        return super()._reason(finish)
