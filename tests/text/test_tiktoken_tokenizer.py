"""A tiktoken ranks file against tiktoken's own rule: merge the neighbors with the lowest rank, the leftmost first."""

import json
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.request import Message
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from emberline.text.tokenizers.gguf_tokenizer import KIMI, Recipe, pre_tokenizer
from emberline.text.tokenizers.tiktoken_tokenizer import N_SPECIAL, tiktoken_parts
from emberline.text.tokenizers.tokenizer import Tokenizer
from emberline.weights.model_config import BadCheckpoint


def write(folder: Path, tokens: list[bytes], settings: dict[str, object] | None = None) -> Path:
    lines = [b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return folder


def trained(texts: list[bytes], n_merges: int) -> list[bytes]:
    """All bytes, then the tokens that byte-pair encoding learns from the texts."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in text] for text in texts]
    for _ in range(n_merges):
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None:
            break
        if best[0] + best[1] not in tokens:
            tokens.append(best[0] + best[1])
        words = [joined(word, best) for word in words]
    return tokens


def joined(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def tiktoken(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 1:
        found = [(ranks[left + right], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in ranks]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


ALPHABET = "abc =\n你A1"


@settings(max_examples=30, deadline=None)
@given(
    corpus=st.lists(st.text("abc =", min_size=2, max_size=30), min_size=1, max_size=6),
    extra=st.lists(st.text("abc", min_size=3, max_size=6), max_size=4, unique=True),
    texts=st.lists(st.text(ALPHABET, max_size=60), min_size=1, max_size=8),
)
def test_ids_are_tiktokens(
    tmp_path_factory: pytest.TempPathFactory, corpus: list[str], extra: list[str], texts: list[str]
) -> None:
    """`extra`: tokens that no merge may ever make, as added vocabularies have them."""
    tokens = trained([text.encode() for text in corpus], 30)
    tokens += [text.encode() for text in extra if text.encode() not in tokens]
    tokenizer = Tokenizer(tiktoken_parts(write(tmp_path_factory.mktemp("ranks"), tokens), {}))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    split = pre_tokenizer(Recipe((KIMI,)))
    for text in [*texts, *corpus]:
        pieces = [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]
        assert "".join(pieces) == text
        want = [token_id for piece in pieces for token_id in tiktoken(piece.encode(), ranks)]
        assert list(unpack(tokenizer.encode(text, special=False))) == want
        assert b"".join(tokenizer.token_bytes[token_id] for token_id in want) == text.encode()


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    named = {259: "[BOS]", 260: "[EOS]", 261: "<|im_end|>", 262: "<|im_user|>", 263: "<|im_assistant|>"}
    named |= {264: "<|im_middle|>", 270: "<think>", 271: "</think>"}
    decoder = {str(i): {"content": text, "special": i < 265} for i, text in named.items()}
    settings = {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}"
    )
    return write(tmp_path, tokens, settings)


def test_folder_of_kimis_form(kimi: Path) -> None:
    model = TextModel.load(kimi)
    assert model.vocab_size == 259 + N_SPECIAL
    assert model.tokenizer.special["<|im_end|>"] == 261
    assert model.tokenizer.special["<|reserved_token_300|>"] == 300
    assert model.reasoning_format is not None
    assert model.reasoning_format.tokens == {"<think>": 270, "</think>": 271}
    rendered = model.render([Message("user", "the")])
    ids = list(unpack(model.encode(rendered, special=True)))
    assert ids[0] == 262
    assert ids[-2:] == [264, 270]
    assert model.decode(ids, special=True) == rendered
    assert unpack(model.encode("<|im_end|>", special=False)) != [261]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!! 256", "line 257"),
        (b"YWI= 300", "line 257"),
        (b"YQ== 256", "line 257"),
        (b" 256", "line 257"),
    ],
)
def test_bad_ranks_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    write(tmp_path, [bytes([byte]) for byte in range(256)])
    with (tmp_path / "tiktoken.model").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(BadCheckpoint, match=message):
        TextModel.load(tmp_path)


def test_every_byte_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no token for the byte 255"):
        TextModel.load(write(tmp_path, [bytes([byte]) for byte in range(255)]))


def test_added_token_outside_the_reserved_ids_is_named(tmp_path: Path) -> None:
    settings: dict[str, object] = {"added_tokens_decoder": {"7": {"content": "<|x|>"}}}
    with pytest.raises(BadCheckpoint, match="added token '7'"):
        TextModel.load(write(tmp_path, [bytes([byte]) for byte in range(256)], settings))
