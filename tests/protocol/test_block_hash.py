import random
from itertools import pairwise

import pytest

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
