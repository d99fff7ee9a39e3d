"""One sequence's way from token ids to the text a client sees."""

import time
from typing import Literal

from emberline.protocol import tokens
from emberline.protocol.events import ChoiceDone, TextDelta, TextEvent, TextLogprob, TokenDelta, TokenLogprobs
from emberline.protocol.request import Message
from emberline.service.histogram import Histogram
from emberline.service.prepare import Prepared
from emberline.text.stops import StopMatcher


class Choice:
    """Detokenises, looks for stop strings, and keeps what the session and the usage row need."""

    __slots__ = (
        "_asked_stops",
        "_detokenizer",
        "_end_ids",
        "_gaps",
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

    def __init__(self, index: int, prepared: Prepared, gaps: Histogram) -> None:
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
        self._gaps = gaps
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
            self._gaps.observe((now_s - self._last_s) / n, n)
        self._last_s = now_s

    def _text_logprob(self, entry: TokenLogprobs) -> TextLogprob:
        chosen = self._one_logprob(entry.token_id, entry.logprob)
        chosen.top = [self._one_logprob(token_id, logprob) for token_id, logprob in entry.top]
        return chosen

    def _one_logprob(self, token_id: int, logprob: float) -> TextLogprob:
        raw = self._text.token_text(token_id)
        return TextLogprob(raw.decode("utf-8", "replace"), logprob, list(raw))
