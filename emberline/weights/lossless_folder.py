"""Compressing a checkpoint's folder without loss, and restoring it.

The compressed folder is made under a name of its own that begins with a dot, and gets its name when every file of it
has been verified. The source is only read. What was made is kept when it cannot be finished: the next run continues.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.hf_checkpoint import shard_names
from emberline.weights.lossless_blocks import WIDTHS
from emberline.weights.lossless_files import (
    MANIFEST,
    VERSION,
    FileEntry,
    Manifest,
    config_digest,
    is_compressed,
    open_compressed,
    read_manifest,
)
from emberline.weights.lossless_writer import Estimate, LosslessWriter, estimate_tensor, source_bytes
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import SafetensorsFile
from emberline.weights.task_config import read_json

LEAST_GAIN = 0.05  # share of a checkpoint's bytes that compressing must save
_SPARE_BYTES = 256 << 20  # left on the drive
_SOURCE, _LOCK = ".source", ".lock"  # in a folder that is being made
# Other copies of the weights that repositories hold: they are not part of the model that is compressed.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")


class Progress(NamedTuple):
    done: int  # bytes of the source
    total: int
    written: int


Report = Callable[[Progress], None]


class KindEstimate(NamedTuple):
    """All tensors of one dtype."""

    dtype: str
    source: int  # bytes
    stored: int


def _identify(source: Path) -> tuple[str, str]:
    """Fingerprint and digest of the configuration. Both are empty for a draft head, which is no model by itself."""
    architectures = read_json(source, "config.json").get("architectures")
    if isinstance(architectures, list) and any("Eagle3" in str(name) for name in architectures):
        return "", ""
    checkpoint = open_checkpoint(source)
    checkpoint.close()
    return checkpoint.fingerprint, config_digest(checkpoint.config)


def _check_source(source: Path) -> None:
    if source.is_file():
        raise BadCheckpoint(f"{source.name} is GGUF, whose weights have no exponents of their own: nothing is gained")
    if is_compressed(source):
        raise BadCheckpoint(f"{source.name} is compressed already")


def estimate_folder(folder: Path) -> list[KindEstimate]:
    """Bytes by dtype, the largest first, and those that are left when compressed, from a sample of every tensor."""
    _check_source(folder)
    found: dict[str, Estimate] = {}
    for name in shard_names(folder):
        file = SafetensorsFile.open(folder / name)
        for key, tensor in file.tensors.items():
            before = found.get(tensor.dtype, Estimate(0, 0))
            each = estimate_tensor(file, key)
            found[tensor.dtype] = Estimate(before.source + each.source, before.stored + each.stored)
        file.close()
    kinds = [KindEstimate(dtype, *each) for dtype, each in found.items()]
    return sorted(kinds, key=lambda kind: -kind.source)


def compress_folder(source: Path, target: Path, report: Report = lambda _: None) -> Manifest:
    """Write the checkpoint `source` to the new folder `target`, compressed. Raises BadCheckpoint, and OSError where
    there is no room: what was written until then stays, and the next call continues."""
    _check_source(source)
    if target.exists():
        raise BadCheckpoint(f"{target} exists already: remove it, or name another folder with --output")
    fingerprint, config = _identify(source)
    kinds = estimate_folder(source)
    check_gain(source, kinds)
    staging = staging_folder(target)
    with _locked(staging):
        expected = sum(kind.stored for kind in kinds)
        _check_room(staging, expected - _bytes_below(staging))
        manifest = _compress_files(source, staging, Manifest(VERSION, fingerprint, config, ()), report)
        _copy_others(source, staging)
        _publish(staging, target)
    return manifest


def staging_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.compressing")


def check_gain(source: Path, kinds: list[KindEstimate]) -> None:
    """Raise BadCheckpoint, naming the formats, where compressing saves next to nothing."""
    total, stored = sum(kind.source for kind in kinds), sum(kind.stored for kind in kinds)
    if total - stored >= LEAST_GAIN * total:
        return
    most = [kind for kind in kinds if kind.source > total / 20]
    named = ", ".join(f"{kind.source / total:.0%} of its bytes are {_known_as(kind.dtype)}" for kind in most)
    raise BadCheckpoint(
        f"{source.name} would become {max(0.0, 1 - stored / total):.1%} smaller: {named}. Compression needs weights"
        " with an exponent of their own, such as BF16; this checkpoint stays as it is"
    )


def _known_as(dtype: str) -> str:
    packed = {"I32": "packed codes (INT4)", "U8": "packed codes (INT4, MXFP4) or scales", "I64": "integers"}
    return packed.get(dtype, dtype if dtype not in WIDTHS else f"{dtype} without a pattern in its exponents")


def _compress_files(source: Path, staging: Path, manifest: Manifest, report: Report) -> Manifest:
    """Compress file by file. The manifest in the folder names those that are finished."""
    files = [SafetensorsFile.open(source / name) for name in shard_names(source)]
    total = sum(file.path.stat().st_size for file in files)
    finished = _finished(staging, source)
    done = written = 0

    def progress(n_source: int, n_written: int) -> None:
        nonlocal done, written
        done, written = done + n_source, written + n_written
        report(Progress(done, total, written))

    threads = ThreadPoolExecutor((os.cpu_count() or 1) + 1, "compress")
    try:
        for file in files:
            entry = finished.get(file.path.name)
            if entry is None:
                entry = LosslessWriter(file, staging, threads).write(progress)
            else:
                progress(entry.source.size, entry.size)
            manifest = msgspec.structs.replace(manifest, files=(*manifest.files, entry))
            _write_manifest(staging, manifest)
            file.close()
    finally:
        threads.shutdown(cancel_futures=True)
    return manifest


def _finished(staging: Path, source: Path) -> dict[str, FileEntry]:
    """Files that an earlier run finished, by the name of their source. Nothing is kept if the source has changed."""
    content, known = _identity(source), staging / _SOURCE
    if not known.is_file() or known.read_text() != content:
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
        known.write_text(content)
    try:
        files = read_manifest(staging).files
    except (FileNotFoundError, BadCheckpoint):
        return {}
    complete = [(staging / each.name, each) for each in files]
    return {each.source.name: each for path, each in complete if path.is_file() and path.stat().st_size == each.size}


def _identity(source: Path) -> str:
    """The files of the source, as far as a change would show."""
    stats = {name: (source / name).stat() for name in shard_names(source)}
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items())


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    new = folder / f".{MANIFEST}"
    with new.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        file.flush()
        os.fsync(file.fileno())
    new.rename(folder / MANIFEST)


def _check_room(staging: Path, needed: int) -> None:
    free = shutil.disk_usage(staging).free
    if needed + _SPARE_BYTES > free:
        raise BadCheckpoint(
            f"{staging.parent} has room for {free / 1e9:.1f} GB, and the compressed model needs"
            f" {(needed + _SPARE_BYTES) / 1e9:.1f} GB: free some, or give another drive with --output"
        )


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


def _copy_others(source: Path, staging: Path) -> None:
    """Copy the configuration, tokenizer and so on, also of folders within, such as the pooling of an embedder."""
    for path in sorted(source.rglob("*")):
        below = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in below.parts)
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and not is_hidden:
            (staging / below).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, staging / below)


def _publish(staging: Path, target: Path) -> None:
    for name in (_SOURCE, _LOCK):
        (staging / name).unlink(missing_ok=True)
    for path in (*staging.rglob("*"), staging):
        _sync(path)
    staging.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Hold a folder that is being made; only one process compresses into it."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadCheckpoint(f"another process is compressing into {staging}: wait for it") from None
        yield


def check_unchanged(source: Path, compressed: Path) -> None:
    """Raise BadCheckpoint unless `compressed`, which an earlier run has made, was made of what `source` holds now."""
    advice = f"{compressed} was left by an earlier run: remove it"
    if is_compressed(source):
        raise BadCheckpoint(f"{source.name} is compressed already. {advice}")
    if not is_compressed(compressed):
        raise BadCheckpoint(f"{advice}, and run the command again")
    manifest = read_manifest(compressed)
    made_of = {each.source.name: each.source.sha256 for each in manifest.files}
    is_same = (manifest.fingerprint, manifest.config) == _identify(source) and list(made_of) == shard_names(source)
    for name, sha256 in made_of.items() if is_same else ():
        with (source / name).open("rb") as file:
            is_same = is_same and hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if not is_same:
        raise BadCheckpoint(f"{source.name} has changed since it was compressed. {advice}, and run the command again")


def replace_folder(source: Path, compressed: Path) -> None:
    """Put a compressed, verified folder in its source's place, and remove the source's files."""
    if not _exchange(source, compressed):
        former = source.with_name(f".{source.name}.uncompressed")
        source.rename(former)
        compressed.rename(source)
        compressed = former
    _sync(source.parent)
    shutil.rmtree(compressed)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step. Returns False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return not rename(at_working_folder, bytes(one), at_working_folder, bytes(other), exchange)


def verify_folder(folder: Path, report: Report = lambda _: None) -> None:
    """Decode everything and compare it with the SHA-256 of the source's files. Raises BadCheckpoint."""
    _stream(folder, None, report)


