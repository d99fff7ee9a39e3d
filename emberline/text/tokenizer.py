"""Text to token ids, and a token's bytes. Made by gguf_tokenizer.py or hf_tokenizer.py."""

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
from emberline.text import special_tokens as trie
from emberline.weights.model_config import BadCheckpoint

MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 48  # longer ones (data, paths) hardly come again
CHARS_PER_WORD = 40  # of text at once, for the time that a single word takes: 12 µs
LEARNED_CHARS = 256  # of text at once, for which a word is learned
FEW = 16  # words that are learned in any case

Encode = Callable[[str], bytes]


class Words:
    """`encode` tokenises one piece of ordinary text; `uncuttable` are characters that a token joins to a space."""

    def __init__(self, encode: Encode, uncuttable: Iterable[str] = ()) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}
        self._cut = _cutter("".join(uncuttable)).findall

    def encode(self, text: str) -> bytes:
        known = self._known
        words: list[str] = self._cut(text)
        try:
            return b"".join([known[word] for word in words])
        except KeyError:
            new = Counter(word for word in words if word not in known)
        if len(new) > FEW and len(new) * CHARS_PER_WORD > len(text):
            for word, _ in new.most_common(FEW + len(text) // LEARNED_CHARS):
                self._learn(word)
            return self._encode(text)
        return b"".join([known.get(word) or self._learn(word) for word in words])

    def cuts(self, token: str) -> bool:
        """Whether text that contains this could be cut in the middle of it."""
        ends = set(accumulate(map(len, self._cut(f"\0{token}\0"))))
        return not ends.isdisjoint(range(2, len(token) + 1))

    def _learn(self, word: str) -> bytes:
        ids = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self._known) >= MAX_WORDS:
                self._known.clear()
            self._known[word] = ids
        return ids


def _cutter(uncuttable: str) -> re.Pattern[str]:
    """Finds words: an optional leading space, text, and on over any white space that is not a cut.

    A cut lies before ` x` when what precedes is neither white space nor uncuttable, and in `x\\ny` before `y`.
    What has matched never has to be given back for the rest to match, so nothing is kept for trying again. The groups
    are in an atomic one, for Python before 3.11.5 loses characters in possessive repeats of groups.
    """
    no_cut = f"(?<=[{re.escape(uncuttable)}]) (?=\\S)|" if uncuttable else ""
    gap = rf"(?:{no_cut}[^\S ]\s*+| \s++| \Z)"
    return re.compile(rf"(?: ?\S++|\s++(?:(?<!\S\n)\S++)?)(?>(?:{gap}(?:(?<!\S\n)\S++)?)*)")


MAX_ADDED_CHARS = 256  # of a special token's text; trie.py goes that deep
OFF_LOOP_BYTES = 16 << 10  # longer text is tokenised off the event loop, by the caller
WORDS_CHARS = 64 << 10  # longer text is tokenised at once: words would keep the interpreter from others for too long

# Where the tokenizer puts a space before text by itself: nowhere, at the beginning, or after every special token too.
PrefixSpace = Literal["never", "first", "always"]
Spelling = Literal["bytelevel", "metaspace"]  # how vocabulary entries write bytes and spaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a tokenizer is made of, whichever file it was read from."""

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
    uncuttable: str | None = None  # see Words; None: word by word would not be exact


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
        self.added = frozenset(token.content for token in parts.added.values())
        self._added_text = "\0".join(token.content for token in parts.added.values())
        self.bound = cache(self._bound)
        self.token_bytes = TokenBytes(self._parsing, parts, self.special_ids)
        self._guarded = lru_cache(maxsize=4)(self._guard)
        self._words = self._make_words()
        pattern = trie.longest(self.special)
        self.match_special = re.compile(pattern).match
        self.split_special = re.compile(f"({pattern})").split  # ordinary and special in turn
        self._packed = {text: pack([token_id]) for text, token_id in self.special.items()}

    def longest_token_chars(self) -> int:
        """Of the vocabulary as it is spelled: a byte-level spelling has a character for every byte."""
        return max(map(len, self._parsing.get_vocab()))

    def encode(self, text: str, *, special: bool) -> bytes:
        """Ids of `text`, u32 little-endian, without a beginning-of-sequence token."""
        if self._words is None or len(text) > WORDS_CHARS:
            return _encode(self._parsing if special else self._plain, text)
        if not special:
            return self._encode_words(text)
        pieces = self.split_special(text)
        ids = [self._packed[piece] if at % 2 else self._encode_words(piece) for at, piece in enumerate(pieces)]
        return b"".join(ids)

    def encode_marked(self, text: str, mark: str) -> bytes:
        """As `encode` with special tokens, except that a special token with `mark` inside is ordinary text."""
        return _encode(self._guarded(mark), text) if mark else self.encode(text, special=True)

    def _bound(self, token_id: int) -> str | None:
        """The text of a special token at which text may be cut and tokenised apart: one that neither looks at the
        text before it nor stands inside another added token."""
        token = self._parts.added.get(token_id)
        if token is None or not token.special or token.lstrip or token.single_word:
            return None
        return token.content if self._added_text.count(token.content) == 1 else None

    def _encode_words(self, text: str) -> bytes:
        assert self._words is not None
        if not text:
            return b""
        return self._words.encode(" " + text if self.prefix_space == "always" else text)

    def _make_words(self) -> Words | None:
        parts = self._parts
        if parts.uncuttable is None:
            return None
        assert parts.prefix_space != "first"
        bare = _assemble(parts, parts.unspaced, special=False) if parts.prefix_space == "always" else self._plain
        words = Words(lambda text: _encode(bare, text), parts.uncuttable)
        for token in parts.added.values():
            looks_around = token.lstrip or token.rstrip or token.single_word
            if looks_around or (not token.special and words.cuts(token.content)):
                return None
        return words

    def _guard(self, mark: str) -> tokenizers.Tokenizer:
        """Special tokens are found in the raw text, so a mark inside one hides it; then the marks are taken out."""
        erase = normalizers.Replace(mark, "")
        inner = self._parts.normalizer
        return _assemble(self._parts, erase if inner is None else normalizers.Sequence([erase, inner]))


class TokenBytes(dict[int, bytes]):
    """The bytes that a token stands for, filled in as they are asked for. Special tokens stand for none."""

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
        if text is None:  # the model's table may be longer than the vocabulary
            return b""
        if text in self._literal:
            return text.encode()
        if self._bytelevel:
            try:
                return text.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:  # an entry outside the byte alphabet is literal
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _assemble(parts: Parts, normalizer: normalizers.Normalizer | None, *, special: bool = True) -> tokenizers.Tokenizer:
    """One view of the vocabulary. The views share the model's tables."""
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
        if len(text) > OFF_LOOP_BYTES:  # a batch leaves the interpreter to others meanwhile, and needs half the memory
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        return pack(encoding.ids)
    except (TypeError, UnicodeEncodeError):  # what the library says to it
        raise BadInput("the text contains a lone surrogate (half of a UTF-16 pair), which is not Unicode") from None


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet: every byte as a printable character; here character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
