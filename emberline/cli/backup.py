"""`emberline backup` and `emberline restore`: everything durable of a server in one file, taken while it runs.

emberline backup /backups                       # a new file in the folder
emberline restore /backups/emberline-….tar      # on a machine where no server runs yet

The file is a tar archive: the store's snapshot, blobs, spooled usage, the root secret, the configuration and the
operator's model cards, then a manifest with the SHA-256 of each, then the manifest's own. Models are not in it.
"""

import argparse
import asyncio
import contextlib
import fcntl
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from emberline import __version__
from emberline.accounts.secret import ENVIRONMENT, FILE
from emberline.catalog.card_files import FOLDER as CARDS
from emberline.cli import common
from emberline.config import FILE_NAME, Config, resolve
from emberline.jobs.queue.queue import BLOBS
from emberline.protocol.errors import BadInput, Conflict, Unavailable
from emberline.service.service_factory import DATABASE, USAGE
from emberline.store.snapshot import Snapshot, check_target, load_snapshot, sqlite_path, take_snapshot

_MANIFEST, _MANIFEST_DIGEST = "manifest.json", "manifest.sha256"
_STORE = "store"  # the archive's folder with the snapshot
_MAX_MANIFEST_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20


class ArchivedFile(msgspec.Struct, frozen=True):
    n_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    emberline: str  # the version that made it
    created_us: int
    store: Snapshot
    files: dict[str, ArchivedFile]  # by name in the archive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    restores = parser.get_default("command") == "restore"
    what = "the backup" if restores else "the file to write, or a folder for a new one"
    parser.add_argument("path", metavar="FILE" if restores else "FILE|DIR", type=Path, help=what)
    forced = "replace what is there; the old files are kept beside it" if restores else "overwrite the file"
    parser.add_argument("--force", action="store_true", help=forced)
    if restores:
        parser.add_argument("--verify", action="store_true", help="only check the file; change nothing")
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    if args.command == "backup":
        path, manifest = asyncio.run(back_up(config, args.path, force=args.force))
        done = f"{path}: {_summary(manifest)}; verified"
    elif args.verify:
        path, manifest = args.path, verify(args.path)
        done = f"{path}: {_summary(manifest)}; intact"
    else:
        path, manifest = args.path, asyncio.run(restore(config, args.path, force=args.force))
        done = f"restored {_summary(manifest)} into {config.home}; start the server with `emberline serve`"
    if args.json:
        common.print_json({"file": str(path), **msgspec.to_builtins(manifest)})
    else:
        print(done)
    return 0


def _summary(manifest: Manifest) -> str:
    n_bytes = sum(file.n_bytes for file in manifest.files.values())
    return f"{len(manifest.files):,} files, {common.format_size(n_bytes)}, schema {manifest.store.schema_version}"


# --- backup -----------------------------------------------------------------------------------------------------------


