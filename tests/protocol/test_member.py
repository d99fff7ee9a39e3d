import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.member import Announcement, Signed, Standing, connection_token, read_message, sign, verified

KEY = b"k" * 32


def announcement(**more: object) -> Announcement:
    fields: dict[str, object] = {
        "challenge": "c",
        "name": "w0",
        "instance": "0" * 32,
        "address": "tcp:10.0.0.2:7070",
        "role": "both",
        "model": "m",
        "fingerprint": "f",
        "version": 5,
    }
    return Announcement(**{**fields, **more})  # type: ignore[arg-type]


def test_a_signed_message_comes_back_and_only_with_its_key() -> None:
    said = announcement(region="eu")
    assert verified(KEY, sign(KEY, said), Announcement, "no") == said
    with pytest.raises(Unauthorized, match="wrong key"):
        verified(b"o" * 32, sign(KEY, said), Announcement, "wrong key")


@given(st.integers(0, 400), st.integers(1, 255))
def test_no_byte_of_a_signed_message_can_be_changed(at: int, by: int) -> None:
    signed = sign(KEY, announcement())
    text = bytearray(signed.message.encode())
    text[at % len(text)] ^= by
    with pytest.raises(Unauthorized):
        verified(KEY, Signed(text.decode("latin-1"), signed.proof), Announcement, "changed")


def test_a_proof_of_one_kind_is_none_of_another() -> None:
    """Or a core's answer could be sent back to it as an announcement."""
    signed = sign(KEY, announcement())
    with pytest.raises(Unauthorized):
        verified(KEY, signed, Standing, "kind")


def test_a_message_of_a_newer_version_with_more_fields_is_verified() -> None:
    newer = msgspec.defstruct("Announcement", [("more", int)], bases=(Announcement,), kw_only=True)
    said = newer(more=1, **msgspec.structs.asdict(announcement()))
    assert verified(KEY, sign(KEY, said), Announcement, "no") == announcement()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../x"},
        {"name": ""},
        {"name": "w0\n"},
        {"name": "w0."},
        {"name": "w..0"},
        {"address": "http://x"},
        {"instance": "x"},
        {"role": "chef"},
    ],
)
def test_malformed_announcements_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        read_message(sign(KEY, announcement(**wrong)), Announcement)


def test_a_connection_token_is_of_one_run() -> None:
    assert connection_token(KEY, "a") != connection_token(KEY, "b")
    assert KEY.hex() not in connection_token(KEY, "a")
