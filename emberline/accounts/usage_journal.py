"""The usage journal: two local files that keep usage while the store is away, and should this process die.

The *spool* is append-only and holds the rows of ended requests that the store could not take; appends that wait
together share one sync. The *checkpoint* is rewritten as a whole and holds what running requests have used so far. A
process owns its two files by a lock on the spool, which ends with it however it dies. The next process on the same
folder adopts the files of dead ones: their spooled rows, and the checkpoints of requests that never ended.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.errors import Unavailable

_READ_BYTES = 1 << 18
_to_row = msgspec.json.Decoder(UsageRow).decode
_to_line = msgspec.json.Encoder().encode

log = logging.getLogger("emberline.usage")


class UsageJournal:
    """Owns its files. Methods belong to one event loop; the disk is used on other threads."""

    def __init__(self, folder: Path) -> None:
        """Adopts what dead processes left in the folder: it is spooled here when this returns."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder
            self._spool = folder / f"{secrets.token_hex(8)}.spool"
            file = _lock(self._spool)
            assert file is not None, "the name is new"
            self._file = file
            self._n_bytes = 0  # of the spool: whole, durable lines
            self._n_forwarded = 0  # bytes of it that the store has
            self.name = self._spool.stem  # of this process
            self.adopted: list[str] = []  # names of dead ones
            for path in sorted(folder.glob("*.spool")):
                self._adopt(path)
        except OSError as error:
            raise Unavailable(f"cannot use {folder}: {error.strerror}") from error
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._has_checkpoint = False

    @property
    def has_rows(self) -> bool:
        """True if rows wait for the store."""
        return self._n_forwarded < self._n_bytes

    async def append(self, row: UsageRow) -> None:
        """Return once the row is durable. Unavailable: the disk is full or broken."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((_to_line(row) + b"\n", done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_groups())
        await done

    async def rows(self) -> tuple[list[UsageRow], int]:
        """The next rows for the store, and what `forwarded` is to be told once it has them."""
        data = await asyncio.to_thread(os.pread, self._file, _READ_BYTES, self._n_forwarded)
        data = data[: min(data.rfind(b"\n") + 1, self._n_bytes - self._n_forwarded)]
        return _decode(data), self._n_forwarded + len(data)

    def forwarded(self, position: int) -> None:
        self._n_forwarded = position
        if position == self._n_bytes and self._writing is None:
            os.ftruncate(self._file, 0)
            self._n_forwarded = self._n_bytes = 0

    async def checkpoint(self, running: Sequence[UsageRow]) -> None:
        """Replace the checkpoint by these rows of running requests; return once it is durable."""
        if running or self._has_checkpoint:
            self._has_checkpoint = bool(running)
            try:
                await asyncio.to_thread(self._replace, [_to_line(row) for row in running])
            except OSError as error:
                log.error("no checkpoint of usage: %s", error.strerror)

    async def close(self) -> None:
        """Nothing is left behind unless rows still wait for the store. Idempotent."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
        if self._file < 0:
            return
        if not self.has_rows:
            _remove(self._spool)
        os.close(self._file)
        self._file = -1

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                error = await asyncio.to_thread(self._write, b"".join(line for line, _ in group))
                for _, done in group:
                    if error is not None and not done.done():
                        done.set_exception(_unavailable(error))
                    elif not done.done():
                        done.set_result(None)
        finally:
            self._writing = None

    def _write(self, data: bytes) -> OSError | None:
        """Append durably, or not at all."""
        try:
            at = self._n_bytes
            while at < self._n_bytes + len(data):
                at += os.pwrite(self._file, data[at - self._n_bytes :], at)
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._n_bytes)
            return error
        self._n_bytes = at
        return None

    def _replace(self, lines: list[bytes]) -> None:
        path = self._spool.with_suffix(".running")
        if not lines:
            path.unlink(missing_ok=True)
            return
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def _adopt(self, spool: Path) -> None:
        file = None if spool == self._spool else _lock(spool)
        if file is None:
            return
        try:
            if not os.fstat(file).st_nlink:
                return  # another process has adopted it
            ended = _decode(spool.read_bytes())
            running = spool.with_suffix(".running")
            cut = _decode(running.read_bytes()) if running.exists() else []
            # A row that the store has already, or a second one of the same id, changes nothing there.
            if rows := [*ended, *cut]:
                log.warning("the usage of %d requests is taken over from a process that died", len(rows))
                if (error := self._write(b"".join(_to_line(row) + b"\n" for row in rows))) is not None:
                    raise error
            _remove(spool)
            self.adopted.append(spool.stem)
        finally:
            os.close(file)


def _lock(path: Path) -> int | None:
    """None: another process owns it."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _remove(spool: Path) -> None:
    for suffix in (".part", ".running", ".spool"):  # the spool last: it is what others look for
        spool.with_suffix(suffix).unlink(missing_ok=True)


def _decode(data: bytes) -> list[UsageRow]:
    """The last line may be incomplete: its append never returned."""
    rows: list[UsageRow] = []
    for line in data.splitlines():
        try:
            rows.append(_to_row(line))
        except msgspec.DecodeError as error:
            log.error("an unreadable usage row is skipped: %s", error)
    return rows


def _unavailable(error: OSError) -> Unavailable:
    return Unavailable(
        f"the server cannot record usage: {error.strerror}; check the data folder's disk", retry_after_s=5
    )
