"""Files read and written past the page cache (O_DIRECT) in aligned pieces, and the threads that wait for them.

The page cache would cost a copy of every byte and evict what the machine needs more. Where a file system has no direct
I/O, such as tmpfs, the same calls go through the cache.
"""

import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PAGE = 4096  # alignment of offsets, lengths and memory: enough for every drive
MAX_VECTORS = 1024  # buffers of one call (IOV_MAX)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS


def padded(n_bytes: int) -> int:
    """The bytes, rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def aligned_buffer(n_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(PAGE, padded(n_bytes))))


def is_aligned(buffer: memoryview) -> bool:
    """True if direct I/O can use the buffer as it is. A read-only buffer is copied, since its alignment is not
    known."""
    if buffer.nbytes % PAGE or buffer.readonly or not buffer.contiguous:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0


class DirectFile:
    """One file. All calls block and raise OSError; a short read raises nothing and says how much there was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o600)
            self.direct = bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags, 0o600)
            self.direct = False

    @property
    def n_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    @property
    def disk_bytes(self) -> int:
        """Space that the file takes: without what was wiped, and with what is allocated behind its end."""
        return 512 * os.fstat(self._descriptor).st_blocks

    @property
    def is_linked(self) -> bool:
        """True if the path still names this file."""
        try:
            there, here = os.stat(self.path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers; the number of bytes, fewer at the end of the file."""
        return self._all(os.preadv, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._all(os.pwritev, buffers, offset) < sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "the drive accepted only a part of a write", str(self.path))

    def _all(self, call: Callable[[int, Any, int], int], buffers: Sequence[memoryview], offset: int) -> int:
        left, done = [buffer for buffer in buffers if buffer.nbytes], 0
        while left and (n := call(self._descriptor, left[:MAX_VECTORS], offset + done)):
            done += n
            while left and n >= left[0].nbytes:
                n -= left.pop(0).nbytes
            if n % PAGE:
                break  # the end of the file: direct I/O goes on at whole pages only
            if n:
                left[0] = left[0][n:]
        return done

    def allocate(self, offset: int, n_bytes: int) -> None:
        """Take the space now, so that a full disk is known before blocks are written. ENOSPC where there is none."""
        code = _fallocate(self._descriptor, _KEEP_SIZE, offset, n_bytes)
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(self.path))

    def wipe(self, offset: int, n_bytes: int) -> None:
        """The range reads as zeros from now on, and its space is given back where the file system can."""
        end = min(offset + n_bytes, padded(self.n_bytes))
        if end <= offset:
            return
        if _fallocate(self._descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, end - offset):
            zeros = aligned_buffer(1 << 20)
            for at in range(offset, end, zeros.nbytes):
                self.write([zeros[: min(zeros.nbytes, end - at)]], at)

    def truncate(self, n_bytes: int) -> None:
        os.ftruncate(self._descriptor, n_bytes)

    def sync(self) -> None:
        os.fdatasync(self._descriptor) if hasattr(os, "fdatasync") else os.fsync(self._descriptor)

    def __del__(self) -> None:  # not before: a call that runs must not use the descriptor of another file
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "fallocate"):
        library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def _fallocate(descriptor: int, mode: int, offset: int, n_bytes: int) -> int:
    """0, or the error's number."""
    if not hasattr(_libc(), "fallocate"):
        return errno.ENOSYS
    while _libc().fallocate(descriptor, mode, offset, n_bytes):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


class IoThreads:
    """Daemon threads that run blocking calls: a drive that never answers keeps no process from ending."""

    def __init__(self, n_threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def run_all(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks at once and return when all have ended. They raise nothing; the last one runs here."""
        if not tasks:
            return
        left, done = len(tasks) - 1, threading.Event()
        lock = threading.Lock()

        def counted(task: Callable[[], None]) -> None:
            nonlocal left
            try:
                task()
            finally:
                with lock:
                    left -= 1
                    if not left:
                        done.set()

        for task in tasks[:-1]:
            self._tasks.put(lambda task=task: counted(task))  # type: ignore[misc]
        tasks[-1]()
        if len(tasks) > 1:
            done.wait()

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
