"""The disk tier: what is written comes back, after a restart too, or not at all."""

from pathlib import Path

import pytest

from emberline.kv.tiers.tier import BlockId
from emberline.protocol.errors import BadInput
from tests.kv.tiers.disk.disk_blocks import (
    GROUP,
    KEY,
    ODD,
    OTHER,
    OWNER,
    block_id,
    content,
    held,
    open_tier,
    read,
    write,
)


@pytest.fixture(params=[False, True], ids=["aligned", "unaligned"])
def aligned(request: pytest.FixtureRequest) -> bool:
    return not request.param


@pytest.mark.parametrize("group", [GROUP, ODD], ids=["pages", "odd"])
@pytest.mark.parametrize("cipher_key", [None, b"c" * 32], ids=["plain", "encrypted"])
def test_blocks_come_back(tmp_path: Path, group, cipher_key, aligned: bool) -> None:
    tier = open_tier(tmp_path, groups=(GROUP, ODD), cipher_key=cipher_key)
    numbers = list(range(40))
    write(tier, numbers, group, aligned)
    assert read(tier, numbers[::-1], group, aligned) == [content(n, group) for n in numbers[::-1]]
    assert read(tier, [99], group) == [None]
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.blocks, stats.state) == (40, 1, 40, "ok")
    assert stats.written_bytes == stats.read_bytes == 40 * group.block_bytes
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*.blocks"))
    assert (content(3, group) in stored) == (cipher_key is None)
    tier.close()


def test_groups_do_not_mix(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, groups=(GROUP, ODD))
    write(tier, [1, 2])
    assert held(tier, [1, 2], ODD) == []
    assert tier.read([BlockId(block_id(1).key, b"x" * 8)], [memoryview(bytearray(8))]) == [False]
    tier.close()


@pytest.mark.parametrize("orderly", [True, False])
def test_restart_finds_everything(tmp_path: Path, orderly: bool) -> None:
    tier = open_tier(tmp_path)
    write(tier, list(range(30)), session=b"s" * 16)
    tier.remove([block_id(7)])
    if orderly:
        tier.close()
    del tier
    again = open_tier(tmp_path)
    left = [n for n in range(30) if n != 7]
    assert held(again, list(range(30))) == left
    assert read(again, left) == [content(n) for n in left]
    meta = dict(again.chains(OWNER, b"s" * 16))[block_id(5)]
    assert (meta.owner, meta.session, meta.position, meta.parent) == (OWNER, b"s" * 16, 5, block_id(4).key)
    again.close()


@pytest.mark.parametrize("change", ["key", "cipher", "version"])
def test_blocks_of_another_key_or_version_are_discarded(tmp_path: Path, change: str, monkeypatch, caplog) -> None:
    tier = open_tier(tmp_path)
    write(tier, [1, 2, 3])
    tier.close()
    if change == "key":
        monkeypatch.setattr("tests.kv.tiers.disk.disk_blocks.KEY", KEY[::-1])
    if change == "version":
        monkeypatch.setattr("emberline.kv.tiers.disk.disk_folder.VERSION", 2)
    again = open_tier(tmp_path, cipher_key=b"k" * 32 if change == "cipher" else None)
    assert held(again, [1, 2, 3]) == []
    assert "another version or key" in caplog.text
    write(again, [1, 2])
    assert read(again, [1, 2]) == [content(1), content(2)]
    again.close()


def test_capacity_evicts_the_least_recently_used(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_slots=32)
    for n in range(32):
        write(tier, [n], used_s=1000.0 + n)
    tier.touch([block_id(0)])
    assert read(tier, [1]) == [content(1)]
    write(tier, [40, 41, 42])
    assert held(tier, [*range(32), 40, 41, 42]) == [0, 1, *range(5, 32), 40, 41, 42]
    write(tier, list(range(100, 200)))
    assert len(held(tier, list(range(100, 200)))) <= 32
    stats = tier.stats()
    assert stats.blocks == 32
    assert stats.used_bytes <= stats.capacity_bytes
    size = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.blocks"))
    assert size <= stats.capacity_bytes
    tier.close()


