"""GGUF files: mapped, never trusted. Every count, length and offset is checked against the file before it is used."""

import math
import mmap
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import BadCheckpoint
from emberline.weights.quantization import FORMATS, Bytes

# The value of a metadata key. Arrays of strings are lists, arrays of numbers and booleans numpy arrays.
Value = str | int | float | bool | list[str] | NDArray[np.generic]

MAGIC = b"GGUF"
MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_KINDS = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    30: "bf16",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost first, as in numpy
    kind: str
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads the header front to back; a step past the end is a BadCheckpoint."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def take(self, n: int, what: str) -> int:
        """The position of the next n bytes, which are then behind the cursor."""
        if n > self.size - self.at:
            raise BadCheckpoint(f"{what} at byte {self.at} needs {n} bytes, the file has {self.size - self.at} left")
        at, self.at = self.at, self.at + n
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each: it cannot claim more than the file can hold."""
        n = self.u64(what)
        if n * least_bytes > self.size - self.at:
            raise BadCheckpoint(f"{what} is {n}, more than the rest of the file can hold")
        return n

    def string(self, what: str) -> str:
        n = self.u64(what)
        at = self.take(n, what)
        try:
            return self.data[at : at + n].decode()
        except UnicodeDecodeError:
            raise BadCheckpoint(f"{what} at byte {at} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.u32(f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0].item()  # type: ignore[no-any-return]

    def _array(self, key: str) -> list[str] | NDArray[np.generic]:
        kind = self.u32(f"the item type of {key!r}")
        if kind == _STRING:
            return self._strings(self.count(f"the length of {key!r}", 8), key)
        if kind == _ARRAY:
            raise BadCheckpoint(f"metadata {key!r} is an array of arrays, which no model uses")
        return self._numbers(kind, self.count(f"the length of {key!r}", 1), key)

    def _strings(self, n: int, key: str) -> list[str]:
        """`string` n times over, unrolled: vocabularies have hundreds of thousands."""
        data, size, end = self.data, self.size, self.at
        strings: list[str] = []
        for _ in range(n):
            start = end + 8
            end = start + _U64.unpack_from(data, end)[0] if start <= size else start
            if end > size:
                raise BadCheckpoint(f"item {len(strings)} of {key!r} reaches past the end of the file")
            try:
                strings.append(data[start:end].decode())
            except UnicodeDecodeError:
                raise BadCheckpoint(f"item {len(strings)} of {key!r} is not UTF-8") from None
        self.at = end
        return strings

    def _numbers(self, kind: int, n: int, key: str) -> NDArray[np.generic]:
        if kind not in _SCALARS:
            raise BadCheckpoint(f"metadata {key!r} has unknown type {kind}")
        dtype = np.dtype("u1" if kind == _BOOL else _SCALARS[kind])
        at = self.take(n * dtype.itemsize, f"the value of {key!r}")
        numbers = np.frombuffer(self.data, dtype, n, at)
        return numbers != 0 if kind == _BOOL else numbers.copy()


class GGUFFile:
    """A mapped GGUF file: its metadata, its tensors' places, and views of their bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._map = data
        cursor = _Cursor(data)
        n_tensors, n_pairs = _preamble(cursor)
        self.metadata: dict[str, Value] = _metadata(cursor, n_pairs)
        self.tensors: dict[str, GGUFTensor] = _tensors(cursor, n_tensors, _alignment(self.metadata))

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # what mmap says of an empty file
            raise BadCheckpoint(f"{path.name}: the file is empty") from None
        try:
            return cls(path, data)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{path.name}: {error}") from None

    def bytes_of(self, tensor: GGUFTensor) -> Bytes:
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    def close(self) -> None:
        """Gives the mapping back; views still held keep it alive until they go."""
        with suppress(BufferError):
            self._map.close()


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    at = cursor.take(4, "the magic number")
    if cursor.data[at : at + 4] != MAGIC:
        raise BadCheckpoint("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.u32("the version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version and version % 0x1000000 == 0 else ""
        raise BadCheckpoint(f"GGUF version {version}{hint} is not read, only 2 and 3, little-endian")
    # A tensor's entry takes 24 bytes at the least, a metadata pair 13.
    return cursor.count("the tensor count", 24), cursor.count("the metadata count", 13)


def _metadata(cursor: _Cursor, n_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(n_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise BadCheckpoint(f"metadata {key!r} appears twice")
        metadata[key] = cursor.value(key)
    return metadata


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise BadCheckpoint(f"general.alignment is {alignment!r}, not a power of two of at least 8")
    return alignment


def _tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    entries = [_entry(cursor) for _ in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in entries:
        offset = data_start + tensor.offset
        if tensor.name in tensors:
            raise BadCheckpoint(f"tensor {tensor.name!r} appears twice")
        if tensor.offset % alignment or offset + tensor.nbytes > cursor.size:
            raise BadCheckpoint(
                f"tensor {tensor.name!r} claims bytes {offset} to {offset + tensor.nbytes} of {cursor.size}:"
                " the file is cut short or lies"
            )
        tensors[tensor.name] = tensor._replace(offset=offset)
    return tensors


def _entry(cursor: _Cursor) -> GGUFTensor:
    """One tensor's entry; its offset is still relative to the data section."""
    name = cursor.string("a tensor name")
    n_dims = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise BadCheckpoint(f"tensor {name!r} has {n_dims} dimensions")
    shape = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(n_dims))[::-1]
    type_id = cursor.u32(f"the type of {name!r}")
    kind = _KINDS.get(type_id)
    if kind is None:
        raise BadCheckpoint(f"tensor {name!r} has type {type_id}, which is not read; read are {', '.join(FORMATS)}")
    fmt = FORMATS[kind]
    if 0 in shape or shape[-1] % fmt.block:
        raise BadCheckpoint(f"tensor {name!r} of type {kind} has shape {shape}, not rows of whole blocks")
    nbytes = math.prod(shape) // fmt.block * fmt.block_bytes
    return GGUFTensor(name, shape, kind, cursor.u64(f"the offset of {name!r}"), nbytes)
