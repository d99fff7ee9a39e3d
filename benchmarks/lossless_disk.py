"""Losslessly compressed weights on disk against zstd: `python -m benchmarks.lossless_disk`.

Writes one layer of a Llama-3.1-8B with generated weights, and takes the trained BF16 draft head of the package. Both
are compressed by Emberline and by `zstd -1 -T2`, and read back by Emberline on two threads and by `zstd -d`, in turn,
on the same cores. The rate of `emberline compress` includes what zstd's does not: SHA-256 of the source, reading the
result back from the file and comparing it with the source. Processor seconds are given beside the rates: on a machine
that does other work too, they say more. Prints a table and, with --out, JSON.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import emberline
from emberline.kernels.gpu.triton_placeholder import importable_kernels
from emberline.weights.lossless_blocks import Grid, encode_block
from emberline.weights.lossless_files import LosslessFile
from emberline.weights.lossless_tensor import LosslessRows
from emberline.weights.lossless_writer import LosslessWriter
from emberline.weights.readahead import PIECE_BYTES
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors

HEADS = Path(emberline.__file__).parent / "models" / "draft_heads"
HIDDEN, WIDTH, KV = 4096, 14336, 1024
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}


def generate(path: Path, share: float) -> None:
    """Write a layer with normal weights of a deviation that a trained model's have; `share` of its rows."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (rows, columns) in LAYER.items():
        n_rows = int(rows * share)
        numbers = (rng.standard_normal((n_rows, columns), np.float32) * 0.02).view(np.uint32)
        bf16 = ((numbers + 0x7FFF + (numbers >> 16 & 1)) >> 16).astype("<u2")
        tensors[f"model.layers.0.{name}.weight"] = ("BF16", (n_rows, columns), bf16.tobytes())
    write_safetensors(path, tensors)


class Seconds(NamedTuple):
    wall: float
    processor: float


def seconds(run: Callable[[], Any]) -> Seconds:
    start, used = time.perf_counter(), processor_s()
    run()
    return Seconds(time.perf_counter() - start, processor_s() - used)


def processor_s() -> float:
    """Processor seconds of this process and of the processes that it has started."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def zstd(*arguments: str | Path) -> None:
    subprocess.run(["zstd", "-q", "-f", *map(str, arguments)], check=True)


def encode_all(source: SafetensorsFile, threads: ThreadPoolExecutor) -> None:
    """Code every block of the file's matrices, as the writer does, and drop the result."""
    for tensor in source.tensors.values():
        if len(tensor.shape) != 2:
            continue
        grid = Grid.of(tensor.shape)
        matrix = source.bytes_of(tensor).reshape(grid.rows, -1)

        def code(number: int, grid: Grid = grid, matrix: Any = matrix) -> None:
            rows, columns = grid.place(number)
            encode_block(np.ascontiguousarray(matrix[rows, 2 * columns.start : 2 * columns.stop]).reshape(-1), 2)

        for _ in threads.map(code, range(grid.n_blocks)):
            pass


def decode_all(file: LosslessFile, buffer: Any) -> None:
    """Decode every tensor piece by piece into one buffer, as `WeightLoader` does and as zstd writes its output."""
    for name, tensor in file.coded.items():
        for piece in LosslessRows.of(tensor, file.format.tensors[name].shape).pieces(len(buffer)):
            piece.read(buffer[: piece.nbytes])


def measure(path: Path, folder: Path, rounds: int) -> dict[str, Any]:
    source, threads = SafetensorsFile.open(path), ThreadPoolExecutor(2)
    n_bytes, packed = path.stat().st_size, folder / f"{path.stem}.zst"
    times: dict[str, list[Seconds]] = {}
    buffer = np.zeros(PIECE_BYTES, np.uint8)

    def write() -> None:
        for old in folder.glob(f"{path.stem}.lossless*"):
            old.unlink()
        LosslessWriter(source, folder, threads).write(lambda *_: None)

    write()
    target = folder / f"{path.stem}.lossless.safetensors"
    for _ in range(rounds):
        for name, run in {
            "zstd -1 -T2": lambda: zstd("-1", "-T2", path, "-o", packed),
            "codec": lambda: encode_all(source, threads),
            "emberline compress": write,
            "zstd -d": lambda: zstd("-d", packed, "-o", os.devnull),
        }.items():
            times.setdefault(name, []).append(seconds(run))
        file = LosslessFile.open(target)
        times.setdefault("decode", []).append(seconds(lambda: decode_all(file, buffer)))  # noqa: B023
        file.close()
    rates = {name: n_bytes / statistics.median(each.wall for each in found) / 1e6 for name, found in times.items()}
    used = {name: statistics.median(each.processor for each in found) * 1e9 / n_bytes for name, found in times.items()}

    def ratio(name: str, peer: str) -> float:
        return statistics.median(b.wall / a.wall for a, b in zip(times[name], times[peer], strict=True))

    return {
        "bytes": n_bytes,
        "on disk": 1 - target.stat().st_size / n_bytes,
        "zstd -1": 1 - packed.stat().st_size / n_bytes,
        "MB/s": rates,
        "processor s/GB": used,
        "codec / zstd -1 -T2": ratio("codec", "zstd -1 -T2"),
        "compress / zstd -1 -T2": ratio("emberline compress", "zstd -1 -T2"),
        "decode / zstd -d": ratio("decode", "zstd -d"),
        "in device memory": device_saving(source),
    }


def device_saving(source: SafetensorsFile) -> float:
    """The share of a GPU's memory that packing all matrices saves, escapes and raw rows counted."""
    import torch

    with importable_kernels():
        from emberline.kernels.gpu.lossless_packing import pack_lossless

    plain = packed = 0
    for tensor in source.tensors.values():
        if len(tensor.shape) != 2:
            continue
        numbers = torch.from_numpy(source.bytes_of(tensor).copy()).view(torch.bfloat16).view(tensor.shape)
        matrix = pack_lossless(numbers)
        plain += 2 * math.prod(tensor.shape)
        parts = (matrix.codes, matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw)
        packed += sum(part.nbytes for part in parts)
        assert torch.equal(matrix.dense().view(torch.int16), numbers.view(torch.int16))
    return 1 - packed / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, in turn (default 5)")
    parser.add_argument("--share", type=float, default=1.0, help="of the generated layer's rows (default 1)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder / "generated.safetensors", args.share)
        heads = sorted(HEADS.glob("*/model.safetensors"))
        for title, path in [("generated", folder / "generated.safetensors"), *((p.parent.name, p) for p in heads)]:
            found[title] = row = measure(path, folder, args.rounds)
            print(f"{title}: {row['bytes'] / 1e6:.0f} MB")
            print(
                f"  smaller by {row['on disk']:.1%} on disk (zstd -1: {row['zstd -1']:.1%}),"
                f" {row['in device memory']:.1%} in a GPU's memory"
            )
            for each, rate in row["MB/s"].items():
                print(f"  {each:20} {rate:6.0f} MB/s  {row['processor s/GB'][each]:6.2f} processor s/GB")
            for each in ("codec / zstd -1 -T2", "compress / zstd -1 -T2", "decode / zstd -d"):
                print(f"  {each:22} {row[each]:.2f}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
