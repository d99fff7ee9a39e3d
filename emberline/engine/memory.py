"""Memory budgets: how much the KV cache takes by default on a host, and what fits on an accelerator."""

import os
from dataclasses import dataclass
from pathlib import Path

from emberline.engine.gpu.shapes import CHUNK_ROWS, MAX_GRAPH_TOKENS, table_width
from emberline.engine.scheduler.limits import Limits
from emberline.protocol.errors import BadInput

MAX_HOST_KV_BYTES = 2 << 30


def default_kv_bytes(device: str, n_workers: int = 1) -> int:
    """Default size of the KV cache of each of n_workers: its share of a quarter of the host's free memory, at most
    2 GiB; on an accelerator, half of its free memory."""
    if device == "cpu":
        return min(free_host_bytes() // 4 // n_workers, MAX_HOST_KV_BYTES)
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free) // 2


def free_host_bytes() -> int:
    """What can be allocated without swapping, on the machine and in its control group."""
    return min(_available_bytes(), _cgroup_bytes(Path("/sys/fs/cgroup")))


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux: assume half is free


def _cgroup_bytes(folder: Path) -> int:
    """What the control group (version 2) still allows; reclaimable page cache counts as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    if limit == "max":
        return 1 << 62
    return max(0, int(limit) - used + int(stats.get("inactive_file", 0)))


RESERVE_BYTES = 448 << 20  # CUDA graphs, workspaces of libraries, small temporary tensors
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemoryBudget:
    """Bytes of an accelerator, counted before they are allocated."""

    total: int
    elsewhere: int  # the driver and other processes
    weights: int
    workspace: int
    state: int  # tables and buffers by slot, including the sampler
    reserve: int
    kv: int

    @property
    def free(self) -> int:
        return self.total - self.elsewhere - self.weights - self.workspace - self.state - self.reserve - self.kv

    def table(self) -> str:
        parts = ("weights", "kv", "workspace", "state", "reserve", "elsewhere", "free")
        cells = [f"{name} {getattr(self, name) / GIB:.2f}" for name in parts]
        return f"memory, GiB of {self.total / GIB:.2f}: " + ", ".join(cells)


def runner_state_bytes(limits: Limits, n_groups: int) -> int:
    """What the GPU runner keeps: block tables (of slots, of decode rows, of mixed steps), packets, outputs."""
    n_rows = limits.max_running + CHUNK_ROWS
    tables = 3 * n_groups * n_rows * table_width(limits.context_len) * 4
    tokens = max(limits.token_budget, MAX_GRAPH_TOKENS)
    return tables + tokens * 8 + n_rows * 1024 + (1 << 20)


def device_memory_budget(
    total: int, free: int, weights: int, workspace: int, state: int, allocated: int, kv_bytes: int | None
) -> DeviceMemoryBudget:
    """`free` and `allocated` are current; `allocated` includes the weights and what else is already taken."""
    elsewhere = total - free - allocated
    most = total - elsewhere - weights - workspace - state - RESERVE_BYTES
    if most <= 0 or (kv_bytes is not None and kv_bytes > most):
        raise BadInput(
            f"{(total - elsewhere) / GIB:.1f} GiB of the device are available; weights take {weights / GIB:.1f},"
            f" a step {(workspace + state + RESERVE_BYTES) / GIB:.1f}: that leaves {max(most, 0) / GIB:.1f} for KV"
            " (give less with --kv-bytes, or a smaller --token-budget)",
            param="kv_bytes",
        )
    return DeviceMemoryBudget(total, elsewhere, weights, workspace, state, RESERVE_BYTES, kv_bytes or most)
