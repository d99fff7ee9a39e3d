"""The model store: one folder per model under `$EMBERLINE_HOME/models`, with the card next to the weights.

A folder is filled under a name that begins with a dot, synced, and then renamed, so an interrupted pull is never taken
for a model.
"""

import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.catalog.card_files import CardFiles
from emberline.catalog.model_card import ModelCard, WheelSource, built_in, describe_path, read_sampling
from emberline.catalog.published_shapes import LATEST, PublishedShape, all_shapes, find_offer
from emberline.protocol.errors import ModelNotFound

CARD = "card.json"


class ModelEntry(NamedTuple):
    card: ModelCard
    path: Path  # the GGUF file or the Hugging Face folder


class _StoredCard(msgspec.Struct, frozen=True):
    """The content of card.json: the card and the weights' path, absolute or relative to the model's folder."""

    card: ModelCard
    path: str
    sha256: dict[str, str] = {}  # of the files that were pulled, by their paths in the folder


class _Identity(msgspec.Struct, frozen=True):
    id: str
    fingerprint: str = ""


class _StoredName(msgspec.Struct, frozen=True):
    """The part of card.json that is read of a built-in model."""

    card: _Identity
    path: str


class ModelStore:
    def __init__(self, home: Path) -> None:
        self.root = home / "models"
        self.cards = CardFiles(home)
        self._home = home

    @cached_property
    def shapes(self) -> tuple[PublishedShape, ...]:
        """The table of models known by name, with the user's own entries."""
        return all_shapes(self._home)

    def offer(self, name: str, *, on_gpu: bool = False) -> ModelCard | None:
        """The card to pull for a name of the catalog; `on_gpu` chooses where the name leaves the format open."""
        name = name.removesuffix(LATEST)
        return self.cards.find(name) or find_offer(name, self.shapes, on_gpu=on_gpu)

    def entries(self) -> list[ModelEntry]:
        """The pulled models whose weights still exist, by id."""
        return [entry for entry in self._all() if entry.path.exists()]

    def _all(self) -> list[ModelEntry]:
        found = [_read(path.parent) for path in self.root.glob(f"[!.]*/{CARD}")]
        entries = [ModelEntry(self.cards.apply(entry.card), entry.path) for entry in found if entry is not None]
        return sorted(entries, key=lambda entry: entry.card.id)

    def find(self, name: str) -> ModelEntry | None:
        """The pulled model of that id or alias, case-insensitive; `hf:org/repo` is an alias."""
        return self._named(name, self.entries())

    def resolve(self, name: str) -> ModelEntry:
        """The model of that id, alias or path. Only for names the operator gave: a client must not name paths."""
        entry = self.find(name)
        if entry is not None:
            return entry
        if looks_like_path(name):
            path = Path(name).expanduser().absolute()
            return ModelEntry(describe_path(path), path)
        if name.startswith("hf:") or self.offer(name) is not None:
            raise ModelNotFound(f"model {name!r} is not on this machine yet; run `emberline pull {name}`")
        raise ModelNotFound(f"there is no model {name!r} here; `emberline ls` shows what there is")

    def remove(self, name: str) -> ModelCard:
        """Remove a pulled model and what was downloaded for it. A linked file stays, without its packed weights."""
        entry = self._named(name, self._all())
        if entry is None:
            raise ModelNotFound(f"model {name!r} is not pulled; `emberline ls` shows what is")
        _remove_packed(entry.path)
        with self.lock():
            # Renamed first, so that no reader finds a partial model.
            staging = self.staging(entry.card.id)
            shutil.rmtree(staging, ignore_errors=True)
            self.folder(entry.card.id).rename(staging)
            shutil.rmtree(staging)
        return entry.card

    def _named(self, name: str, entries: list[ModelEntry]) -> ModelEntry | None:
        name = name.lower().removesuffix(LATEST)
        card = self.cards.find(name)  # names in the catalog take precedence
        wanted = card.id if card else name
        by_id = next((entry for entry in entries if entry.card.id == wanted), None)
        return by_id or next((entry for entry in entries if wanted in entry.card.aliases), None)

    def folder(self, model_id: str) -> Path:
        return self.root / _slug(model_id)

    def pulled_files(self, card: ModelCard) -> dict[str, str]:
        """The files in a model's folder that were downloaded, with their sha256; none for a model that is linked."""
        if isinstance(card.source, WheelSource):
            return card.source.files
        stored = _read_card(self.folder(card.id))
        return {} if stored is None else stored.sha256

    def forget_missing(self, folder: Path) -> None:
        """Drop the hashes of files that are no longer in a model's folder, such as those that were compressed."""
        stored = _read_card(folder)
        if stored is None or all((folder / name).exists() for name in stored.sha256):
            return
        left = {name: sha256 for name, sha256 in stored.sha256.items() if (folder / name).exists()}
        new = folder / f".{CARD}"
        new.write_bytes(msgspec.json.encode(msgspec.structs.replace(stored, sha256=left)))
        _sync(new)
        new.rename(folder / CARD)

    def staging(self, model_id: str) -> Path:
        """Return the folder to which a pull of that model downloads. It is always the same, so that a pull can be
        resumed."""
        return self.root / f".{_slug(model_id)}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclusive among all processes that share the store; held while it changes."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def place(self, card: ModelCard, path: str, sha256: Mapping[str, str] | None = None) -> ModelEntry:
        """Make the card's staging folder the model's folder. Call with the lock held."""
        stored = _StoredCard(card, path, dict(sha256 or {}))
        staging, folder = self.staging(card.id), self.folder(card.id)
        staging.mkdir(parents=True, exist_ok=True)
        (staging / CARD).write_bytes(msgspec.json.encode(stored))
        for file in [*staging.rglob("*"), staging]:
            _sync(file)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
        _sync(self.root)
        return ModelEntry(card, folder / path)


def looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or Path(name).exists()


def _slug(model_id: str) -> str:
    slug = model_id.removeprefix("@").replace("/", "--")
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", slug), model_id
    return slug


def _read(folder: Path) -> ModelEntry | None:
    stored = _read_card(folder)
    if stored is None:
        return None
    path, card = folder / stored.path, stored.card
    if card.sampling is None and built_in(card.id) is None:  # stored by an earlier version
        card = msgspec.structs.replace(card, sampling=read_sampling(path))
    return ModelEntry(card, path)


def _read_card(folder: Path) -> _StoredCard | None:
    try:
        content = (folder / CARD).read_bytes()
        known = msgspec.json.decode(content, type=_StoredName)
        if (card := built_in(known.card.id)) is not None:  # today's card, whatever the version that has stored it
            return _StoredCard(msgspec.structs.replace(card, fingerprint=known.card.fingerprint), known.path)
        return msgspec.json.decode(content, type=_StoredCard)
    except (OSError, msgspec.MsgspecError):
        return None  # removed meanwhile, or written by another version: pull again


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_packed(path: Path) -> None:
    """Remove what `kernels.cpu.packed_file` keeps beside a model, where this user may."""
    folder, name = (path, "model") if path.is_dir() else (path.parent, path.name)
    for packed in folder.glob(f".{glob.escape(name)}.*.packed"):
        with suppress(OSError):
            packed.unlink()
