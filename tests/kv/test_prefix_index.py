import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.prefix_index import LOOKED_UP_AT_ONCE, LeadingBlocks, PrefixIndex

KEYS = [bytes([n]) * 16 for n in range(20)]
SOME = LOOKED_UP_AT_ONCE


def test_the_first_block_with_a_key_stays():
    index = PrefixIndex(8)
    assert index.put(KEYS[:2], (3, 5)) == [0, 1]
    assert not index.put(KEYS[:1], (4,))
    assert index.block(KEYS[0]) == 3
    assert index.key(4) is None
    assert index.remove((4, 3, 5)) == (list(KEYS[:2]), [3, 5])
    assert KEYS[0] not in index
    assert index.remove((3, 4)) == ([], [])
    assert len(index) == 0


def test_leading_stops_at_the_first_gap():
    index = PrefixIndex(8)
    for n in (0, 1, 3):
        index.put([KEYS[n]], [n + 1])
    assert index.n_leading(KEYS, 4) == 2
    assert index.n_leading(KEYS, 1) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove", "ask"]), st.integers(0, 9), st.integers(0, 9)), max_size=40)
)
def test_what_was_found_before_is_continued_and_forgotten_when_its_block_has_other_content(operations):
    """Keys come into any free block, also into one that had another of them before."""
    index, known = PrefixIndex(11), LeadingBlocks()
    for operation, n, limit in operations:
        free = [block for block in range(1, 11) if index.key(block) is None]
        if operation == "put" and free:
            index.put([KEYS[n]], [free[limit % len(free)]])
        elif operation == "remove":
            index.remove([n + 1])
        else:
            found = index.n_leading(KEYS, limit, known)
            assert found == index.n_leading(KEYS, limit)
            assert known.blocks[:found].tolist() == [index.block(key) for key in KEYS[:found]]


@pytest.mark.parametrize("n_indexed", [0, 1, SOME, SOME + 1, 2 * SOME + 1, 3 * SOME + 2])
def test_a_long_chain_is_looked_up_in_parts(n_indexed):
    keys = [n.to_bytes(16, "little") for n in range(3 * SOME + 2)]
    index, known = PrefixIndex(len(keys) + 1), LeadingBlocks()
    index.put(keys[:n_indexed], range(1, n_indexed + 1))
    for limit in (SOME - 2, 2 * SOME, len(keys)):
        assert index.n_leading(keys, limit, known) == min(n_indexed, limit)
    assert known.blocks.tolist() == list(range(1, n_indexed + 1))
