"""Purge, export and import of cached KV as a worker carries them out."""

import select
import threading
import time
from pathlib import Path

import msgspec
import pytest

from emberline.engine.cache_control import CacheControl, StoredCache
from emberline.engine.ranks.messages import encoder
from emberline.kv import slices
from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.disk.disk_folder import model_folder
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.messages import SavedBlock
from emberline.kv.tiers.mover import HostMover
from emberline.kv.tiers.orders import TierOrder
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol import block_hash
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import CacheCommand, CacheResult
from tests.kv.tiers.disk.disk_blocks import GROUP, KEY, block_id, content

SALT, OTHER_SALT = b"salt", b"other"
OWNER, OTHER = (block_hash.root("model", salt) for salt in (SALT, OTHER_SALT))
SESSION = block_hash.session_digest("s")
DRAFTER = KVGroup("draft", (9,), kv_heads=2, head_dim=8, dtype="float16")
ELSEWHERE = msgspec.structs.replace(DRAFTER, layers=())  # of a stage without the drafter


class Worker:
    """The tiers of a worker; its step loop is whoever calls `run`."""

    def __init__(self, disk_path: Path, host: bool = True) -> None:
        self.disk = DiskTier(model_folder(disk_path, "model"), [GROUP], 1 << 20, KEY, fingerprint="model")
        self.host = HostTier(64 * GROUP.block_bytes, [GROUP.block_bytes], keep=host)
        self.host.allocate_all()
        memory = HostMemory([memoryview(bytearray(4 * GROUP.block_bytes))], [GROUP.block_bytes])
        self.tiers = GroupTiers(TierManager([GROUP], HostMover(memory), self.host, [self.disk], 1e9))
        self.tiers.order = lambda order: self.tiers.own.execute([order])
        self.device_purges: list[tuple[bytes | None, bytes]] = []
        stored = StoredCache("model", self.tiers, KEY, disk_path)
        self.control = CacheControl(stored, self.purge_device)

    def purge_device(self, owner: bytes | None, session: bytes) -> int:
        self.device_purges.append((owner, session))
        return 3

    def write(self, numbers: list[int], owner: bytes = OWNER, session: bytes = SESSION) -> None:
        metas = [BlockMeta(owner, session, n, block_id(n - 1).key if n else owner) for n in numbers]
        for tier in (self.disk, self.host):
            tier.write([block_id(n) for n in numbers], [memoryview(bytearray(content(n))) for n in numbers], metas)

    def held(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        ids = [block_id(n) for n in numbers]
        on_disk, in_host = (
            [n for n, there in zip(numbers, tier.holds(ids)) if there] for tier in (self.disk, self.host)
        )
        return on_disk, in_host

    def run(self, command: CacheCommand) -> CacheResult:
        results: list[CacheResult] = []
        self.control.submit(command, results.append)
        while not results:
            assert select.select([self.control.wakeup, self.tiers.own.queue.wakeup], [], [], 60)[0]
            self.tiers.own.queue.clear_wakeup()
            self.tiers.notices()
            self.control.finish()
        assert results[0].number == command.number
        return results[0]


def test_purge_of_a_session_an_account_and_everything(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.write([0, 1])
    worker.write([2, 3], session=block_hash.session_digest("t"))
    worker.write([10, 11], owner=OTHER)
    result = worker.run(CacheCommand(7, "purge", SALT, SESSION))
    assert result.blocks == {"device": 3, "host": 2, "disk": 2, "unused": 0}
    assert worker.held([0, 1, 2, 3, 10, 11]) == ([2, 3, 10, 11], [2, 3, 10, 11])
    assert worker.run(CacheCommand(8, "purge", SALT)).blocks["disk"] == 2
    assert worker.held([0, 1, 2, 3, 10, 11]) == ([10, 11], [10, 11])
    assert worker.run(CacheCommand(9, "purge")).blocks["disk"] == 2
    assert worker.held([10, 11]) == ([], [])
    assert not any(path.read_bytes().strip(b"\0") for path in tmp_path.rglob("*.blocks"))
    assert worker.device_purges == [
        each
        for each in ((OWNER, SESSION), (OWNER, b""), (None, b""))
        for _ in range(2)  # and once more at the end
    ]
    worker.tiers.close()


@pytest.mark.parametrize("salt", [SALT, None])
def test_purge_reaches_folders_that_no_worker_uses(tmp_path: Path, salt: bytes | None) -> None:
    """Of a model that is not loaded, with other keys: its owner is another digest."""
    tier = DiskTier(model_folder(tmp_path, "unloaded"), [GROUP], 1 << 20, KEY, fingerprint="unloaded")
    for owner, n in ((block_hash.root("unloaded", SALT), 1), (block_hash.root("unloaded", OTHER_SALT), 2)):
        tier.write([block_id(n)], [memoryview(bytearray(content(n)))], [BlockMeta(owner)])
    tier.close()
    worker = Worker(tmp_path)
    assert worker.run(CacheCommand(1, "purge", salt)).blocks["unused"] == (1 if salt else 2)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*.blocks"))
    assert (content(1) in stored, content(2) in stored) == (False, salt is not None)
    worker.tiers.close()


@pytest.mark.parametrize("host", [True, False])
def test_a_session_moves_to_another_worker(tmp_path: Path, host: bool) -> None:
    first, second = Worker(tmp_path / "a", host), Worker(tmp_path / "b")
    first.write([0], session=block_hash.session_digest("another session with the same system prompt"))
    first.write([1, 2, 3])
    first.write([9], session=b"t" * 16)
    path = tmp_path / "export"
    assert first.run(CacheCommand(1, "export", SALT, SESSION, str(path))).blocks == {"exported": 4}
    assert second.run(CacheCommand(1, "import", SALT, path=str(path))).blocks == {"imported": 4}
    assert second.held([0, 1, 2, 3, 9]) == ([0, 1, 2, 3], [0, 1, 2, 3])
    buffer = memoryview(bytearray(GROUP.block_bytes))
    assert second.disk.read([block_id(2)], [buffer]) == [True]
    assert buffer == content(2)
    refused = second.run(CacheCommand(2, "import", OTHER_SALT, path=str(path)))
    assert refused.error is not None
    assert "another account" in refused.error.message
    for worker in (first, second):
        worker.tiers.close()


HALVES = [
    (msgspec.structs.replace(GROUP, layers=(0,)), ELSEWHERE),
    (msgspec.structs.replace(GROUP, layers=(1,)), DRAFTER),
]


class Ranks(Worker):
    """Two stages: each has a layer, and the second one the KV of a drafter, too."""

    def __init__(self, disk_path: Path) -> None:
        self.managers = [self.open_rank(disk_path / str(rank), rank) for rank in range(2)]
        self.tiers = GroupTiers(self.managers[0])
        self.tiers.order = self.order
        self.control = CacheControl(StoredCache("model", self.tiers, KEY))

    def open_rank(self, folder: Path, rank: int) -> TierManager:
        sizes = [group.block_bytes for group in HALVES[rank]]
        disk = DiskTier(folder, HALVES[rank], 1 << 20, KEY, fingerprint="model")
        memory = HostMemory([memoryview(bytearray(64 * size)) for size in sizes], sizes)
        for n in range(4):
            for group, pool in enumerate(memory.pools):
                size = sizes[group]
                source = GROUP if group == 0 else DRAFTER
                slices.copy(source, whole_block(group, n), HALVES[rank][group], pool[n * size : (n + 1) * size])
        return TierManager(HALVES[rank], HostMover(memory), HostTier(1 << 20, sizes), [disk], 1e9, HALVES)

    def order(self, order: TierOrder) -> None:
        sent = msgspec.msgpack.decode(encoder.encode(order), type=TierOrder)
        self.managers[0].execute([order])
        self.managers[1].execute([sent])

    def run(self, command: CacheCommand) -> CacheResult:
        results: list[CacheResult] = []
        self.control.submit(command, results.append)
        until_s = time.monotonic() + 60
        while not results:
            assert time.monotonic() < until_s
            self.tiers.report(1, self.managers[1].reports())
            self.tiers.notices()
            self.control.finish()
            time.sleep(0.001)
        return results[0]

    def save(self, numbers: list[int]) -> None:
        metas = [BlockMeta(OWNER, SESSION, n, block_id(n - 1).key if n else OWNER) for n in numbers]
        blocks = [SavedBlock(g, n, block_id(n).key, meta) for n, meta in zip(numbers, metas) for g in (0, 1)]
        self.tiers.save(1, blocks)

    def stored(self, n: int) -> list[bytes | None]:
        """A block of both groups as all ranks have it."""
        done: list[list[bytes | None]] = []
        thread = threading.Thread(target=lambda: done.append(self.tiers.read([(g, block_id(n).key) for g in (0, 1)])))
        thread.start()
        while thread.is_alive():
            self.tiers.report(1, self.managers[1].reports())
            self.tiers.notices()
            time.sleep(0.001)
        return done[0]

    def close(self) -> None:
        for manager in self.managers:
            manager.close()


def whole_block(group: int, n: int) -> bytes:
    n_bytes = (GROUP, DRAFTER)[group].block_bytes
    return bytes((31 * n + 7 * group + at) % 251 for at in range(n_bytes))


def test_an_export_of_several_ranks_is_of_whole_blocks(tmp_path: Path) -> None:
    """One file, which a worker of one rank imports, and whose own export two ranks import."""
    ranks, one, others = Ranks(tmp_path / "a"), whole_tiers(tmp_path / "b"), Ranks(tmp_path / "c")
    ranks.save([0, 1, 2, 3])
    path, again = tmp_path / "export", tmp_path / "again"
    assert ranks.run(CacheCommand(1, "export", SALT, SESSION, str(path))).blocks == {"exported": 8}
    assert one.run(CacheCommand(1, "import", SALT, path=str(path))).blocks == {"imported": 8}
    assert one.run(CacheCommand(2, "export", SALT, SESSION, str(again))).blocks == {"exported": 8}
    assert others.run(CacheCommand(1, "import", SALT, path=str(again))).blocks == {"imported": 8}
    assert others.stored(2) == [whole_block(0, 2), whole_block(1, 2)]
    # where the block's other part is:
    assert others.tiers.own.find(1, [block_id(2).key]) == ["host"]
    for tier in ranks.managers[1].all_tiers:
        tier.remove([BlockId(block_id(2).key, layout_tag(HALVES[1][0]))])
    (tmp_path / "export").unlink()
    assert ranks.run(CacheCommand(2, "export", SALT, SESSION, str(path))).blocks == {"exported": 7}
    for worker in (ranks, others):
        worker.close()
    one.tiers.close()


def whole_tiers(disk_path: Path) -> Worker:
    """A worker of one rank with the same two groups."""
    worker = Worker.__new__(Worker)
    groups = (GROUP, DRAFTER)
    sizes = [group.block_bytes for group in groups]
    disk = DiskTier(disk_path, groups, 1 << 20, KEY, fingerprint="model")
    memory = HostMemory([memoryview(bytearray(size)) for size in sizes], sizes)
    worker.tiers = GroupTiers(TierManager(groups, HostMover(memory), HostTier(1 << 20, sizes), [disk], 1e9))
    worker.tiers.order = lambda order: worker.tiers.own.execute([order])
    worker.control = CacheControl(StoredCache("model", worker.tiers, KEY))
    return worker


def test_errors_are_answers(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    nothing = worker.run(CacheCommand(1, "export", SALT, SESSION, str(tmp_path / "x"))).error
    assert nothing is not None
    assert nothing.kind == "not_found"
    absent = worker.run(CacheCommand(2, "import", SALT, path=str(tmp_path / "absent"))).error
    assert absent is not None
    assert "No such file" in absent.message
    alone = Worker.__new__(Worker)
    alone.control, alone.tiers = CacheControl(StoredCache("model")), worker.tiers
    refused = alone.run(CacheCommand(3, "export", SALT, SESSION, "x")).error
    assert refused is not None
    assert "--kv-disk-bytes" in refused.message
    assert alone.run(CacheCommand(4, "purge", SALT)).blocks == {"device": 0}
    worker.tiers.close()
