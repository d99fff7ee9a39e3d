"""NCCL between ranks as processes: `python -m benchmarks.gpu.nccl_ranks [--sizes 2 4] [--out FILE]`.

Sums, gathers, all-to-alls and what stages send are compared with the host's, as plain calls and in CUDA graphs, and
timed. Ranks share a GPU where there are fewer GPUs than ranks. NCCL does that from version 2.30 on, if
`NCCL_MULTI_RANK_GPU_ENABLE=1`; `LD_PRELOAD=libnccl.so.2` takes another one than torch's.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.gpu.rank_processes import HIDDEN, LIMIT_S, multi_process_service

COMMAND = ("-m", "benchmarks.gpu.nccl_ranks")
CHECKED = ((1, HIDDEN), (64, HIDDEN), (512, HIDDEN))
TIMED = (1, 64, 585)  # rows
REPLAYS = 3
ROUNDING = 1 / 64  # for each rank: of a bf16 partial sum below 8, which the next rank adds to
HANGS_S = LIMIT_S - 10  # after which a rank tells where it is


def measure(size: int) -> dict[str, Any]:
    """Run `size` processes and return what the first of them found."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *COMMAND, "--store", f"{folder}/store", "--sizes", str(size), "--rank"]
        ranks = [
            subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            places = [" < ".join(_stack(rank.communicate()[1])) for rank in ranks]
            raise RuntimeError(f"the ranks hang at {'; '.join(places)}") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for process, (_, errors) in zip(ranks, said, strict=True):
        if process.returncode:
            last = errors.strip().splitlines()[-3:]
            raise RuntimeError(f"a rank ended with status {process.returncode}: {' | '.join(last)}")
    found: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return found


def _stack(errors: str) -> list[str]:
    """The innermost calls of the main thread, as faulthandler has printed them."""
    main = errors.rpartition("most recent call first")[2].splitlines()
    return [line.split(", line ")[-1] for line in main if line.strip().startswith("File")][:4]


def run_rank(rank: int, size: int, path: str) -> dict[str, Any]:
    """Compare every collective with the host's sums, twice in a CUDA graph, too; then time them."""
    import torch
    import torch.distributed as dist

    from benchmarks.gpu.kernels import time_us
    from emberline.engine.ranks.nccl import NcclCollectives, NcclStages, nccl_version

    store = dist.FileStore(path, size)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    group = NcclCollectives(store, "tp", rank, size, device, LIMIT_S)
    stages = NcclStages(store, "pp", rank, size, device, LIMIT_S)
    generator = torch.Generator().manual_seed(1)
    n_checked = 0

    def check(name: str, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, right: torch.Tensor) -> None:
        """Compare a collective's result with the host's, called plainly and replayed from a graph."""
        nonlocal n_checked
        given = x.to(device)
        work = given.clone()
        plain = run(work).cpu()
        graph, work = torch.cuda.CUDAGraph(), given.clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = run(work)
        found = [plain]
        for _ in range(REPLAYS):
            work.copy_(given)
            graph.replay()
            found.append(out.cpu())
        for each in found:
            if not torch.allclose(each.float(), right.float(), rtol=2e-2, atol=ROUNDING * size):
                raise AssertionError(f"{name} of {tuple(x.shape)} is not the host's")
            n_checked += 1

    def reduced(x: torch.Tensor) -> torch.Tensor:
        group.all_reduce(x)
        return x

    def passed_on(x: torch.Tensor) -> torch.Tensor:
        """What stage 0 has goes through all stages."""
        if rank:
            stages.recv(x, rank - 1)
        if rank < size - 1:
            stages.send(x, rank + 1)
        return x

    for shape in CHECKED:
        parts = [torch.randn(shape, generator=generator).bfloat16() for _ in range(size)]
        total = torch.stack([part.float() for part in parts]).sum(0)
        check("the sum", reduced, parts[rank], total.bfloat16())
        check("what was gathered", group.all_gather, parts[rank], torch.stack(parts))
        check("what a stage received", passed_on, parts[rank], parts[0])
        sliced = [torch.randn((size, *shape), generator=generator).bfloat16() for _ in range(size)]
        check("what was exchanged", group.exchange, sliced[rank], torch.stack([each[rank] for each in sliced]))
    found: dict[str, Any] = {"nccl": nccl_version(), "checked": n_checked}
    for rows in TIMED:
        x = torch.zeros(rows, HIDDEN, device=device, dtype=torch.bfloat16)
        wide = torch.zeros(size, rows, HIDDEN, device=device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        found[f"{rows * HIDDEN * 2 >> 10} KiB"] = {
            "all_reduce_us": time_us(lambda i, x=x: group.all_reduce(x), 10),
            "all_to_all_us": time_us(lambda i, x=wide: group.exchange(x), 10),
            "copy_us": time_us(lambda i, x=x, y=y: y.copy_(x), 10),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.nccl_ranks", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store:
        faulthandler.dump_traceback_later(HANGS_S)  # tells which collective a rank waits in
        print(json.dumps(run_rank(args.rank, args.sizes[0], args.store)), flush=True)
        os._exit(0)  # at once: no rank takes down memory that another maps
    figures: dict[str, Any] = {}
    with multi_process_service() as together:
        print("MPS runs" if together else "MPS does not start: the GPU switches between processes", flush=True)
        for size in args.sizes:
            try:
                figures[str(size)] = measure(size)
            except Exception as error:  # device time is expensive: the other sizes still run
                figures[str(size)] = {"failed": f"{type(error).__name__}: {error}"}
            print(size, "ranks:", json.dumps(figures[str(size)]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return int(any("failed" in found for found in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
