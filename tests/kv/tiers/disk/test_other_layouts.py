"""Blocks that a group of another number of ranks has left on disk, served to the ranks of this one."""

import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from emberline.kv.kv_events import TierChanges
from emberline.kv.tiers.disk.disk_folder import folders_of_other_groups
from emberline.kv.tiers.disk.disk_tier import DiskTier, slot_bytes
from emberline.kv.tiers.disk.drive_health import DriveTimes
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup
from tests.kv.tiers.disk.disk_blocks import KEY
from tests.kv.tiers.disk.test_disk_faults import limit_space, wait_until
from tests.kv.transfer.rank_groups import GROUP, LATENT, divided, part, whole_block

OWNER, SESSION = b"O" * 16, b"S" * 16
LARGE = msgspec.structs.replace(GROUP, head_dim=128)  # 128 KiB: what a header takes beside it hardly counts
WIDE = msgspec.structs.replace(GROUP, kv_heads=8)
BY_CHANNEL = msgspec.structs.replace(GROUP, keys="channel")
NUMBERS = range(6)
NEVER = DriveTimes(shrink_pause_s=1e6)  # the thread that gives blocks up does not get to it


class Group:
    """The disk tiers of all ranks of a group, in folders as workers have them."""

    def __init__(
        self, folder: Path, layout: dict[str, int], whole: KVGroup = GROUP, n_slots: int = 64, **options: object
    ) -> None:
        self.whole, self.slices = whole, [group for (group,) in divided(whole, **layout)]
        self.tiers = []
        n_ranks, base = len(self.slices), folder / "model"
        others = folders_of_other_groups(base, n_ranks)
        for rank, group in enumerate(self.slices):
            own = base if n_ranks == 1 else base.with_name(f"model-rank{rank}of{n_ranks}")
            args: dict[str, object] = {"key": KEY, "grow_bytes": 1, "others": others, "whole": [whole], **options}
            self.tiers.append(DiskTier(own, [group], n_slots * slot_bytes([group]), **args))  # type: ignore[arg-type]
        self.tiers[0].evicted = deque()

    def write(self, numbers: Iterable[int]) -> None:
        """Save blocks on all ranks, which hear first what rank 0 has evicted."""
        for group, tier in zip(self.slices, self.tiers):
            if tier.evicted is None and self.evicted:
                tier.evict(ids(self.evicted, group))
            data = [memoryview(bytearray(self.content(n, group))) for n in numbers]
            metas = [BlockMeta(OWNER, SESSION, position=n, parent=key(n - 1) if n else OWNER) for n in numbers]
            tier.write(ids(numbers, group), data, metas)

    @property
    def evicted(self) -> list[int]:
        """What rank 0 has evicted so far."""
        return [key[0] for key, _ in self.tiers[0].evicted or ()]

    def content(self, n: int, group: KVGroup) -> bytes:
        return part(whole_block(self.whole, n), group, self.whole).tobytes()

    def check(self, tier: DiskTier, numbers: Iterable[int]) -> list[int]:
        """The blocks that a rank reads, each with its bytes."""
        group = self.slices[self.tiers.index(tier)]
        buffers = [memoryview(bytearray(group.block_bytes)) for _ in numbers]
        read = tier.read(ids(numbers, group), buffers)
        found = [(n, bytes(buffer)) for n, good, buffer in zip(numbers, read, buffers) if good]
        assert all(data == self.content(n, group) for n, data in found)
        return [n for n, _ in found]

    def held(self, tier: DiskTier, numbers: Iterable[int] = NUMBERS) -> list[int]:
        group = self.slices[self.tiers.index(tier)]
        return [n for n, has in zip(numbers, tier.holds(ids(numbers, group))) if has]

    def settle(self) -> None:
        """Have old blocks give way to the size limit now, in as many steps as it takes."""
        for tier in self.tiers:
            while tier.shrink_once():
                pass

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def key(n: int) -> bytes:
    return bytes([n]) * 16


def ids(numbers: Iterable[int], group: KVGroup) -> list[BlockId]:
    return [BlockId(key(n), layout_tag(group)) for n in numbers]


