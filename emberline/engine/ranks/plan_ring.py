"""One writer, several readers on one machine: messages in a ring of shared memory, and a futex to wait for them.

A message is written once for all readers. The writer wakes two of them, and each that was woken two more: its time does
not grow with their number. Nobody spins: who waits sleeps in the kernel. A reader whose counter stands still hangs, and
the writer can tell which it is.
"""

import ctypes
import mmap
import os
import platform
import sys
import time
import zlib
from collections import deque
from struct import Struct

RING_BYTES = 16 << 20  # of messages: a plan has some KiB, one with long prompts up to a few MiB
_WRITTEN, _READ = 0, 64  # offsets of counters (u32 messages) in the header: written, and read by each reader
_READ_BYTES = 64  # of each reader's counter: a cache line of its own
_HEADER_BYTES = 8192
MAX_READERS = (_HEADER_BYTES - _READ) // _READ_BYTES
_U32 = Struct("<I")
_PART = Struct("<II")  # in front of each part of a message: its bytes, and CRC-32 over them and the part's number
_MORE = 1 << 31  # in the bytes: another part of the same message follows
_SKIP = (1 << 31) - 1  # instead of the bytes: the next part is at the start of the ring

_FUTEX = {"x86_64": 202, "aarch64": 98}  # numbers of the system call
_WAIT, _WAKE = 0, 1
_WAIT_S = 0.25  # in one system call: also how late a message is if a reader hangs that would have woken others
_WOKEN_AT_ONCE = 2
_ROOM_S = 0.0002  # between two looks at how far the readers are
_MASK = 0xFFFFFFFF


class RingClosed(Exception):
    """The other side is gone, or does not read what is written."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() in _FUTEX


class _SharedMemory:
    """The memory behind a descriptor, as both sides map it."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.header = memoryview(self._map)[:_HEADER_BYTES]
        self.ring = memoryview(self._map)[_HEADER_BYTES:]
        address = ctypes.addressof(ctypes.c_uint32.from_buffer(self._map))
        self._written = ctypes.c_void_p(address + _WRITTEN)
        self._syscall = ctypes.CDLL(None).syscall
        self._number = _FUTEX[platform.machine()]

    def wait(self, n_written: int, timeout_s: float) -> None:
        """Wait until the number of messages differs from `n_written`, or the time has passed."""
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        self._syscall(self._number, self._written, _WAIT, n_written, ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        self._syscall(self._number, self._written, _WAKE, _WOKEN_AT_ONCE, None, None, 0)


class RingWriter:
    """Creates the memory, whose descriptor the readers inherit or receive."""

    def __init__(self, n_readers: int, n_bytes: int = RING_BYTES) -> None:
        if n_readers > MAX_READERS:
            raise ValueError(f"{n_readers} readers; a ring has at most {MAX_READERS}")
        self.descriptor = os.memfd_create("emberline-plans", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _HEADER_BYTES + n_bytes)
        self._memory = _SharedMemory(self.descriptor)
        self._readers = [_READ + _READ_BYTES * number for number in range(n_readers)]
        self._n, self._at = 0, 0  # parts; bytes, those left out at the end of the ring included
        self._unread: deque[int] = deque()  # where the last parts begin, of which some may be unread

    def write(self, message: bytes, timeout_s: float = 60.0) -> None:
        """RingClosed: there is no room for it, because a reader does not read."""
        most = len(self._memory.ring) // 4
        if len(message) <= most:
            self._write_part(message, len(message), timeout_s)
            return
        for start in range(0, len(message), most):
            part = message[start : start + most]
            self._write_part(part, len(part) | (_MORE if start + most < len(message) else 0), timeout_s)

    def n_unread(self) -> list[int]:
        """Parts that each reader has not done yet."""
        header = self._memory.header
        return [(self._n - int(_U32.unpack_from(header, offset)[0])) & _MASK for offset in self._readers]

    def _write_part(self, part: bytes, length: int, timeout_s: float) -> None:
        ring = self._memory.ring
        n_bytes = _PART.size + len(part)
        left = len(ring) - self._at % len(ring)
        skipped = 0 if left >= n_bytes else left
        if self._at + skipped + n_bytes - (self._unread[0] if self._unread else self._at) > len(ring):
            self._make_room(skipped + n_bytes, timeout_s)
        if skipped >= _PART.size:
            _PART.pack_into(ring, self._at % len(ring), _SKIP, _checksum(b"", self._n))
        self._at += skipped
        offset = self._at % len(ring)
        _PART.pack_into(ring, offset, length, _checksum(part, self._n))
        ring[offset + _PART.size : offset + n_bytes] = part
        self._unread.append(self._at)
        self._at += n_bytes
        self._n += 1
        _U32.pack_into(self._memory.header, _WRITTEN, self._n & _MASK)
        self._memory.wake()

    def _make_room(self, n_bytes: int, timeout_s: float) -> None:
        limit_s = time.monotonic() + timeout_s
        while True:
            n_unread = max(self.n_unread(), default=0)
            while len(self._unread) > n_unread:
                self._unread.popleft()
            if not self._unread or self._at + n_bytes - self._unread[0] <= len(self._memory.ring):
                return
            if time.monotonic() > limit_s:
                raise RingClosed(f"a reader is {n_unread} messages behind")
            time.sleep(_ROOM_S)


class RingReader:
    """Reader `number` of a ring."""

    def __init__(self, descriptor: int, number: int) -> None:
        self._memory = _SharedMemory(descriptor)
        self._counter = _READ + _READ_BYTES * number
        self._n, self._at = 0, 0
        self._parts: list[bytes] = []

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None: none has come in this time. It counts as done when the next one is asked for."""
        limit_s = time.monotonic() + timeout_s
        while True:
            _U32.pack_into(self._memory.header, self._counter, self._n & _MASK)
            has_waited = False
            while int(_U32.unpack_from(self._memory.header, _WRITTEN)[0]) == self._n & _MASK:
                if (left_s := limit_s - time.monotonic()) <= 0:
                    return None
                self._memory.wait(self._n & _MASK, min(left_s, _WAIT_S))
                has_waited = True
            if has_waited:
                self._memory.wake()
            part, more = self._take()
            if more or self._parts:
                self._parts.append(part)
            if not more:
                message = b"".join(self._parts) if self._parts else part
                self._parts.clear()
                return message

    def _take(self) -> tuple[bytes, bool]:
        """The next part. Its counter may be visible before its bytes are: then the checksum is another's."""
        ring = self._memory.ring
        limit_s = time.monotonic() + 1.0
        while True:
            at, left = self._at, len(ring) - self._at % len(ring)
            if left < _PART.size:
                at += left
            offset = at % len(ring)
            length, checksum = _PART.unpack_from(ring, offset)
            if length == _SKIP and checksum == _checksum(b"", self._n):
                self._at = at + len(ring) - offset
                continue
            part = bytes(ring[offset + _PART.size : offset + _PART.size + (length & ~_MORE)])
            if _checksum(part, self._n) == checksum:
                self._n, self._at = self._n + 1, at + _PART.size + len(part)
                return part, bool(length & _MORE)
            if time.monotonic() > limit_s:
                raise RingClosed("what is in the ring is no message")


def _checksum(part: bytes, number: int) -> int:
    return zlib.crc32(part, number & _MASK)
