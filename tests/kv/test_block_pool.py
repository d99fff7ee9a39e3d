import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.block_pool import NULL_BLOCK, BlockPool, StepFence


def free_blocks(pool):
    """In order of reuse."""
    return pool.settled(pool.n_free, but=set()) if not pool._fence.in_flight else [block for block, _ in pool._free]


def test_every_block_but_the_null_block_is_allocated():
    pool = BlockPool(4)
    assert sorted(pool.take_all(1)[0] for _ in range(3)) == [1, 2, 3]
    assert pool.n_free == 0
    with pytest.raises(AssertionError):
        pool.take_all(1)[0]


def test_blocks_without_content_are_reused_first_then_cached_ones_oldest_first():
    pool = BlockPool(6)
    a, b, c, d, e = (pool.take_all(1)[0] for _ in range(5))
    pool.drop(b, keep=True)
    pool.drop(d, keep=True)
    pool.drop(a, keep=False)
    assert free_blocks(pool) == [a, b, d]
    assert [pool.take_all(1)[0], pool.take_all(1)[0]] == [a, b]
    assert pool.refs[c] == pool.refs[e] == 1


def test_holding_a_free_block_removes_it_from_the_free_list():
    pool = BlockPool(4)
    blocks = [pool.take_all(1)[0] for _ in range(3)]
    for block in blocks:
        pool.drop(block, keep=True)
    pool.hold(blocks[1])
    pool.hold(blocks[1])
    assert free_blocks(pool) == [blocks[0], blocks[2]]
    pool.drop(blocks[1], keep=True)
    assert pool.n_free == 2
    pool.drop(blocks[1], keep=True)
    assert free_blocks(pool) == [blocks[0], blocks[2], blocks[1]]


def test_blocks_that_a_step_in_flight_may_write_are_not_settled():
    fence = StepFence()
    pool = BlockPool(6, fence)
    a, b, c, d, e = pool.take_all(5)
    pool.drop(a, keep=True)  # before the first step
    fence.next_step()
    pool.drop(b, keep=True)  # while step 1 is planned, or in flight
    fence.next_step()
    pool.drop(c, keep=True)
    fence.set_oldest_in_flight(1)
    assert pool.settled(5, but=set()) == [a]
    fence.set_oldest_in_flight(2)
    assert pool.settled(5, but=set()) == [a, b]
    assert pool.settled(5, but={a}) == [b]
    assert pool.settled(1, but=set()) == [a]
    pool.hold(b)
    pool.drop(b, keep=False)  # freed again, after step 2 was planned
    assert pool.settled(5, but=set()) == [a]
    fence.set_oldest_in_flight(None)
    assert pool.settled(5, but=set()) == [b, a, c]
    assert pool.refs[d] == pool.refs[e] == 1


def test_dropping_a_free_block_fails_an_assertion():
    pool = BlockPool(3)
    block = pool.take_all(1)[0]
    pool.drop(block, keep=False)
    with pytest.raises(AssertionError):
        pool.drop(block, keep=False)


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "keep", "lose"]), st.integers(0, 99)), max_size=80))
def test_the_free_list_holds_exactly_the_unreferenced_blocks(operations):
    pool = BlockPool(8)
    refs = dict.fromkeys(range(1, 8), 0)
    for operation, choice in operations:
        held = [block for block in refs if refs[block]]
        if operation == "take" and pool.n_free:
            block = pool.take_all(1)[0]
            assert refs[block] == 0
            refs[block] = 1
        elif operation == "hold":
            block = choice % 7 + 1
            pool.hold(block)
            refs[block] += 1
        elif held:
            block = held[choice % len(held)]
            pool.drop(block, keep=operation == "keep")
            refs[block] -= 1
        free = free_blocks(pool)
        assert sorted(free) == [block for block in refs if not refs[block]]
        assert pool.n_free == len(free)
        assert pool.refs[1:].tolist() == list(refs.values())
        assert NULL_BLOCK not in free


@given(st.lists(st.integers(1, 7), max_size=7, unique=True), st.lists(st.booleans(), min_size=7, max_size=7), st.data())
def test_bulk_operations_equal_single_ones(kept, worth, data):
    one, many = BlockPool(8), BlockPool(8)
    taken = [one.take_all(1)[0] for _ in range(7)]
    assert many.take_all(7) == taken
    for block, is_worth in zip(taken, worth):
        one.drop(block, keep=is_worth)
    many.drop_all(np.array(taken), np.array(worth))
    assert free_blocks(many) == free_blocks(one)
    blocks = np.array(kept, np.intp)
    assert many.n_unheld(blocks) == len(kept)
    for block in kept:
        one.hold(block)
    many.hold_all(blocks)
    assert many.n_unheld(blocks) == 0
    n = data.draw(st.integers(0, one.n_free))
    assert many.take_all(n) == [one.take_all(1)[0] for _ in range(n)]
    state = [(free_blocks(pool), pool.refs, pool.n_free, pool.n_releases) for pool in (one, many)]
    assert state[0] == state[1]
