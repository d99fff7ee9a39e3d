"""The keyed tag of stored blocks: whatever changes, in bytes, address, tag or key, is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.tiers.block_tag import TAG_BYTES, BlockTagger, openssl_gmac

KEY = bytes(range(32))
ADDRESS = b"key and layout"


@pytest.fixture(params=["gmac", "sha256"])
def tagger(request: pytest.FixtureRequest) -> BlockTagger:
    if request.param == "gmac" and openssl_gmac() is None:
        pytest.skip("this Python has no OpenSSL 3 that can be called")
    return BlockTagger(KEY, use_openssl=request.param == "gmac")


def test_verifies_what_was_tagged_and_nothing_else(tagger: BlockTagger) -> None:
    data = bytearray(b"kv" * 500)
    tag = tagger.tag(ADDRESS, data)
    assert len(tag) == TAG_BYTES
    assert tagger.verify(ADDRESS, data, tag)
    assert tagger.verify(ADDRESS, memoryview(bytes(data)), bytearray(tag))
    assert not tagger.verify(b"another address", data, tag)
    assert not BlockTagger(bytes(32)).verify(ADDRESS, data, tag)
    assert not tagger.verify(ADDRESS, data[:-1], tag)
    assert not tagger.verify(ADDRESS, data, tag[:-1])
    assert not tagger.verify(ADDRESS, data, b"")
    assert tagger.tag(ADDRESS, data) != tag, "the nonce is fresh"


@given(st.binary(max_size=200), st.integers(min_value=0), st.integers(1, 255))
def test_every_flipped_bit_is_noticed(data: bytes, at: int, flip: int) -> None:
    tagger = BlockTagger(KEY)
    tag = bytearray(tagger.tag(ADDRESS, data))
    changed = bytearray(data)
    if at % (len(data) + TAG_BYTES) < len(data):
        changed[at % (len(data) + TAG_BYTES)] ^= flip
    else:
        tag[at % (len(data) + TAG_BYTES) - len(data)] ^= flip
    assert tagger.verify(ADDRESS, data, tagger.tag(ADDRESS, data))
    assert not tagger.verify(ADDRESS, changed, tag)


def test_a_worker_without_openssl_verifies_sha256_and_refuses_what_it_cannot_compute() -> None:
    if openssl_gmac() is None:
        pytest.skip("this Python has no OpenSSL 3 that can be called")
    by_gmac = BlockTagger(KEY).tag(ADDRESS, b"data")
    without = BlockTagger(KEY, use_openssl=False)
    by_sha = without.tag(ADDRESS, b"data")
    assert without.verify(ADDRESS, b"data", by_sha)
    assert not without.verify(ADDRESS, b"data", by_gmac)
    assert BlockTagger(KEY).verify(ADDRESS, b"data", by_sha)
