"""Checks of the machine's GPUs for `emberline doctor --gpus`: kernels, memory bandwidth, peer access and NCCL.

`python -m emberline.engine.planning.gpu_check` prints a line of JSON for each check. To try NCCL between every two GPUs
it starts itself again, once for each GPU; a hanging pair ends by its timeout.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import msgspec

from emberline.engine.planning.hardware import Gpu, gpu_of_device

ENOUGH = 0.8  # of the expected bandwidth
COPY_BYTES = 1 << 30
LINK_BYTES = 256 << 20
REDUCE_BYTES = 64 << 20
PAIR_TIMEOUT_S = 20.0
LIMIT_S = 300.0  # of all pairs
REPEATS = 5


class GpuFinding(msgspec.Struct, frozen=True):
    """Finding of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def examine() -> Iterator[GpuFinding]:
    """Check all GPUs that this process sees."""
    import torch

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not n:
        yield GpuFinding("gpus", "fail", "torch sees none", "install a CUDA build of torch and a driver for it")
        return
    gpus = []
    for number in range(n):
        properties = torch.cuda.get_device_properties(number)
        gpus.append(gpu_of_device(properties.name, properties.total_memory))
        yield kernels(f"cuda:{number}")
        yield memory(number, gpus[number], _copy_rate(number))
    for one, other in combinations(range(n), 2):
        access = torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
        yield peers(one, other, gpus[one], access, _peer_rate(one, other))
    if n > 1:
        yield from nccl(n, gpus[0])
    elif _shares_gpus():
        yield from nccl(2, gpus[0], shared=True)
    else:
        yield GpuFinding("nccl", "ok", "one GPU: no pair to try")


def kernels(device: str) -> GpuFinding:
    """Run kernels against their references."""
    from emberline.kernels.gpu import self_test

    wrong = self_test.failures(device)
    name = f"kernels {device}"
    if wrong:
        return GpuFinding(name, "fail", "; ".join(wrong), "run `make test-gpu`; a GPU that computes wrongly is faulty")
    return GpuFinding(name, "ok", f"{len(self_test.CHECKS)} kernels agree with their references")


def memory(number: int, gpu: Gpu, bytes_per_s: float) -> GpuFinding:
    """Judge the rate of a copy inside a GPU's memory."""
    share, detail = _of_expected(bytes_per_s, gpu.bandwidth_tb_s * 1e12)
    if share < ENOUGH:
        return GpuFinding(f"memory {number}", "warn", detail, "see whether other programs use it, and its power limit")
    return GpuFinding(f"memory {number}", "ok", detail)


def peers(one: int, other: int, gpu: Gpu, has_access: bool, bytes_per_s: float) -> GpuFinding:
    """Judge copies from one GPU to another."""
    name = f"peers {one}-{other}"
    share, detail = _of_expected(bytes_per_s, gpu.link_gb_s * 1e9)
    if not bytes_per_s:
        return GpuFinding(name, "fail", "a copy arrived damaged", "check cables, risers and the IOMMU's settings")
    if not has_access:
        fix = (
            "without peer access KV and collectives pass through host memory: disable ACS and the IOMMU, or use NVLink"
        )
        return GpuFinding(name, "warn", f"no peer access; {detail}", fix)
    if share < ENOUGH:
        return GpuFinding(name, "warn", detail, "`nvidia-smi topo -m` shows how they are linked")
    return GpuFinding(name, "ok", detail)


def _of_expected(bytes_per_s: float, expected: float) -> tuple[float, str]:
    share = bytes_per_s / expected
    return share, f"{bytes_per_s / 1e9:,.0f} GB/s, {share:.0%} of what is expected"


