"""The folders of disk tiers: one for each model, and in it one for each of its workers, locked while that runs.

DISK_PATH/FINGERPRINT/0/lock, format.json, TAG.blocks, TAG.index
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.disk.block_file import VERSION, BlockFile, block_path, index_path
from emberline.protocol import block_hash

MAX_WORKERS = 256  # of one model on one machine
_FORMAT = "format.json"


def model_folder(disk_path: Path, fingerprint: str) -> Path:
    return disk_path / blake2b(fingerprint.encode(), digest_size=16).hexdigest()


def folders_of_other_groups(base: Path, n_ranks: int) -> list[list[Path]]:
    """Folders of a model's groups of another number of ranks: for each number those of its ranks."""
    found: dict[str, list[Path]] = {"1": [base]} if base.is_dir() else {}
    for path in sorted(base.parent.glob(f"{base.name}-rank*of*")):
        found.setdefault(path.name.rpartition("of")[2], []).append(path)
    found.pop(str(n_ranks), None)
    return list(found.values())


class FolderFormat(msgspec.Struct, frozen=True):
    """Format in which the blocks of a folder were written."""

    version: int
    fingerprint: str  # of the model
    layouts: dict[str, Annotated[int, Meta(ge=1)]]  # layout tag in hexadecimal, and bytes of a block
    n_slots: Annotated[int, Meta(ge=0)]
    key: str  # names the tagging key, and says nothing about it
    cipher: str  # names the encryption key; empty: not encrypted
    boot: str  # the start of the machine on which it was used last
    clean: bool = False  # it was closed orderly

    @classmethod
    def of(
        cls, fingerprint: str, layouts: Mapping[bytes, int], n_slots: int, key: bytes, cipher_key: bytes | None
    ) -> "FolderFormat":
        named = {tag.hex(): n_bytes for tag, n_bytes in layouts.items()}
        return cls(VERSION, fingerprint, named, n_slots, _name_of(key), _name_of(cipher_key), boot_id())

    def is_compatible(self, other: "FolderFormat") -> bool:
        """True if blocks of this format can be read as blocks of the other one. Layouts have files of their own."""
        ours, theirs = ((one.version, one.fingerprint, one.key, one.cipher) for one in (self, other))
        return ours == theirs

    def is_trusted(self, boot: str) -> bool:
        """True if the index tells the contents of the slots, because the machine has not crashed since they were
        written."""
        return self.clean or (self.boot == boot != "")


_decoder = msgspec.json.Decoder(FolderFormat)


class TierFolder:
    """A folder that this process has locked, until this object or the process is gone."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        """shared: others may lock it so, too, and nobody writes blocks. BlockingIOError: another process has it."""
        self.path = path
        self._descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    @classmethod
    def take(cls, base: Path) -> "TierFolder":
        """The first one of the model that no other process has."""
        for number in range(MAX_WORKERS):
            path = base / str(number)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                return cls(path)
            except BlockingIOError:
                continue
        raise OSError(errno.EBUSY, f"{MAX_WORKERS} workers use it", str(base))

    @property
    def is_linked(self) -> bool:
        return os.fstat(self._descriptor).st_nlink > 0

    def read_format(self) -> FolderFormat | None:
        """None: there is none that can be read."""
        try:
            return _decoder.decode((self.path / _FORMAT).read_bytes())
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write_format(self, known: FolderFormat) -> None:
        new = self.path / f"{_FORMAT}.{os.getpid()}"  # ranks that share the folder may write it at once
        new.write_bytes(msgspec.json.encode(known))
        new.replace(self.path / _FORMAT)

    def keep_only(self, tags: Iterable[bytes]) -> bool:
        """Delete the blocks of all other layouts; whether there were any."""
        kept = {path(self.path, tag) for tag in tags for path in (block_path, index_path)}
        others = {*self.path.glob("*.blocks"), *self.path.glob("*.index")} - kept
        for path in others:
            path.unlink()
        return bool(others)

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)


def unused_folders(disk_path: Path) -> Iterator[TierFolder]:
    """Folders that no worker uses: of models that are not loaded, or of workers that there were once."""
    for path in sorted(disk_path.glob("*/*/lock")):
        try:
            yield TierFolder(path.parent)
        except BlockingIOError:
            continue


def purge_unused(disk_path: Path, salt: bytes | None, session: bytes | None) -> int:
    """Wipe an account's blocks, or one session's, in the folders that no worker uses; without an account, all of them.

    The number of blocks. OSError: something may be left.
    """
    n_blocks = 0
    for folder in unused_folders(disk_path):
        known = folder.read_format()
        if known is None or known.version != VERSION or salt is None:
            n_blocks += sum(len(file.index) for file in _files(folder, known))
            folder.keep_only(())
            continue
        owner = block_hash.root(known.fingerprint, salt)
        for file in _files(folder, known):
            n_blocks += file.purge(owner, session)
            file.close()
    return n_blocks


def _files(folder: TierFolder, known: FolderFormat | None) -> list[BlockFile]:
    if known is None or known.version != VERSION:
        return []
    trusted = known.is_trusted(boot_id())
    nobody = BlockTagger(bytes(32))  # nothing is read
    return [
        BlockFile(folder.path, bytes.fromhex(tag), n_bytes, known.n_slots, nobody, None, trusted)
        for tag, n_bytes in known.layouts.items()
        if block_path(folder.path, bytes.fromhex(tag)).exists()
    ]


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: what an unclean end left is trusted less


def _name_of(key: bytes | None) -> str:
    return blake2b(key, person=b"emberline.kvkey", digest_size=8).hexdigest() if key else ""