def space(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*.blocks"))


@pytest.fixture
def fast_switches() -> Iterator[None]:
    """Threads take turns more often than they do by default, so that they meet more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("whole", "first", "second"),
    [
        (GROUP, {"tp": 2}, {"tp": 1}),
        (GROUP, {"tp": 1}, {"tp": 4}),
        (GROUP, {"tp": 4}, {"tp": 2}),
        (GROUP, {"tp": 2}, {"tp": 2, "pp": 2}),
        (GROUP, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 2}),
        (GROUP, {"tp": 8}, {"tp": 4}),
        (LATENT, {"tp": 4, "dcp": 4}, {"tp": 2}),
        (LATENT, {"tp": 1}, {"tp": 2, "dcp": 2}),
        (LATENT, {"tp": 2}, {"tp": 1}),
        (LATENT, {"tp": 2, "dcp": 2}, {"tp": 8, "dcp": 8}),
    ],
)
def test_slices_are_made_of_those_of_another_number_of_ranks(
    tmp_path: Path, whole: KVGroup, first: dict[str, int], second: dict[str, int]
) -> None:
    group = Group(tmp_path, first, whole)
    group.write(NUMBERS)
    group.close()
    other = Group(tmp_path, second, whole)
    for tier, slices in zip(other.tiers, other.slices):
        assert other.held(tier, range(9)) == list(NUMBERS)
        assert sorted(tier.held()) == ids(NUMBERS, slices)
        assert [id_ for id_, _ in tier.chains(OWNER, SESSION)] == ids(NUMBERS, slices)
        assert other.check(tier, [7, *NUMBERS]) == list(NUMBERS)
        assert (tier.stats().hits, tier.stats().misses) == (len(NUMBERS), 1)
        assert not tier.unreadable
    other.write(range(6, 9))
    assert all(other.check(tier, range(9)) == list(range(9)) for tier in other.tiers)
    other.close()


@pytest.mark.parametrize(
    ("whole", "first", "second", "options"),
    [
        (GROUP, {"pp": 2}, {"tp": 1}, {}),
        (BY_CHANNEL, {"tp": 2}, {"tp": 1}, {}),
        (msgspec.structs.replace(GROUP, dtype="float16"), {"tp": 2}, {"tp": 1}, {}),
        (msgspec.structs.replace(GROUP, name="window64", window=64), {"tp": 2}, {"tp": 1}, {}),
        (GROUP, {"tp": 2}, {"tp": 1}, {"key": bytes(32)}),
        (GROUP, {"tp": 2}, {"tp": 1}, {"cipher_key": bytes(32)}),
        (GROUP, {"tp": 2}, {"tp": 1}, {"fingerprint": "other weights"}),
    ],
)
def test_what_cannot_be_resliced_is_missing_and_named(
    tmp_path: Path, whole: KVGroup, first: dict[str, int], second: dict[str, int], options: dict[str, object]
) -> None:
    group = Group(tmp_path, first, whole)
    group.write(NUMBERS)
    group.close()
    before = space(tmp_path)
    other = Group(tmp_path, second, BY_CHANNEL if whole is BY_CHANNEL else GROUP, **options)
    (tier,) = other.tiers
    assert other.held(tier) == other.check(tier, NUMBERS) == []
    assert {path.name for path in tier.unreadable} == {"model-rank0of2", "model-rank1of2"}
    other.close()
    assert space(tmp_path) == before, "it is left alone"


def test_keys_by_channel_are_served_where_nothing_is_divided(tmp_path: Path) -> None:
    group = Group(tmp_path, {"tp": 2}, msgspec.structs.replace(LATENT, keys="channel"))
    group.write(NUMBERS)
    group.close()
    other = Group(tmp_path, {"tp": 1}, group.whole)
    assert other.check(other.tiers[0], NUMBERS) == list(NUMBERS)
    other.close()


@pytest.mark.parametrize("how", ["lost", "damaged", "folder"])
def test_a_block_with_a_missing_part_is_missing_until_it_is_written_anew(tmp_path: Path, how: str) -> None:
    group = Group(tmp_path, {"tp": 2})
    group.write(NUMBERS)
    if how == "lost":
        group.tiers[1].remove(ids([2, 4], group.slices[1]))
    group.close()
    base = tmp_path / "model-rank1of2" / "0"
    (blocks,) = base.glob("*.blocks")
    if how == "damaged":
        with blocks.open("r+b") as file:
            for n in (2, 4):
                file.seek(n * slot_bytes([group.slices[1]]) + 4096)
                file.write(b"damage")
    elif how == "folder":
        blocks.unlink()
    left = [] if how == "folder" else [0, 1, 3, 5]
    other = Group(tmp_path, {"tp": 1})
    (tier,) = other.tiers
    assert other.held(tier) == (list(NUMBERS) if how == "damaged" else left)
    assert other.check(tier, NUMBERS) == left
    assert other.held(tier) == left
    other.write([n for n in NUMBERS if n not in left])
    assert other.check(tier, NUMBERS) == list(NUMBERS)
    other.close()


def test_all_ranks_share_a_folder_that_a_worker_of_its_layout_then_leaves_alone(tmp_path: Path) -> None:
    one = Group(tmp_path, {"tp": 1})
    one.write(NUMBERS)
    running = Group(tmp_path, {"tp": 4})
    assert [running.held(tier) for tier in running.tiers] == [[]] * 4, "a worker uses it"
    assert not any(tier.unreadable for tier in running.tiers)
    running.close()
    one.close()
    group = Group(tmp_path, {"tp": 4})
    assert [group.held(tier) for tier in group.tiers] == [list(NUMBERS)] * 4
    again = Group(tmp_path, {"tp": 1})
    assert again.held(again.tiers[0]) == []
    assert (tmp_path / "model" / "1").is_dir()
    again.close()
    group.close()
    first = Group(tmp_path, {"tp": 1})
    assert first.check(first.tiers[0], NUMBERS) == list(NUMBERS)
    first.close()


@pytest.mark.parametrize(("first", "second"), [({"tp": 2}, {"tp": 1}), ({"tp": 1}, {"tp": 2})])
def test_blocks_of_another_layout_give_way_least_recently_used_first(
    tmp_path: Path, first: dict[str, int], second: dict[str, int]
) -> None:
    old = Group(tmp_path, first, LARGE, n_slots=10)
    old.write(range(10))
    old.close()
    capacity = 10 * slot_bytes([LARGE])
    headers = 2 * 10 * 4096  # the two layouts have different numbers of headers
    assert capacity - headers <= space(tmp_path) <= capacity + headers
    group = Group(tmp_path, second, LARGE, n_slots=10)
    for tier in group.tiers:
        assert tier.stats().blocks >= 9
        assert group.check(tier, [0, 1]), "used"
    for n in range(20, 24):
        group.write([n])
        assert space(tmp_path) <= capacity + headers
    group.settle()
    for tier in group.tiers:
        stats, held = tier.stats(), group.held(tier, range(10))
        assert len(held) in (5, 6)
        assert held[:2] == [0, 1]
        assert stats.blocks == len(held) + 4
        assert stats.used_bytes <= stats.capacity_bytes
        assert group.check(tier, range(10)) == held
        assert group.check(tier, range(20, 24)) == [20, 21, 22, 23]
    assert group.tiers[0].stats().evicted >= len(group.evicted) >= 4
    group.write(range(30, 40))
    for tier in group.tiers:
        assert (group.held(tier, range(10)), tier.stats().blocks) == ([], 10)
        assert group.check(tier, range(30, 40)) == list(range(30, 40))
    assert space(tmp_path) <= capacity + headers
    group.close()


def test_a_tier_with_less_room_gives_blocks_of_another_layout_up_as_it_starts(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE, n_slots=6)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=3)
    (tier,) = group.tiers
    wait_until(lambda: space(tmp_path) <= tier.stats().capacity_bytes)
    assert 1 <= len(group.held(tier)) <= 3
    group.close()


def test_a_tier_with_less_room_starts_first_and_what_it_writes_takes_no_more_space(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE, n_slots=6)
    old.write(NUMBERS)
    old.close()
    before = space(tmp_path)
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=3, times=NEVER)
    (tier,) = group.tiers
    assert space(tmp_path) == before > tier.stats().capacity_bytes
    assert group.check(tier, NUMBERS) == list(NUMBERS)
    group.write([20])
    assert space(tmp_path) <= before
    assert len(group.check(tier, [*NUMBERS, 20])) >= len(NUMBERS) - 1, "not all at once"
    group.settle()
    assert space(tmp_path) <= tier.stats().capacity_bytes
    assert group.check(tier, [20]) == [20]
    assert 1 <= len(group.check(tier, NUMBERS)) <= 2
    group.close()
    wait_until(lambda: all(thread.name != "kv-disk-shrink" for thread in threading.enumerate()))


def test_a_worker_that_is_killed_while_old_blocks_give_way_leaves_right_blocks_and_nothing_else(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, n_slots=250)
    old.write(range(250))
    old.close()
    before = space(tmp_path)
    script = f"""
import time
from pathlib import Path
import msgspec
from emberline.kv.tiers.disk.disk_folder import folders_of_other_groups
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.disk.drive_health import DriveTimes
from emberline.protocol.block_hash import KVGroup
group = msgspec.json.decode({msgspec.json.encode(GROUP)!r}, type=KVGroup)
base = Path({str(tmp_path)!r}) / "model"
options = {{"others": folders_of_other_groups(base, 1), "whole": [group], "times": DriveTimes(shrink_pause_s=0.0)}}
tier = DiskTier(base, [group], {2 * slot_bytes([GROUP])}, {KEY!r}, **options)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as worker:
        wait_until(lambda: space(tmp_path) < before)
        worker.send_signal(signal.SIGKILL)
    group = Group(tmp_path, {"tp": 1}, n_slots=2, times=NEVER)
    (tier,) = group.tiers
    assert len(group.check(tier, range(250))) < 250
    group.settle()
    assert space(tmp_path) <= tier.stats().capacity_bytes
    tier.purge()
    assert not any(path.read_bytes().strip(b"\0") for path in tmp_path.rglob("*.blocks"))
    group.close()


def test_of_several_folders_the_block_that_is_next_to_go_was_used_least_recently(tmp_path: Path) -> None:
    """The last block of a conversation goes first: when the first one was used says nothing about it."""
    workers = [Group(tmp_path, {"tp": 1}, LARGE) for _ in range(2)]
    for worker, used_s in zip(workers, ({0: 100, 1: 1000}, {2: 500})):
        data = [memoryview(bytearray(worker.content(n, LARGE))) for n in used_s]
        metas = [BlockMeta(OWNER, bytes([min(used_s) + 1]) * 16, n, used_s=at_s) for n, at_s in used_s.items()]
        worker.tiers[0].write(ids(used_s, LARGE), data, metas)
    for worker in workers:
        worker.close()
    group = Group(tmp_path, {"tp": 2}, LARGE, n_slots=2, times=NEVER)
    group.settle()
    assert group.held(group.tiers[0]) == [0, 1]
    group.close()


def test_giving_up_a_block_takes_few_calls(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 4}, n_slots=120)
    old.write(range(120))
    old.close()
    group = Group(tmp_path, {"tp": 1}, n_slots=10, times=NEVER)
    (tier,) = group.tiers
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        tier.shrink_once()
    finally:
        sys.setprofile(None)
    n_parts = 4 * tier.stats().evicted
    assert n_parts > 200
    assert calls["call"] + calls["c_call"] < 18 * n_parts
    group.close()


