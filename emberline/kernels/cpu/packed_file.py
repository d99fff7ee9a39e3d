"""A file that keeps a model's packed matrices beside the model: they are packed once, and mapped at every later start.

The file begins with a JSON header of fixed length: its key, and the place of every matrix. The key covers the model, as
its fingerprint and its files' sizes and times name it, and the library, since processors differ in how they want codes
packed. A file of another key is as good as none.
"""

import fcntl
import glob
import json
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_BYTES = 32 << 20  # smaller models are packed in a moment
ALIGNMENT = 4096  # of each matrix in the file
FREE_SHARE = 0.5  # of the drive's free bytes that a file may take
_SUFFIX = ".packed"
_MAGIC = b"emberline packed 1\n"
_LENGTH_BYTES = 8

_log = logging.getLogger(__name__)
Bytes = NDArray[np.uint8]


class PackedArray(NamedTuple):
    """The panels of a matrix, and the bits of their codes."""

    panels: Bytes
    bits: int


class PackedFile:
    """The packed matrices of one model, by name: those of an earlier start, or of this one until `save`."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._stored = _read(path, key)
        self._new: dict[str, PackedArray] = {}

    @classmethod
    def beside(cls, model: Path, fingerprint: str, library: Path) -> "PackedFile":
        """The file of a model and a library of kernels: in the model's folder, or next to its only file."""
        named = fingerprint + _files(model)  # the fingerprint alone covers samples: a few edited rows do not change it
        digest = blake2b(named.encode() + library.read_bytes(), digest_size=16).hexdigest()
        folder, name = (model, "model") if model.is_dir() else (model.parent, model.name)
        return cls(folder / f".{name}.{digest[:8]}{_SUFFIX}", digest)

    def find(self, name: str) -> PackedArray | None:
        """The matrix in the file. Returns None if it is not there."""
        return self._stored.get(name)

    def add(self, name: str, packed: PackedArray) -> None:
        """Remember a matrix to be saved."""
        self._new[name] = packed

    def save(self) -> threading.Thread | None:
        """Write the matrices of this start on a thread, if they were packed and there is room for them. A process that
        ends finishes the file first, so that a model that is soon unloaded again is not packed at every load."""
        added, self._new = self._new, {}
        if sum(each.panels.nbytes for each in added.values()) < MIN_BYTES or self._stored:
            return None
        thread = threading.Thread(target=self._write, args=(added,), name="packed-file")
        thread.start()
        return thread

    def _write(self, added: dict[str, PackedArray]) -> None:
        places, size = _places(added)
        try:
            if size > FREE_SHARE * shutil.disk_usage(self._path.parent).free:
                _log.info("the packed weights are not kept: the drive has too little room", extra={"bytes": size})
                return
            self._remove_others()
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=self._path.name, delete=False) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)  # until this process ends: `_remove_others` leaves it alone
                    file.write(_header(self._key, places))
                    for name, packed in added.items():
                        file.seek(places[name]["offset"])
                        file.write(packed.panels.data)
                    file.truncate(size)
                    file.flush()
                    os.fsync(file.fileno())  # a power cut must not leave a file whose name is there and numbers are not
                    os.replace(file.name, self._path)  # atomic: another process never maps a partial file
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            _log.info("the packed weights are not kept beside the model: %s", error)

    def _remove_others(self) -> None:
        """Remove this model's files for other kernels or of an earlier version, and what killed processes left."""
        stem = glob.escape(self._path.name.removesuffix(_SUFFIX).rpartition(".")[0])
        for other in self._path.parent.glob(f"{stem}.*{_SUFFIX}*"):
            with suppress(OSError), other.open("rb") as file:
                if other.suffix != _SUFFIX:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is being written
                other.unlink()


def _files(model: Path) -> str:
    """Names, sizes and times of the files that hold a model's weights."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    stats = [(each.name, each.stat()) for each in files if each.exists()]
    return "".join(f"\n{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def _places(arrays: dict[str, PackedArray]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the position of each matrix in the file, and the size of the file."""
    places: dict[str, dict[str, Any]] = {}
    offset = ALIGNMENT * (1 + sum(200 + len(name) for name in arrays) // ALIGNMENT)  # after the header
    for name, (panels, bits) in arrays.items():
        places[name] = {"offset": offset, "bytes": panels.nbytes, "bits": bits}
        offset += -(-panels.nbytes // ALIGNMENT) * ALIGNMENT
    return places, offset


def _header(key: str, places: dict[str, dict[str, Any]]) -> bytes:
    text = json.dumps({"key": key, "matrices": places}).encode()
    return _MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read(path: Path, key: str) -> dict[str, PackedArray]:
    """Map a file. Returns nothing if it is not there, is of another key, or is damaged."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC) + _LENGTH_BYTES)
            length = int.from_bytes(begin[len(_MAGIC) :], "little")
            size = os.fstat(file.fileno()).st_size
            if not begin.startswith(_MAGIC) or length > size:
                return {}
            header = json.loads(file.read(length))
            if header["key"] != key:
                return {}
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_WILLNEED)
        return dict(_arrays(np.frombuffer(mapped, np.uint8), header["matrices"]))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _arrays(file: Bytes, places: dict[str, dict[str, Any]]) -> Iterator[tuple[str, PackedArray]]:
    for name, place in places.items():
        offset, n_bytes, bits = place["offset"], place["bytes"], place["bits"]
        if offset % ALIGNMENT or not 0 <= offset <= offset + n_bytes <= len(file):
            raise ValueError(f"the place of {name} is not in the file")
        yield name, PackedArray(file[offset : offset + n_bytes], bits)
