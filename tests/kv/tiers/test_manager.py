"""The tier manager: blocks pass through host memory, and what came from a slow tier stays in the faster ones."""

import threading
import time

import pytest

from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.host import HostTier, padded, plain_segment
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.messages import BlocksFetched, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.mover import HostMover
from emberline.kv.tiers.orders import (
    BlocksWritten,
    CancelFetch,
    Fetch,
    FetchCancelled,
    ReadBlocks,
    Remove,
    Save,
    SlicesRead,
    WholeBlock,
    WriteBlocks,
)
from emberline.kv.tiers.pool.pool_tier import N_STAGES, PoolTier
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup
from tests.kv.tiers.pool.lying_store import LyingStore

GROUP = KVGroup("full", (0,), 2, 32, "float32")
N_BLOCKS = 20


class MemoryTier(HostTier):
    """A host tier that plays another one."""

    def __init__(self, name, remote=False):
        super().__init__(1 << 20, [GROUP.block_bytes])
        self.allocate_all()
        self.name, self.remote = name, remote
        self.looked_up, self.touched = [], []

    def touch(self, ids, conversation=None):
        self.touched += ids
        super().touch(ids, conversation)

    def look_up(self, ids):
        self.looked_up += ids


@pytest.fixture
def tiers():
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * GROUP.block_bytes))], [GROUP.block_bytes])
    for block in range(N_BLOCKS):
        memory.block(0, block)[:] = bytes([block]) * GROUP.block_bytes
    host = HostTier(4 << 20, [GROUP.block_bytes])
    manager = TierManager([GROUP], HostMover(memory), host, [MemoryTier("disk"), MemoryTier("pool", True)], 1e9)
    yield manager, memory
    manager.close()


def ids(*numbers):
    return [BlockId(bytes([n]) * 16, layout_tag(GROUP)) for n in numbers]


def find(manager, *numbers):
    return manager.find(0, [key for key, _ in ids(*numbers)])


def wait_for(manager, kind, n=1):
    found, until_s = [], time.monotonic() + 60
    while len(found) < n:
        assert time.monotonic() < until_s
        found += [notice for notice in manager.reports() if isinstance(notice, kind)]
        time.sleep(0.001)
    return found


def save(manager, *numbers):
    blocks = [SavedBlock(0, n, id.key, BlockMeta(owner=b"o", position=n)) for n, id in zip(numbers, ids(*numbers))]
    manager.execute([Save(1, blocks)])
    wait_for(manager, Saved)
    assert manager.flush(60)


def fetch(manager, tier, blocks):
    """Numbers of contents by the device blocks that they go to."""
    manager.fetch(1, [WantedBlock((0, j), to, id.key, BlockMeta(), tier) for j, (to, id) in enumerate(blocks)])
    fetched, missing, until_s = [], [], time.monotonic() + 60
    while len(fetched) + len(missing) < len(blocks):
        assert time.monotonic() < until_s
        for notice in manager.reports():
            if isinstance(notice, BlocksFetched):
                fetched += notice.fetched
                missing += notice.missing
        time.sleep(0.001)
    manager.cancel(1)
    return sorted(fetched), sorted(missing)


def test_a_saved_block_is_in_every_tier(tiers):
    manager, _ = tiers
    save(manager, 1, 2, 3)
    assert find(manager, 1, 2, 3, 4) == ["host", "host", "host", None]
    assert [tier.holds(ids(1, 2, 3, 4)) for tier in manager.all_tiers] == [[True, True, True, False]] * 3


def test_a_copy_that_fails_leaves_its_slots_free(tiers, monkeypatch, caplog):
    manager, _ = tiers
    save(manager, 1)
    host = manager.all_tiers[0]
    n_free = sum(len(known.free) for known in host._classes.values())

    def fail(copies):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(manager._mover, "save", fail)
        save(manager, 2, 3)
    assert "the device is gone" in caplog.text
    assert find(manager, 1, 2, 3) == ["host", None, None]
    assert sum(len(known.free) for known in host._classes.values()) == n_free
    save(manager, 2, 3)
    assert find(manager, 2, 3) == ["host", "host"]


