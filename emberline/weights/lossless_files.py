"""Losslessly compressed checkpoints on disk: the manifest of a folder, and the files that it names.

A folder has `lossless.json` and, for each safetensors file of its source, a safetensors file in which every tensor that
gains by it is stored as planes. Each file says in its metadata how: it can be restored to the source's bytes alone.

    NAME.coded   U8            exponents of all blocks, one zstd frame after the other
    NAME.rest    U8            signs and mantissas of all blocks
    NAME.blocks  U64 [n, 3]    where each block's exponents end, and the checksum of its numbers
    NAME         as it was     tensors that gain nothing, such as norms, scales and INT4 codes
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from emberline.weights.lossless_blocks import WIDTHS, Grid
from emberline.weights.lossless_tensor import LosslessRows, LosslessTensor
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.safetensors_file import SafeTensor, SafetensorsFile
from emberline.weights.tensors import Bytes, FileLocation

VERSION = 1
MANIFEST = "lossless.json"
SUFFIX = ".lossless.safetensors"
METADATA_KEY = "emberline.lossless"
HEADER_TENSOR = "emberline.source_header"  # of the source's file, byte for byte
CODED, REST, BLOCKS = ".coded", ".rest", ".blocks"
SMALL_BYTES = 1 << 16  # a tensor that is stored as it was and has no more is checked whenever its file is opened


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the source."""

    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None = None  # rows and columns of a block; None: stored as it was
    digest: str = ""  # of a tensor that is stored as it was


class FileFormat(msgspec.Struct, frozen=True):
    """The metadata of a file."""

    version: int
    tensors: dict[str, TensorEntry]


class SourceFile(msgspec.Struct, frozen=True):
    name: str
    size: int
    sha256: str


class FileEntry(msgspec.Struct, frozen=True):
    """One file of the manifest. The digest covers its format and its tables of blocks, not its planes, which the
    tables cover."""

    name: str
    size: int
    digest: str
    source: SourceFile


class Manifest(msgspec.Struct, frozen=True):
    version: int
    fingerprint: str  # of the source's checkpoint, with a configuration of this digest
    config: str
    files: tuple[FileEntry, ...]


class _Version(msgspec.Struct, frozen=True):
    version: int


def is_compressed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    content = (folder / MANIFEST).read_bytes()
    try:
        _check_version(MANIFEST, msgspec.json.decode(content, type=_Version).version)
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{MANIFEST} of {folder.name} is damaged: {error}") from None
    for file in manifest.files:
        for name in (file.name, file.source.name):
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise BadCheckpoint(f"{MANIFEST} names {name[:80]!r}, not a safetensors file of this folder")
    return manifest


def _check_version(what: str, version: int) -> None:
    if version != VERSION:
        raise BadCheckpoint(
            f"{what} has version {version} of the compressed format, and this Emberline reads version {VERSION}:"
            " upgrade Emberline, or compress the model again with this one"
        )


def config_digest(config: ModelConfig) -> str:
    return hashlib.blake2b(msgspec.json.encode(config), digest_size=16).hexdigest()


