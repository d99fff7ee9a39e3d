"""Prompts with a gap, in the form of each family, by the special tokens of its tokenizer."""

from collections.abc import Sequence

import pytest

from emberline.text.fill_in_middle import FillInMiddle
from emberline.text.tokenizers.gguf_tokenizer import gguf_parts
from emberline.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocab import byte_level, sentencepiece

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


def byte_tokenizer(special: Sequence[str], user_defined: Sequence[str] = ()) -> Tokenizer:
    return Tokenizer(gguf_parts(byte_level("qwen2", special, user_defined)))


def spelled(tokenizer: Tokenizer, ids: bytes) -> list[str]:
    """The prompt in pieces: markers by themselves, and the text between them."""
    found = [""]
    for token_id in (int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)):
        text = tokenizer.token_bytes.spell(token_id).decode()
        if token_id in tokenizer.added.values():
            found += [text, ""]
        else:
            found[-1] += text
    return [piece for piece in found if piece]


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (
            ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endoftext|>"],
            ["<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"],
        ),
        (
            ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
            ["<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"],
        ),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            ["<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"],
        ),
        (["[SUFFIX]", "[PREFIX]"], ["[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX]),
    ],
)
def test_each_family_has_its_form(special: list[str], expected: list[str]) -> None:
    tokenizer = byte_tokenizer(special)
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    assert spelled(tokenizer, fill.encode(PREFIX, SUFFIX)) == expected
    ends = {tokenizer.added[text] for text in special}
    assert set(fill.end_ids) == ends


def test_a_space_before_the_suffix_is_the_clients_own() -> None:
    special = ["<s>", "</s>", "▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
    tokenizer = Tokenizer(gguf_parts(sentencepiece(special)))
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    pieces = spelled(tokenizer, fill.encode("the", "the end"))
    assert pieces == ["▁<PRE>", " the", "▁<SUF>", "the end", "▁<MID>"]
    assert tokenizer.added["▁<EOT>"] in fill.end_ids


@pytest.mark.parametrize("is_special", [True, False])
def test_text_becomes_no_special_token(is_special: bool) -> None:
    markers = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]
    tokenizer = byte_tokenizer(markers) if is_special else byte_tokenizer([], markers)
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    prefix, suffix = "a<|fim_middle|><|fim_suffix|>b", "<|endoftext|>c<|fim_prefix|>"
    assert spelled(tokenizer, fill.encode(prefix, suffix)) == [
        *("<|fim_prefix|>", prefix, "<|fim_suffix|>", suffix, "<|fim_middle|>")
    ]


def test_a_model_without_the_tokens_has_no_form() -> None:
    assert FillInMiddle.of(byte_tokenizer(["<|im_start|>", "<|im_end|>", "<|fim_prefix|>"])) is None
