"""The server's log file in the data folder: JSON lines of all its processes, rotated, written by a thread.

`emberline serve` writes it besides stderr, so that `emberline logs` finds the lines wherever stderr went: a terminal
that was closed, journald, nothing.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from emberline.log import JsonFormatter

NAME = "emberline.log"
N_OLDER = 3  # files besides the current one; each has a quarter of the bytes
MAX_QUEUED = 20_000  # lines; more are dropped and counted, so that a slow disk slows down no request
WRITE_S = 0.2  # between two writes
BLOCK_BYTES = 64 << 10  # read at a time from the end of a file
POLL_S = 0.2  # between two looks for new lines


def log_path(home: Path) -> Path:
    return home / "logs" / NAME


class LogFile(logging.Handler):
    """A handler for the root logger; `close` writes what is queued."""

    def __init__(self, path: Path, max_bytes: int, write_s: float = WRITE_S, max_queued: int = MAX_QUEUED) -> None:
        super().__init__()
        self.n_dropped = 0
        self.setFormatter(JsonFormatter())
        self._path = path
        self._write_s, self._max_queued = write_s, max_queued
        self._max_bytes = max(1, max_bytes // (N_OLDER + 1))
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="log file", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() < self._max_queued:
            self._queue.put(record)
        else:
            self.n_dropped += 1

    def close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        self._thread.join(2.0)
        super().close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """A few times a second, however many lines there are, and never while there are none. A full or missing disk
        loses lines and nothing else: stderr has them too."""
        while True:
            records = [self._queue.get()]
            self._closing.wait(self._write_s)
            records += [self._queue.get() for _ in range(self._queue.qsize())]  # nobody else takes them
            lines = [self._line(record) for record in records if record is not None]
            with contextlib.suppress(OSError):
                self._write("".join(lines).encode("utf-8", "replace"))
            if None in records:
                return

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record) + "\n"
        except Exception:  # arguments that do not fit the message: `logging` reports it, the next lines are written
            self.handleError(record)
            return ""

    def _write(self, data: bytes) -> None:
        """Opened anew for every batch of lines, so that it may be moved or removed at any time."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size + len(data) > self._max_bytes:
                self._rotate()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        names = [self._path, *older_files(self._path)]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.rename(older)


def older_files(path: Path) -> list[Path]:
    """Newest first, whether they exist or not."""
    return [path.with_name(f"{path.name}.{number}") for number in range(1, N_OLDER + 1)]


def lines_backward(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The lines of all files, newest first, without reading more than is asked for."""
    for each in (path, *older_files(path)):
        with contextlib.suppress(FileNotFoundError), each.open("rb") as file:
            yield from _file_backward(file.seek(0, os.SEEK_END), file.fileno(), block_bytes)


def _file_backward(end: int, descriptor: int, block_bytes: int) -> Iterator[bytes]:
    rest = b""
    while end > 0:
        start = max(0, end - block_bytes)
        first, *lines = (os.pread(descriptor, end - start, start) + rest).split(b"\n")
        yield from (line for line in reversed(lines) if line)
        rest, end = first, start
    if rest:
        yield rest


def follow(path: Path, poll_s: float = POLL_S) -> Iterator[bytes | None]:
    """Lines that are written from now on, through rotations; None while there is nothing new."""
    file: BinaryIO | None = None
    is_new, rest = False, b""  # what is there already is not new
    try:
        while True:
            if file is None:
                with contextlib.suppress(FileNotFoundError):
                    file = path.open("rb")
                    file.seek(0, os.SEEK_SET if is_new else os.SEEK_END)
                is_new = True
            replaced = file is not None and _is_replaced(path, file)  # asked first: what is read then is all of it
            *lines, rest = (rest + (file.read() if file is not None else b"")).split(b"\n")
            yield from (line for line in lines if line)
            if replaced and file is not None:
                file.close()
                file, rest = None, b""
                continue
            yield None
            time.sleep(poll_s)
    finally:
        if file is not None:
            file.close()


def _is_replaced(path: Path, file: BinaryIO) -> bool:
    """True if the path has another file now, or the file was emptied."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    return found.st_ino != os.fstat(file.fileno()).st_ino or found.st_size < file.tell()
