"""Blocks that a group of one layout has put into the pool, read by a group of another one."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.mover import HostMover
from emberline.kv.tiers.pool.pool_tier import N_STAGES, PoolTier
from emberline.kv.tiers.pool.resliced_pool import ReslicedPool
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup
from tests.kv.tiers.pool.lying_store import LyingStore
from tests.kv.tiers.pool.test_pool_tier import KEY, STAGE_BYTES, make_tier
from tests.kv.transfer.rank_groups import GROUP, LATENT, divided, part, whole_block

KEYS = [bytes([n]) * 16 for n in range(3)]


def ids_of(group: KVGroup) -> list[BlockId]:
    return [BlockId(key, layout_tag(group)) for key in KEYS]


def content(group: KVGroup, whole: KVGroup) -> list[bytes]:
    return [part(whole_block(whole, n), group, whole).tobytes() for n in range(len(KEYS))]


def saved(whole: KVGroup, layout: dict[str, int]) -> dict[str, bytes]:
    """Objects of a pool in which every rank of a layout has its slices."""
    objects: dict[str, bytes] = {}
    for (group,) in divided(whole, **layout):
        pool = ReslicedPool(make_tier(objects)[0], [group], [whole])
        data = [memoryview(bytearray(each)) for each in content(group, whole)]
        pool.write(ids_of(group), data, [BlockMeta()] * len(KEYS))
    return objects


def read(pool: ReslicedPool, group: KVGroup) -> list[bytes | None]:
    buffers = [memoryview(bytearray(group.block_bytes)) for _ in KEYS]
    return [bytes(buffer) if ok else None for ok, buffer in zip(pool.read(ids_of(group), buffers), buffers)]


@pytest.mark.parametrize(
    ("whole", "first", "second"),
    [
        (GROUP, {"tp": 2}, {"tp": 1}),
        (GROUP, {"tp": 1}, {"tp": 4}),
        (GROUP, {"tp": 4}, {"tp": 2}),
        (GROUP, {"tp": 2}, {"tp": 2, "pp": 2}),
        (GROUP, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 2}),
        (LATENT, {"tp": 4, "dcp": 4}, {"tp": 2}),
        (LATENT, {"tp": 2}, {"tp": 2, "dcp": 2}),
        (LATENT, {"tp": 2, "dcp": 2}, {"tp": 8, "dcp": 8}),
    ],
)
@pytest.mark.parametrize("looks_up", [True, False], ids=["rank 0", "another rank"])
def test_slices_are_made_of_those_of_another_layout(
    whole: KVGroup, first: dict[str, int], second: dict[str, int], looks_up: bool
) -> None:
    objects = saved(whole, first)
    for (group,) in divided(whole, **second):
        pool = ReslicedPool(make_tier(objects)[0], [group], [whole])
        ids = ids_of(group)
        assert pool.holds(ids) == [False] * len(ids)
        if looks_up:
            pool.look_up(ids)
            assert pool.holds(ids) == [True] * len(ids)
            assert pool.holds([BlockId(b"?" * 16, ids[0].tag)]) == [False]
        assert read(pool, group) == content(group, whole)


def test_the_step_loop_finds_blocks_of_another_layout() -> None:
    pool, size = ReslicedPool(make_tier(saved(GROUP, {"tp": 2}))[0], [GROUP], [GROUP]), GROUP.block_bytes
    memory = HostMemory([memoryview(bytearray(size))], [size])
    manager = TierManager([GROUP], HostMover(memory), HostTier(1 << 20, [size]), [pool], 1e9)
    pool.look_up(ids_of(GROUP))
    assert manager.find(0, [*KEYS, b"?" * 16]) == ["pool"] * len(KEYS) + [None]
    manager.close()


class Interrupted(PoolTier):
    """A pool of which a thread asks `holds` while another one does something, the call after the next."""

    def interrupt(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = [meanwhile, lambda: None]

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().holds(ids)

    meanwhile: Sequence[Callable[[], object]] = ()


def test_a_group_is_looked_up_while_the_step_loop_asks_for_another() -> None:
    other = msgspec.structs.replace(GROUP, name="sliding", window=64)
    memory = memoryview(bytearray(N_STAGES * STAGE_BYTES))
    store = LyingStore(memory, saved(GROUP, {"tp": 2}) | saved(other, {"tp": 2}))
    tier = Interrupted(store, memory, BlockTagger(KEY), "test")
    pool = ReslicedPool(tier, [GROUP, other], [GROUP, other])
    pool.look_up(ids_of(GROUP))
    tier.interrupt(lambda: pool.look_up(ids_of(other)))
    assert pool.holds(ids_of(GROUP)) == [True] * len(KEYS)
    assert pool.holds(ids_of(other)) == [True] * len(KEYS)


def test_a_part_that_is_lost_or_damaged_is_a_missing_block() -> None:
    objects = saved(GROUP, {"tp": 2})
    lost, damaged, _ = (key.hex() for key in KEYS)
    tag = layout_tag(divided(GROUP, tp=2)[1][0]).hex()
    for name in [name for name in objects if name.endswith(tag)]:
        if lost in name:
            del objects[name]
        elif damaged in name:
            objects[name] = objects[name][:-1] + bytes([objects[name][-1] ^ 1])
    pool = ReslicedPool(make_tier(objects)[0], [GROUP], [GROUP])
    buffers = [memoryview(bytearray(GROUP.block_bytes)) for _ in KEYS]
    got = pool.read(ids_of(GROUP)[::-1], buffers)
    assert got == [True, False, False]
    assert bytes(buffers[0]) == content(GROUP, GROUP)[2]


def test_blocks_of_this_layout_are_read_as_they_are_and_removed_everywhere() -> None:
    objects = saved(GROUP, {"tp": 1}) | saved(GROUP, {"tp": 2})
    tier, _ = make_tier(objects)
    pool = ReslicedPool(tier, [GROUP], [GROUP])
    assert read(pool, GROUP) == content(GROUP, GROUP)
    assert (tier.stats().hits, tier.stats().misses) == (len(KEYS), 0)
    pool.remove(ids_of(GROUP))
    assert not objects


def test_no_other_division_of_keys_that_are_stored_by_channel() -> None:
    by_channel = KVGroup("full", (0,), kv_heads=2, head_dim=4, dtype="bfloat16", keys="channel")
    pool = ReslicedPool(make_tier()[0], [by_channel], [by_channel])
    assert read(pool, by_channel) == [None] * len(KEYS)
