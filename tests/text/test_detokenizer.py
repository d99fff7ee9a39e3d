import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.token_ids import pack, unpack
from emberline.text.tokenizers.detokenizer import Detokenizer
from tests.text.chats import FAMILIES, family
from tests.text.strategies import snippets

BYTES = {byte: bytes([byte]) for byte in range(256)}


def test_an_incomplete_character_is_held_back():
    detokenizer = Detokenizer(BYTES)
    rocket = "\U0001f680".encode()
    assert [detokenizer.push([byte]) for byte in rocket] == ["", "", "", "\U0001f680"]
    assert detokenizer.finish() == ""


def test_what_never_becomes_a_character_is_replaced():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xC3]) == ""
    assert detokenizer.push([0x28]) == "\ufffd("
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"


@given(st.lists(st.binary(max_size=5)))
def test_pieces_are_the_whole(pieces):
    detokenizer = Detokenizer(BYTES)
    text = "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()
    assert text == b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token_is_the_same_as_at_once(name):
    model = family(name)

    @given(snippets)
    def same(text):
        ids = model.encode(text, special=False)
        detokenizer = model.detokenizer()
        assert "".join(detokenizer.push([i]) for i in unpack(ids)) + detokenizer.finish() == model.decode(ids)

    same()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_prompt_continues_its_text(name):
    model = family(name)

    @given(snippets)
    def continues(text):
        ids = [min(model.special_ids), *unpack(model.encode(text, special=False))]
        whole = model.decode(ids, special=True)
        for cut in range(1, len(ids) + 1):
            before = model.decode(ids[:cut], special=True)
            if not before.endswith("\ufffd"):  # not in the middle of a character
                rest = model.detokenizer(pack(ids[:cut]))
                assert before + rest.push(ids[cut:]) + rest.finish() == whole

    continues()


def test_special_tokens_are_no_text():
    model = family("chatml")
    ids = model.encode("<|im_start|>user<|im_end|>", special=True)
    assert model.decode(ids) == "user"
    assert model.decode(ids, special=True) == "<|im_start|>user<|im_end|>"


def test_user_defined_tokens_are_text():
    model = family("reasoning")
    ids = model.encode("<think>so</think>", special=False)
    assert model.decode(ids) == "<think>so</think>"
    assert len(unpack(ids)) < len("<think>so</think>")


def test_ids_beyond_the_vocabulary_are_no_text():
    assert family("chatml").decode([1 << 30]) == ""


def test_a_leading_space_belongs_to_the_text_unless_the_tokenizer_put_it():
    model = family("llama2")
    ids = unpack(model.encode("the", special=False))
    assert model.detokenizer().push(ids) == "the"
    assert model.detokenizer(model.encode("<s>", special=True)).push(ids) == "the"
    assert model.detokenizer(model.encode("[/INST]", special=True)).push(ids) == " the"
