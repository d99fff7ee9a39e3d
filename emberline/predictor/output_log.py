"""The log of a predictor: what its processes print, and why predictions failed, in files of bounded size, without the
secrets that it was given."""

import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

MAX_BYTES = 4 << 20  # of a file; the one before it is kept
MAX_LINE_BYTES = 16 << 10  # a longer line is cut
KEPT_LINES = 20  # in memory, for error messages
HIDDEN = "**********"
END_BYTES = 256 << 10  # of a log that a client gets at most
MIN_LINE_CHARS = 8  # of a line of a secret, such as a private key's, that is hidden alone: shorter ones are words


class _ServerLine(msgspec.Struct):
    """A line that Cog's server logs itself."""

    fields: dict[str, Any]


class OutputLog:
    """Reads a pipe in a thread, so that a program that floods its output is slowed down and fills no disk.

    Several workers of a predictor may write the same file. The one that finds it full rotates it; the others follow."""

    def __init__(self, path: Path, secrets: tuple[str, ...] = (), max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._secrets = [secret.encode("utf-8", "replace") for secret in spellings(secrets)]
        self._file = self._open()
        self._lock = threading.Lock()  # of the file, which several threads write
        self._tail: deque[bytes] = deque(maxlen=KEPT_LINES)
        reader, self.descriptor = os.pipe()  # the write end, which the program gets
        self._thread = threading.Thread(target=self._read, args=(reader,), name="predictor log", daemon=True)
        self._thread.start()

    def close_writer(self) -> None:
        """Close our copy of the write end, once the program has it."""
        os.close(self.descriptor)

    def close(self, limit_s: float) -> None:
        """Wait for the end of the output, after the program has ended, and close the file."""
        self._thread.join(limit_s)
        with self._lock:
            self._file.close()

    @property
    def last_line(self) -> str:
        """The last line that tells something: of an error, its message."""
        for line in reversed(self._tail):
            if text := line.decode("utf-8", "replace").strip():
                return _message(text)[-500:]
        return "it wrote nothing to its log"

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=1 << 16) as pipe:
            n_held, held = max(map(len, self._secrets), default=1) - 1, b""
            while line := pipe.readline(MAX_LINE_BYTES):
                line, held = self._hidden(held + line), b""
                if n_held and not line.endswith(b"\n"):  # a secret may go on in the next part of a long line
                    line, held = line[:-n_held], line[-n_held:]
                self._add_line(line)
            self._add_line(held)

    def _add_line(self, line: bytes) -> None:
        if line:
            self._tail.append(line if line.endswith(b"\n") else line + b"\n")
            self._write(self._tail[-1])

    def add(self, text: str) -> None:
        """Write what Cog's server does not print itself: the output of a prediction's code, or its error."""
        if text:
            self._write(self._hidden(text.rstrip("\n").encode("utf-8", "replace")) + b"\n")

    def _hidden(self, line: bytes) -> bytes:
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN.encode())
        return line

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._make_room(len(line))
            except FileNotFoundError:  # the folder was removed with the model: the pipe is read on, for nobody
                self._file.close()
                return
            self._file.write(line)

    def _make_room(self, n_bytes: int) -> None:
        """Follow a rotation by another process, and rotate the file if the line would make it too large.

        The lock on the file keeps two processes from rotating at once, which would remove the newest lines."""
        while True:
            if not self._is_current():
                self._reopen()
            size = os.fstat(self._file.fileno()).st_size
            if size == 0 or size + n_bytes <= self._max_bytes:
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until the file is closed
            if self._is_current():
                os.replace(self._path, f"{self._path}.1")
            self._reopen()

    def _is_current(self) -> bool:
        """True if the path still leads to the open file."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        self._file.close()
        self._file = self._open()

    def _open(self) -> FileIO:
        """Open the file without a buffer, so that each line is one write and lines of other processes do not cut it."""
        return self._path.open("ab", buffering=0)


def last_lines(path: Path, n_lines: int, max_bytes: int = END_BYTES) -> list[str]:
    """The last lines of a log, from its current file and the one before. Reads at most `max_bytes`."""
    end = b""
    for each in (path, Path(f"{path}.1")):
        with suppress(FileNotFoundError), each.open("rb") as file:
            n_bytes = min(file.seek(0, os.SEEK_END), max_bytes - len(end))
            file.seek(-n_bytes, os.SEEK_END)
            end = file.read(n_bytes) + end
    lines = end.decode("utf-8", "replace").splitlines()
    return lines[max(0, len(lines) - n_lines) :]


def spellings(secrets: Iterable[str]) -> list[str]:
    """The secrets as a log may have them, the longest first: whole, as JSON and Python quote them, and line by line."""
    found = set[str]()
    for secret in secrets:
        lines = secret.splitlines() if len(secret.splitlines()) > 1 else []
        for text in (secret, *(line.strip() for line in lines if len(line.strip()) >= MIN_LINE_CHARS)):
            found |= {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return sorted(filter(None, found), key=len, reverse=True)


def _message(line: str) -> str:
    """The error in a line of Cog's server, which is JSON; any other line as it is."""
    try:
        fields = msgspec.json.decode(line, type=_ServerLine).fields
    except msgspec.MsgspecError:
        return line
    return str(fields.get("error") or fields.get("message") or line).rpartition("setup failed: ")[2]
