"""The default size of the KV cache. Imports no numpy or torch: the supervisor uses it, too."""

import os
from pathlib import Path

MAX_HOST_KV_BYTES = 2 << 30
_UNLIMITED = 1 << 62
MIN_HOST_TIER_BYTES = 1 << 30  # less is of no use below a GPU's KV cache


def default_kv_bytes(device: str, n_workers: int = 1, free_bytes: int | None = None) -> int:
    """Default size of the KV cache of each of n_workers: its share of a quarter of the host's free memory, at most
    2 GiB; on an accelerator, half of its free memory. `free_bytes` of the host: asked of the system if None."""
    if device == "cpu":
        free_bytes = free_host_bytes() if free_bytes is None else free_bytes
        return min(free_bytes // 4 // n_workers, MAX_HOST_KV_BYTES)
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free) // 2


def default_host_tier_bytes(free_bytes: int, n_gpus: int) -> int:
    """Default size of the host tier below a GPU's KV cache: a quarter of the host's free memory, divided by the
    machine's GPUs. Returns 0 if that is too little to be of use. On a CPU the cache itself is in host memory."""
    share = free_bytes // 4 // max(1, n_gpus)
    return share if share >= MIN_HOST_TIER_BYTES else 0


def n_gpus_of_machine() -> int:
    """Number of GPUs of the machine, including those that this process does not see."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 1


def free_host_bytes() -> int:
    """Bytes that can be allocated without swapping, on the machine and in the process's control groups."""
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        own = "0::/"
    return min(_available_bytes(), cgroup_bytes(Path("/sys/fs/cgroup"), own))


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux: assume half is free


def cgroup_bytes(root: Path, own: str = "0::/") -> int:
    """Bytes that control groups (of version 2 or 1) still allow. `own`: those of the process, as /proc tells them; a
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
    """Bytes left in one group; reclaimable page cache counts as free."""
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