def restore_folder(folder: Path, target: Path, report: Report = lambda _: None) -> None:
    """Write the source's files, as they were to the byte, to the new folder `target`."""
    if not is_compressed(folder):
        raise BadCheckpoint(f"{folder.name} is not compressed: it has no {MANIFEST}")
    if target.exists():
        raise BadCheckpoint(f"{target} exists already: remove it, or name another folder with --output")
    staging = target.with_name(f".{target.name}.restoring")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _check_room(staging, sum(entry.source.size for entry in read_manifest(folder).files))
    try:
        _stream(folder, staging, report)
        _copy_others(folder, staging)
        (staging / MANIFEST).unlink()
        _publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _stream(folder: Path, target: Path | None, report: Report) -> None:
    files, manifest = open_compressed(folder)
    total, done = sum(entry.source.size for entry in manifest.files), 0
    for file, entry in zip(files, manifest.files, strict=True):
        digest = hashlib.sha256()
        with (Path(os.devnull) if target is None else target / entry.source.name).open("wb") as out:
            for chunk in source_bytes(file):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                report(Progress(done, total, done))
        if digest.hexdigest() != entry.source.sha256:
            raise BadCheckpoint(
                f"{entry.name} does not hold the weights of {entry.source.name} that were compressed (SHA-256"
                f" {entry.source.sha256[:12]}…): it is damaged; copy it again"
            )
        with suppress(BufferError):
            file.close()