def test_blocks_are_saved_although_memory_is_allocated_late():
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * GROUP.block_bytes))], [GROUP.block_bytes])
    may_allocate = threading.Event()

    def allocate(n_bytes):
        assert may_allocate.wait(60)
        return plain_segment(n_bytes)

    host = HostTier(4 << 20, [GROUP.block_bytes], allocate=allocate)
    manager = TierManager([GROUP], HostMover(memory), host, [], 1e9)
    manager.execute([Save(1, [SavedBlock(0, 1, ids(1)[0].key, BlockMeta(owner=b"o"))])])
    may_allocate.set()
    wait_for(manager, Saved)
    assert manager.flush(60)
    assert find(manager, 1) == ["host"]
    manager.close()


@pytest.mark.parametrize("tier", ["host", "disk", "pool"])
def test_a_block_comes_back_from_each_tier_and_stays_in_faster_ones(tiers, tier):
    manager, memory = tiers
    save(manager, 1, 2, 3)
    names = list(manager.names)
    for faster in manager.all_tiers[: names.index(tier)]:
        faster.purge()
    assert find(manager, 2) == [tier]
    assert fetch(manager, tier, [(11, ids(3)[0]), (12, ids(2)[0]), (13, ids(9)[0])]) == ([(0, 0), (0, 1)], [(0, 2)])
    assert [bytes(memory.block(0, block)[:1]) for block in (11, 12)] == [b"\x03", b"\x02"]
    assert manager.flush(60)
    assert find(manager, 2, 3) == ["host", "host"]
    assert manager.all_tiers[1].holds(ids(2, 3)) == [True, True]


def test_a_flush_waits_for_what_was_read_to_be_in_the_faster_tiers(tiers, monkeypatch):
    """Else a purge could be over before, and leave it there."""
    manager, _ = tiers
    save(manager, 1)
    manager.all_tiers[0].purge()
    promote, go = manager._promote, threading.Event()
    monkeypatch.setattr(manager, "_promote", lambda *read: go.wait(60) and promote(*read))
    assert fetch(manager, "disk", [(11, ids(1)[0])]) == ([(0, 0)], [])
    assert not manager.flush(0.2)
    assert find(manager, 1) == ["disk"]
    go.set()
    assert manager.flush(60)
    assert find(manager, 1) == ["host"]


def test_what_the_host_tier_has_lost_comes_from_the_next_tier(tiers):
    manager, memory = tiers
    save(manager, 1, 2, 3, 4)
    host, disk, _ = manager.all_tiers
    host.remove(ids(2, 3))
    disk.remove(ids(3))
    blocks = [(11, ids(1)[0]), (12, ids(2)[0]), (13, ids(3)[0]), (14, ids(4)[0])]
    manager.fetch(1, [WantedBlock((0, j), to, id.key, BlockMeta(), "host") for j, (to, id) in enumerate(blocks)])
    came, until_s = {}, time.monotonic() + 60
    while len(came) < 4:
        assert time.monotonic() < until_s
        came |= {item[1]: each.tier for each in wait_for(manager, BlocksFetched) for item in each.fetched}
    assert came == {0: "host", 1: "disk", 2: "pool", 3: "host"}
    assert [bytes(memory.block(0, 10 + n)[:1]) for n in range(1, 5)] == [bytes([n]) for n in range(1, 5)]
    manager.cancel(1)
    assert manager.flush(60)
    assert find(manager, 2, 3) == ["host", "host"]


def test_blocks_that_a_tier_could_not_take_are_counted(tiers):
    manager, _ = tiers
    manager._workers["disk"].n_dropped = 3
    manager._stats_s = -1e9
    assert [stats.dropped for stats in manager.stats()] == [0, 3, 0]


def test_removed_content_is_gone_everywhere(tiers):
    manager, _ = tiers
    save(manager, 1, 2)
    manager.execute([Remove([ids(1)[0].key])])
    assert manager.flush(60)
    assert find(manager, 1, 2) == [None, "host"]


def test_remote_tiers_are_asked(tiers):
    manager, _ = tiers
    assert manager.remote
    manager.look_up(5, [key for key, _ in ids(1, 2)])
    assert wait_for(manager, LookedUp) == [LookedUp(5)]
    assert manager.all_tiers[2].looked_up == ids(1, 2)


