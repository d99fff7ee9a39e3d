"""The pool tier over a store that may lie: what it returns is what was written, or nothing."""

import os
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.pool.pool_tier import HEADER_BYTES, N_STAGES, PoolTier
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup
from tests.kv.tiers.pool.lying_store import Listing, LyingStore

BLOCK_BYTES = 1000
STAGE_BYTES = 4 * (BLOCK_BYTES + HEADER_BYTES) + 50  # 4 blocks each
KEY = bytes(range(32))


def make_tier(
    objects: dict[str, bytes] | None = None, key: bytes = KEY, namespace: str = "test", **limits: float
) -> tuple[PoolTier, LyingStore]:
    memory = memoryview(bytearray(N_STAGES * STAGE_BYTES))
    store = LyingStore(memory, objects)
    return PoolTier(store, memory, BlockTagger(key), namespace, Listing(store.objects), **limits), store


def block_ids(n: int, tag: bytes = b"layout-1") -> list[BlockId]:
    return [BlockId(os.urandom(16), tag) for _ in range(n)]


def blocks(n: int, n_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(random.randbytes(n_bytes))) for _ in range(n)]


def read(tier: PoolTier, ids: list[BlockId], n_bytes: int = BLOCK_BYTES) -> list[bytes | None]:
    buffers = [memoryview(bytearray(n_bytes)) for _ in ids]
    return [bytes(buffer) if ok else None for ok, buffer in zip(tier.read(ids, buffers), buffers)]


def write(tier: PoolTier, ids: list[BlockId], data: list[memoryview], **meta: bytes) -> None:
    tier.write(ids, data, [BlockMeta(**meta)] * len(ids))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 4, 5, 23])
def test_another_worker_reads_what_one_wrote(n: int) -> None:
    here, store = make_tier()
    there, _ = make_tier(store.objects)
    ids, data = block_ids(n), blocks(n)
    write(here, ids, data)
    assert there.holds(ids) == [False] * n, "nothing is known before a lookup"
    there.look_up(ids)
    assert there.holds(ids) == here.holds(ids) == [True] * n
    assert read(there, ids) == [bytes(each) for each in data]
    assert read(there, block_ids(1)) == [None]
    stats = there.stats()
    assert (stats.hits, stats.misses, stats.read_bytes, stats.state) == (n, 1, n * BLOCK_BYTES, "ok")
    assert stats.blocks == n
    assert stats.read_rate > 0
    assert here.stats().written_bytes == n * BLOCK_BYTES