def test_blocks_that_lack_a_part_give_way_too(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE, n_slots=6)
    old.write(NUMBERS)
    old.close()
    shutil.rmtree(tmp_path / "model-rank1of2")
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=6)
    (tier,) = group.tiers
    assert (group.held(tier), tier.stats().blocks) == ([], 0)
    group.write(range(20, 26))
    assert group.check(tier, range(20, 26)) == list(range(20, 26))
    assert space(tmp_path) <= tier.stats().capacity_bytes
    group.close()


def test_space_that_no_block_of_another_layout_takes_is_given_back(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE, grow_bytes=64 * slot_bytes([LARGE]))
    old.write(NUMBERS)
    for tier, group in zip(old.tiers, old.slices):
        tier.remove(ids([0], group))
    old.close()
    assert space(tmp_path) >= 64 * slot_bytes([LARGE])
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=6)
    assert group.held(group.tiers[0]) == list(NUMBERS)[1:]
    assert space(tmp_path) <= 6 * slot_bytes([LARGE])
    group.close()


def test_the_first_layout_finds_its_own_blocks_and_those_of_the_second_again(tmp_path: Path) -> None:
    one = Group(tmp_path, {"tp": 1}, LARGE, n_slots=10)
    one.write(range(10))
    one.close()
    two = Group(tmp_path, {"tp": 2}, LARGE, n_slots=10)
    two.write(range(20, 24))
    kept = two.held(two.tiers[0], range(10))
    assert len(kept) >= 5
    two.close()
    again = Group(tmp_path, {"tp": 1}, LARGE, n_slots=10)
    (tier,) = again.tiers
    assert again.check(tier, range(10)) == kept
    assert len(again.check(tier, range(20, 24))) >= 3, "all but what other headers take"
    again.close()


