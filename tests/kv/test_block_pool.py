import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.block_pool import (
    NULL_BLOCK,
    UNBOUNDED,
    BlockPool,
    StepFence,
    blocks_of,
    capacity,
    peak_blocks,
    running_blocks,
    split_bytes,
)
from emberline.kv.prefix_index import first_visible
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput


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


FULL = KVGroup("full", (0, 1), kv_heads=2, head_dim=8, dtype="float16")
WINDOW = KVGroup("window", (2, 3, 4), kv_heads=2, head_dim=8, dtype="float16", window=40)


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 64), st.booleans())
def test_peak_is_never_exceeded_by_a_chunked_prefill(n_tokens, window, chunk, chunked):
    layout = KVGroup("window", (0,), 1, 1, "float16", window=window, chunked=chunked)
    for start in range(0, n_tokens, chunk):
        end = min(start + chunk, n_tokens)
        assert blocks_of(end) - first_visible(start, window, chunked) <= peak_blocks(layout, n_tokens, chunk)


def test_capacity():
    assert capacity(FULL, 10, chunk=16) == 160
    peak = peak_blocks(WINDOW, UNBOUNDED, chunk=16)
    assert capacity(WINDOW, peak, chunk=16) == UNBOUNDED
    assert capacity(WINDOW, peak - 1, chunk=16) == (peak - 1) * 16


@given(st.integers(0, 10_000_000), st.integers(1, 64), st.integers(1, 512))
def test_kv_bytes_are_used_and_never_exceeded(kv_bytes, max_running, chunk):
    layouts = [FULL, WINDOW]
    if kv_bytes < 3 * (FULL.block_bytes + WINDOW.block_bytes):
        with pytest.raises(BadInput, match="at least"):
            split_bytes(layouts, kv_bytes, chunk, max_running)
        return
    n_blocks = split_bytes(layouts, kv_bytes, chunk, max_running)
    spent = sum(n * layout.block_bytes for n, layout in zip(n_blocks, layouts))
    assert spent <= kv_bytes < spent + 2 * (FULL.block_bytes + WINDOW.block_bytes)
    assert n_blocks[1] <= n_blocks[0]
    assert min(capacity(layout, n - 1, chunk) for layout, n in zip(layouts, n_blocks)) > 0


def test_a_window_group_gets_fewer_blocks_when_memory_is_plentiful():
    n_full, n_window = split_bytes([FULL, WINDOW], 100_000_000, 64, max_running=8)
    assert n_window - 1 == (n_full - 1) * 4 // 128, "a window of 3 blocks, and one more, of every 2,048 tokens"
    wide = KVGroup("wide", (2, 3, 4), kv_heads=2, head_dim=8, dtype="float16", window=8192)
    n_full, n_window = split_bytes([FULL, wide], 100_000_000, 64, max_running=8)
    assert n_window - 1 == (n_full - 1) // 4


def test_a_narrow_window_needs_little_for_many_sequences_and_large_steps():
    """GPT-OSS-20B's groups with 256 sequences and steps of 8,192 tokens."""
    full = KVGroup("full", tuple(range(12)), kv_heads=8, head_dim=64, dtype="bfloat16")
    window = KVGroup("window", tuple(range(12, 24)), kv_heads=8, head_dim=64, dtype="bfloat16", window=128)
    n_full, n_window = split_bytes([full, window], 100 << 30, 8192, 256)
    assert n_window < n_full // 10
    assert n_window > 256 * 10 + 2 * 512
    assert capacity(window, n_window - 1, 8192) == UNBOUNDED


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=6), st.integers(1, 64))
def test_running_sequences_fit_their_windows(sequences, window):
    """Whatever they have, a step's tokens are shared by all: two steps' new blocks and a window each are enough."""
    layout = KVGroup("window", (0,), 1, 1, "float16", window=window)
    chunk = sum(new for _, new in sequences)
    held = sum(blocks_of(before + new) - first_visible(before, window, False) for before, new in sequences)
    assert held <= running_blocks(layout, chunk, len(sequences))
