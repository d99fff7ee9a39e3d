"""Secrets at rest: what is sealed opens in its own context and nowhere else, and shows nothing of itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.accounts.sealing import Sealer
from emberline.accounts.secret import Secret
from emberline.protocol.errors import Internal

ROOT = "0123456789abcdef" * 4
sealer = Sealer(Secret(ROOT), "test")


@given(st.text(max_size=300), st.text(max_size=20), st.text(max_size=20))
def test_what_is_sealed_opens(text: str, account: str, provider: str) -> None:
    sealed = sealer.seal(text, account, provider)
    assert sealer.open(sealed, account, provider) == text
    assert sealed != sealer.seal(text, account, provider)
    if len(text) > 3:
        assert text.encode() not in sealed


@settings(max_examples=50)
@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(sealer.seal("sk-secret", "a", "openai"))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Internal):
        sealer.open(bytes(sealed), "a", "openai")


@pytest.mark.parametrize("context", [("b", "openai"), ("a", "groq"), ("ao", "penai"), ("a",), ()])
def test_another_context_does_not_open_it(context: tuple[str, ...]) -> None:
    sealed = sealer.seal("sk-secret", "a", "openai")
    with pytest.raises(Internal):
        sealer.open(sealed, *context)
    for other in (Sealer(Secret(ROOT[::-1]), "test"), Sealer(Secret(ROOT), "another")):
        with pytest.raises(Internal, match="does not open"):
            other.open(sealed, "a", "openai")


@pytest.mark.parametrize("length", range(14))
def test_a_secret_that_was_cut_does_not_open(length: int) -> None:
    with pytest.raises(Internal):
        sealer.open(sealer.seal("sk-secret", "a")[:length], "a")