def test_a_cancelled_fetch_writes_nothing_afterwards(tiers):
    manager, memory = tiers
    save(manager, *range(1, 10))
    manager.fetch(
        7, [WantedBlock((0, j), 10 + j, id.key, BlockMeta(), "host") for j, id in enumerate(ids(*range(1, 10)))]
    )
    writing = {10 + j for _, j in manager.cancel(7)}
    now = {block: bytes(memory.block(0, block)) for block in range(10, 19)}
    assert manager.flush(60)
    fetch(manager, "host", [(1, ids(1)[0])])  # behind the cancelled one
    done = {10 + j for notice in manager.reports() if isinstance(notice, BlocksFetched) for _, j in notice.fetched}
    for block in set(range(10, 19)) - writing - done:
        assert bytes(memory.block(0, block)) == now[block]


class HeldMover(HostMover):
    """Copies to the device end when `go` is set."""

    def __init__(self, memory):
        super().__init__(memory)
        self.began, self.go = threading.Event(), threading.Event()

    def load(self, copies):
        self.began.set()
        return self

    def wait(self):
        assert self.go.wait(60)


def test_a_cancelled_fetch_is_over_when_its_blocks_are_not_written_any_more():
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * GROUP.block_bytes))], [GROUP.block_bytes])
    mover = HeldMover(memory)
    manager = TierManager([GROUP], mover, HostTier(4 << 20, [GROUP.block_bytes]), [], 1e9)
    manager.execute([Save(1, [SavedBlock(0, 1, ids(1)[0].key, BlockMeta(owner=b"o"))])])
    wait_for(manager, Saved)
    assert manager.flush(60)
    manager.execute([Fetch(7, [WantedBlock((0, 0), 10, ids(1)[0].key, BlockMeta(), "host")])])
    assert mover.began.wait(60)
    manager.execute([CancelFetch(7), CancelFetch(8)])
    assert manager.reports() == [FetchCancelled(8)], "the block of the other one is still written"
    mover.go.set()
    assert wait_for(manager, FetchCancelled) == [FetchCancelled(7)]
    assert manager.reports() == []
    manager.close()


def test_what_to_expect_of_each_tier(tiers):
    manager, _ = tiers
    queues, mover = manager.queues()
    assert set(queues) == {"host", "disk", "pool"}
    assert all(queue.rate > 0 and queue.queued_bytes == 0 for queue in (*queues.values(), mover))


def test_used_blocks_are_as_recent_in_every_tier_as_if_they_were_read(tiers):
    manager, _ = tiers
    _, disk, _ = manager.all_tiers
    save(manager, 1, 2, 3)
    assert not disk.touched
    manager.used([key for key, _ in ids(1, 3)], None)
    assert manager.flush(60)
    assert disk.touched == ids(1, 3)


class Failing(MemoryTier):
    def remove(self, ids):
        raise RuntimeError("not now")


def test_a_tier_that_fails_does_not_keep_the_others_from_what_they_are_told():
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * GROUP.block_bytes))], [GROUP.block_bytes])
    all_tiers = [HostTier(4 << 20, [GROUP.block_bytes]), Failing("disk"), MemoryTier("pool", True)]
    manager = TierManager([GROUP], HostMover(memory), all_tiers[0], all_tiers[1:], 1e9)
    save(manager, 1, 2)
    manager.execute([Remove([key for key, _ in ids(1)])])
    assert manager.flush(60)
    assert [tier.holds(ids(1, 2)) for tier in all_tiers] == [[False, True], [True, True], [False, True]]
    manager.close()


class Unsure(MemoryTier):
    """A tier that cannot say what it holds of one layout."""

    def holds(self, ids):
        if any(tag != layout_tag(GROUP) for _, tag in ids):
            raise RuntimeError("not now")
        return super().holds(ids)


def test_blocks_of_one_group_are_saved_although_those_of_another_cannot_be():
    groups = [GROUP, KVGroup("window64", (1,), 2, 64, "float32")]
    sizes = [group.block_bytes for group in groups]
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * size)) for size in sizes], sizes)
    manager = TierManager(groups, HostMover(memory), HostTier(4 << 20, sizes), [Unsure("disk")], 1e9)
    (id,) = ids(1)
    manager.execute([Save(1, [SavedBlock(g, 1, id.key, BlockMeta(owner=b"o")) for g in range(2)])])
    wait_for(manager, Saved)
    assert manager.flush(60)
    assert [tier.holds([id]) for tier in manager.all_tiers] == [[True], [True]]
    manager.close()


