"""The default size of the KV cache. Imports no numpy or torch: the supervisor uses it, too."""

import os
from pathlib import Path

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
