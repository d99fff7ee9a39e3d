import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from emberline.protocol.errors import BadInput
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from emberline.text.tokenizers.gguf_tokenizer import gguf_parts
from emberline.text.tokenizers.tokenizer import OFF_LOOP_BYTES, WORD_CACHE_CHARS, Tokenizer
from emberline.weights.gguf import GGUFFile
from emberline.weights.model_config import BadCheckpoint
from tests.text.chats import FAMILIES, family
from tests.text.strategies import snippets
from tests.text.vocab import byte_level, sentencepiece

# What llama.cpp makes of these with the same file.
SMOLLM2_IDS = {
    "Hello world": [19556, 905],
    " 3.14159 and 2024\n\n  x": [216, 35, 30, 33, 36, 33, 37, 41, 284, 216, 34, 32, 34, 36, 8866, 1792],
    "I'll don't THEY'RE": [57, 3060, 1326, 982, 6462, 73, 23, 3256],
    "日本語 naïve 🚀": [23274, 115, 40993, 179, 120, 248, 15486, 46494, 15107, 244, 218],
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
}


@pytest.fixture(scope="module")
def smol(smollm2):
    return TextModel.load(smollm2)


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_tokenizes_as_llama_cpp_does(smol, text):
    assert unpack(smol.encode(text, special=False)) == SMOLLM2_IDS[text]


