"""Reading a model's files while the process is still importing torch.

Reads use O_DIRECT into private memory, which is twice as fast as through the page cache and leaves the interpreter to
the imports. `WeightLoader` takes the pieces over. Files that are already in the page cache are skipped.
"""

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.weights.lossless_files import is_compressed, read_manifest

_FIRST_BIT = bytes(n & 1 for n in range(256))  # of mincore's byte for a page: it is resident


@cache
def _mincore() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):  # not on this platform
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return function


def resident(address: int, n_bytes: int) -> bool:
    """True if nearly all pages of a mapping are in memory. False where the platform cannot tell."""
    function = _mincore()
    if function is None or not n_bytes:
        return False
    start = address - address % mmap.PAGESIZE
    n_pages = -(-(address + n_bytes - start) // mmap.PAGESIZE)
    pages = ctypes.create_string_buffer(n_pages)
    if function(start, n_pages * mmap.PAGESIZE, pages):
        return False
    return pages.raw.translate(_FIRST_BIT).count(1) > 0.9 * n_pages


PIECE_BYTES = 16 << 20
N_THREADS = 6


class ReadAhead:
    """Threads that read files front to back, in pieces of PIECE_BYTES, until stopped or at the memory limit."""

    def __init__(self, paths: Iterable[Path], limit_bytes: int) -> None:
        self._todo = iter(_pieces(paths, limit_bytes))
        self._done: dict[tuple[Path, int], tuple[mmap.mmap, int]] = {}  # a piece's memory, and its length
        self._expected: Counter[tuple[Path, int]] = Counter()  # copies to come from each piece
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(N_THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start no further piece, and wait for those in progress."""
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def expect(self, path: Path, offset: int, n_bytes: int) -> bool:
        """True if a file's bytes were read, and are therefore to be copied once.

        Memory is freed with the last copy from it that is expected: all of it at the end takes a second.
        """
        pieces = self._find(path, offset, offset + n_bytes)
        for start, _ in pieces or []:
            self._expected[path, start] += 1
        return pieces is not None

    def copy(self, path: Path, offset: int, to: NDArray[np.uint8]) -> bool:
        """Copy a file's bytes from `offset` into `to`; False if not all of them were read."""
        end = offset + len(to)
        pieces = self._find(path, offset, end)
        if pieces is None:
            return False
        for start, (memory, n) in pieces:
            a, b = max(offset, start), min(end, start + PIECE_BYTES)
            np.copyto(to[a - offset : b - offset], np.frombuffer(memory, np.uint8, n)[a - start : b - start])
            with self._lock:
                self._expected[path, start] -= 1
                last = self._expected[path, start] == 0
            if last:
                self._free(path, start)
        return True

    def _find(self, path: Path, offset: int, end: int) -> list[tuple[int, tuple[mmap.mmap, int]]] | None:
        """The pieces that hold a file's bytes, each with the offset of its first; None if not all were read."""
        found: list[tuple[int, tuple[mmap.mmap, int]]] = []
        for start in range(offset - offset % PIECE_BYTES, end, PIECE_BYTES):
            piece = self._done.get((path, start))
            if piece is None or start + piece[1] < min(end, start + PIECE_BYTES):
                return None
            found.append((start, piece))
        return found

    def _free(self, path: Path, start: int) -> None:
        memory, _ = self._done.pop((path, start))
        with suppress(BufferError):  # a view of it is in some traceback
            memory.close()

    def release(self) -> None:
        """Free what nobody copied, on a thread."""

        def free() -> None:
            for path, start in list(self._done):
                self._free(path, start)

        threading.Thread(target=free, daemon=True).start()

    def _run(self) -> None:
        opened: dict[Path, int] = {}
        try:
            while not self._stopped:
                with self._lock:
                    piece = next(self._todo, None)
                if piece is None:
                    return
                path, offset = piece
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                memory = mmap.mmap(-1, PIECE_BYTES)
                with suppress(OSError, AttributeError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                n = os.preadv(opened[path], [memory], offset)
                self._done[path, offset] = memory, n
        except (OSError, AttributeError):
            return  # no O_DIRECT here, or a read error: the loader reads again and reports it
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def _pieces(paths: Iterable[Path], limit_bytes: int) -> Iterable[tuple[Path, int]]:
    for path in paths:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                size = len(mapped)
                if _in_cache(mapped):
                    continue
        except (OSError, ValueError):
            continue
        for offset in range(0, size, PIECE_BYTES):
            if limit_bytes <= 0:
                return
            limit_bytes -= PIECE_BYTES
            yield path, offset


def _in_cache(mapped: mmap.mmap) -> bool:
    """Judged by samples: a file is usually cached either almost entirely or not at all."""
    view = np.frombuffer(mapped, np.uint8)
    places = np.linspace(0, max(0, len(view) - (1 << 20)), 9).astype(np.int64)
    address = view.ctypes.data
    return sum(resident(address + int(place), min(1 << 20, len(view))) for place in places) >= 5


def model_files(model: Path) -> list[Path]:
    """The files of a model that hold weights."""
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def model_bytes(model: Path) -> int:
    """Bytes of a model's weights, decoded if they are compressed; 0 if there is none."""
    if is_compressed(model):
        return sum(file.source.size for file in read_manifest(model).files)
    return sum(path.stat().st_size for path in model_files(model) if path.exists())
