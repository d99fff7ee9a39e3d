"""What the model's tokens stand for: for the matcher's library, and to spell a closing text in few tokens."""

import hashlib
from typing import Any

import msgspec

from emberline.protocol.frames import Vocabulary as Frame

MAX_PIECE_BYTES = 32  # of a token that a closing text is spelled with


class Vocabulary:
    """Takes tens of milliseconds to build: a job for a thread."""

    def __init__(self, frame: Frame, vocab_size: int) -> None:
        self.n_tokens = vocab_size
        self.special = {token_id: text for token_id, text in frame.special.items() if 0 <= token_id < vocab_size}
        self.tokens = [b"" if i in self.special else text for i, text in enumerate(frame.tokens)]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(self.tokens):
            if 0 < len(text) <= MAX_PIECE_BYTES:
                self._ids.setdefault(text, token_id)
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)
        self.spells_all = all(bytes([byte]) in self._ids for byte in range(256))

    @property
    def n_words(self) -> int:
        """32-bit words of a mask: the library's own end token, which no model has, is the last bit."""
        return (self.n_tokens + 32) // 32

    def spell(self, text: bytes) -> list[int] | None:
        """As few tokens as can spell a text; None where some byte has no token."""
        fewest = [0] + [-1] * len(text)
        piece = [b""] * (len(text) + 1)
        for end in range(1, len(text) + 1):
            for length in self._lengths:
                if length > end or not 0 <= fewest[end - length] < (fewest[end] - 1 if fewest[end] > 0 else end):
                    continue  # no way there, or none that is shorter
                if text[end - length : end] in self._ids:
                    fewest[end], piece[end] = fewest[end - length] + 1, text[end - length : end]
        if fewest[-1] < 0:
            return None
        found: list[int] = []
        end = len(text)
        while end:
            found.append(self._ids[piece[end]])
            end -= len(piece[end])
        return found[::-1]

    def library(self) -> Any:
        """The library's own view. Slow: a job for a thread."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Tokens(self)),
            n_vocab=self.n_tokens + 1,
            eos_token=self.n_tokens,
            slices=LLTokenizer.json_slices(),
        )


class _Tokens:
    """The shape in which the library takes a vocabulary, with one more token: its end, which is never drawn."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.n_tokens
        self.tokens = [
            vocabulary.special[i].encode() if i in vocabulary.special else text
            for i, text in enumerate(vocabulary.tokens)
        ] + [b"<the end>"]
        self.special_token_ids = [*vocabulary.special, vocabulary.n_tokens]

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.spell(text if isinstance(text, bytes) else text.encode()) or []


def digest(frame: Frame) -> bytes:
    """By which doors are seen to agree."""
    words = msgspec.msgpack.encode([frame.tokens, sorted(frame.special.items())])
    return hashlib.blake2b(words, digest_size=16).digest()
