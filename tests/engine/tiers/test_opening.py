"""The tiers that a worker is started with, by its flags and the key in its environment."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from emberline.engine.tiers.opening import (
    KEY_VARIABLE,
    SPARED_BYTES,
    SpareMemory,
    open_tiers,
    stored_cache,
)
from emberline.engine.worker.main import parse_arguments
from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import Segment, plain_segment
from emberline.kv.tiers.mover import HostMover
from emberline.kv.tiers.tier import BlockMeta
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import CacheCommand
from tests.kv.tiers.disk.disk_blocks import GROUP, block_id, content

MOVER = HostMover(HostMemory([memoryview(bytearray(4 * GROUP.block_bytes))], [GROUP.block_bytes]))


def parse(*words: str) -> argparse.Namespace:
    return parse_arguments(["--model", "model", "--socket", "socket", *words])


@pytest.mark.parametrize("encrypts", [False, True])
def test_blocks_on_disk_are_encrypted_if_asked_for(tmp_path: Path, encrypts: bool, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    args = parse("--kv-disk-bytes", "1000000", "--kv-disk-path", str(tmp_path), *["--kv-disk-encrypt"] * encrypts)
    tiers = open_tiers(args, "model", [GROUP], MOVER)
    assert tiers is not None
    (disk,) = tiers.all_tiers
    disk.write([block_id(1)], [memoryview(bytearray(content(1)))], [BlockMeta()])
    buffer = memoryview(bytearray(GROUP.block_bytes))
    assert disk.read([block_id(1)], [buffer]) == [True]
    assert buffer == content(1)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*.blocks"))
    assert (content(1) in stored) == (not encrypts)
    group = GroupTiers(tiers)
    group.order = lambda order: tiers.execute([order])
    with ThreadPoolExecutor(1) as pool:
        purged = pool.submit(stored_cache(args, "model", group).run, CacheCommand(1, "purge"))
        while not purged.done():  # as a step loop does
            group.notices()
            time.sleep(0.001)
    assert purged.result() == {"disk": 1, "unused": 0}
    tiers.close()


def test_a_worker_that_stores_blocks_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(BadInput, match=KEY_VARIABLE):
        open_tiers(parse("--kv-disk-bytes", "1000000", "--kv-disk-path", str(tmp_path)), "model", [GROUP], MOVER)
    assert open_tiers(parse(), "model", [GROUP], MOVER) is None


def test_a_gpu_has_a_host_tier_by_default() -> None:
    made: list[int] = []

    def allocate(n_bytes: int) -> Segment:
        made.append(n_bytes)
        return plain_segment(n_bytes)

    tiers = open_tiers(parse(), "model", [GROUP], MOVER, allocate, default_bytes=1 << 20, free_bytes=lambda: 12 << 30)
    assert tiers is not None
    assert tiers.names == ("host",)
    tiers.close()
    assert open_tiers(parse("--kv-host-bytes", "0"), "model", [GROUP], MOVER, allocate) is None
    assert open_tiers(parse(), "model", [GROUP], MOVER) is None, "on a CPU"
    with pytest.raises(MemoryError, match="--kv-host-bytes"):
        SpareMemory(allocate, needed=0, free_bytes=lambda: SPARED_BYTES)(4096)


def test_a_disk_that_was_asked_for_has_its_staging_area_however_little_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    flags = ["--kv-disk-bytes", "1000000", "--kv-disk-path", str(tmp_path)]
    for default_bytes in (0, 2 << 20):
        sizes = {"default_bytes": default_bytes, "stage_bytes": 1 << 20}
        tiers = open_tiers(
            parse(*flags), "model", [GROUP], MOVER, plain_segment, **sizes, free_bytes=lambda: SPARED_BYTES
        )
        assert tiers is not None
        assert tiers._host.take(GROUP.block_bytes, 1, wait_s=30.0)
        tiers.close()


def test_blocks_on_disk_of_another_number_of_ranks_are_found_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    args = parse("--kv-disk-bytes", "1000000", "--kv-disk-path", str(tmp_path))
    whole = msgspec.structs.replace(GROUP, kv_heads=2)
    halves = [msgspec.structs.replace(whole, kv_heads=1, first_head=head) for head in range(2)]
    stages = [msgspec.structs.replace(whole, layers=(layer,)) for layer in whole.layers]
    for number, (ranks, n_found, n_warnings) in enumerate(
        [
            ([whole], 0, 0),
            ([whole], 1, 0),
            (halves, 2, 0),
            (stages, 2, 0),  # of whole blocks; those of the halves, in a folder of the same name, are discarded
            ([whole], 2, 1),
        ]
    ):
        caplog.clear()
        several = [[group] for group in ranks] if len(ranks) > 1 else ()
        tiers = open_tiers(args, "model", [ranks[0]], MOVER, ranks=several)
        assert tiers is not None
        (disk,) = tiers.all_tiers
        assert len(disk.held()) == n_found, ranks
        data = memoryview(bytearray(ranks[0].block_bytes))
        disk.write([block_id(number, ranks[0])], [data], [BlockMeta()])
        tiers.close()
        assert len([each for each in caplog.records if "another number of ranks" in each.message]) == n_warnings