def test_smollm2_is_what_its_authors_configured(smol, smollm2):
    """Their tokenizer.json: digits one by one, then GPT-2's byte-level BPE. Built here from the file's tables."""
    metadata = GGUFFile.open(smollm2).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Library(models.BPE(vocab=vocab, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    @given(st.one_of(st.text(), snippets))
    def same(text):
        assert unpack(smol.encode(text, special=False)) == theirs.encode(text).ids

    same()


def test_smollm2_round_trips(smol):
    """Text of the bytes that its authors kept: they left out some that hardly occur, which then vanish."""
    spelled = [text for token_id in range(smol.vocab_size) if len(text := smol.token_text(token_id)) == 1]
    assert len(spelled) > 230
    missing = frozenset(range(256)) - frozenset(b"".join(spelled))
    texts = st.one_of(snippets, st.text()).filter(lambda text: missing.isdisjoint(text.encode()))

    @given(texts)
    def round_trips(text):
        assert smol.decode(smol.encode(text, special=False)) == text

    round_trips()


def test_smollm2_knows_its_special_tokens(smol):
    assert unpack(smol.encode("<|im_start|>user", special=True))[0] == 1
    assert 1 not in unpack(smol.encode("<|im_start|>user", special=False))
    assert smol.special_ids == frozenset(range(17))
    assert smol.token_text(2) == b"<|im_end|>"
    assert smol.vocab_size == 49152
    assert not smol.tokenizer.add_bos


@pytest.mark.parametrize("name", FAMILIES)
def test_text_round_trips(name):
    model = family(name)

    @given(st.one_of(st.text(), snippets))
    def round_trips(text):
        ids = model.encode(text, special=False)
        assert not model.special_ids & set(unpack(ids))
        expected = unicodedata.normalize("NFC", text) if name in ("chatml", "reasoning", "plain") else text
        if model.tokenizer.prefix_space == "always" or name == "gemma":
            expected = expected.replace("▁", " ")  # SentencePiece's own letter for a space
        assert model.decode(ids) == expected

    round_trips()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("special", [False, True])
def test_word_by_word_is_the_same_as_at_once(name, special):
    tokenizer = family(name).tokenizer
    whole = tokenizer._parsing if special else tokenizer._plain
    assert tokenizer._word_cache is not None

    @given(st.one_of(st.text(), snippets, st.lists(snippets).map(" ".join)))
    def same(text):
        assert unpack(tokenizer.encode(text, special=special)) == whole.encode(text, add_special_tokens=False).ids

    same()


def test_a_token_that_spans_a_space_is_found():
    """As Gemma's `>▁</`: text is not cut where such a token may be."""
    metadata = sentencepiece(("<bos>",), add_space_prefix=False)
    pieces = [piece for piece in ("▁<", "▁</", ">▁</") if piece not in metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"] += pieces
    metadata["tokenizer.ggml.token_type"] += [1] * len(pieces)
    metadata["tokenizer.ggml.scores"] += [100.0] * len(pieces)
    tokenizer = Tokenizer(gguf_parts(metadata))
    ids = unpack(tokenizer.encode("<b> </b> the", special=False))
    assert metadata["tokenizer.ggml.tokens"].index(">▁</") in ids
    assert ids == tokenizer._plain.encode("<b> </b> the", add_special_tokens=False).ids


def test_user_defined_tokens_are_never_cut():
    tokens = ("of the", "end ", "\nnext")
    tokenizer = Tokenizer(gguf_parts(byte_level("qwen2", ("<|im_end|>",), tokens)))
    ids = unpack(tokenizer.encode("out of the way, end of\nnext line", special=False))
    n_tokens = tokenizer.vocab_size
    assert [token_id - n_tokens + 3 for token_id in ids if token_id >= n_tokens - 3] == [0, 1, 2]


def test_long_text_is_tokenized_as_short_text_is():
    tokenizer = family("llama3").tokenizer
    text = "The engine plans a step.\n" * 1000
    assert len(text) > OFF_LOOP_BYTES
    once = unpack(tokenizer.encode(text[:25], special=False))
    assert unpack(tokenizer.encode(text, special=False)) == once * 1000


@pytest.mark.parametrize("name", FAMILIES)
def test_long_text_is_the_same_however_much_of_it_is_new(name):
    tokenizer = family(name).tokenizer
    draw = random.Random(name)
    rare = " ".join("".join(draw.choices("abcdefgh\n", k=draw.randint(1, 12))) for _ in range(3000))
    special = min(tokenizer.special, key=len)
    for text in (rare, rare.replace("a", "e "), special.join([rare[:9000], rare[9000:]])):
        assert OFF_LOOP_BYTES < len(text) <= WORD_CACHE_CHARS
        whole = tokenizer._parsing.encode(text, add_special_tokens=False).ids
        for _ in range(3):  # more of it is learned each time
            assert unpack(tokenizer.encode(text, special=True)) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_a_marked_special_token_is_ordinary_text(name):
    model = family(name)
    tokenizer = model.tokenizer

    @given(snippets)
    def ordinary(text):
        mark = model.guard.choose(text)
        hidden = tokenizer.encode_marked(model.guard.mark(text, mark), mark)
        assert hidden == tokenizer.encode(text, special=False)

    ordinary()


def test_a_prefix_space_is_put_and_taken_after_special_tokens():
    model = family("phi")
    assert model.tokenizer.prefix_space == "always"
    text = "<|user|>the<|end|> and<|assistant|>"
    assert model.decode(model.encode(text, special=True), special=True) == text
    assert model.token_text(unpack(model.encode("the", special=False))[0]).startswith(b" ")


def test_beginning_of_sequence_is_never_doubled():
    model = family("llama3")
    assert unpack(model.encode_prompt("hi"))[0] == model.bos_id
    assert unpack(model.encode_prompt("<|begin_of_text|>hi")).count(model.bos_id) == 1
    assert model.with_bos(model.with_bos(b"")) == model.with_bos(b"")
    assert family("chatml").encode_prompt("hi") == family("chatml").encode("hi", special=False)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("length", [1, OFF_LOOP_BYTES, WORD_CACHE_CHARS])
def test_lone_surrogates_are_refused(special, length):
    with pytest.raises(BadInput, match="surrogate"):
        family("chatml").encode("x" * length + "\ud800", special=special)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"pre": "no-such"}, "'no-such'"),
        ({"bos_token_id": 1 << 20}, "bos_token_id"),
        ({"tokens": None}, "no tokenizer"),
        ({"merges": None}, "merges"),
        ({"merges": ["x y", "zz"]}, "merges"),
        ({"token_type": [1, 2]}, "token_type"),
        ({"bos_token_id": "one"}, "bos_token_id"),
    ],
)
def test_a_broken_tokenizer_is_named(change, message):
    metadata = byte_level("qwen2", ("<|im_end|>",))
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(BadCheckpoint, match=message):
        gguf_parts(metadata)


def test_monstrous_tokens_are_refused():
    with pytest.raises(BadCheckpoint, match="an added token has 300 characters"):
        Tokenizer(gguf_parts(byte_level("qwen2", ("x" * 300,))))
    for metadata in (byte_level("qwen2", ("x" * 2000,)), sentencepiece(("<s>", "x" * 2000))):
        with pytest.raises(BadCheckpoint, match="a token has 2000 characters"):
            gguf_parts(metadata)
    Tokenizer(gguf_parts(byte_level("qwen2", ("x" * 256, "y" * 255))))


def test_a_token_that_is_listed_twice_is_the_first():
    metadata = byte_level("qwen2", ("<|im_end|>",))
    first = metadata["tokenizer.ggml.tokens"].index("a")
    metadata["tokenizer.ggml.tokens"].append("a")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert unpack(Tokenizer(gguf_parts(metadata)).encode("a", special=False)) == [first]


def test_sentencepiece_without_scores_is_named():
    metadata = sentencepiece(("<s>",))
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(BadCheckpoint, match="scores"):
        gguf_parts(metadata)
