"""Replies in GPT-OSS's Harmony format: messages, each with a header that names its channel, and who it is for.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{arguments}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends with `<|start|>assistant`. `<|call|>` and `<|return|>` are end tokens, so a reply has one call at most.
Commentary for nobody is text: what the model tells the user before it calls a tool.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from emberline.text.tokenizers.detokenizer import Detokenizer
from emberline.text.tool_calls.formats import HARMONY, sentinels
from emberline.text.tool_calls.parser import (
    ArgumentsPiece,
    CallEnd,
    CallStart,
    ReasoningPiece,
    ReplyPiece,
    TextPiece,
    joined,
)

HEADER_CHARS = 256  # a longer header is text
_SENTINELS = re.compile("[\ud800-\udfff]")
_RECIPIENT = re.compile(r"\bto=([^\s\ud800-\udfff]+)")
_PREFIX = "functions."


class HarmonyFormat:
    """The special tokens of one tokenizer; shared by its parsers."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.tokens = HARMONY.at(special).tokens
        self.sentinels = sentinels(self.tokens)
        self.sentinel_of = {self.tokens[marker]: sentinel for marker, sentinel in self.sentinels.items()}
        self.message = self.sentinels["<|message|>"]
        self.channel = self.sentinels["<|channel|>"]


class HarmonyParser:
    """Parses one reply, as `parser.ReplyParser` does. `begun`: the prompt has begun the answer, which goes on."""

    def __init__(self, form: HarmonyFormat, detokenizer: Detokenizer, names: Collection[str], *, begun: bool) -> None:
        self._form = form
        self._detokenizer = detokenizer
        self._names = names
        self._header: str | None = None if begun else ""  # what has come of it; None: inside a message
        self._piece: type[TextPiece | ReasoningPiece | ArgumentsPiece] = TextPiece  # of the current message
        self._read_any = begun
        self.lost_tool_call = False  # the reply was cut off inside the header of a call

    @property
    def reasoning(self) -> bool:
        return self._header is None and self._piece is ReasoningPiece

    @property
    def decided(self) -> bool:
        return self._read_any

    @property
    def in_text(self) -> bool:
        return self._header is None and self._piece is TextPiece

    @property
    def plain(self) -> bool:
        """Another message may always follow."""
        return False

    def push(self, ids: Sequence[int]) -> list[ReplyPiece]:
        sign_of = self._form.sentinel_of
        if sign_of.keys().isdisjoint(ids):
            return self.push_text(self._detokenizer.push(ids))
        texts: list[str] = []
        for token_id in ids:
            if token_id in sign_of:
                texts += [self._detokenizer.finish(), sign_of[token_id]]
            else:
                texts.append(self._detokenizer.push((token_id,)))
        return self.push_text("".join(texts))

    def push_text(self, text: str) -> list[ReplyPiece]:
        """Like `push`, for decoded text with sentinels."""
        pieces: list[ReplyPiece] = []
        at = 0
        while at < len(text):
            at = self._push_header(text, at, pieces) if self._header is not None else self._push_body(text, at, pieces)
        return pieces if len(pieces) < 2 else joined(pieces)

    def finish(self, *, cut: bool = False) -> list[ReplyPiece]:
        """`cut`: the reply ended at max_tokens."""
        pieces = self.push_text(self._detokenizer.finish())
        if self._header is not None:
            self.lost_tool_call = cut and _RECIPIENT.search(self._header) is not None
        elif not cut:
            self._end_message(pieces)
        return pieces

    def _push_header(self, text: str, at: int, pieces: list[ReplyPiece]) -> int:
        """Consume text through the next special token of the header; returns the offset behind it."""
        assert self._header is not None
        found = _SENTINELS.search(text, at)
        end = len(text) if found is None else found.start()
        self._header += text[at:end]
        if self._is_text(self._header):
            stray, self._header, self._piece, self._read_any = self._header, None, TextPiece, True
            pieces += [TextPiece(clean)] if (clean := _SENTINELS.sub("", stray)) else []
            return end
        if found is None:
            return end
        if found[0] == self._form.message:
            self._begin_message(self._header, pieces)
        else:
            self._header += found[0]
        return end + 1

    def _is_text(self, header: str) -> bool:
        """True if this cannot be the beginning of a header: a model that leaves the format has answered."""
        begun = header.lstrip()
        plain = bool(begun) and not _SENTINELS.match(begun) and not "to=".startswith(begun[:3])
        return len(header) > HEADER_CHARS or (plain and not self._read_any)

    def _begin_message(self, header: str, pieces: list[ReplyPiece]) -> None:
        self._header, self._read_any = None, True
        _, _, rest = header.partition(self._form.channel)
        channel = re.match(r"\s*(\w*)", rest)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_PREFIX) if recipient is not None else ""
        if name in self._names:
            self._piece = ArgumentsPiece
            pieces.append(CallStart(name, ""))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._piece = ReasoningPiece  # what is for a tool that was not declared is not for the user
        else:
            self._piece = TextPiece

    def _push_body(self, text: str, at: int, pieces: list[ReplyPiece]) -> int:
        found = _SENTINELS.search(text, at)
        end = len(text) if found is None else found.start()
        if end > at:
            pieces.append(self._piece(text[at:end]))
        if found is None:
            return end
        self._end_message(pieces)
        self._header = ""
        return end + 1 if found[0] != self._form.channel else end  # `<|start|>assistant` is optional

    def _end_message(self, pieces: list[ReplyPiece]) -> None:
        if self._piece is ArgumentsPiece:
            pieces.append(CallEnd())
            self._piece = TextPiece
