"""The models of this machine: one folder each under `$EMBERLINE_HOME/models`, the card beside the weights.

A folder bears its final name only when it is whole: it is filled under a name that begins with a dot, synced, and then
renamed. What a broken-off pull leaves behind is therefore never taken for a model.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.catalog.model_card import ModelCard, built_in, describe_path
from emberline.protocol.errors import ModelNotFound

CARD = "card.json"


class ModelEntry(NamedTuple):
    card: ModelCard
    path: Path  # the GGUF file or the Hugging Face folder


class _Placed(msgspec.Struct, frozen=True):
    """What card.json holds: the card, and the weights' place, absolute or relative to the model's folder."""

    card: ModelCard
    path: str


class ModelStore:
    def __init__(self, home: Path) -> None:
        self.root = home / "models"

    def entries(self) -> list[ModelEntry]:
        """What is pulled and still there, by id."""
        return [entry for entry in self._all() if entry.path.exists()]

    def _all(self) -> list[ModelEntry]:
        found = [_read(path.parent) for path in self.root.glob(f"[!.]*/{CARD}")]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.card.id)

    def find(self, name: str) -> ModelEntry | None:
        """The pulled model of that id or alias, in any case of letters; `hf:org/repo` is an alias."""
        return _named(name, self.entries())

    def resolve(self, name: str) -> ModelEntry:
        """The model of that id, alias or path, ready to load. Takes the user's own words, never a client's."""
        entry = self.find(name)
        if entry is not None:
            return entry
        if looks_like_path(name):
            path = Path(name).expanduser().absolute()
            return ModelEntry(describe_path(path), path)
        if built_in(name) is not None or name.startswith("hf:"):
            raise ModelNotFound(f"model {name!r} is not on this machine yet; run `emberline pull {name}`")
        raise ModelNotFound(f"there is no model {name!r} here; `emberline ls` shows what there is")

    def remove(self, name: str) -> ModelCard:
        """Forgets a pulled model and deletes what was downloaded for it; a linked file stays where it is."""
        entry = _named(name, self._all())
        if entry is None:
            raise ModelNotFound(f"model {name!r} is not pulled; `emberline ls` shows what is")
        with self.lock():
            # Renamed first, so that no reader finds half a model while it goes.
            doomed = self.staging(entry.card.id)
            shutil.rmtree(doomed, ignore_errors=True)
            self.folder(entry.card.id).rename(doomed)
            shutil.rmtree(doomed)
        return entry.card

    def folder(self, model_id: str) -> Path:
        return self.root / _slug(model_id)

    def staging(self, model_id: str) -> Path:
        """Where a pull of that model is prepared; the same each time, so that what has arrived is found again."""
        return self.root / f".{_slug(model_id)}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while the shelf changes, by one process of all that share it; the others wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def place(self, card: ModelCard, path: str) -> ModelEntry:
        """Makes the staging folder of that card the model's folder. Call with the lock held."""
        staging, folder = self.staging(card.id), self.folder(card.id)
        staging.mkdir(parents=True, exist_ok=True)
        (staging / CARD).write_bytes(msgspec.json.encode(_Placed(card, path)))
        _sync(staging)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
        _sync_one(self.root)
        return ModelEntry(card, folder / path)


def looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or Path(name).exists()


def _slug(model_id: str) -> str:
    slug = model_id.removeprefix("@").replace("/", "--")
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", slug), model_id
    return slug


def _read(folder: Path) -> ModelEntry | None:
    try:
        placed = msgspec.json.decode((folder / CARD).read_bytes(), type=_Placed)
    except (OSError, msgspec.MsgspecError):
        return None  # removed meanwhile, or written by another version: pull again
    return ModelEntry(placed.card, folder / placed.path)


def _named(name: str, entries: list[ModelEntry]) -> ModelEntry | None:
    card = built_in(name)  # whose names no other model can take
    wanted = card.id if card else name.lower()
    by_id = next((entry for entry in entries if entry.card.id == wanted), None)
    return by_id or next((entry for entry in entries if wanted in entry.card.aliases), None)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