def test_used_blocks_stay_in_host_memory():
    block = GROUP.block_bytes
    host = HostTier(3 * padded(block), [block], segment_bytes=padded(block))
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * block))], [block])
    manager = TierManager([GROUP], HostMover(memory), host, [], 1e9)
    save(manager, 1, 2, 3)
    manager.used([ids(3)[0].key], None)
    save(manager, 4)
    assert find(manager, 1, 2, 3, 4) == ["host", None, "host", "host"]
    manager.close()


def test_room_for_a_save_that_evicts_blocks_of_its_own():
    """All that a save evicts is known before it is ordered: other ranks evict just that."""
    block = GROUP.block_bytes
    host = HostTier(3 * padded(block), [block], segment_bytes=padded(block))
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * block))], [block])
    manager = TierManager([GROUP], HostMover(memory), host, [], 1e9)
    manager.record_evictions()
    save(manager, 1, 2, 3)
    made = [SavedBlock(0, n, id.key, BlockMeta()) for n, id in zip((4, 3), ids(4, 3))]  # 3 is evicted first
    evicted = manager.make_room(2, made)
    assert evicted == {"host": [(0, ids(3)[0].key), (0, ids(2)[0].key)]}
    manager.execute([Save(2, made)])
    wait_for(manager, Saved)
    assert manager.flush(60)
    assert find(manager, 1, 2, 3, 4) == ["host", None, "host", "host"]
    assert manager.make_room(3, []) == {}
    manager.close()


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_a_rank_that_decides_evictions_does_not_repeat_them(keep, decides):
    """A block may be evicted and saved again before the other ranks hear of its eviction."""
    memory = HostMemory([memoryview(bytearray(N_BLOCKS * GROUP.block_bytes))], [GROUP.block_bytes])
    host, disk = HostTier(1 << 20, [GROUP.block_bytes], keep=keep), MemoryTier("disk")
    manager = TierManager([GROUP], HostMover(memory), host, [disk], 1e9)
    if decides:
        manager.record_evictions()
    save(manager, 1)
    manager.execute([Save(2, [], {"disk": [(0, ids(1)[0].key)]})])
    wait_for(manager, Saved)
    assert disk.holds(ids(1)) == [decides]
    manager.close()


class BrokenTier(MemoryTier):
    def read(self, ids, buffers):
        raise RuntimeError("broken")

    def write(self, ids, buffers, metas):
        raise RuntimeError("broken")


def test_an_export_and_an_import_go_on_with_the_other_tiers():
    mover = HostMover(HostMemory([memoryview(bytearray(GROUP.block_bytes))], [GROUP.block_bytes]))
    host = HostTier(1 << 20, [GROUP.block_bytes], keep=False)
    broken, disk = BrokenTier("pool"), MemoryTier("disk")
    manager = TierManager([GROUP], mover, host, [broken, disk], 1e9)
    content = bytes(range(256)) * (GROUP.block_bytes // 256)
    manager.execute([WriteBlocks(1, [WholeBlock(0, ids(1)[0].key, BlockMeta(), content)])])
    assert wait_for(manager, BlocksWritten) == [BlocksWritten(1)]
    MemoryTier.write(broken, ids(1), [memoryview(bytearray(content))], [BlockMeta()])
    manager.execute([ReadBlocks(2, [(0, ids(1)[0].key)])])
    assert wait_for(manager, SlicesRead) == [SlicesRead(2, [content])]
    manager.close()


def test_statistics_of_a_tier_that_is_out_of_use_are_asked_for_again():
    """A pool that connects after the first report changes nothing else."""
    memory = memoryview(bytearray(N_STAGES << 16))
    store = LyingStore(memory)
    store.problem = "not connected yet"
    pool = PoolTier(store, memory, BlockTagger(bytes(32)), "cluster")
    mover = HostMover(HostMemory([memoryview(bytearray(GROUP.block_bytes))], [GROUP.block_bytes]))
    manager = TierManager([GROUP], mover, HostTier(1 << 20, [GROUP.block_bytes], keep=False), [pool], 1e9)
    assert [stats.state for stats in manager.stats()] == ["degraded: not connected yet"]
    assert manager.report_s < time.monotonic() + 60
    manager.close()
