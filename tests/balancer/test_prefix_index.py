import tracemalloc

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
    looked: list[int] = []
    mask_of = index._mask
    index._mask = lambda keys, block: looked.append(block) or mask_of(keys, block)  # type: ignore[assignment,func-returns-value]
    match = index.match(mine)
    assert [n for n, _ in match] == [6000, 900]
    assert match[0][1] == 1 << slots[7]
    assert len(looked) < 40


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


def test_dropped_slots_are_swept_in_batches() -> None:
    index = FleetPrefixIndex(1 << 20)
    chain = keys(("c", 100))
    for _ in range(index_module.MAX_STALE_SLOTS):
        slot = index.take_slot()
        index.stored(slot, chain)
        index.drop_slot(slot)
    assert len(index) == 100  # still stored, without holders
    assert index.match(chain) == []
    index.drop_slot(index.take_slot())
    assert len(index) == 0
    assert index.take_slot() <= index_module.MAX_STALE_SLOTS
