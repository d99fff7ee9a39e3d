"""Checks that a model's files are still those that were pulled, by their sha256, computed once per change of a file.

A file that has kept its size, time of change and inode is taken for unchanged: to hash gigabytes at every start would
take longer than to load them.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from emberline.catalog.model_card import ModelCard
from emberline.catalog.model_store import ModelStore
from emberline.protocol.errors import BadInput

RECORD = ".verified.json"  # in the model's folder
_log = logging.getLogger(__name__)


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when its content had this hash."""

    n_bytes: int
    changed_ns: int
    inode: int
    sha256: str


def verify(store: ModelStore, card: ModelCard) -> None:
    """Raise BadInput if a file has other content than what was pulled. Of the operator's own files nothing is known."""
    folder = store.folder(card.id)
    known = _read(folder / RECORD)
    try:
        now = _states(folder, store.pulled_files(card))
        for name, state in now.items():
            if known.get(name) == state:
                continue
            _log.info("verifying %s", folder / name, extra={"mib": state.n_bytes >> 20})
            if _sha256(folder / name) != state.sha256:
                problem = "is damaged: its sha256 is not that of the file that was pulled"
                raise BadInput(f"{folder / name} {problem}; {_advice(card)}")
    except OSError as error:
        raise BadInput(f"{error.filename} cannot be read: {error.strerror}; {_advice(card)}") from None
    if now != known:
        _write(folder / RECORD, now)


def record_pulled(store: ModelStore, card: ModelCard) -> None:
    """The files were hashed as they arrived: the next start need not do it again."""
    folder = store.folder(card.id)
    _write(folder / RECORD, _states(folder, store.pulled_files(card)))


def _states(folder: Path, files: Mapping[str, str]) -> dict[str, FileState]:
    """The files as they are now, with the hashes that they should have."""
    found = {name: ((folder / name).stat(), sha256) for name, sha256 in files.items()}
    return {name: FileState(s.st_size, s.st_mtime_ns, s.st_ino, sha256) for name, (s, sha256) in found.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(record: Path) -> dict[str, FileState]:
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, FileState])
    except (OSError, msgspec.DecodeError):
        return {}


def _write(record: Path, verified: Mapping[str, FileState]) -> None:
    """A folder that cannot be written has no record: its files are hashed at every start."""
    with contextlib.suppress(OSError):
        part = record.with_name(f"{RECORD}.{os.getpid()}")
        part.write_bytes(msgspec.json.encode(verified))
        part.replace(record)


def _advice(card: ModelCard) -> str:
    name = card.aliases[0] if card.aliases else card.id
    return f"fetch it again: emberline rm {card.id} && emberline pull {name}"
