"""Prompts with a gap that the model fills: the texts before and after it, each behind a token for that.

A model is taken to be trained for it if its tokenizer has all tokens of a form.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from emberline.text.tokenizers.tokenizer import Tokenizer


class FillForm(NamedTuple):
    """Prompt format that a family of models was trained on for filling in the middle: each piece of text follows its
    token."""

    prefix: str
    suffix: str
    middle: str  # the reply follows it; empty: the reply follows the text before the gap
    suffix_first: bool = False


FORMS = (
    FillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coders, CodeGemma, Granite 4
    FillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    FillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek coders
    FillForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FillForm("<PRE>", "<SUF>", "<MID>"),
    FillForm("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
# Tokens after which nothing of the middle follows, besides those that end every reply of the model.
ENDS = (
    *(
        "<|endoftext|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|file_separator|>",
        "<|cursor|>",
        "<|im_end|>",
    ),
    *("<fim_pad>", "<file_sep>", "<repo_name>", "<fim-pad>"),
    *("<｜end▁of▁sentence｜>", "<|EOT|>", "▁<EOT>", "<EOT>", "</s>", "[MIDDLE]"),
)
_BEFORE = "☺"  # text before which a tokenizer puts its space, instead of before the suffix


class FillInMiddle:
    """Builds such prompts for one model."""

    def __init__(self, form: FillForm, tokenizer: Tokenizer) -> None:
        self._form, self._tokenizer = form, tokenizer
        added = tokenizer.added
        self._markers = {text: added[text].to_bytes(4, "little") for text in form[:3] if text}
        ends = (*ENDS, *self._markers)
        self.end_ids = tuple(sorted({added[text] for text in ends if text in added}))
        # Some tokenizers parse these tokens in any text, because they are not marked as special.
        self._literal = re.compile("|".join(re.escape(text) for text in ends if text in added))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillInMiddle | None":
        """The form of a model. Returns None if it has none."""
        added: Mapping[str, int] = tokenizer.added
        form = next((form for form in FORMS if all(text in added for text in form[:3] if text)), None)
        return None if form is None else cls(form, tokenizer)

    def encode(self, prefix: str, suffix: str) -> bytes:
        """Ids (u32 little-endian) of a prompt, without a BOS token. Neither text becomes a special token."""
        form = self._form
        before = self._markers[form.prefix] + self._encode(prefix)
        after = self._markers[form.suffix] + self._encode_unspaced(suffix)
        if form.suffix_first:
            return after + before
        return before + after + self._markers[form.middle]

    def _encode(self, text: str) -> bytes:
        """Encode text in which no special token is parsed: where it spells one, it is cut inside it."""
        cuts = [0, *(found.start() + 1 for found in self._literal.finditer(text)), len(text)]
        pieces = (text[begin:end] for begin, end in pairwise(cuts) if begin < end)
        return b"".join(self._tokenizer.encode(piece, special=False) for piece in pieces)

    def _encode_unspaced(self, text: str) -> bytes:
        """Encode text that follows other text: without the space that some tokenizers put before any."""
        if self._tokenizer.prefix_space == "never":
            return self._encode(text)
        head = self._encode(_BEFORE)
        whole = self._encode(_BEFORE + text)
        return whole[len(head) :] if whole.startswith(head) else self._encode(text)
