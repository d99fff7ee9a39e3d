"""Blocks between a device pool and pinned host memory: the copy engines, on streams of their own."""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.kernels.native_library import load_library
from emberline.kv.host_memory import private_pages
from emberline.kv.tiers.host import Segment, address_of
from emberline.kv.tiers.mover import BlockCopy, Ticket
from emberline.protocol.block_hash import KVGroup

_TOUCHING_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context

_log = logging.getLogger(__name__)


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


def _check(driver: Any, name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'').decode() or code}")


class CudaMover:
    """One copy for each run of blocks that are neighbors on both sides; a block is contiguous over layers. One call
    queues all of them, and leaves the interpreter's lock to the step loop."""

    def __init__(self, pools: Sequence[Tensor], layouts: Sequence[KVGroup], driver: Any = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        self._copy_runs = load_library().em_copy_runs
        self._copy_runs.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._device = pools[0].device
        self._bases = [pool.data_ptr() for pool in pools]
        self._sizes = [layout.block_bytes for layout in layouts]
        self._entered = threading.local()
        # Like the steps' stream: copy engines do not compete with kernels, and copies wait for no step.
        self._streams = {name: torch.cuda.Stream(self._device) for name in ("load", "save")}  # type: ignore[no-untyped-call]

    def load(self, copies: Sequence[BlockCopy]) -> Ticket:
        bases, sizes = self._bases, self._sizes
        runs = joined((bases[g] + block * sizes[g], slot.address, sizes[g]) for g, block, slot in copies)
        return self._queue("cuMemcpyHtoDAsync_v2", runs, self._streams["load"])

    def save(self, copies: Sequence[BlockCopy]) -> Ticket:
        bases, sizes = self._bases, self._sizes
        runs = joined((slot.address, bases[g] + block * sizes[g], sizes[g]) for g, block, slot in copies)
        return self._queue("cuMemcpyDtoHAsync_v2", runs, self._streams["save"])

    def _queue(self, name: str, runs: list[tuple[int, int, int]], stream: Any) -> Ticket:
        if not hasattr(self._entered, "done"):
            make_current(self._device)
            self._entered.done = True
        table = np.array(runs, np.int64)
        copy = ctypes.cast(getattr(self._driver, name), ctypes.c_void_p)
        _check(self._driver, name, self._copy_runs(copy, table.ctypes.data, len(runs), stream.cuda_stream))
        return _Recorded(stream)


class _Recorded:
    """Done when the stream has come to where it was when this was made."""

    def __init__(self, stream: Any) -> None:
        # "blocking" sleeps instead of spinning
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


def joined(copies: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Copies (target, source, bytes) with those made one that continue each other."""
    found: list[tuple[int, int, int]] = []
    for first, second, n_bytes in copies:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (first, second):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + n_bytes)
        else:
            found.append((first, second, n_bytes))
    return found


class PinnedAllocator:
    """Segments of pinned memory, on the NUMA node of the device. Called by a thread of its own: first its pages are
    touched, which takes most of the time and is done by several threads, then they are pinned. Saving must not wait
    for this: a prompt of a small model writes some 4 GB of KV a second."""

    def __init__(self, device: str, driver: Any = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        index = torch.device(device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._touching: ThreadPoolExecutor | None = None

    def __call__(self, n_bytes: int) -> Segment:
        if self._touching is None:
            _run_on(_near_cores(self._device))  # and so do the threads that this one starts
            make_current(self._device)
            self._touching = ThreadPoolExecutor(_TOUCHING_THREADS, "kv-touch")
        # One page more is not pinned: no copy spans two segments, which the driver would refuse.
        buffer = memoryview(private_pages(n_bytes + mmap.PAGESIZE).buffer)[:n_bytes]
        parts = np.array_split(np.frombuffer(buffer, np.uint8), _TOUCHING_THREADS)
        list(self._touching.map(lambda part: part.fill(0), parts))  # without the interpreter's lock
        segment = Segment(buffer, address_of(buffer))
        pinned = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(segment.address), ctypes.c_size_t(n_bytes), ctypes.c_uint(_PORTABLE)
        )
        _check(self._driver, "cuMemHostRegister", pinned)
        return segment


def make_current(device: torch.device) -> None:
    """Make the device's context that of this thread: the driver's own calls need it, and torch sets it when used."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


def _near_cores(device: torch.device) -> set[int]:
    """CPU cores on the device's NUMA node; empty: unknown."""
    try:
        properties: Any = torch.cuda.get_device_properties(device)
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = Path(f"/sys/bus/pci/devices/{name}/local_cpulist").read_text().strip()
        cores: set[int] = set()
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        return cores
    except Exception:  # no such file, or properties of an older torch: any core will do
        return set()


def _run_on(cores: set[int]) -> None:
    """Bind the calling thread to these cores. Memory is taken from the node of the core that touches it first."""
    allowed = cores & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