def _copy_rate(number: int) -> float:
    """Bytes per second of a copy inside a GPU's memory, read and written."""
    import torch

    source = torch.empty(COPY_BYTES // 2, dtype=torch.int8, device=f"cuda:{number}")
    target = torch.empty_like(source)
    return 2 * len(source) / _fastest(lambda: target.copy_(source), number)


def _peer_rate(one: int, other: int) -> float:
    """Bytes per second of a copy from one GPU to another; 0 if it arrives damaged."""
    import torch

    source = torch.arange(LINK_BYTES // 8, dtype=torch.int64, device=f"cuda:{one}")
    target = torch.zeros_like(source, device=f"cuda:{other}")
    seconds = _fastest(lambda: target.copy_(source), one)
    return LINK_BYTES / seconds if torch.equal(target.cpu(), source.cpu()) else 0.0


def _fastest(run: Any, number: int) -> float:
    import torch

    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize(number)
        began_s = time.perf_counter()
        run()
        torch.cuda.synchronize(number)
        best = min(best, time.perf_counter() - began_s)
    return best


# --- NCCL ------------------------------------------------------------------------------------------------------------


def _shares_gpus() -> bool:
    from emberline.engine.ranks.nccl import shares_gpus

    return shares_gpus()


def nccl(n: int, gpu: Gpu, *, shared: bool = False) -> Iterator[GpuFinding]:
    """Try an all-reduce between every two of n ranks, in a process each. shared: they have one GPU, not one each."""
    with tempfile.TemporaryDirectory(prefix="emberline-nccl-") as folder:
        words = [sys.executable, "-m", __spec__.name, "--store", f"{folder}/store", "--gpus", str(n), "--number"]
        started = [subprocess.Popen([*words, str(k)], stdout=subprocess.PIPE, text=True) for k in range(n)]
        end_s, said = time.monotonic() + LIMIT_S, list[str]()
        for process in started:
            try:
                said += process.communicate(timeout=max(1.0, end_s - time.monotonic()))[0].splitlines()
            except subprocess.TimeoutExpired:
                process.kill()
                said += process.communicate()[0].splitlines()
    yield from pairs(n, gpu, said, shared=shared)


def pairs(n: int, gpu: Gpu, said: Sequence[str], *, shared: bool = False) -> Iterator[GpuFinding]:
    """Judge every pair by what the processes of the GPUs have printed."""
    found = {(each["one"], each["other"]): each for each in map(json.loads, said)}
    for pair in combinations(range(n), 2):
        name, each = f"nccl {pair[0]}-{pair[1]}", found.get(pair, {})
        if not each.get("seconds"):
            problem = each.get("problem") or f"no answer within {LIMIT_S:.0f} s"
            yield GpuFinding(
                name, "fail", problem, "NCCL_DEBUG=INFO shows the transport; NCCL_P2P_DISABLE=1 avoids peers"
            )
            continue
        share, detail = _of_expected(REDUCE_BYTES / each["seconds"], gpu.link_gb_s * 1e9)
        if shared:
            rate = REDUCE_BYTES / each["seconds"] / 1e9
            yield GpuFinding(
                name, "ok", f"all-reduce of two ranks on one GPU: {rate:,.1f} GB/s; there is no link to judge"
            )
            continue
        fix = "`nvidia-smi topo -m` shows how they are linked" if share < ENOUGH else ""
        yield GpuFinding(name, "warn" if fix else "ok", f"all-reduce {detail}", fix)


def _run_pairs(path: Path, n: int, number: int) -> None:
    """Take part in the pairs of one GPU; the first of each prints its time."""
    import torch
    import torch.distributed

    from emberline.engine.ranks.nccl import NcclCollectives

    dist: Any = torch.distributed
    store, device = dist.FileStore(str(path), n), f"cuda:{number % torch.cuda.device_count()}"
    for one, other in combinations(range(n), 2):
        if number not in (one, other):
            continue
        said: dict[str, Any] = {"one": one, "other": other}
        try:
            group = NcclCollectives(store, f"{one}-{other}", int(number == other), 2, device, PAIR_TIMEOUT_S)
            x = torch.full((REDUCE_BYTES // 4,), 1.0, device=device)
            group.all_reduce(x)
            right = bool((x == 2.0).all())
            seconds = _fastest(partial(group.all_reduce, x), torch.cuda.current_device())
            said |= {"seconds": seconds} if right else {"problem": "a wrong sum"}
        except Exception as error:  # whatever NCCL raises is what is looked for
            said["problem"] = str(error).strip()[:300]
        if number == one:
            print(json.dumps(said), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each check."""
    parser = argparse.ArgumentParser(prog="python -m emberline.engine.planning.gpu_check", description=__doc__)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.store is not None:
        _run_pairs(args.store, args.gpus, args.number)
        return 0
    for finding in examine():
        print(msgspec.json.encode(finding).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
