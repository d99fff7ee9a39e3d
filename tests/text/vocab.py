"""Small real tokenizers, trained on the spot, as GGUF metadata and as Hugging Face folders."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

PROSE = (
    "The engine plans a step, launches it, and absorbs what the step before has given. A request ends exactly once: "
    "finished, failed or cancelled.\n\nDer Zug fährt über die Brücke; naïve café, señor, ¿qué tal? "
    "数字は 123 と 4567 です。\n"
    "def plan(queue):\n    for item in queue:\n        if item.ready:\n            yield item  # first come\n\n"
    'user assistant system model header the and then there they\'re it\'s we\'ll \U0001f680 {"name": "f", "a": [1, 2]} '
    "<b>bold</b> </s> <think> -- ---- ==== ........  two  spaces   three\n\n\n\ttab\n"
) * 3
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@cache
def _trained_bytes() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROSE], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@cache
def _trained_pieces() -> list[str]:
    """Pieces of a SentencePiece-like vocabulary, the likeliest first, after all single characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    return [piece for piece in pieces if "\n" not in piece]


def byte_level(pre: str, special: Sequence[str], user_defined: Sequence[str] = (), **fields: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE tokenizer; the added tokens come last, special ones first."""
    vocab, merges = _trained_bytes()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *special, *user_defined]
    types = [NORMAL] * len(vocab) + [CONTROL] * len(special) + [USER_DEFINED] * len(user_defined)
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types}
    metadata["merges"] = [" ".join(pair) for pair in merges]
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **fields}.items()}


def sentencepiece(special: Sequence[str], user_defined: Sequence[str] = (), **fields: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece tokenizer: <unk>, the special tokens, bytes, pieces with scores."""
    pieces = [piece for piece in _trained_pieces() if piece not in user_defined]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *special, *byte_tokens, *user_defined, *pieces]
    types = [UNKNOWN, *[CONTROL] * len(special), *[BYTE] * 256, *[USER_DEFINED] * len(user_defined)]
    scores = [0.0] * len(types) + [-float(rank) for rank in range(len(pieces))]
    types += [NORMAL] * len(pieces)
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **fields}.items()}
