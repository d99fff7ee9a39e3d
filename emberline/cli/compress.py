"""`emberline compress`: a model's files without a bit of loss in two thirds of the bytes, and back.

emberline compress MODEL [--output FOLDER | --replace]
emberline compress MODEL --estimate | --verify
emberline compress MODEL --restore --output FOLDER
"""

import argparse
import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emberline.catalog.model_store import ModelStore, looks_like_path
from emberline.cli import common
from emberline.cli.terminal import byte_progress
from emberline.protocol.errors import BadInput
from emberline.weights import lossless_folder
from emberline.weights.lossless_files import is_compressed, read_manifest
from emberline.weights.model_config import BadCheckpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model that is pulled, or a folder with config.json and safetensors")
    add("--output", type=Path, metavar="FOLDER", help="the new folder (default for a folder: beside it, NAME-lossless)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--replace", action="store_true", help="put the verified result in the model's place")
    action.add_argument("--restore", action="store_true", help="write the files as they were before, to --output")
    action.add_argument("--verify", action="store_true", help="decode all of a compressed model and check its SHA-256")
    action.add_argument("--estimate", action="store_true", help="tell what compressing would save, and write nothing")
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    store = ModelStore(common.config_of(args).home)
    source = store.resolve(args.model).path
    if args.output is not None and (args.replace or args.verify or args.estimate):
        raise BadInput("--output is for a new folder; leave it out with --replace, --verify and --estimate")
    try:
        with _explained():
            shown = _run(args, store, source)
    except BadCheckpoint as error:
        raise BadInput(f"{args.model}: {error}", param="model") from None
    if args.json:
        common.print_json(shown)
    return 0


def _run(args: argparse.Namespace, store: ModelStore, source: Path) -> dict[str, Any]:
    if args.estimate:
        return _estimate(args, source)
    if args.verify or args.restore:
        return _read_back(args, source)
    target = args.output or source.with_name(f"{source.name}-lossless")
    if args.output is None and not args.replace and not looks_like_path(args.model):
        raise BadInput(f"{args.model} is in the model store: give --replace, or --output FOLDER", param="output")
    if args.replace:
        source = source.resolve()  # the folder itself, not a link to it
        target = source.with_name(f".{source.name}.compressed")
        if target.exists():  # finished by a run that was stopped before it could replace
            lossless_folder.check_unchanged(source, target)
            lossless_folder.verify_folder(target)
    if not (args.replace and target.exists()):
        with _progress("compressing", source) as report:
            lossless_folder.compress_folder(source, target, report)
    manifest = read_manifest(target)
    n_source, n_stored = (sum(sizes) for sizes in zip(*((f.source.size, f.size) for f in manifest.files), strict=True))
    if args.replace:
        store.forget_missing(target)  # a card in the folder is exchanged with it
        lossless_folder.replace_folder(source, target)
        if (entry := store.find(args.model)) is not None:
            store.forget_missing(store.folder(entry.card.id))
        target = source
    shown = {"path": str(target), "source_bytes": n_source, "bytes": n_stored, "fingerprint": manifest.fingerprint}
    if not args.json:
        print(
            f"{common.format_size(n_source)} became {common.format_size(n_stored)}, {1 - n_stored / n_source:.1%}"
            f" smaller; every bit was verified.\n{target}"
        )
    return shown


def _read_back(args: argparse.Namespace, source: Path) -> dict[str, Any]:
    if not is_compressed(source):
        raise BadCheckpoint("it is not compressed")
    if args.verify:
        with _progress("verifying", source) as report:
            lossless_folder.verify_folder(source, report)
        path, said = source, "Every file decodes to the bytes that were compressed"
    else:
        if args.output is None:
            raise BadInput("--restore writes to a new folder: name it with --output", param="output")
        with _progress("restoring", source) as report:
            lossless_folder.restore_folder(source, args.output, report)
        path, said = args.output, f"Restored to {args.output}"
    files = {each.source.name: each.source.sha256 for each in read_manifest(source).files}
    if not args.json:
        print(said + ":")
        for name, sha256 in files.items():
            print(f"  {sha256}  {name}")
    return {"path": str(path), "sha256": files}


def _estimate(args: argparse.Namespace, source: Path) -> dict[str, Any]:
    kinds = lossless_folder.estimate_folder(source)
    n_source, n_stored = sum(kind.source for kind in kinds), sum(kind.stored for kind in kinds)
    if not args.json:
        rows = [("FORMAT", "NOW", "COMPRESSED", "SMALLER BY")]
        for name, now, then in [*kinds, ("all", n_source, n_stored)]:
            rows.append((name, common.format_size(now), common.format_size(then), f"{1 - then / max(1, now):.1%}"))
        common.print_table(rows)
        lossless_folder.check_gain(source, kinds)
    fields = {kind.dtype: {"bytes": kind.source, "compressed": kind.stored} for kind in kinds}
    return {"bytes": n_source, "compressed": n_stored, "formats": fields}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what a full drive means: nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(
            "the drive is full. The model is as it was, and what was written is kept: free some room and run the"
            " command again, which continues"
        ) from None


@contextlib.contextmanager
def _progress(doing: str, source: Path) -> Iterator[lossless_folder.Report]:
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if not sys.stderr.isatty():
        print(f"{doing} {source.name}", file=sys.stderr)
    with byte_progress(f"{doing} {source.name}", total) as moved:
        before = 0

        def report(progress: lossless_folder.Progress) -> None:
            nonlocal before
            moved(progress.done - before)
            before = progress.done

        yield report