async def back_up(config: Config, target: Path, *, force: bool = False) -> tuple[Path, Manifest]:
    """Write and verify a backup. The server may run: nothing waits for it but the removal of blobs."""
    if target.is_dir():
        target = target / time.strftime("emberline-%Y%m%dT%H%M%SZ.tar", time.gmtime())
    if target.exists() and not force:
        raise Conflict(f"{target} exists already: --force overwrites it")
    if not target.parent.is_dir():
        raise BadInput(f"there is no folder {target.parent}")
    where = config.store.url or config.home / DATABASE
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    with (
        tempfile.TemporaryDirectory(prefix=".emberline-backup-", dir=target.parent) as scratch,
        _blobs_kept(config.home),
    ):
        # Spooled rows before the store: one that is forwarded meanwhile is in both, which counts it once.
        spooled = _read_small(config.home / USAGE)
        snapshot = await take_snapshot(where, Path(scratch))
        try:
            await asyncio.to_thread(_write, config.home, Path(scratch), spooled, snapshot, part)
            manifest = await asyncio.to_thread(verify, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target, manifest


def _write(home: Path, scratch: Path, spooled: dict[str, bytes], snapshot: Snapshot, part: Path) -> None:
    files: dict[str, ArchivedFile] = {}
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # it holds the root secret
    with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:

        def add(name: str, source: IO[bytes], n_bytes: int) -> None:
            reader = _HashingReader(source, n_bytes)
            archive.addfile(_header(name, n_bytes), reader)
            files[name] = ArchivedFile(n_bytes, reader.digest.hexdigest())

        for name, data in spooled.items():
            add(f"{USAGE}/{name}", io.BytesIO(data), len(data))
        for path, name in _durable_files(home, scratch):
            with path.open("rb") as source:
                add(name, source, os.fstat(source.fileno()).st_size)
        manifest = Manifest(emberline=__version__, created_us=time.time_ns() // 1000, store=snapshot, files=files)
        encoded = msgspec.json.encode(manifest)
        for name, data in ((_MANIFEST, encoded), (_MANIFEST_DIGEST, sha256(encoded).hexdigest().encode())):
            archive.addfile(_header(name, len(data)), io.BytesIO(data))
        archive.close()
        raw.flush()
        os.fsync(raw.fileno())


def _durable_files(home: Path, scratch: Path) -> Iterator[tuple[Path, str]]:
    """Files and their names in the archive."""
    for name in (FILE, FILE_NAME):
        if (home / name).is_file():
            yield home / name, name
    yield from ((path, f"{_STORE}/{path.name}") for path in sorted(scratch.iterdir()))
    for folder in (CARDS, BLOBS):
        for path in sorted((home / folder).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield path, f"{folder}/{path.relative_to(home / folder).as_posix()}"


def _read_small(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as they are now; they may vanish meanwhile."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix != ".part" and path.is_file():
                found[path.name] = path.read_bytes()
    return found


@contextlib.contextmanager
def _blobs_kept(home: Path) -> Iterator[None]:
    """No blob is removed meanwhile: all that the snapshot names are still there."""
    if not (home / BLOBS).is_dir():
        yield
        return
    with (home / BLOBS / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


class _HashingReader(io.RawIOBase):
    """Exactly `n_bytes` of a file, hashed as they are read."""

    def __init__(self, source: IO[bytes], n_bytes: int) -> None:
        self._source, self._left = source, n_bytes
        self.digest = sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        self.digest.update(data)
        return data


def _header(name: str, n_bytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = n_bytes, 0o600, int(time.time())
    return info


# --- restore ----------------------------------------------------------------------------------------------------------


async def restore(config: Config, source: Path, *, force: bool = False) -> Manifest:
    """Put a backup into the data folder, and its store where the configuration says. Nothing is changed before every
    checksum has been verified."""
    home = config.home
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_running_server(home)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=home) as scratch:
        fresh = Path(scratch)
        manifest = await asyncio.to_thread(verify, source, fresh)
        if (fresh / FILE_NAME).exists():
            url = config.store.url or resolve(environ={}, home=fresh).store.url
        else:
            url = config.store.url
        where = url or home / DATABASE
        check_target(manifest.store, where)
        names = sorted(path.name for path in fresh.iterdir() if path.name != _STORE)
        path = sqlite_path(where)
        occupied = [name for name in names if _is_occupied(home / name)]
        if path is not None and path.exists():
            occupied.append(path.name)
        if occupied and not force:
            raise Conflict(f"{home} already has {', '.join(occupied)}: --force replaces what is there")
        aside = home / time.strftime("before-restore-%Y%m%dT%H%M%SZ", time.gmtime())
        if path is not None:
            _move_aside([path.with_name(path.name + side) for side in ("", "-wal", "-shm")], aside)
        await load_snapshot(manifest.store, fresh / _STORE, where, force=force)
        _move_aside([home / name for name in names], aside)
        for name in names:
            os.replace(fresh / name, home / name)
    if FILE not in manifest.files and not os.environ.get(ENVIRONMENT):
        common.print_note(f"the backup has no root secret: set {ENVIRONMENT} to that of the server it was made on")
    return manifest


def _is_occupied(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir()))


def _move_aside(paths: list[Path], aside: Path) -> None:
    """Keep what is replaced, so that a restore of the wrong file can be undone."""
    for path in paths:
        if path.exists():
            aside.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, aside / path.name)


def _refuse_running_server(home: Path) -> None:
    """A server holds a lock on its spool."""
    for spool in (home / USAGE).glob("*.spool"):
        with contextlib.suppress(FileNotFoundError), spool.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(f"a server runs on {home}: stop it first") from None


def verify(source: Path, into: Path | None = None) -> Manifest:
    """Check a backup's every byte, and extract it into an empty folder. Unavailable: it is damaged or incomplete."""
    found: dict[str, ArchivedFile] = {}
    manifest, manifest_digest = b"", b""
    try:
        with tarfile.open(source, "r:") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or not _is_safe(member.name):
                    raise _damaged(source, f"it contains {member.name[:100]!r}")
                if member.name in (_MANIFEST, _MANIFEST_DIGEST):
                    data = file.read(_MAX_MANIFEST_BYTES)
                    if member.name == _MANIFEST:
                        manifest = data
                    else:
                        manifest_digest = data
                    continue
                found[member.name] = _extract(file, None if into is None else into / member.name)
        known = msgspec.json.decode(manifest, type=Manifest)
    except FileNotFoundError:
        raise BadInput(f"there is no file {source}") from None
    except (tarfile.TarError, EOFError, msgspec.DecodeError) as error:
        raise _damaged(source, f"it is no complete backup ({error})") from None
    if sha256(manifest).hexdigest().encode() != manifest_digest:
        raise _damaged(source, "the checksum of its manifest is wrong")
    for name in known.files.keys() | found.keys():
        if known.files.get(name) != found.get(name):
            raise _damaged(source, f"the checksum of {name} is wrong")
    return known


def _damaged(source: Path, reason: str) -> Unavailable:
    return Unavailable(f"{source} cannot be restored: {reason}")


def _is_safe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    tops = (FILE, FILE_NAME, _MANIFEST, _MANIFEST_DIGEST, _STORE, CARDS, BLOBS, USAGE)
    return bool(parts) and parts[0] in tops and ".." not in parts and "\0" not in name


def _extract(source: IO[bytes], target: Path | None) -> ArchivedFile:
    digest, n_bytes = sha256(), 0
    with contextlib.ExitStack() as stack:
        file = None
        if target is not None:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = stack.enter_context(os.fdopen(handle, "wb"))
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            n_bytes += len(chunk)
            if file is not None:
                file.write(chunk)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
    return ArchivedFile(n_bytes, digest.hexdigest())
