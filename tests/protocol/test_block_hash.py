import random
from hashlib import blake2b
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emberline.protocol import block_hash as blockhash
from emberline.protocol.token_ids import pack


@pytest.mark.parametrize("n_tokens", [0, 15, 16, 1023, 1024, 1025, 1040, 5000])
def test_a_chain_is_its_blocks_digests_end_to_end(n_tokens):
    draw = random.Random(n_tokens)
    ids = pack(draw.randrange(1 << 15) for _ in range(n_tokens))
    root = blockhash.root("model", b"salt")
    one_by_one: list[bytes] = []
    blockhash.extend(one_by_one, root, ids)
    assert len(one_by_one) == n_tokens // 16
    for _ in range(2):  # new, then known
        keys = blockhash.chain(root, ids)
        assert keys == b"".join(one_by_one)
        assert blockhash.split(keys) == one_by_one


def test_a_chain_is_extended_after_known_keys():
    root = blockhash.root("model", b"salt")
    ids = pack(range(4000))
    keys = [blockhash.chain(root, ids[: 4 * n]) for n in (900, 1100, 2500, 4000)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(keys))
    other = blockhash.chain(root, pack([7, *range(1, 4000)]))
    assert not set(blockhash.split(other)) & set(blockhash.split(keys[-1]))


def reference(root, ids, extras=()):
    """The keys by their definition: BLAKE2 over a block's token ids and its extras, keyed with the key before."""
    keys, parent = [], root
    for block in range(len(ids) // 64):
        content = ids[64 * block : 64 * block + 64] + dict(extras).get(block, b"")
        parent = blake2b(content, key=parent, digest_size=16).digest()
        keys.append(parent)
    return keys


def test_keys_without_extras_are_those_of_stored_files():
    """Known answers: blocks on disks, in pools and of other workers are found by these keys."""
    root = blockhash.root("model", b"salt")
    assert root.hex() == "6375866a00cf5ba5761dbdbd3b05fb6c"
    assert blockhash.split(blockhash.chain(root, pack(range(32))))[1].hex() == "dcef19dbaeeda90253318fccc49ec287"
    assert blockhash.root("model", b"salt", b"") == root
    assert blockhash.chain(root, pack(range(32)), {}) == blockhash.chain(root, pack(range(32)))


positions = st.dictionaries(
    st.sampled_from([0, 3, 4, 15, 16, 1023, 1024, 1500, 1501, 2100]), st.sampled_from([b"a", b"b", b"aa"]), max_size=4
)


@given(st.sampled_from([0, 16, 1030, 1504, 1520, 2112, 2200]), positions, st.integers(0, 40))
def test_extras_are_part_of_the_keys_from_their_block_on(n_tokens, parts, n_known):
    root, ids = blockhash.root("model", b"salt"), pack(range(n_tokens))
    extras = blockhash.extras_at(parts.items())
    expected = reference(root, ids, extras)
    extended = expected[: min(n_known, len(expected))]
    blockhash.extend(extended, root, ids, extras=extras)
    assert extended == expected
    assert blockhash.split(blockhash.chain(root, ids, extras)) == expected
    plain, first = reference(root, ids), min(extras, default=len(expected))
    assert expected[:first] == plain[:first]
    assert not set(expected[first:]) & set(plain[first:])


@given(positions, positions)
@example({3: b"a"}, {4: b"a"})
@example({3: b"a", 4: b"a"}, {3: b"a\x04a"})
def test_other_digests_or_positions_give_other_keys(one, other):
    ids, root = pack([7]) * 2112, blockhash.root("model", b"salt")  # the same tokens throughout, as of images
    chains = [blockhash.chain(root, ids, blockhash.extras_at(parts.items())) for parts in (one, other)]
    assert (chains[0] == chains[1]) == (one == other)


def test_an_adapter_at_the_root_separates_all_keys():
    roots = [blockhash.root("model", b"salt", extras) for extras in (b"", b"adapter", b"another")]
    chains = [set(blockhash.split(blockhash.chain(root, pack(range(64))))) for root in roots]
    assert len(set().union(*chains)) == 3 * 4
