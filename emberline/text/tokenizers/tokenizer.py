"""Text to token ids, and the bytes of a token. `gguf_tokenizer` and `hf_tokenizer` read its parts from model files."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Literal

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from emberline.protocol.errors import BadInput
from emberline.protocol.token_ids import pack
from emberline.text.tokenizers import special_tokens as trie
from emberline.weights.model_config import BadCheckpoint

MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 48  # longer ones (data, paths) rarely recur
CHARS_PER_WORD = 40  # of a whole text that are tokenized in the time of a single word: 12 µs
CHARS_PER_CACHED_WORD = 256  # one more word is cached for so many characters of new text
MIN_CACHED_WORDS = 16  # that are cached of every new text

Encode = Callable[[str], bytes]


class WordCache:
    """Tokenizes text word by word, from a cache, with exactly the ids of the whole text.

    Text is cut before a single space and behind a single line break between two words. What lies between two cuts is
    tokenized once and cached as packed ids. A text that is mostly new is tokenized as a whole, which is cheaper than
    word by word, and its most frequent words are cached.
    `encode` tokenizes ordinary text; `uncuttable` are the characters that some token joins to a space behind them.
    """

    def __init__(self, encode: Encode, uncuttable: Iterable[str] = ()) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}
        self._cut = _cutter("".join(uncuttable)).findall

    def encode(self, text: str) -> bytes:
        words: list[str] = self._cut(text)
        ids = list(map(self._known.get, words))
        if None in ids:
            new = Counter([word for word, found in zip(words, ids, strict=True) if found is None])
            if len(new) > MIN_CACHED_WORDS and len(new) * CHARS_PER_WORD > len(text):
                for word, _ in new.most_common(MIN_CACHED_WORDS + len(text) // CHARS_PER_CACHED_WORD):
                    self._cache(word)
                return self._encode(text)
            tokenized = {word: self._cache(word) for word in new}
            ids = [tokenized[word] if found is None else found for word, found in zip(words, ids, strict=True)]
        return b"".join(ids)  # type: ignore[arg-type]

    def cuts(self, token: str) -> bool:
        """True if text that contains this token could be cut inside it."""
        ends = set(accumulate(map(len, self._cut(f"\0{token}\0"))))
        return not ends.isdisjoint(range(2, len(token) + 1))

    def _cache(self, word: str) -> bytes:
        ids = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self._known) >= MAX_WORDS:
                self._known.clear()
            self._known[word] = ids
        return ids


def _cutter(uncuttable: str) -> re.Pattern[str]:
    """Matches one word: an optional leading space, text, and any further white space that is not a cut.

    A cut is before ` x` where neither white space nor an uncuttable character precedes, and in `x\\ny` before `y`.
    The pattern never backtracks. Groups are atomic because Python before 3.11.5 loses characters in possessive repeats
    of groups.
    """
    no_cut = f"(?<=[{re.escape(uncuttable)}]) (?=\\S)|" if uncuttable else ""
    gap = rf"(?:{no_cut}[^\S ]\s*+| \s++| \Z)"
    return re.compile(rf"(?: ?\S++|\s++(?:(?<!\S\n)\S++)?)(?>(?:{gap}(?:(?<!\S\n)\S++)?)*)")


MAX_ADDED_CHARS = 256  # of an added token: the depth of the regex in special_tokens
OFF_LOOP_BYTES = 16 << 10  # callers tokenize longer text outside the event loop
WORD_CACHE_CHARS = 64 << 10  # longer text bypasses the word cache, which would hold the GIL for too long

# Where the tokenizer itself prepends a space: nowhere, at the beginning, or also behind every special token.
PrefixSpace = Literal["never", "first", "always"]
Spelling = Literal["bytelevel", "metaspace"]  # how vocabulary entries encode bytes and spaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a tokenizer, independent of the file format."""

    model: models.Model
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    added: dict[int, AddedToken]  # matched in text before the model sees it; by id, ascending
    spelling: Spelling
    vocab_size: int
    bos_id: int | None
    add_bos: bool  # sequences begin with bos_id
    prefix_space: PrefixSpace
    unspaced: normalizers.Normalizer | None = None  # `normalizer` without the prefix space
    uncuttable: str | None = None  # see WordCache; None: word by word would not be exact


