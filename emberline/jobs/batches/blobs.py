"""Bodies and files too large for a row: kept under the hash of what is in them, written once, collected when unused.

A blob is there before a row refers to it: written under another name, flushed, renamed, its folder flushed. Collecting
leaves alone what is younger than a grace period; putting a blob that exists makes it young again. A lock between the
two sees to it that none is removed while it is being put.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO

from emberline.protocol.errors import TooLarge, Unavailable

_READ = 1 << 20
_UNFINISHED = ".part-"


class BlobStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise Unavailable(f"cannot use {folder}: {error.strerror}") from error

    async def put(self, data: bytes) -> str:
        """Its name; durable when this returns."""
        return await asyncio.to_thread(self._put, data)

    async def put_stream(self, chunks: AsyncIterable[bytes], max_bytes: int) -> tuple[str, int]:
        """The name and size of what the chunks add up to; no more than one of them is in memory."""
        digest, n_bytes = blake2b(digest_size=32), 0
        path = self._folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            with _said("store a file"), path.open("xb") as file:
                async for chunk in chunks:
                    n_bytes += len(chunk)
                    if n_bytes > max_bytes:
                        raise TooLarge(f"the file is larger than {max_bytes:,} bytes", param="file")
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(_flush, file)
            name = digest.hexdigest()
            await asyncio.to_thread(self._keep, path, name)
        finally:
            path.unlink(missing_ok=True)
        return name, n_bytes

    async def get(self, name: str) -> bytes:
        with _said("read a stored body"):
            return await asyncio.to_thread(self._path(name).read_bytes)

    async def stream(self, name: str) -> AsyncIterator[bytes]:
        with _said("read a stored file"):
            file = await asyncio.to_thread(self._path(name).open, "rb")
            try:
                while chunk := await asyncio.to_thread(file.read, _READ):
                    yield chunk
            finally:
                file.close()

    def old(self, grace_s: float) -> Iterator[str]:
        """Names of blobs that nobody put lately; unfinished ones that old are removed on the way."""
        before = time.time() - grace_s
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            yield from (path.name for path in folder.iterdir() if _modified(path) < before)
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            if _modified(path) < before:
                path.unlink(missing_ok=True)

    def remove(self, name: str, grace_s: float) -> bool:
        """Unless it was put again meanwhile."""
        with self._locked(fcntl.LOCK_EX):
            path = self._path(name)
            if _modified(path) >= time.time() - grace_s:
                return False
            path.unlink(missing_ok=True)
            return True

    def _put(self, data: bytes) -> str:
        name = blake2b(data, digest_size=32).hexdigest()
        if self._renew(name):
            return name
        path = self._folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            with _said("store a body"), path.open("xb") as file:
                file.write(data)
                _flush(file)
            self._keep(path, name)
        finally:
            path.unlink(missing_ok=True)
        return name

    def _renew(self, name: str) -> bool:
        with self._locked(fcntl.LOCK_SH), contextlib.suppress(FileNotFoundError):
            os.utime(self._path(name))
            return True
        return False

    def _keep(self, path: Path, name: str) -> None:
        final = self._path(name)
        with _said("store a body"), self._locked(fcntl.LOCK_SH):
            if not final.parent.exists():
                final.parent.mkdir(exist_ok=True, mode=0o700)
                _flush_folder(self._folder)
            os.utime(path)
            path.replace(final)
            _flush_folder(final.parent)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self._folder / ".lock").open("ab") as file:
            fcntl.flock(file, how)
            yield


def _modified(path: Path) -> float:
    """When it was last put; one that is gone is as young as can be."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot {what}: {error.strerror}", retry_after_s=5) from error