def test_smaller_and_larger_capacity_at_the_next_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_slots=32)
    write(tier, list(range(32)))
    tier.close()
    for n_slots in (8, 64):
        tier = open_tier(tmp_path, n_slots=n_slots)
        left = held(tier, list(range(32)))
        assert len(left) == 8
        assert read(tier, left) == [content(n) for n in left]
        tier.close()


def test_two_workers_have_a_folder_each(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    write(first, [1])
    write(second, [2])
    assert (held(first, [1, 2]), held(second, [1, 2])) == ([1], [2])
    first.close()
    third = open_tier(tmp_path)
    assert held(third, [1, 2]) == [1]
    for tier in (second, third):
        tier.close()


def test_too_little_room_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give at least 12288"):
        open_tier(tmp_path, n_slots=0)


# --- purging ---------------------------------------------------------------------------------------------------------


def stored_bytes(base: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(base.rglob("*")) if path.is_file())


def test_purge_leaves_no_byte(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_slots=16)
    write(tier, [0, 1, 2], owner=OTHER, session=b"s" * 16)
    write(tier, [3, 4], owner=OTHER, session=b"t" * 16)
    write(tier, list(range(10, 16)))
    tier.remove([block_id(0)])  # evicted blocks leave their bytes until they are overwritten
    assert content(0) in stored_bytes(tmp_path)
    assert tier.purge(owner=OTHER, session=b"s" * 16) == 2
    left = stored_bytes(tmp_path)
    assert not any(content(n)[:64] in left for n in (0, 1, 2))
    assert not any(block_id(n).key in left for n in (0, 1))  # that of 2 is the parent of 3
    assert held(tier, list(range(16))) == [3, 4, *range(10, 16)]
    assert tier.purge(owner=OTHER) == 2
    left = stored_bytes(tmp_path)
    assert OTHER not in left
    assert content(4)[:64] not in left
    assert tier.purge() == 6
    assert not any(stored_bytes(tmp_path / "0" / path.name).strip(b"\0") for path in tmp_path.rglob("*.blocks"))
    assert b"O" * 16 not in stored_bytes(tmp_path)
    write(tier, [1, 20])
    assert read(tier, [1, 20, 3]) == [content(1), content(20), None]
    tier.close()


def test_chains_of_a_session_include_what_it_shares(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, [0, 1], session=b"s" * 16)  # a system prompt that another session saved first
    write(tier, [2, 3], session=b"t" * 16)
    assert [key for (key, _), _ in tier.chains(OWNER, b"t" * 16)] == [block_id(n).key for n in range(4)]
    assert tier.chains(OTHER, None) == []
    tier.close()


def test_after_a_crash_of_the_machine_a_purge_wipes_what_is_uncertain(tmp_path: Path, monkeypatch) -> None:
    """The index may be older than the blocks: whose bytes a slot holds is not known."""
    tier = open_tier(tmp_path)
    write(tier, [0, 1, 2])
    del tier
    monkeypatch.setattr("emberline.kv.tiers.disk.disk_folder.boot_id", lambda: "another start of the machine")
    again = open_tier(tmp_path)
    assert read(again, [0, 1]) == [content(0), content(1)]  # verified, so they are what they claim to be
    write(again, [3])
    again.purge(owner=OTHER)
    left = stored_bytes(tmp_path)
    assert (held(again, [0, 1, 2, 3]), content(2)[:64] in left) == ([3], False)
    again.close()


def test_retired_blocks_are_evicted_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_slots=8)
    write(tier, [0, 1, 2, 3], session=b"s" * 16, used_s=2000.0)
    write(tier, [4, 5, 6, 7], session=b"t" * 16, used_s=1000.0)
    tier.retire(OWNER, b"s" * 16, 2)
    tier.retire(OTHER, b"t" * 16, 0)
    write(tier, [10, 11])
    assert held(tier, list(range(12))) == [0, 1, 4, 5, 6, 7, 10, 11]
    stats = tier.stats()
    assert (stats.evicted, stats.blocks) == (2, 8)
    assert stats.oldest_s > 1e9
    assert stats is not tier.stats()  # a report that is kept does not change
    tier.close()
