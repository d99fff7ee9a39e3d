"""Content-addressed blobs for bodies and files too large for a row, with garbage collection.

A blob is durable before a row references it: written under a temporary name, synced, renamed, its folder synced.
Collection skips blobs younger than a grace period; storing a blob that exists renews it. A file lock keeps collection
and storing apart.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Protocol

from emberline.protocol.errors import TooLarge, Unavailable

_READ_BYTES = 1 << 20
_TEMPORARY = ".part-"


class Blobs(Protocol):
    """Store of blobs, each named by the hash of its content."""

    async def put(self, data: bytes) -> str: ...

    async def put_stream(self, chunks: AsyncIterable[bytes], max_bytes: int) -> tuple[str, int]: ...

    async def get(self, name: str) -> bytes: ...

    def stream(self, name: str) -> AsyncGenerator[bytes, None]: ...

    async def unused_since(self, grace_s: float) -> list[str]:
        """Names of blobs that were neither stored nor renewed since; whether rows refer to them is not known here."""

    async def discard(self, name: str, grace_s: float) -> None:
        """Remove the blob unless it was renewed in the meantime."""


class BlobStore:
    """Blobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise Unavailable(f"cannot use {folder}: {error.strerror}") from error

    async def put(self, data: bytes) -> str:
        """Store the bytes durably and return their name."""
        return await asyncio.to_thread(self._put, data)

    async def put_stream(self, chunks: AsyncIterable[bytes], max_bytes: int) -> tuple[str, int]:
        """Store the concatenated chunks, one in memory at a time; returns the name and size."""
        digest, n_bytes = blake2b(digest_size=32), 0
        with self._temporary() as path:
            with _io_errors("store a file"), path.open("xb") as file:
                async for chunk in chunks:
                    n_bytes += len(chunk)
                    if n_bytes > max_bytes:
                        raise too_large(max_bytes)
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(_sync, file)
            name = digest.hexdigest()
            await asyncio.to_thread(self._publish, path, name)
        return name, n_bytes

    async def get(self, name: str) -> bytes:
        with _io_errors("read a stored body"):
            return await asyncio.to_thread(self.path_of(name).read_bytes)

    async def stream(self, name: str) -> AsyncGenerator[bytes, None]:
        with _io_errors("read a stored file"):
            file = await asyncio.to_thread(self.path_of(name).open, "rb")
            try:
                while chunk := await asyncio.to_thread(file.read, _READ_BYTES):
                    yield chunk
            finally:
                file.close()

    def old(self, grace_s: float) -> Iterator[str]:
        """Names of blobs older than the grace period; temporary files of that age are removed."""
        before = time.time() - grace_s
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            yield from (path.name for path in folder.iterdir() if _modified(path) < before)
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            if _modified(path) < before:
                path.unlink(missing_ok=True)

    def remove(self, name: str, grace_s: float) -> bool:
        """Remove the blob unless it was renewed in the meantime."""
        with self._locked(fcntl.LOCK_EX):
            path = self.path_of(name)
            if _modified(path) >= time.time() - grace_s:
                return False
            path.unlink(missing_ok=True)
            return True

    async def unused_since(self, grace_s: float) -> list[str]:
        return await asyncio.to_thread(lambda: list(self.old(grace_s)))

    async def discard(self, name: str, grace_s: float) -> None:
        await asyncio.to_thread(self.remove, name, grace_s)

    def _put(self, data: bytes) -> str:
        name = blake2b(data, digest_size=32).hexdigest()
        if self._renew(name):
            return name
        with self._temporary() as path:
            with _io_errors("store a body"), path.open("xb") as file:
                file.write(data)
                _sync(file)
            self._publish(path, name)
        return name

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        path = self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _renew(self, name: str) -> bool:
        with self._locked(fcntl.LOCK_SH), contextlib.suppress(FileNotFoundError):
            os.utime(self.path_of(name))
            return True
        return False

    def _publish(self, path: Path, name: str) -> None:
        final = self.path_of(name)
        with _io_errors("store a body"), self._locked(fcntl.LOCK_SH):
            if not final.parent.exists():
                final.parent.mkdir(exist_ok=True, mode=0o700)
                _sync_folder(self._folder)
            os.utime(path)
            path.replace(final)
            _sync_folder(final.parent)

    def path_of(self, name: str) -> Path:
        """Path of the file that holds the blob, if the folder has it."""
        return self._folder / name[:2] / name

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self._folder / ".lock").open("ab") as file:
            fcntl.flock(file, how)
            yield


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the file is larger than {max_bytes:,} bytes", param="file")


def _modified(path: Path) -> float:
    """When it was last stored or renewed; infinity if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _io_errors(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot {action}: {error.strerror}", retry_after_s=5) from error