def test_written_blocks_are_not_written_again() -> None:
    tier, store = make_tier()
    ids, data = block_ids(3), blocks(3)
    write(tier, ids, data)
    write(tier, ids, data)
    assert store.calls == ["put"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_the_store_returns_a_block_is_the_one_written_or_absent(data: st.DataObject) -> None:
    tier, store = make_tier()
    ids, written = block_ids(6), blocks(6)
    write(tier, ids, written, owner=b"owner", session=b"session")
    names = list(store.objects)
    for name in data.draw(st.sets(st.sampled_from(names))):
        kind = data.draw(st.sampled_from(["flip", "swap", "cut", "extend", "garbage", "absent"]))
        before = store.objects[name]
        if kind == "flip":
            at = data.draw(st.integers(0, len(before) - 1).filter(lambda at: at < 65 or at >= HEADER_BYTES))
            store.objects[name] = before[:at] + bytes((before[at] ^ data.draw(st.integers(1, 255)),)) + before[at + 1 :]
        elif kind == "swap":
            other = data.draw(st.sampled_from(names))
            store.objects[name] = store.objects.get(other, b"")
        elif kind == "absent":
            del store.objects[name]
        else:
            changed = {"cut": before[:-1], "extend": before + b"\0", "garbage": os.urandom(len(before))}
            store.objects[name] = changed[kind]
    for got, expected in zip(read(tier, ids), written):
        assert got is None or got == bytes(expected)


def test_a_forged_block_is_refused_counted_removed_and_written_anew() -> None:
    tier, store = make_tier()
    forger, _ = make_tier(store.objects, key=bytes(32))
    ids, data = block_ids(2), blocks(2)
    write(forger, ids, blocks(2))
    assert set(store.objects) == {f"test/{id_.key.hex()}{id_.tag.hex()}" for id_ in ids}
    assert read(tier, ids) == [None, None]
    assert tier.stats().extra["refused"] == 2
    assert store.objects == {}, "they would keep the name from being written"
    write(tier, ids, data)
    assert read(tier, ids) == [bytes(each) for each in data]


def test_a_block_of_another_account_session_or_address_does_not_verify_here() -> None:
    """Whoever can write to the pool copies an object under another name."""
    tier, store = make_tier()
    (victim, other), data = block_ids(2), blocks(2)
    write(tier, [victim, other], data, owner=b"account a")
    first, second = store.objects
    store.objects[second] = store.objects[first]
    assert read(tier, [victim, other]) == [bytes(data[0]), None]


def test_models_dtypes_layouts_drafters_and_clusters_never_mix() -> None:
    """Even for equal content keys, which two models cannot have: the fingerprint is in the root of their chain."""
    objects: dict[str, bytes] = {}
    key = os.urandom(16)

    def group(name: str = "full", dtype: str = "float16", head_dim: int = 64, layers: int = 4) -> KVGroup:
        return KVGroup(name, tuple(range(layers)), 2, head_dim, dtype)

    layouts = [group(), group(dtype="bfloat16"), group(head_dim=32), group(layers=2), group("draft"), group("window64")]
    tags = [layout_tag(each) for each in layouts]
    assert len(set(tags)) == len(tags)
    tier, _ = make_tier(objects)
    for tag, value in zip(tags, b"abcdef"):
        write(tier, [BlockId(key, tag)], [memoryview(bytes((value,)) * BLOCK_BYTES)])
    other_cluster, _ = make_tier(objects, namespace="other")
    for tag, value in zip(tags, b"abcdef"):
        assert read(tier, [BlockId(key, tag)]) == [bytes((value,)) * BLOCK_BYTES]
        assert read(other_cluster, [BlockId(key, tag)]) == [None]


def test_a_pool_that_is_full_or_lost_drops_writes_and_recovers() -> None:
    tier, store = make_tier()
    ids, data = block_ids(5), blocks(5)
    store.full = True
    write(tier, ids, data)
    assert tier.stats().dropped == 5
    assert not any(tier.holds(ids))
    store.full = False
    store.problem = "the master does not answer"
    write(tier, ids, data)
    assert (tier.stats().dropped, tier.stats().state) == (10, "degraded: the master does not answer")
    assert read(tier, ids) == [None] * 5
    tier.look_up(ids)
    assert tier.holds(ids) == [False] * 5
    assert tier.purge() == 0
    store.problem = ""
    write(tier, ids, data)
    assert read(tier, ids) == [bytes(each) for each in data]
    assert tier.stats().state == "ok"
    store.objects.clear()  # the master was restarted
    store.generation += 1
    assert tier.holds(ids) == [False] * 5
    write(tier, ids, data)
    assert read(tier, ids) == [bytes(each) for each in data]


def test_a_store_that_hangs_is_given_up() -> None:
    tier, store = make_tier(call_limit_s=0.0, min_rate=1e12)
    ids = block_ids(9)
    write(tier, ids, blocks(9))
    store.hang_s = 60.0
    began_s = time.monotonic()
    assert read(tier, ids) == [None] * 9
    assert time.monotonic() - began_s < 30
    assert tier.holds(ids) == [False] * 9


def test_blocks_of_a_lost_peer_are_absent_and_stay_in_the_pool() -> None:
    tier, store = make_tier()
    ids, data = block_ids(3), blocks(3)
    write(tier, ids, data)
    store.unreachable = {list(store.objects)[1]}
    assert read(tier, ids) == [bytes(data[0]), None, bytes(data[2])]
    assert tier.holds(ids) == [True, False, True]
    assert len(store.objects) == 3, "its peer may come back"
    assert tier.stats().extra["refused"] == 0


def test_purge_by_owner_or_session_removes_every_workers_blocks_and_no_others() -> None:
    here, store = make_tier()
    there, _ = make_tier(store.objects)
    ids, data = block_ids(4), blocks(4)
    write(here, ids[:1], data[:1], owner=b"a", session=b"1")
    write(there, ids[1:2], data[1:2], owner=b"a", session=b"2")
    write(there, ids[2:3], data[2:3], owner=b"b", session=b"1")
    store.objects["a stranger's"] = b"x"
    assert here.purge(owner=b"a", session=b"2") == 1
    assert read(here, ids[:3]) == [bytes(data[0]), None, bytes(data[2])]
    assert here.purge(owner=b"a") == 1
    assert read(here, ids[:3]) == [None, None, bytes(data[2])]
    assert here.purge() == 1
    assert list(store.objects) == ["a stranger's"]


def test_a_block_larger_than_a_stage_is_dropped() -> None:
    tier, store = make_tier()
    ids, data = block_ids(1), blocks(1, STAGE_BYTES)
    write(tier, ids, data)
    assert (store.calls, tier.stats().dropped) == ([], 1)
    assert read(tier, ids, STAGE_BYTES) == [None]


def test_a_lookup_asks_only_for_what_is_not_known() -> None:
    tier, store = make_tier()
    ids = block_ids(3)
    write(tier, ids[:2], blocks(2))
    tier.look_up(ids)
    tier.look_up(ids[:2])
    assert store.calls == ["put", "exist"]
    tier.remove(ids[:1])
    assert tier.holds(ids) == [False, True, False]