def test_other_ranks_hear_of_what_gave_way(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 1}, LARGE, n_slots=6)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 2}, LARGE, n_slots=6)
    leader, follower = group.tiers
    before = set(group.held(leader))
    told = TierChanges("disk", layout_tag(group.slices[0]), leader.held, lambda: None)
    leader.changes = told
    assert {known for event in told.watch() for known in keys_of(event.stored)} == {key(n) for n in before}
    data = memoryview(bytearray(group.content(9, group.slices[0])))
    leader.write(ids([9], group.slices[0]), [data], [BlockMeta(OWNER)])
    lost = before - set(group.held(leader))
    assert lost
    assert group.evicted == sorted(lost)
    (removed, stored) = told.take()
    assert set(keys_of(removed.removed)) == {key(n) for n in lost}
    assert keys_of(stored.stored) == [key(9)]
    follower.evict(ids(lost, group.slices[1]))
    assert set(group.held(follower)).isdisjoint(lost)
    group.close()


def keys_of(joined: bytes) -> list[bytes]:
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def test_a_purge_wipes_blocks_of_every_layout(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, LARGE)
    (tier,) = group.tiers
    group.write([8])
    assert tier.purge(OWNER, b"another session") == 0
    assert tier.purge(OWNER, SESSION) == len(NUMBERS) + 1
    assert tier.stats().blocks == 0
    assert group.check(tier, NUMBERS) == []
    assert not any(path.read_bytes().strip(b"\0") for path in tmp_path.rglob("*.blocks"))
    group.close()
    again = Group(tmp_path, {"tp": 2}, LARGE)
    assert again.held(again.tiers[0]) == []
    again.close()


