"""CPU threads shared by need among the engine workers of one machine.

A worker that computes alone uses every core; of several that compute at once each uses an even share. They learn of
each other from a small file in shared memory: one slot a worker, holding the time until which it counts as computing.
No worker waits for another, and one that died stops counting by itself.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

MAX_WORKERS = 512  # slots of the file
FILE_BYTES = 8 * MAX_WORKERS
STEP_NS = 60_000_000_000  # a step counts for at most so long: its worker may have died in it
PAUSE_NS = 20_000_000  # between two steps of a busy worker


class CpuShare:
    """A context around the computation of each step, which adapts the number of threads."""

    def __init__(self, path: Path, slot: int, n_threads: int, set_threads: Callable[[int], None]) -> None:
        """`set_threads` applies the number of threads, `n_threads` when no other worker computes."""
        import numpy as np  # not where only `create` is used

        with path.open("r+b") as file:
            self._busy_until_ns = np.frombuffer(mmap.mmap(file.fileno(), FILE_BYTES), np.int64)
        self._slot = slot
        self._most = self._now = n_threads
        self._set_threads = set_threads

    def __enter__(self) -> None:
        now_ns = time.monotonic_ns()  # the same clock in all processes
        self._busy_until_ns[self._slot] = now_ns + STEP_NS
        n_busy = int((self._busy_until_ns > now_ns).sum())
        n_threads = -(-self._most // n_busy)
        if n_threads != self._now:
            self._now = n_threads
            self._set_threads(n_threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy_until_ns[self._slot] = time.monotonic_ns() + PAUSE_NS


def open_share(place: str | None, n_threads: int | None, set_threads: Callable[[int], None]) -> CpuShare | None:
    """Open the share at `place`, FILE:SLOT. Without one, the threads of this worker are its own."""
    if place is None:
        return None
    path, _, slot = place.rpartition(":")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CpuShare(Path(path), int(slot), n_threads or n_cores, set_threads)


def create(path: Path) -> Path:
    """Create a file for the workers of a machine, none of which computes yet."""
    path.write_bytes(bytes(FILE_BYTES))
    return path


def thread_setter(backend: str) -> Callable[[int], None]:
    """The function that sets the number of a backend's CPU threads."""
    if backend == "native":
        from emberline.kernels.cpu.native_backend import set_threads

        return set_threads
    import torch

    return torch.set_num_threads


def set_threads(backend: str, n_threads: int | None) -> None:
    """Set torch's threads, at start. The C kernels have their own, with which torch's would compete for the cores."""
    if backend == "native" and sys.modules.get("torch") is None:
        return
    import torch

    if backend == "native":
        torch.set_num_threads(1)
    elif n_threads is not None:
        torch.set_num_threads(n_threads)
