"""A worker's modelled KV memory: what is held, cached and evicted always adds up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.simulator.kv_memory import Cache

LENGTHS = {0: 3, 1: 2, 2: 4, 3: 1, 4: 5}  # a tree: 0 is everybody's, then 1 -> 2 and 3 -> 4
PATHS = ((0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4))


def lengths(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(LENGTHS[segment] for segment in path)


def computed(cache: Cache, path: tuple[int, ...]) -> None:
    """A sequence that finds what it can, computes the rest, and goes."""
    n, n_blocks = cache.match(path, lengths(path))
    full = n if n_blocks == sum(lengths(path)[:n]) else n - 1
    cache.hold(path, n)
    cache.reserve(sum(lengths(path)) - n_blocks)
    left = sum(lengths(path)) - n_blocks
    for place in range(full, len(path)):
        left -= cache.publish(path[place], LENGTHS[path[place]], place < n)
    assert left == 0
    cache.release(path, len(path))


def test_what_was_computed_is_found_again() -> None:
    cache = Cache(20)
    computed(cache, (0, 1, 2))
    assert cache.match((0, 1, 2), (3, 2, 4)) == (3, 9)
    assert cache.match((0, 3), (3, 1)) == (1, 3)
    assert cache.n_used == 0
    assert cache.n_cached == 9


def test_the_oldest_goes_first_and_ends_go_before_beginnings() -> None:
    gone = []
    cache = Cache(12, lambda stored, segment, start, end: None if stored else gone.append((segment, start, end)))
    computed(cache, (0, 1, 2))
    computed(cache, (0, 3, 4))  # six more: three of the oldest end must go
    assert gone == [(2, 1, 4)]
    assert cache.match((0, 1, 2), (3, 2, 4)) == (3, 6)
    assert cache.match((0, 3, 4), (3, 1, 5)) == (3, 9)


def test_who_was_slower_gets_its_blocks_back() -> None:
    cache = Cache(20)
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
@settings(max_examples=60, deadline=None)
def test_never_more_than_there_is(paths: list[tuple[int, ...]], capacity: int) -> None:
    there: dict[int, int] = {}

    def changed(stored: bool, segment: int, start: int, end: int) -> None:
        assert there.get(segment, 0) == (start if stored else end)
        there[segment] = end if stored else start

    cache = Cache(capacity, changed)
    for path in paths:
        computed(cache, path)
        assert cache.n_used == 0
        assert cache.n_cached == sum(there.values()) <= capacity
        _, n_blocks = cache.match(path, lengths(path))
        assert n_blocks == sum(lengths(path))  # the newest is whole