def test_invalid_content_is_removed_in_every_layout(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2})
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1})
    group.tiers[0].remove(ids([3], GROUP))
    group.close()
    again = Group(tmp_path, {"tp": 2})
    assert [again.held(tier) for tier in again.tiers] == [[0, 1, 2, 4, 5]] * 2
    again.close()


def test_on_a_full_disk_blocks_of_another_layout_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, LARGE, times=DriveTimes(full_pause_s=-1.0))
    (tier,) = group.tiers
    most = space(tmp_path)
    limit_space(monkeypatch, "allocate", lambda: space(tmp_path) + slot_bytes([LARGE]) > most)
    group.write([8])
    assert group.check(tier, [8]) == [8]
    assert 3 <= len(group.held(tier)) < len(NUMBERS)
    group.close()


def test_files_that_are_removed_meanwhile_are_missing_blocks(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2})
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, times=DriveTimes(check_s=0.0))
    (tier,) = group.tiers
    group.write([8])
    for path in (tmp_path / "model-rank0of2").rglob("*.blocks"):
        path.unlink()
    assert group.check(tier, [*NUMBERS, 8]) == [8]
    assert group.held(tier) == []
    group.close()


def test_files_are_opened_anew_while_the_step_loop_asks_what_is_held(tmp_path: Path, fast_switches: None) -> None:
    old = Group(tmp_path, {"tp": 2})
    old.write([0])
    old.close()
    group = Group(tmp_path, {"tp": 1}, times=DriveTimes(check_s=0.0))
    (tier,) = group.tiers
    unknown = [BlockId(n.to_bytes(16), b"another") for n in range(2000)]
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            tier.holds(unknown)

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        for _ in range(60):
            for path in (tmp_path / "model").rglob("*.blocks"):
                path.unlink()
            assert group.check(tier, [0]) == [0]
        ended.set()
        asking.result()
    group.close()


