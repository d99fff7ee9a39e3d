"""Reading a model's files while the process is still importing torch.

Reads use O_DIRECT into private memory, which is twice as fast as through the page cache and leaves the interpreter to
the imports. `WeightLoader` takes the bytes over where they are. Files that are already in the page cache are skipped.
"""

import ctypes
import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.weights.lossless_files import is_compressed, read_manifest

_FIRST_BIT = bytes(n & 1 for n in range(256))  # of mincore's byte for a page: it is resident


@cache
def _memory_calls() -> Any:
    """The C library, whose calls let other threads run Python. Returns None where it lacks these calls."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except AttributeError:
        return None
    return library


def resident(address: int, n_bytes: int) -> bool:
    """True if nearly all pages of a mapping are in memory. False where the platform cannot tell."""
    library = _memory_calls()
    if library is None or not n_bytes:
        return False
    start = address - address % mmap.PAGESIZE
    n_pages = -(-(address + n_bytes - start) // mmap.PAGESIZE)
    pages = ctypes.create_string_buffer(n_pages)
    if library.mincore(start, n_pages * mmap.PAGESIZE, pages):
        return False
    return pages.raw.translate(_FIRST_BIT).count(1) > 0.9 * n_pages


def will_need(places: Iterable[tuple[Path, int, int]]) -> None:
    """Ask the kernel for many small places of files at once: path, offset and bytes of each.

    Whoever then looks at them through a mapping reads no more than them. Otherwise the drive reads ahead around each
    one, up to 8 MiB: all of a model for the scales of its experts.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    opened: dict[Path, int] = {}
    try:
        for path, offset, n_bytes in places:
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
            os.posix_fadvise(opened[path], offset, n_bytes, os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # only a hint: the places are read anyway
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def direct_memory(n_bytes: int) -> mmap.mmap:
    """Return aligned memory for reads with O_DIRECT.

    It is private, for shared memory has no huge pages. A child process does not get it: what a read writes into private
    memory while the process forks could else be lost.
    """
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return memory


PIECE_BYTES = 32 << 20
N_THREADS = 8


class _Piece:
    """A piece of a file that is being read, or was."""

    __slots__ = ("n_bytes", "read")

    def __init__(self) -> None:
        self.read = threading.Event()
        self.n_bytes = 0


class _FileMemory(NamedTuple):
    """Memory for the bytes of a file from its first on, which are in it once their piece has been read."""

    descriptor: int  # until `ReadAhead.release_all`
    view: NDArray[np.uint8]
    pieces: dict[int, _Piece]  # that were begun, by offset


class ReadAhead:
    """Threads that read files front to back, in pieces of PIECE_BYTES, until stopped or at the memory limit."""

    def __init__(self, paths: Iterable[Path], limit_bytes: int) -> None:
        self._opened = ExitStack()
        self._files: dict[Path, _FileMemory] = {}
        self._todo: deque[tuple[_FileMemory, int]] = deque()
        for path in paths:
            with suppress(OSError, ValueError, AttributeError):  # no such file, an empty one, or no O_DIRECT here
                limit_bytes -= self._open(path, limit_bytes)
        self._expected: Counter[tuple[Path, int]] = Counter()  # readers to come, of each piece
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self.seconds = 0.0  # until the last piece that was read
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(N_THREADS)]
        for thread in self._threads:
            thread.start()

    def _open(self, path: Path, limit_bytes: int) -> int:
        """Schedule a file that is not in the page cache. Returns the bytes of memory that it may take."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            n_pieces = -(-min(len(mapped), limit_bytes) // PIECE_BYTES)
            if n_pieces <= 0 or _in_cache(mapped):
                return 0
        memory = direct_memory(n_pieces * PIECE_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._opened.callback(os.close, descriptor)
        found = self._files[path] = _FileMemory(descriptor, np.frombuffer(memory, np.uint8), {})
        self._todo += [(found, n * PIECE_BYTES) for n in range(n_pieces)]
        return n_pieces * PIECE_BYTES

    def _run(self) -> None:
        while True:
            with self._lock:  # after `stop` no piece is added
                if not self._todo:
                    return
                file, offset = self._todo.popleft()
                piece = file.pieces[offset] = _Piece()
            self._read(file, offset, piece)

    def _read(self, file: _FileMemory, offset: int, piece: _Piece) -> None:
        memory = file.view[offset : offset + PIECE_BYTES]
        # Page faults of a read hold a lock of the process's memory, for which imports wait. Those of a thread do not.
        ctypes.memset(memory.ctypes.data, 0, memory.nbytes)
        with suppress(OSError):  # the loader reads again and reports it
            piece.n_bytes = os.preadv(file.descriptor, [memory.data], offset)
        self.seconds = time.monotonic() - self._began_s
        piece.read.set()

    @property
    def n_bytes(self) -> int:
        """Bytes that were read and are still in memory."""
        return sum(piece.n_bytes for file in list(self._files.values()) for piece in list(file.pieces.values()))

    def wait(self) -> None:
        """Wait until all is read."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Begin no further piece. Call it before `expect`."""
        with self._lock:
            self._todo.clear()

    def expect(self, path: Path, offset: int, n_bytes: int) -> bool:
        """True if a file's bytes were read or are being read, and are therefore to be taken by `view` once.

        Memory is freed when the last reader that is expected has released it: all of it at the end takes a second.
        """
        file, starts = self._files.get(path), _starts(offset, n_bytes)
        if file is None or not all(start in file.pieces for start in starts):
            return False
        for start in starts:
            self._expected[path, start] += 1
        return True

    def view(self, path: Path, offset: int, n_bytes: int) -> NDArray[np.uint8] | None:
        """Bytes of a file that were expected, until they are released. Waits until they are read. Returns None if they
        are not expected, or could not be read."""
        file, end = self._files.get(path), offset + n_bytes
        for start in _starts(offset, n_bytes):
            piece = None if file is None else file.pieces.get(start)
            if piece is None or not piece.read.wait() or start + piece.n_bytes < min(end, start + PIECE_BYTES):
                return None
        return None if file is None else file.view[offset:end]

    def release(self, path: Path, offset: int, n_bytes: int) -> None:
        """Note that the bytes which `view` has returned are no longer read."""
        for start in _starts(offset, n_bytes):
            with self._lock:
                self._expected[path, start] -= 1
                last = self._expected[path, start] == 0
            if last:
                file = self._files[path]
                del file.pieces[start]
                _free(file.view[start : start + PIECE_BYTES])

    def release_all(self) -> None:
        """Begin no further piece, and free the pieces that no reader took, on a thread."""
        self.stop()

        def free() -> None:
            self.wait()
            self._opened.close()
            for file in self._files.values():
                for start in list(file.pieces):
                    _free(file.view[start : start + PIECE_BYTES])
            self._files = {}

        threading.Thread(target=free, daemon=True).start()


def _starts(offset: int, n_bytes: int) -> range:
    """Offsets of the pieces that hold some bytes of a file."""
    return range(offset - offset % PIECE_BYTES, offset + n_bytes, PIECE_BYTES)


def _free(memory: NDArray[np.uint8]) -> None:
    """Give the pages of some memory back, which then is zero."""
    if (library := _memory_calls()) is not None:
        library.madvise(memory.ctypes.data, memory.nbytes, mmap.MADV_DONTNEED)


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
