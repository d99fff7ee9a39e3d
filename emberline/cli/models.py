"""`emberline pull`, `ls` and `rm`: the models on this machine."""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from emberline.catalog.download import DownloadProgress, ReportProgress
from emberline.catalog.integrity import verify
from emberline.catalog.model_card import DEFAULT_MODEL, SPEECH_RECOGNITION
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.offers import capability_names, offers
from emberline.catalog.pull import pull
from emberline.catalog.store_watch import wait_until_offered
from emberline.cli import common
from emberline.predictor.versions import PredictorVersions
from emberline.server.model_memory import machine_memory
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.task_config import task_of
from emberline.weights.vision_config import read_tower_config
from emberline.weights.whisper_files import LIBRARY, MISSING_LIBRARY

if TYPE_CHECKING:
    from emberline.catalog.model_files import Tokenizer

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command = parser.get_default("command")
    if command == "pull":
        parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=f"default {DEFAULT_MODEL}")
    elif command == "ls":
        parser.add_argument("--all", action="store_true", help="also those that can be pulled, and what fits here")
    elif command == "rm":
        parser.add_argument("models", nargs="+", metavar="MODEL", help="id or alias, see `emberline ls`")
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    store = ModelStore(common.config_of(args).home)
    return {"pull": _pull, "ls": _list, "rm": _remove}[args.command](store, args)


def fetch(name: str, store: ModelStore, is_logged: bool = False, on_gpu: bool | None = None) -> ModelEntry:
    """Find a model, or download it, and verify its files. A download shows a progress bar on a terminal, else it is one
    line: of the log if `is_logged`. `on_gpu`: the device that the model is for; None: this machine's best."""
    entry = store.find(name)
    if entry is not None:
        verify(store, entry.card)
        return entry
    on_gpu = machine_memory().on_gpu if on_gpu is None else on_gpu
    with _progress_bar(name, is_logged) as report:
        return pull(name, store, report, on_gpu=on_gpu, note=log.info if is_logged else common.print_note)


def load_text(entry: ModelEntry) -> "Tokenizer":
    """The model's tokenizer, and its chat template if it generates; BadInput for a model that cannot be served."""
    from emberline.catalog.model_files import ModelFiles, read_text
    from emberline.server.http_worker import confined_templates

    return read_text(ModelFiles(entry.card, str(entry.path)), confined_templates())


def _pull(store: ModelStore, args: argparse.Namespace) -> int:
    entry = fetch(args.model, store)
    load_text(entry)  # report a model that cannot be served now rather than when it is
    wait_until_offered(store.root)
    problem = _missing_library(entry)
    if args.json:
        common.print_json(_as_dict(entry) | ({"problem": problem} if problem else {}))
    else:
        print(f"{entry.card.id} ({common.format_size(entry.card.weight_bytes)}) is on this machine:\n{entry.path}")
    if problem:
        common.print_note(f"{entry.card.id}: {problem}")
    return 0


def _missing_library(entry: ModelEntry) -> str:
    """Say what a model cannot do yet, and how to install the library that is missing. Returns "" if none is."""
    if entry.card.task == SPEECH_RECOGNITION:
        return f"it cannot run yet: {MISSING_LIBRARY}" if find_spec(LIBRARY) is None else ""
    if entry.card.predictor is not None or find_spec("torch") is not None:
        return ""
    from emberline.models.registry import IMAGES_NEED, missing_torch, why_torch

    checkpoint = open_checkpoint(entry.path)
    checkpoint.close()
    if why := why_torch(task_of(entry.path).task, checkpoint.config):
        return f"it cannot run yet: {missing_torch(why)}"
    return "" if read_tower_config(entry.path) is None else f"it takes no images yet: {missing_torch(IMAGES_NEED)}"


def _list(store: ModelStore, args: argparse.Namespace) -> int:
    if getattr(args, "all", False):
        return _list_all(store, args)
    entries = store.entries()
    if args.json:
        common.print_json([_as_dict(entry) for entry in entries])
    elif not entries:
        print("No models yet. `emberline pull` downloads the default one.")
    else:
        rows = [
            (
                card.id,
                card.aliases[0] if card.aliases else "",
                common.format_size(card.weight_bytes),
                f"{card.context_window:,}",
                card.architecture,
            )
            for card, _ in entries
        ]
        common.print_table([("MODEL", "ALIAS", "SIZE", "CONTEXT", "ARCHITECTURE"), *rows])
    return 0


def _list_all(store: ModelStore, args: argparse.Namespace) -> int:
    memory = machine_memory()
    found = offers(store, memory)
    if args.json:
        common.print_json([offer.body() for offer in found])
        return 0
    rows = [
        (
            offer.name,
            common.format_size(offer.card.weight_bytes),
            offer.card.quantization,
            f"{offer.card.context_window:,}",
            ", ".join(capability_names(offer.card)),
            offer.card.license,
            "here" if offer.is_here else "fits" if offer.fits else "",
        )
        for offer in found
    ]
    common.print_table([("MODEL", "SIZE", "FORMAT", "CONTEXT", "CAN", "LICENCE", "THIS MACHINE"), *rows])
    device = "the GPU" if memory.on_gpu else "the CPU"
    print(f"\n`fits`: in {common.format_size(memory.n_bytes)}, for {device}. `emberline pull MODEL` downloads one.")
    return 0


def _remove(store: ModelStore, args: argparse.Namespace) -> int:
    """A user's own file that was only linked stays where it is."""
    removed = []
    for name in args.models:
        card = store.remove(name)
        if card.predictor is not None:
            PredictorVersions(store.root.parent).remove(card.id)
        removed.append(card.id)
        if not args.json:
            print(f"removed {removed[-1]}")
    wait_until_offered(store.root)
    if args.json:
        common.print_json({"removed": removed})
    return 0


def _as_dict(entry: ModelEntry) -> dict[str, Any]:
    card = entry.card
    return {
        "id": card.id,
        "aliases": card.aliases,
        "path": str(entry.path),
        "bytes": card.weight_bytes,
        "context_window": card.context_window,
        "architecture": card.architecture,
        "fingerprint": card.fingerprint,
    }


@contextmanager
def _progress_bar(name: str, is_logged: bool) -> Iterator[ReportProgress | None]:
    """Show a progress bar on a terminal; otherwise write one line at the start."""
    if not sys.stderr.isatty():
        if is_logged:
            log.info("pulling a model", extra={"model": name})
        else:
            print(f"pulling {name}", file=sys.stderr)
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"pulling {name}", total=None)

        started = False

        def report(progress: DownloadProgress) -> None:
            nonlocal started
            if not started:  # what an interrupted pull left behind is no part of the rate
                started = True
                bar.reset(task, completed=progress.done_bytes, total=progress.total_bytes or None)
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes or None)

        yield report
