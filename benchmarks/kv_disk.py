"""The disk tier of the KV cache against its drive: read and write rate, encrypted too, and the start with a full index.

python -m benchmarks.kv_disk [--folder DIR] [--gib 2]

The drive's own rate is that of plain preadv and pwritev with O_DIRECT in pieces of 4 MiB, by one thread or by eight,
whichever is faster, in the same run. Give a folder on the drive that matters, and more bytes than the drive caches.
"""

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from emberline.kv.tiers.disk.direct_file import aligned_buffer
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.disk.slot_index import RECORD, SlotIndex, SlotState
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup

PIECE = 4 << 20
BATCH_BYTES = 32 << 20  # as the tier manager asks for blocks
REPEATS = 3
N_INDEX = 2_500_000  # blocks of 40 million tokens
SHAPES = {
    "SmolLM2-135M": KVGroup("full", tuple(range(30)), kv_heads=3, head_dim=64, dtype="float16"),
    "Llama-8B": KVGroup("full", tuple(range(32)), kv_heads=8, head_dim=128, dtype="bfloat16"),
}


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began_s = clock()
    call()
    return clock() - began_s


def plain_rate(folder: Path, n_bytes: int, call: Callable[..., int], n_threads: int) -> float:
    """Bytes per second of plain calls."""
    descriptor = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    pages = [mmap.mmap(-1, PIECE) for _ in range(n_threads)]
    for page in pages:
        page.write(np.random.default_rng(0).bytes(PIECE))

    def work(n: int) -> None:
        for offset in range(n * PIECE, n_bytes, n_threads * PIECE):
            assert call(descriptor, [pages[n]], offset) == PIECE

    try:
        with ThreadPoolExecutor(n_threads) as pool:
            return n_bytes / timed(lambda: list(pool.map(work, range(n_threads))))
    finally:
        os.close(descriptor)


def tier_rates(folder: Path, group: KVGroup, n_bytes: int, cipher_key: bytes | None) -> dict[str, float]:
    """Bytes per second of a tier of its own."""
    n_blocks, n_batch = n_bytes // group.block_bytes, max(1, BATCH_BYTES // group.block_bytes)
    tier = DiskTier(folder / "tier", [group], n_bytes + (n_bytes >> 1) + (64 << 20), b"k" * 32, cipher_key)
    data = np.random.default_rng(0).bytes(group.block_bytes)
    buffers = [aligned_buffer(group.block_bytes)[: group.block_bytes] for _ in range(n_batch)]
    for buffer in buffers:
        buffer[:] = data
    ids = [BlockId(n.to_bytes(16, "little"), layout_tag(group)) for n in range(n_blocks)]
    metas = [BlockMeta(b"o" * 16, position=n) for n in range(n_blocks)]
    batches = [range(at, min(at + n_batch, n_blocks)) for at in range(0, n_blocks, n_batch)]

    def write() -> None:
        for batch in batches:
            tier.write([ids[n] for n in batch], buffers[: len(batch)], [metas[n] for n in batch])

    def read() -> None:
        for batch in batches:
            assert all(tier.read([ids[n] for n in batch], buffers[: len(batch)]))

    try:
        written = [n_bytes / timed(write)]
        rates = [n_bytes / timed(read) for _ in range(REPEATS)]
        assert bytes(buffers[0]) == data
        return {"write": median(written), "read": median(rates), "cpu": timed(read, time.process_time) / n_bytes}
    finally:
        tier.close()
        shutil.rmtree(folder / "tier")


def index_s(folder: Path) -> dict[str, float]:
    """Seconds to load the index of N_INDEX blocks, and to look 2,048 of them up."""
    records = np.zeros(N_INDEX, RECORD)
    keys = np.random.default_rng(0).bytes(16 * N_INDEX)
    records["key"], records["owner"] = np.frombuffer(keys, "V16"), np.void(b"o" * 16)
    records["state"], records["verified"], records["used_s"] = SlotState.VALID, 1, 1
    index, path = SlotIndex(N_INDEX), folder / "index"
    index.records = records
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    index.store(descriptor, range(N_INDEX))
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # not out of memory
    os.close(descriptor)
    loaded = SlotIndex(N_INDEX)
    load_s = timed(lambda: loaded.load(path, N_INDEX * 4096, 4096, trusted=True))
    assert len(loaded) == N_INDEX
    wanted = [keys[16 * n :][:16] for n in range(2048)]
    look_up_s = min(timed(lambda: [key in loaded.slots for key in wanted]) for _ in range(REPEATS))
    evict_s = timed(lambda: loaded.take(64))
    path.unlink()
    return {"load_s": round(load_s, 2), "look_up_2048_us": round(1e6 * look_up_s), "evict_64_ms": round(1e3 * evict_s)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: the temporary folder)")
    parser.add_argument("--gib", type=float, default=1.0, help="to write and read")
    parser.add_argument("--rates-only", action="store_true", help="leave the index out")
    args = parser.parse_args(argv)
    n_bytes = int(args.gib * (1 << 30)) // PIECE * PIECE
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        drive = {
            kind: max(plain_rate(folder, n_bytes, call, n_threads) for n_threads in (1, 8) for _ in range(2))
            for kind, call in (("write", os.pwritev), ("read", os.preadv))
        }
        (folder / "plain").unlink()
        result: dict[str, Any] = {"drive": {kind: f"{rate / 1e9:.2f} GB/s" for kind, rate in drive.items()}}
        if not args.rates_only:
            result["index_of_40M_tokens"] = index_s(folder)
        print(f"{'':32} {'write GB/s':>11} {'of drive':>9} {'read GB/s':>10} {'of drive':>9} {'CPU s per GB':>12}")
        print(f"{'drive':32} {drive['write'] / 1e9:11.2f} {'':9} {drive['read'] / 1e9:10.2f}")
        for shape, group in SHAPES.items():
            for title, cipher_key in (("", None), (", encrypted", b"c" * 32)):
                rates = tier_rates(folder, group, n_bytes, cipher_key)
                shares = {f"{kind}_of_drive": rates[kind] / rate for kind, rate in drive.items()}
                columns = (rates["write"] / 1e9, shares["write_of_drive"], rates["read"] / 1e9, shares["read_of_drive"])
                print(
                    "{:32} {:11.2f} {:9.2f} {:10.2f} {:9.2f} {:12.2f}".format(
                        shape + title, *columns, rates["cpu"] * 1e9
                    )
                )
                result[shape + title] = {name: round(share, 3) for name, share in shares.items()}
                result[shape + title]["read_cpu_s_per_gb"] = round(rates["cpu"] * 1e9, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
