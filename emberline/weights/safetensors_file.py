"""Safetensors files: their header, mapped tensors, and writing one."""

import math
import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import FORMATS, Bytes, FileLocation

KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Of the parts of quantized weights. Words of packed codes are bytes like others.
QUANTIZED_KINDS = {"F8_E4M3": "fp8", "U8": "u8", "F8_E8M0": "u8", "I32": "u8", "I64": "i64"}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafeTensor(msgspec.Struct, frozen=True):
    """An entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """A mapped file. Raises BadCheckpoint where its header does not describe it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, name = path, path.name
        self._map = data
        self._start = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or self._start > min(len(data), MAX_HEADER_BYTES):
            raise BadCheckpoint(f"{name}: the header claims {self._start - 8} bytes of {len(data)}")
        try:
            header = msgspec.json.decode(data[8 : self._start], type=dict[str, msgspec.Raw])
            metadata = header.pop("__metadata__", None)
            self.metadata = {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, str])
            self.tensors: dict[str, SafeTensor] = {
                key: msgspec.json.decode(raw, type=SafeTensor) for key, raw in header.items()
            }
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{name}: the header is not valid: {error}") from None
        for key, tensor in self.tensors.items():
            self._check(f"{name}: tensor {key!r}", tensor)

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        try:
            with path.open("rb") as file:
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise BadCheckpoint(f"{path.name} is missing") from None
        except ValueError as error:
            raise error if isinstance(error, BadCheckpoint) else BadCheckpoint(f"{path.name} is empty") from None

    def _check(self, what: str, tensor: SafeTensor) -> None:
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= len(self._map) - self._start:
            raise BadCheckpoint(f"{what} claims bytes {begin} to {end}: the file is truncated or its header is wrong")
        kind = KINDS.get(tensor.dtype) or QUANTIZED_KINDS.get(tensor.dtype)
        if kind is None:
            return  # rejected only when used, so that a folder may hold other tensors
        item_bytes = 4 if tensor.dtype == "I32" else FORMATS[kind].block_bytes
        if min(tensor.shape, default=1) < 1 or math.prod(tensor.shape) * item_bytes != end - begin:
            raise BadCheckpoint(f"{what} of shape {tensor.shape} does not take {end - begin} bytes")

    @property
    def header(self) -> bytes:
        """The header with the 8 bytes of its length, as the file has it."""
        return self._map[: self._start]

    def offset_of(self, tensor: SafeTensor) -> int:
        """Return the file offset of the tensor's first byte."""
        return self._start + tensor.data_offsets[0]

    def rows_of(self, key: str) -> tuple[Bytes, FileLocation]:
        """The bytes of a tensor, [rows, row_bytes], and where they begin on disk."""
        tensor = self.tensors[key]
        raw = self.bytes_of(tensor).reshape((tensor.shape or (1,))[0], -1)
        return raw, FileLocation(self.path, self.offset_of(tensor))

    def will_need(self, tensor: SafeTensor, start: int, stop: int) -> None:
        """Ask the kernel to read some bytes of a tensor into the page cache."""
        first = self.offset_of(tensor) + start
        aligned = first - first % mmap.PAGESIZE
        with suppress(AttributeError, OSError, ValueError):  # only a hint
            self._map.madvise(mmap.MADV_WILLNEED, aligned, self.offset_of(tensor) + stop - aligned)

    def bytes_of(self, tensor: SafeTensor) -> Bytes:
        begin, end = tensor.data_offsets
        return np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)

    def close(self) -> None:
        """Unmap the file, unless views of it are still held: then it is unmapped with the last of them."""
        with suppress(BufferError):
            self._map.close()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Tensors as dtype, shape and bytes, by name. The largest items come first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-len(item[1][2]) // max(1, math.prod(item[1][1])), item[0]))
    header, end = {}, 0
    for name, (dtype, shape, data) in ordered:
        header[name] = SafeTensor(dtype, shape, (end, end + len(data)))
        end += len(data)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, (_, _, data) in ordered:
            file.write(data)
