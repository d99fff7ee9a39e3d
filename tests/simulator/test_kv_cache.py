"""The simulated KV cache: held, idle and evicted blocks always add up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.simulator.kv_cache import SimKVCache
from tests.examples import n_examples

LENGTHS = {0: 3, 1: 2, 2: 4, 3: 1, 4: 5}  # a tree: 0 is the root, then 1 -> 2 and 3 -> 4
PATHS = ((0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4))


def lengths(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(LENGTHS[segment] for segment in path)


def computed(cache: SimKVCache, path: tuple[int, ...]) -> None:
    """A sequence that holds its cached prefix, computes the rest, and releases all."""
    n, n_blocks = cache.match(path, lengths(path))
    full = n if n_blocks == sum(lengths(path)[:n]) else n - 1
    cache.hold(path, n)
    cache.reserve(sum(lengths(path)) - n_blocks)
    left = sum(lengths(path)) - n_blocks
    for place in range(full, len(path)):
        left -= cache.publish(path[place], LENGTHS[path[place]], place < n)
    assert left == 0
    cache.release(path, len(path))


def test_published_segments_match() -> None:
    cache = SimKVCache(20)
    computed(cache, (0, 1, 2))
    assert cache.match((0, 1, 2), (3, 2, 4)) == (3, 9)
    assert cache.match((0, 3), (3, 1)) == (1, 3)
    assert cache.n_used == 0
    assert cache.n_cached == 9


def test_lru_eviction_takes_leaves_first() -> None:
    evicted = []
    cache = SimKVCache(
        12, lambda stored, segment, start, end: None if stored else evicted.append((segment, start, end))
    )
    computed(cache, (0, 1, 2))
    computed(cache, (0, 3, 4))  # six more: three of the oldest end must go
    assert evicted == [(2, 1, 4)]
    assert cache.match((0, 1, 2), (3, 2, 4)) == (3, 6)
    assert cache.match((0, 3, 4), (3, 1, 5)) == (3, 9)


def test_second_publisher_keeps_its_reservation() -> None:
    cache = SimKVCache(20)
    cache.reserve(3)
    cache.reserve(3)
    assert cache.publish(0, 3, held_before=False) == 3
    assert cache.publish(0, 3, held_before=False) == 0
    assert cache.n_used == 6  # the second still has what it reserved
    cache.reserve(-3)
    cache.release((0,), 1)
    assert cache.n_used == 3
    cache.release((0,), 1)
    assert cache.n_used == 0


@given(st.lists(st.sampled_from(PATHS), max_size=30), st.integers(12, 16))
@settings(max_examples=n_examples(60), deadline=None)
def test_capacity_is_never_exceeded(paths: list[tuple[int, ...]], capacity: int) -> None:
    present: dict[int, int] = {}

    def changed(stored: bool, segment: int, start: int, end: int) -> None:
        assert present.get(segment, 0) == (start if stored else end)
        present[segment] = end if stored else start

    cache = SimKVCache(capacity, changed)
    for path in paths:
        computed(cache, path)
        assert cache.n_used == 0
        assert cache.n_cached == sum(present.values()) <= capacity
        _, n_blocks = cache.match(path, lengths(path))
        assert n_blocks == sum(lengths(path))  # the newest is whole
