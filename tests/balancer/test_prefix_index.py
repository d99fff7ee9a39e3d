import math
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emberline.balancer import prefix_index as index_module
from emberline.balancer.prefix_index import ENTRY_BYTES, FleetPrefixIndex, Match
from tests.balancer.balancing import keys
from tests.examples import n_examples

CHAINS = [keys(("system", 5), (f"s{i}", 6), *((f"t{i}{j}", 3) for j in range(2))) for i in range(3)]
CHAINS += [keys(("system", 3), ("other", 4)), keys(("unrelated", 9))]


def depth(match: Match, slot: int) -> int:
    return next((depth for depth, mask in match if mask >> slot & 1), 0)


class AgainstNaive(RuleBasedStateMachine):
    """Caches that lose the ends of prefixes first, as engines do: a set per worker is the reference."""

    @initialize()
    def begin(self) -> None:
        self.index = FleetPrefixIndex(1 << 20)
        self.now_s = 0.0
        self.slots = [self.index.take_slot() for _ in range(3)]
        self.held: list[set[bytes]] = [set() for _ in self.slots]
        self.expected: list[dict[bytes, float]] = [{} for _ in self.slots]

    def cut(self, chain: bytes) -> list[bytes]:
        return [chain[start : start + 16] for start in range(0, len(chain), 16)]

    def naive(self, worker: int, chain: bytes) -> int:
        known = self.held[worker] | self.expected[worker].keys()
        n = 0
        for key in self.cut(chain):
            if key not in known:
                break
            n += 1
        return n

    @rule(worker=st.integers(0, 2), chain=st.sampled_from(CHAINS), n=st.integers(1, 20))
    def store(self, worker: int, chain: bytes, n: int) -> None:
        self.index.stored(self.slots[worker], chain[: 16 * n])
        self.held[worker].update(self.cut(chain[: 16 * n]))

    @rule(worker=st.integers(0, 2), chain=st.sampled_from(CHAINS), n=st.integers(0, 20))
    def evict(self, worker: int, chain: bytes, n: int) -> None:
        """Everything whose prefix is evicted goes too."""
        gone = {key for other in CHAINS for key in self.cut(other)[n:] if other[: 16 * n] == chain[: 16 * n]}
        self.index.removed(self.slots[worker], b"".join(gone))
        self.held[worker] -= gone
        for key in gone:
            self.expected[worker].pop(key, None)

    @rule(worker=st.integers(0, 2), chain=st.sampled_from(CHAINS), for_s=st.just(4.0))
    def expect(self, worker: int, chain: bytes, for_s: float) -> None:
        n = self.naive(worker, chain)
        self.index.expect(self.slots[worker], chain[16 * n :], self.now_s + for_s)
        self.expected[worker].update(dict.fromkeys(self.cut(chain[16 * n :]), self.now_s + for_s))

    @rule(chain=st.sampled_from(CHAINS), n=st.integers(1, 20))
    def use(self, chain: bytes, n: int) -> None:
        self.index.used(chain, min(n, len(chain) // 16))

    @rule(seconds=st.sampled_from([1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.index.expire(self.now_s)
        for expected in self.expected:
            for key in [key for key, until_s in expected.items() if until_s <= self.now_s]:
                del expected[key]

    @rule(worker=st.integers(0, 2), times=st.sampled_from([1, index_module.MAX_STALE_SLOTS + 1]))
    def clear(self, worker: int, times: int) -> None:
        for _ in range(times):  # many times over: slots are swept and used again
            self.index.drop_slot(self.slots[worker])
            self.slots[worker] = self.index.take_slot()
        self.held[worker], self.expected[worker] = set(), {}

    @invariant()
    def says_the_same(self) -> None:
        for chain in CHAINS:
            match = self.index.match(chain)
            assert [depth for depth, _ in match] == sorted({depth for depth, _ in match}, reverse=True)
            for worker, slot in enumerate(self.slots):
                if self.closed(worker):
                    assert depth(match, slot) == self.naive(worker, chain)

    def teardown(self) -> None:
        """Entries of slots that were given up are all swept: the hand visits every entry."""
        if not hasattr(self, "index"):
            return
        self.index.expire(math.inf)
        for worker in range(3):
            self.clear(worker, 3 * index_module.MAX_STALE_SLOTS)
        for _ in range(2 * index_module.MAX_STALE_SLOTS):
            self.index.drop_slot(self.index.take_slot())
            self.index.tidy()
        assert len(self.index) == 0

    def closed(self, worker: int) -> bool:
        """Expired expected blocks may leave a hole: then the index may be wrong about this worker."""
        known = self.held[worker] | self.expected[worker].keys()
        return all(sum(key in known for key in self.cut(chain)) == self.naive(worker, chain) for chain in CHAINS)


AgainstNaive.TestCase.settings = settings(max_examples=n_examples(60), stateful_step_count=30, deadline=None)
TestAgainstNaive = AgainstNaive.TestCase


def test_matching_a_long_prompt_looks_up_few_blocks() -> None:
    index = FleetPrefixIndex(1 << 28)
    slots = [index.take_slot() for _ in range(64)]
    shared, mine = keys(("system", 900)), keys(("system", 900), ("mine", 5600))
    for slot in slots:
        index.stored(slot, shared)
    index.stored(slots[7], mine[: 16 * 6000])
    looked: list[object] = []

    class Keys(bytes):
        def __getitem__(self, part: Any) -> Any:
            looked.append(part)
            return super().__getitem__(part)

    match = index.match(Keys(mine))
    assert [n for n, _ in match] == [6000, 900]
    assert match[0][1] == 1 << slots[7]
    assert 0 < len(looked) < 40


def test_the_byte_limit_drops_the_oldest_entries() -> None:
    index = FleetPrefixIndex(4000 * ENTRY_BYTES)
    slot = index.take_slot()
    chains = [keys((f"c{i}", 500)) for i in range(20)]
    for chain in chains:
        index.stored(slot, chain)
        assert len(index) * ENTRY_BYTES <= 4000 * ENTRY_BYTES
    assert depth(index.match(chains[-1]), slot) == 500
    assert depth(index.match(chains[0]), slot) == 0


def test_entry_bytes_is_the_measured_size() -> None:
    chains = [keys((f"c{i}", 1000)) for i in range(90)]
    tracemalloc.start()
    index = FleetPrefixIndex(1 << 30)
    slots = [index.take_slot() for _ in range(16)]
    for i, chain in enumerate(chains):
        for slot in slots[i % 13 : i % 13 + 3]:
            index.stored(slot, chain)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * len(index) * ENTRY_BYTES < used < 1.3 * len(index) * ENTRY_BYTES


def test_dropped_slots_are_swept_and_used_again() -> None:
    index = FleetPrefixIndex(1 << 20)
    chain = keys(("c", 100))
    for _ in range(index_module.MAX_STALE_SLOTS):
        slot = index.take_slot()
        index.stored(slot, chain)
        index.drop_slot(slot)
    assert len(index) == 100  # still stored, without holders
    assert index.match(chain) == []
    index.drop_slot(index.take_slot())
    index.tidy()
    assert len(index) == 0
    for _ in range(10 * index_module.MAX_STALE_SLOTS):
        index.drop_slot(index.take_slot())
        index.tidy()
    assert index.take_slot() < 3 * index_module.MAX_STALE_SLOTS


def test_a_slot_is_not_used_again_while_blocks_are_expected_of_its_worker() -> None:
    index = FleetPrefixIndex(1 << 20)
    old, chain = index.take_slot(), keys(("c", 10))
    index.expect(old, chain, until_s=10.0)
    index.drop_slot(old)
    taken = []
    for _ in range(10 * index_module.MAX_STALE_SLOTS):
        taken.append(index.take_slot())
        index.drop_slot(taken[-1])
        index.tidy()
    assert old not in taken
    index.expire(11.0)
    assert len(index) == 0


def test_prefixes_in_use_survive_a_flood_of_prompts() -> None:
    """System prompts were stored first, and every prompt begins with them."""
    index = FleetPrefixIndex(4000 * ENTRY_BYTES)
    slot = index.take_slot()
    system = keys(("system", 200))
    index.stored(slot, system)
    for i in range(400):
        chain = keys(("system", 200), (f"c{i}", 50))
        match = index.match(chain)
        assert depth(match, slot) == 200
        index.used(chain, match[0][0])
        index.stored(slot, chain[200 * 16 :])
        assert len(index) <= 4000
    assert depth(index.match(keys(("system", 200), ("c0", 50))), slot) == 200  # its own blocks are evicted
    assert depth(index.match(chain), slot) == 250


def test_the_limit_holds_even_where_every_block_is_in_use() -> None:
    index = FleetPrefixIndex(4000 * ENTRY_BYTES)
    slot = index.take_slot()
    for i in range(40):
        chain = keys((f"c{i}", 500))
        index.stored(slot, chain)
        index.used(chain, 500)
        assert len(index) <= 4000


def test_no_call_visits_more_entries_than_its_own_keys_allow() -> None:
    """At 400,000 entries: neither slots given up, nor a full index, nor removals make one call go through all."""
    index = FleetPrefixIndex(400_000 * ENTRY_BYTES)
    slots = [index.take_slot() for _ in range(8)]
    rng = Random(1)

    def chain(n: int) -> bytes:
        return rng.randbytes(16 * n)

    def visits(call: Callable[[], object]) -> int:
        before = index.n_visited
        call()
        return index.n_visited - before

    chains = [chain(4000) for _ in range(100)]
    for i, one in enumerate(chains):
        index.stored(slots[i % 8], one)
    assert len(index) == 400_000
    for one in chains:
        index.used(one, 4000)
    most = 2 * (index_module.VISITS_PER_KEY * 500 + 2 * index_module.VISITS)
    worst = max(visits(lambda: index.stored(slots[0], chain(500))) for _ in range(20))
    assert 0 < worst <= most
    assert len(index) <= 400_000
    for _ in range(index_module.MAX_STALE_SLOTS + 1):
        slots[0], old = index.take_slot(), slots[0]
        assert visits(lambda old=old: index.drop_slot(old)) <= most  # type: ignore[misc]
    assert 0 < visits(lambda: index.removed(slots[1], chains[1][: 16 * 500])) <= most
    assert 0 < visits(index.tidy) <= most
    n_calls = 0
    while visits(index.tidy):
        n_calls += 1
    assert n_calls > 100


def test_many_expected_blocks_do_not_expire_in_one_call() -> None:
    index = FleetPrefixIndex(1 << 30)
    slot = index.take_slot()
    n, block = 50, index_module.MAX_EXPIRED // 4
    for i in range(n):
        index.expect(slot, Random(i).randbytes(16 * block), until_s=1.0)
    index.expire(2.0)
    assert len(index) == (n - 4) * block
    for _ in range(n):
        index.expire(2.0)
    assert len(index) == 0


def test_blocks_that_come_and_go_leave_nothing_behind() -> None:
    index = FleetPrefixIndex(1 << 30)
    slot = index.take_slot()
    for i in range(200):
        index.stored(slot, chain := keys((f"c{i % 7}", 300)))
        index.removed(slot, chain)
    assert len(index) == 0
    assert index.n_ordered <= 6 * index_module.VISITS
