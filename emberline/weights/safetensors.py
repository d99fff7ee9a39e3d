"""Safetensors files: mapped, every offset checked against the file. No code and no pickle can be in one."""

import math
import mmap
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from emberline.weights.errors import BadCheckpoint
from emberline.weights.quants import FORMATS, Bytes

KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafeTensor(msgspec.Struct, frozen=True):
    """An entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, name = path, path.name
        self._map = data
        self._start = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or self._start > min(len(data), MAX_HEADER_BYTES):
            raise BadCheckpoint(f"{name}: the header claims {self._start - 8} bytes of {len(data)}")
        try:
            header = msgspec.json.decode(data[8 : self._start], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            self.tensors = {key: msgspec.json.decode(raw, type=SafeTensor) for key, raw in header.items()}
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
            raise BadCheckpoint(f"{what} claims bytes {begin} to {end}: the file is cut short or lies")
        kind = KINDS.get(tensor.dtype)
        if kind is None:
            return  # refused when asked for, so that a folder may hold what nobody reads
        if min(tensor.shape, default=1) < 1 or math.prod(tensor.shape) * FORMATS[kind].block_bytes != end - begin:
            raise BadCheckpoint(f"{what} of shape {tensor.shape} does not take {end - begin} bytes")

    def offset_of(self, tensor: SafeTensor) -> int:
        """Of its bytes, from the beginning of the file."""
        return self._start + tensor.data_offsets[0]

    def bytes_of(self, tensor: SafeTensor) -> Bytes:
        begin, end = tensor.data_offsets
        return np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)

    def close(self) -> None:
        """Gives the mapping back; views still held keep it alive until they go."""
        with suppress(BufferError):
            self._map.close()