@pytest.mark.parametrize(
    ("damage", "held"),
    [({"n_slots": 10**18}, NUMBERS), ({"n_slots": 0}, NUMBERS), ({"layouts": {"no tag": 1}}, ())],
)
def test_a_worker_starts_beside_a_folder_with_a_damaged_format(
    tmp_path: Path, damage: dict[str, object], held: Sequence[int]
) -> None:
    """The size of a file says how many blocks it may have."""
    old = Group(tmp_path, {"tp": 2})
    old.write(NUMBERS)
    old.close()
    known = tmp_path / "model-rank1of2" / "0" / "format.json"
    known.write_bytes(msgspec.json.encode(msgspec.json.decode(known.read_bytes()) | damage))
    group = Group(tmp_path, {"tp": 1})
    (tier,) = group.tiers
    assert group.held(tier) == list(held)
    group.write([8])
    assert group.check(tier, [*NUMBERS, 8]) == [*held, 8]
    group.close()


@pytest.mark.parametrize("name", ["lock", "format.json", "blocks"])
def test_a_folder_that_cannot_be_read_leaves_the_others_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    old = Group(tmp_path, {"tp": 2})
    old.write(NUMBERS)
    old.close()
    sound = tmp_path / "model-rank0of2" / "0"
    bad = sound.parent / "1"
    shutil.copytree(sound, bad)
    (replaced,) = bad.glob("*.blocks") if name == "blocks" else (bad / name,)
    replaced.unlink()
    replaced.mkdir()
    group = Group(tmp_path, {"tp": 1})
    (tier,) = group.tiers
    assert f"{bad}, is not used" in caplog.text
    assert group.check(tier, NUMBERS) == list(NUMBERS)
    group.close()


class CountedKey(bytes):
    """A key that counts how often it was looked up."""

    n_look_ups = 0

    def __hash__(self) -> int:
        CountedKey.n_look_ups += 1
        return super().__hash__()


def test_a_block_is_looked_up_twice_at_most_however_many_parts_it_has(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 8}, WIDE)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, WIDE)
    (tier,) = group.tiers
    CountedKey.n_look_ups = 0
    assert all(tier.holds([BlockId(CountedKey(key(n)), layout_tag(WIDE)) for n in NUMBERS]))
    assert 0 < CountedKey.n_look_ups <= 2 * len(NUMBERS)
    group.close()


def test_a_block_in_two_forms_counts_once(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, LARGE)
    group.write([4, 5, 6, 7])  # as an import does
    group.close()
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=7, times=NEVER)
    (tier,) = group.tiers
    assert tier.stats().blocks == len(tier.held()) == 8
    group.settle()
    held = group.held(tier, range(8))
    assert held[-4:] == [4, 5, 6, 7]
    assert tier.stats().blocks == len(tier.held()) == len(held)
    assert tier.stats().evicted == 8 - len(held), "what is left in one form was not evicted"
    tier.evict(ids([7], LARGE))
    group.write([0])
    left = tier.held()
    assert tier.stats().blocks == len(left)
    assert tier.purge() == len(left) > 0
    assert tier.stats().blocks == 0
    group.close()


def test_a_block_in_two_forms_counts_until_the_last_is_gone(tmp_path: Path) -> None:
    old = Group(tmp_path, {"tp": 2}, LARGE)
    old.write(NUMBERS)
    old.close()
    group = Group(tmp_path, {"tp": 1}, LARGE, n_slots=16)
    (tier,) = group.tiers
    group.write(NUMBERS)
    assert tier.stats().blocks == 6
    (own,) = (tmp_path / "model").rglob("*.blocks")
    with own.open("r+b") as file:
        file.write(bytes(own.stat().st_size))
    group.check(tier, [0, 1, 2, 3])  # drops what does not verify
    assert tier.stats().blocks == 6
    for path in tmp_path.glob("model-rank*/0/*.blocks"):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    group.check(tier, [2, 3, 4, 5])
    assert group.held(tier) == [0, 1]
    assert tier.stats().blocks == 2
    group.close()
