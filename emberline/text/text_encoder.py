"""The tokenizer of an encoder: texts, and pairs of texts, to token ids with the model's special tokens around them."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import tokenizers

from emberline.protocol.errors import BadInput, ContextExceeded
from emberline.protocol.token_ids import pack
from emberline.weights.hf_checkpoint import folder_config
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.task_config import TaskConfig

MAX_TOKEN_CHARS = 100  # a text with so many characters for each token that fits is refused without being tokenized


class EncodedTexts(NamedTuple):
    ids: bytes  # u32 little-endian, the texts end to end
    lens: list[int]
    second_starts: list[int] | None = None  # of pairs: where the second text begins


class TextEncoder:
    """Special tokens in a client's text are ordinary text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, task: TaskConfig, vocab_size: int, max_len: int) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self.task = task
        self.vocab_size = vocab_size
        self.max_len = max_len
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, task: TaskConfig) -> "TextEncoder":
        """Load the encoder from a Hugging Face folder. Raises BadCheckpoint."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadCheckpoint(f"{folder.name} has no tokenizer.json; convert its tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BadCheckpoint(f"tokenizer.json cannot be read: {error}") from None
        config = folder_config(folder)
        return cls(tokenizer, task, config.vocab_size, min(config.context_len, task.max_len or config.context_len))

    @cached_property
    def _truncating(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        tokenizer.enable_truncation(self.max_len)
        return tokenizer

    def encode(
        self, texts: Sequence[str], query: str | None = None, *, truncate: bool = False, most: int | None = None
    ) -> EncodedTexts:
        """With a query, each text is the second of a pair. Errors name the text by its index: `texts[3]`.

        `most`: tokens of each text, if they are to be fewer than the model takes; one of the text's own is kept."""
        limit = self.max_len if most is None else min(most, self.max_len)
        most_chars = MAX_TOKEN_CHARS * self.max_len
        for index, text in enumerate(texts):
            n_chars = len(text) + len(query or "")
            if n_chars > most_chars and not truncate:
                raise ContextExceeded(
                    f"the text has {n_chars} characters, far beyond the {self.max_len} tokens that the model takes: "
                    "shorten it, or ask for truncation",
                    param=f"texts[{index}]",
                )
        cut = [text[:most_chars] for text in texts] if truncate else list(texts)
        query = query[:most_chars] if query is not None and truncate else query
        tokenizer = self._truncating if truncate else self._tokenizer
        try:
            if len(cut) == 1:  # a batch would start threads
                found = [tokenizer.encode(cut[0]) if query is None else tokenizer.encode(query, cut[0])]
            else:
                found = tokenizer.encode_batch_fast(cut if query is None else [(query, text) for text in cut])
        except (TypeError, UnicodeEncodeError):  # raised by the library
            message = "a text contains a lone surrogate (half of a UTF-16 pair), which is not Unicode"
            raise BadInput(message, param="texts") from None
        all_ids = [_cut(encoding, limit) if truncate and query is None else encoding.ids for encoding in found]
        lens = [len(ids) for ids in all_ids]
        for index, length in enumerate(lens):
            self.check_length(length, index, None if truncate else limit)
        ids = b"".join(map(pack, all_ids))
        return EncodedTexts(ids, lens, None if query is None else [_second_start(e) for e in found])

    def check_length(self, n_tokens: int, index: int, most: int | None = None) -> None:
        """Raise ContextExceeded for a text of more than `most` tokens, or more than the model takes."""
        limit = self.max_len if most is None else most
        if n_tokens > limit:
            raise ContextExceeded(
                f"the input exceeds maximum context length: the text has {n_tokens} tokens, and at most {limit} are "
                "taken: shorten it, or ask for truncation",
                param=f"texts[{index}]",
            )
        if not n_tokens:
            raise BadInput("the text has no tokens", param=f"texts[{index}]")


def _cut(encoding: tokenizers.Encoding, limit: int) -> list[int]:
    """The first ids, and the special ones at the end."""
    special = encoding.special_tokens_mask
    n_end = next((n for n, is_special in enumerate(reversed(special)) if not is_special), 0)
    n_begin = next((n for n, is_special in enumerate(special) if not is_special), 0)
    ids: list[int] = encoding.ids
    kept = max(limit - n_end, n_begin + 1)
    return ids if len(ids) <= kept + n_end else ids[:kept] + ids[len(ids) - n_end :]


def _second_start(encoding: tokenizers.Encoding) -> int:
    """By token types: models without them (RoBERTa) have one type only, and no second text."""
    types = encoding.type_ids
    return types.index(1) if 1 in types else len(types)
