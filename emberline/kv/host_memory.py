"""Host memory for KV blocks: on huge pages where available, and shareable with other processes."""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from emberline.kv.slices import ByteRun

MAX_HUGE_PAGE_BYTES = 4 << 20  # with 64 KB base pages huge pages have 512 MB: a block would cost one
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # truncation would kill a reader with SIGBUS


@dataclass(slots=True, frozen=True)
class Pages:
    """Zeroed bytes that take memory once they are written."""

    buffer: mmap.mmap
    descriptor: int = -1  # of the shared memory behind it


def private_pages(n_bytes: int) -> Pages:
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(pages)
    return Pages(pages)


def shared_pages(n_bytes: int) -> Pages:
    """Writable by any process that has the descriptor. Huge pages only where the kernel has them for shared memory."""
    descriptor = os.memfd_create("emberline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, n_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    pages = mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED)
    _advise_huge_pages(pages)
    return Pages(pages, descriptor)


def _advise_huge_pages(pages: mmap.mmap) -> None:
    if _huge_page_bytes() <= MAX_HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)  # on small pages most reads of the cache would miss the TLB


def _huge_page_bytes() -> float:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):  # this kernel has no huge pages
        return inf


class HostMemory:
    """One buffer per KV group; the bytes of a block are contiguous."""

    def __init__(
        self, pools: Sequence[memoryview], block_bytes: Sequence[int], descriptors: Sequence[int] = ()
    ) -> None:
        assert len(pools) == len(block_bytes)
        self.pools = [pool.cast("B") for pool in pools]
        self.block_bytes = tuple(block_bytes)
        self.descriptors = tuple(descriptors)  # of the shared memory behind the pools, where it is shared

    def block(self, group: int, block: int) -> memoryview:
        n = self.block_bytes[group]
        return self.pools[group][block * n : (block + 1) * n]

    def fill(
        self, group: int, block: int, runs: Sequence[ByteRun] | None, read_into: Callable[[memoryview], None]
    ) -> None:
        """Read these parts of a block, in this order; None: all of it."""
        view = self.block(group, block)
        for _, first, n_bytes in [ByteRun(0, 0, len(view))] if runs is None else runs:
            read_into(view[first : first + n_bytes])
