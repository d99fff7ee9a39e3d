"""The model's vocabulary for llguidance, and for tokenizing completions in as few tokens as possible."""

import hashlib
import re
from bisect import bisect_right
from itertools import pairwise
from typing import Any

import msgspec

from emberline.protocol.frames import Vocabulary as Frame

MAX_PIECE_BYTES = 32  # of a token used in completions
MAX_CACHED_WORDS = 4096
# A word with the spaces before it. Pre-tokenizers cut there, too; 64 bytes bound the work on text without spaces.
_WORD = re.compile(rb"(?s: *[^ ]{1,64}| +)")


class Vocabulary:
    """Takes tens of milliseconds to build: done in the compile thread."""

    def __init__(self, frame: Frame, vocab_size: int) -> None:
        self.n_tokens = vocab_size
        self.special = {token_id: text for token_id, text in frame.special.items() if 0 <= token_id < vocab_size}
        self.tokens = [b"" if i in self.special else text for i, text in enumerate(frame.tokens)]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self._ids: dict[bytes, int] = {}
        fallback = _byte_fallback_ids(self.tokens)
        for token_id, text in enumerate(self.tokens):
            if 1 <= len(text) <= MAX_PIECE_BYTES and self._ids.get(text, fallback.start) in fallback:
                self._ids[text] = token_id  # the first one that is no fallback: a model does not read fallback tokens
        self._added_texts = {self.tokens[i] for i in frame.added if i < vocab_size} & self._ids.keys()
        pattern = b"|".join(map(re.escape, sorted(self._added_texts, reverse=True)))  # of two, the longer one first
        self._added = re.compile(b"(%b)" % (pattern or b"(?!)"))
        self._sorted = sorted(self._ids)
        self._words: dict[bytes, list[int]] = {}  # tokenized words of the texts that grammars force, which are few
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)
        self.bytes = frozenset(text[0] for text in self._ids if len(text) == 1)  # bytes with a token of their own

    @property
    def n_words(self) -> int:
        """32-bit words of a mask; the last bit is llguidance's own end token, which no model has."""
        return (self.n_tokens + 32) // 32

    def first_token(self, text: bytes, *, cut: bool) -> int | None:
        """The first token of a text that must follow; `cut`: more may follow it, which is not known.

        Returns None where that is not decided yet: with what follows the text, its end may become part of a longer
        token.
        """
        ids = self.tokenize(text)
        if not ids:
            return None
        decided = not cut or self._added.search(text) is not None  # nothing joins an added token
        return ids[0] if decided or not self._may_join(text, len(self.tokens[ids[0]])) else None

    def _may_join(self, text: bytes, end: int) -> bool:
        """True if some token covers the text from before `end` to its last byte and goes on."""
        for start in range(max(0, len(text) + 1 - MAX_PIECE_BYTES), min(end, len(text))):
            tail = text[start:]
            at = bisect_right(self._sorted, tail)
            if at < len(self._sorted) and self._sorted[at].startswith(tail):
                return True
        return False

    def tokenize(self, text: bytes) -> list[int]:
        """Tokenize a text as the model's own tokenizer does, so that a model reads in its reply what it was trained on.

        Added tokens are matched first. Within a word, the pair with the smallest token id is merged first, since ids
        are in the order of merges. That is a guess for a vocabulary that is numbered otherwise. Stops at a word that
        the vocabulary cannot spell.
        """
        ids: list[int] = []
        for place, piece in enumerate(self._added.split(text)):
            for word in (piece,) if place % 2 else _WORD.findall(piece):
                found = self._words.get(word) or self._tokenize_word(word)
                if not found:
                    return ids
                ids += found
        return ids

    def _tokenize_word(self, word: bytes) -> list[int]:
        if len(self._words) >= MAX_CACHED_WORDS:
            self._words.clear()
        self._words[word] = found = [self._ids[word]] if word in self._added_texts else self._merge(word)
        return found

    def _merge(self, text: bytes) -> list[int]:
        pieces = [text[i : i + 1] for i in range(len(text))]
        if not all(piece in self._ids for piece in pieces):
            return self.spell(text) or []
        while len(pieces) > 1:
            merged = [self._ids.get(a + b) for a, b in pairwise(pieces)]
            best = min((token_id for token_id in merged if token_id is not None), default=None)
            if best is None:
                break
            at = merged.index(best)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return [self._ids[piece] for piece in pieces]

    def spell(self, text: bytes) -> list[int] | None:
        """The fewest tokens that spell a text; None where some byte has no token."""
        return self.spelling(text).ids(text)

    def spelling(self, text: bytes) -> "Spelling":
        return Spelling(text, self._ids, self._lengths)

    def llguidance_tokenizer(self) -> Any:
        """The vocabulary for llguidance. Slow: built in the compile thread."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Tokens(self)),
            n_vocab=self.n_tokens + 1,
            eos_token=self.n_tokens,
            slices=LLTokenizer.json_slices(),
        )


def _byte_fallback_ids(tokens: list[bytes]) -> range:
    """Ids of SentencePiece's byte tokens, `<0x00>` to `<0xFF>` in this order.

    They stand for bytes that no other token has, and precede the others (Llama 2) or follow some of them (Gemma).
    Returns one impossible id if the vocabulary has no such tokens.
    """
    every_byte = [bytes([byte]) for byte in range(256)]
    starts = (token_id for token_id, text in enumerate(tokens) if text == b"\0")
    start = next((start for start in starts if tokens[start : start + 256] == every_byte), None)
    return range(-1, 0) if start is None else range(start, start + 256)


class Spelling:
    """The fewest tokens of a text and of each of its suffixes (dynamic programming). Takes about 15 µs per byte."""

    def __init__(self, text: bytes, ids: dict[bytes, int], lengths: list[int]) -> None:
        self.text = text
        self._ids = ids
        self._fewest = [-1] * len(text) + [0]  # by start of the suffix; -1: it cannot be spelled
        self._piece = [b""] * len(text)
        for start in reversed(range(len(text))):
            self._choose(start, lengths)

    def ids(self, suffix: bytes) -> list[int] | None:
        at = len(self.text) - len(suffix)
        assert self.text.endswith(suffix)
        if self._fewest[at] < 0:
            return None
        found: list[int] = []
        while at < len(self.text):
            found.append(self._ids[self._piece[at]])
            at += len(self._piece[at])
        return found

    def _choose(self, start: int, lengths: list[int]) -> None:
        """Finds the first token of the suffix that begins at `start`."""
        fewest, room = self._fewest, len(self.text) - start
        best = room + 1
        for length in lengths:
            if length > room or not 0 <= fewest[start + length] < best - 1:
                continue  # it cannot be continued, or not in fewer tokens
            piece = self.text[start : start + length]
            if piece in self._ids:
                best = fewest[start] = fewest[start + length] + 1
                self._piece[start] = piece


class _Tokens:
    """The tokenizer interface of llguidance, with one more token: its end, which is never sampled."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.n_tokens
        self.tokens = [
            vocabulary.special[i].encode() if i in vocabulary.special else text
            for i, text in enumerate(vocabulary.tokens)
        ] + [b"<end>"]
        self.special_token_ids = [*vocabulary.special, vocabulary.n_tokens]

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.spell(text if isinstance(text, bytes) else text.encode()) or []


def digest(frame: Frame) -> bytes:
    """Equal for front ends with the same vocabulary."""
    words = msgspec.msgpack.encode([frame.tokens, sorted(frame.special.items())])
    return hashlib.blake2b(words, digest_size=16).digest()
