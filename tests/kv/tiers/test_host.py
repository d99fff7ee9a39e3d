"""The host tier: slots, references, and the least recently used block that makes room."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kv.tiers.host import HostTier, Segment, plain_segment
from emberline.kv.tiers.tier import BlockId, BlockMeta
from tests.examples import n_examples

SIZE = 8192


def tier_of(n_blocks=8, sizes=(SIZE,), **more):
    tier = HostTier(n_blocks * SIZE, sizes, **more)
    tier.allocate_all()
    return tier


def block_id(n):
    return BlockId(n.to_bytes(16, "little"), b"t")


def content(n, size=SIZE):
    return memoryview(bytearray(n.to_bytes(2, "little") * (size // 2)))


@settings(max_examples=n_examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["write", "read", "touch", "remove"]), st.integers(0, 12)), max_size=60))
def test_it_returns_what_was_written_and_evicts_the_least_recently_used(actions):
    tier, model = tier_of(8), {}
    for action, n in actions:
        if action == "write":
            tier.write([block_id(n)], [content(n)], [BlockMeta()])
            model[n] = model.pop(n, None)
            while len(model) > 8:
                del model[next(iter(model))]
        elif action == "read":
            buffer = memoryview(bytearray(SIZE))
            assert tier.read([block_id(n)], [buffer]) == [n in model]
            if n in model:
                model[n] = model.pop(n)
                assert buffer == content(n)
        elif action == "touch":
            tier.touch([block_id(n)])
            if n in model:
                model[n] = model.pop(n)
        else:
            tier.remove([block_id(n)])
            model.pop(n, None)
        if action == "write":  # a block that was there is not written again, nor is it newer
            tier.touch([block_id(n)])
        assert tier.holds([block_id(i) for i in range(13)]) == [i in model for i in range(13)]
        assert tier.stats().blocks == len(model)


def test_blocks_in_use_are_not_evicted():
    tier = tier_of(4)
    for n in range(4):
        tier.write([block_id(n)], [content(n)], [BlockMeta()])
    held = tier.find([block_id(0), block_id(1)])
    taken = tier.take(SIZE, 4)
    assert len(taken) == 2
    assert tier.take(SIZE, 1) == []
    assert [slot.buffer for slot in held] == [content(0), content(1)]
    tier.drop(held)
    assert len(tier.take(SIZE, 4)) == 2


def test_every_block_size_has_room():
    tier = tier_of(8, sizes=(SIZE, 4096, 1000))
    slots = [tier.take(size, 1)[0] for size in (SIZE, 4096, 1000)]
    assert [len(slot.buffer) for slot in slots] == [SIZE, 4096, 1000]
    assert all(slot.address % 4096 == 0 for slot in slots)


def test_taking_waits_for_a_slot():
    tier = tier_of(1)
    (slot,) = tier.take(SIZE, 1)
    threading.Timer(0.02, tier.drop, [[slot]]).start()
    assert tier.take(SIZE, 1, wait_s=60) == [slot]


def test_a_purge_leaves_nothing():
    tier = tier_of(4)
    metas = [BlockMeta(owner=b"a", session=b"1"), BlockMeta(owner=b"a", session=b"2"), BlockMeta(owner=b"b")]
    for n, meta in enumerate(metas):
        tier.write([block_id(n)], [content(n + 1)], [meta])
    (in_use,) = tier.find([block_id(0)])
    assert tier.purge(owner=b"a", session=b"1") == 1
    assert in_use.buffer == content(1)
    tier.drop([in_use])
    assert not any(in_use.buffer)
    assert tier.purge(owner=b"a") == 1
    assert tier.holds([block_id(n) for n in range(3)]) == [False, False, True]
    assert tier.purge() == 1


def test_memory_that_cannot_be_allocated_degrades_it():
    segments = []

    def allocate(n_bytes) -> Segment:
        if segments:
            raise MemoryError("no more")
        segments.append(plain_segment(n_bytes))
        return segments[-1]

    tier = tier_of(16, allocate=allocate)
    assert "degraded" in tier.stats().state
    assert tier.stats().capacity_bytes == len(segments[0].buffer)
    assert tier.take(SIZE, 1)


def test_a_stage_keeps_nothing():
    tier = tier_of(4, keep=False)
    slots = tier.take(SIZE, 4)
    tier.put([block_id(n) for n in range(4)], slots, [BlockMeta()] * 4)
    tier.drop(slots)
    assert tier.holds([block_id(0)]) == [False]
    assert len(tier.take(SIZE, 9)) == 4


@pytest.mark.parametrize("n", [1, 3])
def test_a_slot_dropped_too_often_is_an_error(n):
    tier = tier_of(4)
    slots = tier.take(SIZE, n)
    tier.drop(slots)
    with pytest.raises(AssertionError):
        tier.drop(slots)


def test_memory_is_allocated_ahead_of_its_use():
    made = []

    def allocate(n_bytes) -> Segment:
        made.append(n_bytes)
        return plain_segment(n_bytes)

    tier = HostTier(8 * SIZE, [SIZE], allocate=allocate, segment_bytes=SIZE, ahead_bytes=2 * SIZE)
    thread = threading.Thread(target=tier.allocate_ahead, daemon=True)
    thread.start()
    n_written = 0
    while n_written < 8:
        slots = tier.take(SIZE, 1, wait_s=60.0)
        tier.put([block_id(n_written)], slots, [BlockMeta()])
        tier.drop(slots)
        n_written += 1
        assert len(made) <= n_written + 2, "what is not used stays free"
    assert tier.holds([block_id(n) for n in range(8)]) == [True] * 8, "nothing is evicted while there is room to come"
    assert len(made) == 8
    thread.join(60)
    assert not thread.is_alive()
    tier.take(SIZE, 1, wait_s=60.0)
    assert tier.stats().evicted == 1


def test_more_memory_is_allocated_while_there_is_no_work():
    made = []

    def allocate(n_bytes) -> Segment:
        if len(made) == 5:
            raise MemoryError("no more")
        made.append(n_bytes)
        return plain_segment(n_bytes)

    tier = HostTier(8 * SIZE, [SIZE], allocate=allocate, segment_bytes=SIZE, ahead_bytes=0)
    assert not tier.allocate_more(), "no thread allocates yet"
    tier.start_allocating()
    for n in range(1, 6):
        assert tier.allocate_more()
        assert len(made) == n
    assert not tier.allocate_more()
    assert len(tier.take(SIZE, 8)) == 5


def test_a_closed_tier_allocates_no_more():
    tier = HostTier(8 * SIZE, [SIZE], segment_bytes=SIZE, ahead_bytes=0)
    tier.start_allocating()
    assert tier.allocate_more()
    tier.close()
    assert not tier.allocate_more()


@pytest.mark.parametrize(
    ("capacity", "sizes", "segment"),
    [
        (64 << 30, [2 << 20], 32 << 20),
        (64 << 30, [9 << 20], 27 << 20),  # a whole number of blocks
        (64 << 30, [40 << 20], 40 << 20),  # one at least
        (64 << 30, [5000, 3 << 20], 30 << 20),
        (40 << 20, [2 << 20], 10 << 20),  # a quarter of all at most
        (2 << 40, [2 << 20], 128 << 20),  # not too many
    ],
)
def test_segments_have_room_for_blocks_of_every_size(capacity, sizes, segment):
    tier = HostTier(capacity, sizes)
    assert tier.segment_bytes == segment
    assert all(tier.grow() for _ in sizes)
    assert all(len(tier.take(size, 1)) == 1 for size in sizes)


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_nothing_is_evicted_for_a_batch_of_several_segments_that_are_being_allocated(n_blocks):
    n = 4 * n_blocks
    tier = HostTier(n * SIZE, [SIZE], segment_bytes=n_blocks * SIZE)
    tier.grow()
    slots = tier.take(SIZE, 1)
    tier.put([block_id(0)], slots, [BlockMeta()])
    tier.drop(slots)
    tier.start_allocating()
    assert len(tier.take(SIZE, n - 1, wait_s=60.0)) == n - 1
    assert tier.holds([block_id(0)]) == [True]


def test_allocation_ends_when_the_tier_is_closed():
    tier = HostTier(8 * SIZE, [SIZE], segment_bytes=SIZE, ahead_bytes=SIZE)
    thread = threading.Thread(target=tier.allocate_ahead, daemon=True)
    thread.start()
    tier.close()
    thread.join(60)
    assert not thread.is_alive()
