import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.retention import Kind, Retention

N = 24
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["empty", "plain", "shared", "talk", "end", "tools", "remove", "take", "wait"]),
        st.integers(0, 3),
        st.integers(0, N),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_every_block_that_was_added_and_not_removed_is_there_once(operations):
    retention = Retention()
    order = EvictionOrder(N, retention)
    talks = [retention.begin(b"owner", b"%d" % n, [], 0) for n in range(4)]
    present, absent = set(), set(range(N))
    for operation, which, n in operations:
        some = sorted(absent)[:n]
        if operation == "wait":
            retention.now_s += 2.0**n
        elif operation == "end":
            keys = [b"%16d" % place for place in range(n)]
            retention.end(talks[which], keys, hint_s=300.0 * (n % 2), final=n == 7)
        elif operation == "tools":
            retention.ended_with_tool_calls(talks[which])
        elif operation == "remove":
            gone = sorted(present)[which :: n + 1]
            order.remove(gone)
            present -= set(gone)
            absent |= set(gone)
        elif operation == "take":
            expected = [block for block, _ in order]
            gone = order.take(min(n, len(present)))
            assert len(gone) == len(set(gone)) == min(n, len(present))
            assert set(gone) <= present
            assert set(expected) == present
            present -= set(gone)
            absent |= set(gone)
        else:
            add = {"empty": order.add_empty, "plain": order.add_plain, "shared": order.add_shared}.get(operation)
            if add is None:
                order.add(some, talks[which])
            else:
                add(some)
            present |= set(some)
            absent -= set(some)
        found = [block for block, _ in order]
        assert len(found) == len(present)
        assert set(found) == present
        assert (
            order.n_charged == sum(order.charged.values()) == sum(run.charged for run in order._runs.values()) <= N // 2
        )
        assert len(order._next) <= 2 * N + 8  # heads of runs are used again
    assert order.take(len(present)) and not order._runs if present else not order._runs


@given(st.permutations(range(12)), st.integers(0, 12), st.permutations(range(12)), st.integers(0, 12))
def test_blocks_in_an_array_are_linked_as_one_by_one(added, n_first, removed, n_removed):
    """Several runs; blocks are removed in any order, across runs, and whole runs at once."""
    found = []
    for given_as in (list, lambda blocks: np.array(blocks, np.intp)):
        order = EvictionOrder(12, Retention())
        order.add_plain(given_as(added[:n_first]))
        order.add_empty(given_as(added[n_first:]))
        order.remove(given_as(removed[:n_removed]))
        order.add_shared(given_as(removed[:n_removed]))
        found.append([block for block, _ in order])
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(12))


@given(st.lists(st.integers(1, 5), max_size=8), st.data())
def test_without_conversations_it_is_least_recently_used(sizes, data):
    retention = Retention()
    order = EvictionOrder(64, retention)
    runs, number = [], 0
    for size in sizes:
        runs.append(list(range(number, number + size)))
        order.add_plain(runs[-1])
        number += size
        retention.now_s += data.draw(st.floats(0, 100))
    expected = [block for run in runs for block in reversed(run)]
    assert [block for block, _ in order] == expected
    assert order.take(number) == expected


def test_empty_blocks_go_first_and_the_dead_next():
    retention = Retention()
    order = EvictionOrder(16, retention)
    talk = retention.begin(b"owner", b"session", [], 0)
    order.add_plain([1, 2])
    retention.now_s += 100
    retention.end(talk, [], final=True)
    order.add([3, 4], talk)
    assert talk.kind is Kind.DEAD
    order.add_empty([5])
    assert order.take(5) == [5, 4, 3, 2, 1]
