"""The default size of the KV cache. Imports no numpy or torch: the supervisor uses it, too."""

import os
from pathlib import Path

MAX_HOST_KV_BYTES = 2 << 30
_UNLIMITED = 1 << 62
MIN_HOST_TIER_BYTES = 1 << 30  # less is of no use below a GPU's KV cache


def default_kv_bytes(device: str, n_workers: int = 1) -> int:
    """Default size of the KV cache of each of n_workers: its share of a quarter of the host's free memory, at most
    2 GiB; on an accelerator, half of its free memory."""
    if device == "cpu":
        return min(free_host_bytes() // 4 // n_workers, MAX_HOST_KV_BYTES)
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free) // 2


def default_host_tier_bytes() -> int:
    """Default size of the host tier below a GPU's KV cache: a quarter of the host's free memory, divided by the
    machine's GPUs. On a CPU there is none: the cache itself is in host memory."""
    share = free_host_bytes() // 4 // max(1, _n_gpus())
    return share if share >= MIN_HOST_TIER_BYTES else 0


def _n_gpus() -> int:
    """Of the machine, whichever of them this process sees."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 1


def free_host_bytes() -> int:
    """What can be allocated without swapping, on the machine and in the process's control groups."""
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        own = "0::/"
    return min(_available_bytes(), _cgroup_bytes(Path("/sys/fs/cgroup"), own))


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux: assume half is free


def _cgroup_bytes(root: Path, own: str = "0::/") -> int:
    """What control groups (of version 2 or 1) still allow. `own`: those of the process, as /proc tells them; a
    container may see only itself, as the root."""
    left = [_UNLIMITED]
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = [] if ".." in path else [name for name in path.split("/") if name]
        top = root / "memory" if controllers else root
        left += [_left_in(top.joinpath(*names[:n])) for n in range(len(names) + 1)]
    return min(left)


def _left_in(folder: Path) -> int:
    """Of one group; reclaimable page cache counts as free."""
    for limit_name, used_name, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max":
                return max(0, int(limit) - used + int(stats.get(reclaimable, 0)))
        except (OSError, ValueError):
            continue
    return _UNLIMITED
