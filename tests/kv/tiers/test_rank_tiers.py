"""Tiers of several ranks as one: a block is there when all ranks have their slices, and lost when one has not."""

import threading
import time

import msgspec
import pytest

from emberline.engine.ranks.messages import encoder
from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.messages import BlocksFetched, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.mover import HostMover
from emberline.kv.tiers.orders import TierOrder
from emberline.kv.tiers.pool.pool_tier import N_STAGES, PoolTier
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from tests.kv.tiers.pool.lying_store import LyingStore
from tests.kv.transfer.rank_groups import GROUP, divided, part, whole_block

N_BLOCKS = 20
KEY = bytes(32)
SLICES = divided(GROUP, tp=2)


class Group:
    """Two ranks in this process: rank 0 tells rank 1 directly, which reports when it is asked."""

    def __init__(self, folder, pool=None):
        """pool: objects of a pool, which the group has instead of a disk."""
        self.memories, self.managers = [], []
        for rank, slices in enumerate(SLICES):
            size = slices[0].block_bytes
            memory = HostMemory([memoryview(bytearray(N_BLOCKS * size))], [size])
            tier = DiskTier(folder / str(rank), slices, 1 << 20, KEY) if pool is None else pool_tier(pool)
            self.memories.append(memory)
            self.managers.append(TierManager(slices, HostMover(memory), HostTier(1 << 20, [size]), [tier], 1e9, SLICES))
        self.leader = GroupTiers(self.managers[0])
        self.follower = self.managers[1]
        self.hears = True
        self.orders = []
        self.n_saves = 0
        self.leader.order = self._order

    def _order(self, order):
        sent = msgspec.convert(msgspec.msgpack.decode(encoder.encode(order)), TierOrder)
        self.orders.append(sent)
        self.managers[0].execute([order])
        if self.hears:
            self.follower.execute([sent])

    def notices(self):
        self.leader.report(1, self.follower.reports())
        return self.leader.notices()

    def wait_for(self, kind, n=1):
        found, until_s = [], time.monotonic() + 60
        while len(found) < n:
            assert time.monotonic() < until_s
            found += [notice for notice in self.notices() if isinstance(notice, kind)]
            time.sleep(0.001)
        return found

    def save(self, *numbers):
        for n in numbers:
            for memory, (group,) in zip(self.memories, SLICES):
                memory.block(0, n)[:] = part(whole_block(GROUP, n), group, GROUP).tobytes()
        self.n_saves += 1
        blocks = [SavedBlock(0, n, block_id(n).key, BlockMeta(owner=b"o", position=n)) for n in numbers]
        self.leader.save(self.n_saves, blocks)
        assert self.wait_for(Saved) == [Saved(self.n_saves)]
        self.flush()

    def flush(self):
        assert all(manager.flush(60) for manager in self.managers)

    def fetch(self, number, *wanted, tier="host"):
        """Contents into blocks from 10 on; which were found, and which not."""
        blocks = [WantedBlock((0, n), 10 + n, block_id(n).key, BlockMeta(owner=b"o", position=n), tier) for n in wanted]
        self.leader.fetch(number, blocks)
        found, missing, until_s = [], [], time.monotonic() + 60
        while len(found) + len(missing) < len(wanted):
            assert time.monotonic() < until_s
            for notice in self.notices():
                found += notice.fetched
                missing += notice.missing
            time.sleep(0.001)
        assert not self.leader.cancel(number)
        return sorted(j for _, j in found), sorted(j for _, j in missing)

    def has(self, block, n):
        return all(
            bytes(memory.block(0, block)) == part(whole_block(GROUP, n), group, GROUP).tobytes()
            for memory, (group,) in zip(self.memories, SLICES)
        )

    def close(self):
        for manager in self.managers:
            manager.close()


def pool_tier(objects):
    """A rank's own connection to the pool."""
    memory = memoryview(bytearray(N_STAGES << 16))
    return PoolTier(LyingStore(memory, objects), memory, BlockTagger(KEY), "cluster")


def block_id(n, rank=0):
    return BlockId(bytes([n]) * 16, layout_tag(SLICES[rank][0]))


@pytest.fixture
def group(tmp_path):
    made = Group(tmp_path)
    yield made
    made.close()


def test_every_rank_keeps_and_brings_back_its_slice(group):
    group.save(1, 2, 3)
    assert [manager.all_tiers[0].stats().blocks for manager in group.managers] == [3, 3]
    assert group.fetch(1, 3, 1) == ([1, 3], [])
    assert group.has(13, 3)
    assert group.has(11, 1)


def test_a_slice_that_one_rank_has_lost_is_missing_everywhere_until_it_is_saved_again(group):
    group.save(1, 2)
    for tier in group.managers[1].all_tiers:
        tier.remove([block_id(2, rank=1)])
    assert group.fetch(1, 1, 2) == ([1], [2])
    group.save(1, 2)  # as it is computed again: only rank 1 lacks it
    assert group.fetch(2, 1, 2) == ([1, 2], [])
    assert group.has(12, 2)


def test_what_is_on_disk_is_found_after_a_restart(group, tmp_path):
    group.save(1, 2)
    group.close()
    again = Group(tmp_path)
    try:
        assert again.leader.own.find(0, [block_id(n).key for n in (1, 2, 3)]) == ["disk", "disk", None]
        assert again.fetch(1, 1, 2, tier="disk") == ([1, 2], [])
        assert again.has(12, 2)
    finally:
        again.close()


def test_a_group_finds_in_the_pool_what_another_has_written(tmp_path):
    objects = {}
    first, second = Group(tmp_path, objects), Group(tmp_path, objects)
    try:
        first.save(1, 2, 3)
        assert len(objects) == 3 * len(SLICES), "a slice of each rank"
        keys = [block_id(n).key for n in (1, 2, 3, 4)]
        second.leader.own.look_up(7, keys)
        second.wait_for(LookedUp)
        assert second.leader.own.find(0, keys) == ["pool", "pool", "pool", None]
        objects.pop(next(name for name in objects if block_id(2).key.hex() + block_id(2, rank=1).tag.hex() in name))
        assert second.fetch(1, 1, 2, 3, tier="pool") == ([1, 3], [2]), "rank 1 has lost its slice of block 2"
        assert second.has(11, 1)
        assert second.has(13, 3)
        second.save(2)  # as it is computed again
        assert len(objects) == 3 * len(SLICES)
        assert first.fetch(2, 2, tier="pool") == ([2], [])
        assert first.has(12, 2)
    finally:
        first.close()
        second.close()


def test_blocks_of_a_cancelled_fetch_are_named_once_every_rank_has_stopped(group):
    group.save(1)
    group.hears = False
    group.leader.fetch(5, [WantedBlock((0, 1), 11, block_id(1).key, BlockMeta(), "host")])
    assert group.leader.cancel(5) == ((0, 1),)
    assert not [each for each in group.notices() if isinstance(each, BlocksFetched)], "rank 1 may still write"
    group.follower.execute(group.orders[-2:])  # now it hears of both
    (named,) = group.wait_for(BlocksFetched)
    assert (named.number, list(named.fetched), list(named.missing)) == (5, [], [(0, 1)])


def test_a_purge_reaches_every_rank(group):
    group.save(1, 2)
    done = []
    thread = threading.Thread(target=lambda: done.append(group.leader.purge(b"o", None)))
    thread.start()
    until_s = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < until_s:
        group.notices()
        thread.join(0.001)
    assert done == [{"host": 2, "disk": 2}]
    assert [tier.stats().blocks for manager in group.managers for tier in manager.all_tiers] == [0, 0, 0, 0]