class Tokenizer:
    """Special tokens (control tokens, AddedToken.special) are parsed in text only when asked for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.add_bos = parts.add_bos and parts.bos_id is not None
        self.prefix_space = parts.prefix_space
        self._parsing = _assemble(parts, parts.normalizer)
        self._plain = _assemble(parts, parts.normalizer, special=False)
        for token_id, token in parts.added.items():
            if len(token.content) > MAX_ADDED_CHARS:
                raise BadCheckpoint(f"an added token has {len(token.content)} characters, more than {MAX_ADDED_CHARS}")
            if self._parsing.token_to_id(token.content) != token_id:
                raise BadCheckpoint(f"added token {token.content!r} cannot have the id {token_id}: ids are left out")
        self.special = {token.content: token_id for token_id, token in parts.added.items() if token.special}
        self.special_ids = frozenset(self.special.values())
        self.added = {token.content: token_id for token_id, token in parts.added.items()}  # special ones included
        self._added_text = "\0".join(token.content for token in parts.added.values())
        self.bound = cache(self._bound)
        self.token_bytes = TokenBytes(self._parsing, parts, self.special_ids)
        self._guarded = lru_cache(maxsize=4)(self._guard)
        self._word_cache = self._make_word_cache()
        pattern = trie.longest_match(self.special)
        self.match_special = re.compile(pattern).match
        self.split_special = re.compile(f"({pattern})").split  # ordinary and special in turn
        self._packed = {text: pack([token_id]) for text, token_id in self.special.items()}

    def longest_token_chars(self) -> int:
        """Characters of the longest token as spelled: a byte-level spelling has a character for every byte."""
        return max(map(len, self._parsing.get_vocab()))

    def entries(self, ids: Iterable[int]) -> list[str]:
        """Entries of the vocabulary, as the tokenizer spells them; empty for an id that it does not have."""
        return [self._parsing.id_to_token(token_id) or "" for token_id in ids]

    def encode(self, text: str, *, special: bool) -> bytes:
        """Ids of `text`, u32 little-endian, without a beginning-of-sequence token."""
        if self._word_cache is None or len(text) > WORD_CACHE_CHARS:
            return _encode(self._parsing if special else self._plain, text)
        if not special:
            return self._encode_words(text)
        pieces = self.split_special(text)
        ids = [self._packed[piece] if at % 2 else self._encode_words(piece) for at, piece in enumerate(pieces)]
        return b"".join(ids)

    def encode_marked(self, text: str, mark: str) -> bytes:
        """Like `encode` with special tokens, except that a special token with `mark` inside is ordinary text."""
        return _encode(self._guarded(mark), text) if mark else self.encode(text, special=True)

    def _bound(self, token_id: int) -> str | None:
        """The text of a special token before which text may be split and tokenized separately: one that neither
        depends on the text before it nor is part of another added token."""
        token = self._parts.added.get(token_id)
        if token is None or not token.special or token.lstrip or token.single_word:
            return None
        return token.content if self._added_text.count(token.content) == 1 else None

    def _encode_words(self, text: str) -> bytes:
        assert self._word_cache is not None
        if not text:
            return b""
        return self._word_cache.encode(" " + text if self.prefix_space == "always" else text)

    def _make_word_cache(self) -> WordCache | None:
        parts = self._parts
        if parts.uncuttable is None:
            return None
        assert parts.prefix_space != "first"
        unspaced = _assemble(parts, parts.unspaced, special=False) if parts.prefix_space == "always" else self._plain
        words = WordCache(lambda text: _encode(unspaced, text), parts.uncuttable)
        for token in parts.added.values():
            context_dependent = token.lstrip or token.rstrip or token.single_word
            if context_dependent or (not token.special and words.cuts(token.content)):
                return None
        return words

    def _guard(self, mark: str) -> tokenizers.Tokenizer:
        """Special tokens are matched in the raw text, so a mark inside one hides it; then marks are erased."""
        erase = normalizers.Replace(mark, "")
        inner = self._parts.normalizer
        return _assemble(self._parts, erase if inner is None else normalizers.Sequence([erase, inner]))


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, computed on first use. Special tokens have none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, parts: Parts, special_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special_ids, b""))
        self._tokenizer = tokenizer
        self._bytelevel = parts.spelling == "bytelevel"
        self._literal = frozenset(token.content for token in parts.added.values())

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self.spell(token_id)
        return value

    def spell(self, token_id: int) -> bytes:
        """The bytes of any token, special ones included."""
        text = self._tokenizer.id_to_token(token_id)
        if text is None:  # the embedding table may be larger than the vocabulary
            return b""
        if text in self._literal:
            return text.encode()
        if self._bytelevel:
            try:
                return text.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:  # not in the byte alphabet: literal
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _assemble(parts: Parts, normalizer: normalizers.Normalizer | None, *, special: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer with this normalizer. All of them share the vocabulary."""
    tokenizer = tokenizers.Tokenizer(parts.model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if parts.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = parts.pre_tokenizer
    tokenizer.add_tokens(list(parts.added.values()))
    tokenizer.encode_special_tokens = not special
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> bytes:
    try:
        if len(text) > OFF_LOOP_BYTES:  # a batch releases the GIL and needs half the memory
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        return pack(encoding.ids)
    except (TypeError, UnicodeEncodeError):  # raised by the library
        raise BadInput("the text contains a lone surrogate (half of a UTF-16 pair), which is not Unicode") from None


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet: every byte as a printable character; here character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
BYTE_CHARS = {byte: char for char, byte in _BYTE_OF.items()}  # the other way round, for str.translate of Latin-1
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
