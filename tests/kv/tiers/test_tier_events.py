"""What tiers gain and lose is told once, net, and anew after a reset."""

from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.kv_events import TierChanges
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.tier import BlockId, BlockMeta, Tier, layout_tag
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import KVEvents
from tests.kv.tiers.pool.test_pool_tier import make_tier

GROUP = KVGroup("full", (0,), 1, 32, "float16")
TAG = layout_tag(GROUP)


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(bytes([number]) * 16, TAG) for number in numbers]


def test_blocks_of_other_groups_cancel_nothing() -> None:
    """A model with several groups of layers has blocks of each under one content key, and evicts them apart."""
    other = BlockId(bytes([1]) * 16, layout_tag(KVGroup("window", (1,), 1, 64, "float16")))
    changes = TierChanges("host", TAG, list, lambda: None)
    changes.watch()
    changes.stored([*ids(1), other])
    changes.removed([other])
    (event,) = changes.take()
    assert event == KVEvents(stored=ids(1)[0].key, tier="host")
    changes.removed(ids(1))
    changes.stored([other])
    (event,) = changes.take()
    assert event == KVEvents(removed=ids(1)[0].key, tier="host")


def follow(known: set[bytes], events: Iterable[KVEvents]) -> None:
    for event in events:
        if event.whole:
            known.clear()
        known -= {event.removed[at : at + 16] for at in range(0, len(event.removed), 16)}
        known |= {event.stored[at : at + 16] for at in range(0, len(event.stored), 16)}


def watched(tier: Tier) -> tuple[TierChanges, list[int]]:
    wakes = [0]

    def wake() -> None:
        wakes[0] += 1

    tier.changes = TierChanges(tier.name, TAG, tier.held, wake)
    return tier.changes, wakes


def check(tier: Tier, n: int) -> None:
    """A follower knows what the tier holds, through writes, evictions and removals."""
    data = memoryview(bytearray(GROUP.block_bytes))
    tier.write(ids(1, 2), [data] * 2, [BlockMeta()] * 2)
    changes, wakes = watched(tier)
    known: set[bytes] = set()
    follow(known, changes.watch())
    for number in range(3, 3 + n):
        tier.write(ids(number), [data], [BlockMeta(owner=b"o")])
        if number % 3 == 0:
            follow(known, changes.take())
    assert wakes[0] > 1
    tier.remove(ids(n))
    follow(known, changes.take())
    assert known == {block_id.key for block_id in tier.held()}
    assert all(tier.holds(tier.held()))
    tier.purge()
    follow(known, changes.take())
    assert not changes.take()
    changes.unwatch()


def test_host_memory() -> None:
    tier = HostTier(16 * 4096, [GROUP.block_bytes])
    tier.allocate_all()
    check(tier, 40)


def test_disk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, [GROUP], 10 * 8192, bytes(32))
    check(tier, 30)
    tier.close()


def test_pool() -> None:
    tier, store = make_tier()
    check(tier, 20)
    changes, _ = watched(tier)
    changes.watch()
    tier.write(ids(1), [memoryview(bytearray(GROUP.block_bytes))], [BlockMeta()])
    changes.take()
    tier.look_up(ids(1))
    assert not changes.take(), "it was told"
    store.objects.clear()
    tier.look_up(ids(7))
    (absent,) = changes.take()
    assert (absent.removed, absent.tier) == (bytes([7]) * 16, "pool")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.booleans())))
def test_changes_are_net(steps: list[tuple[bool, int, bool]]) -> None:
    held: set[BlockId] = set()
    changes = TierChanges("host", TAG, lambda: held, lambda: None)
    known: set[bytes] = set()
    follow(known, changes.watch())
    for is_stored, number, takes in steps:
        (block_id,) = ids(number)
        if is_stored and block_id not in held:
            held.add(block_id)
            changes.stored([block_id, BlockId(b"x" * 16, b"other lt")])
        elif not is_stored and block_id in held:
            held.remove(block_id)
            changes.removed([block_id])
        if takes:
            follow(known, changes.take())
    follow(known, changes.take())
    assert known == {key for key, _ in held}
    changes.reset()
    (whole,) = changes.take()
    assert whole.whole
    assert len(whole.stored) == 16 * len(held)