class LosslessFile:
    """A mapped file of a compressed checkpoint, read as if it were its source."""

    def __init__(self, file: SafetensorsFile) -> None:
        self.path = file.path
        self.stored = file  # as it is on disk
        text = file.metadata.get(METADATA_KEY, "")
        try:
            _check_version(file.path.name, msgspec.json.decode(text, type=_Version).version)
            self.format = msgspec.json.decode(text, type=FileFormat)
        except msgspec.MsgspecError as error:
            raise BadCheckpoint(f"{file.path.name} is not a compressed file of this format: {error}") from None
        for key, tensor in file.tensors.items():  # so that the drive reads them at once, and not one after the other
            n_bytes = tensor.data_offsets[1] - tensor.data_offsets[0]
            if key.endswith(BLOCKS) or n_bytes <= SMALL_BYTES:
                file.will_need(tensor, 0, n_bytes)
        self.coded = {name: self._coded(name, entry) for name, entry in self.format.tensors.items() if entry.block}
        self.tensors = {name: SafeTensor(each.dtype, each.shape, (0, 0)) for name, each in self.format.tensors.items()}
        for name, entry in self.format.tensors.items():
            self._check(name, entry)

    @classmethod
    def open(cls, path: Path) -> "LosslessFile":
        return cls(SafetensorsFile.open(path))

    @classmethod
    def of_manifest(cls, folder: Path, entry: FileEntry) -> "LosslessFile":
        """Open a file, which must be the one that the manifest means."""
        path = folder / entry.name
        if path.is_file() and path.stat().st_size != entry.size:
            raise BadCheckpoint(
                f"{entry.name} has {path.stat().st_size:,} bytes instead of {entry.size:,}: it is truncated, or"
                " another file; copy it again"
            )
        file = cls.open(path)
        if file.digest != entry.digest:
            file.close()
            raise BadCheckpoint(
                f"{entry.name} is not the file that {MANIFEST} describes: it is damaged, or of another model;"
                " copy it again"
            )
        return file

    @property
    def digest(self) -> str:
        """Digest of the format, the source's header and the tables of blocks."""
        digest = hashlib.blake2b(self.stored.metadata[METADATA_KEY].encode(), digest_size=16)
        digest.update(self.source_header)
        for name in sorted(self.coded):
            digest.update(name.encode())
            digest.update(self.coded[name].blocks.tobytes())
        return digest.hexdigest()

    @property
    def source_header(self) -> bytes:
        return self._plane(HEADER_TENSOR).tobytes()

    def _plane(self, name: str) -> Bytes:
        tensor = self.stored.tensors.get(name)
        if tensor is None:
            raise BadCheckpoint(f"{self.path.name} lacks {name!r}: it is damaged; copy it again")
        return self.stored.bytes_of(tensor)

    def _coded(self, name: str, entry: TensorEntry) -> LosslessTensor:
        if entry.dtype not in WIDTHS or not entry.shape or entry.block is None or min(*entry.shape, *entry.block) < 1:
            raise BadCheckpoint(f"{self.path.name}: tensor {name!r} is {entry.dtype} {entry.shape}, which is not coded")
        coded, rest, table = (self._plane(name + suffix) for suffix in (CODED, REST, BLOCKS))
        whole = Grid.of(entry.shape)
        grid = Grid(whole.rows, whole.columns, *entry.block)
        if table.size % 24:
            raise BadCheckpoint(f"{self.path.name}: tensor {name!r} is damaged: its table of blocks is cut")
        blocks = np.frombuffer(table.tobytes(), "<u8").reshape(-1, 3)
        planes = (self.stored.tensors[name + CODED], self.stored.tensors[name + REST])
        width = WIDTHS[entry.dtype]

        def will_need(first: int, last: int) -> None:
            begin = int(blocks[first - 1, 0]) if first else 0
            self.stored.will_need(planes[0], begin, int(blocks[last, 0]))
            end = grid.preceding(last) + grid.size(last)
            self.stored.will_need(planes[1], grid.preceding(first) * (width - 1), end * (width - 1))

        coded_at, rest_at = (self.stored.offset_of(plane) for plane in planes)
        found = LosslessTensor(
            name, self.path, entry.dtype, grid, coded, rest, coded_at, rest_at, blocks, will_need
        )  # fmt: skip
        found.check()
        return found

    def _check(self, name: str, entry: TensorEntry) -> None:
        """Check a tensor that is stored as it was, if it is small."""
        if entry.block is not None:
            return
        stored = self.stored.tensors.get(name)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            raise BadCheckpoint(f"{self.path.name} lacks tensor {name!r}: it is damaged; copy it again")
        raw = self.stored.bytes_of(stored)
        if raw.nbytes <= SMALL_BYTES and bytes_digest(raw) != entry.digest:
            raise BadCheckpoint(f"{self.path.name}: tensor {name!r} is damaged; copy the file again")

    def rows_of(self, key: str) -> tuple["Bytes | LosslessRows", FileLocation | None]:
        """The rows of a tensor, and where they are on disk. Rows of a compressed tensor have no location."""
        if key in self.coded:
            return LosslessRows.of(self.coded[key], self.format.tensors[key].shape), None
        return self.stored.rows_of(key)

    def close(self) -> None:
        self.coded = {}
        self.stored.close()


def bytes_digest(raw: Bytes) -> str:
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


class OpenedFiles(NamedTuple):
    files: list[LosslessFile]
    manifest: Manifest


def open_compressed(folder: Path) -> OpenedFiles:
    """Open all files of a compressed folder, each checked against the manifest."""
    manifest = read_manifest(folder)
    missing = [file.name for file in manifest.files if not (folder / file.name).is_file()]
    if missing:
        raise BadCheckpoint(
            f"{len(missing)} of the {len(manifest.files)} files that {MANIFEST} names are not in {folder.name}:"
            f" {', '.join(missing[:3])}; copy them again"
        )
    return OpenedFiles([LosslessFile.of_manifest(folder, entry) for entry in manifest.files], manifest)
