"""Comparing what `lossless_writer` has written with the source, bit for bit, while it codes the tensors after it.

Tensors are read back in batches: a batch is written to the drive, dropped from the page cache, read, decoded and
compared, all on one thread.
"""

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from emberline.weights.lossless_blocks import WIDTHS, Grid
from emberline.weights.lossless_files import BLOCKS, CODED, REST, TensorEntry
from emberline.weights.lossless_tensor import LosslessTensor, PlaneBytes
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import SafeTensor, SafetensorsFile
from emberline.weights.tensors import Bytes

_BATCH_BYTES = 8 << 20
_BAND_BYTES = 4 << 20  # of the source that are compared at a time


class _Waiting(NamedTuple):
    name: str
    entry: TensorEntry
    parts: Mapping[str, SafeTensor]

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the tensor's parts begin and end in the data."""
        offsets = [part.data_offsets for part in self.parts.values()]
        return min(begin for begin, _ in offsets), max(end for _, end in offsets)


class ReadBack:
    """Compares the tensors of one file that is being written."""

    def __init__(self, source: SafetensorsFile, out: BinaryIO, target: Path, room: int) -> None:
        """room: bytes of `out` before the data."""
        self._source, self._out, self._target, self._room = source, out, target, room
        self._batch: list[_Waiting] = []
        self._n_bytes = 0
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, "readback")
        self._comparing: deque[Future[None]] = deque()
        self._buffers: dict[str, Bytes] = {}

    def add(self, name: str, entry: TensorEntry, parts: Mapping[str, SafeTensor]) -> None:
        """Have a tensor compared that has been written. Raises BadCheckpoint if one before it differs."""
        tensor = _Waiting(name, entry, parts)
        self._batch.append(tensor)
        self._n_bytes += tensor.bounds[1] - tensor.bounds[0]
        if self._n_bytes >= _BATCH_BYTES:
            self._start()
        while self._comparing and self._comparing[0].done():
            self._comparing.popleft().result()

    def finish(self) -> None:
        """Wait until all tensors are compared. Raises BadCheckpoint if one differs."""
        self._start()
        while self._comparing:
            self._comparing.popleft().result()

    def close(self) -> None:
        """Compare no more."""
        self._stopped = True
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        batch, self._batch, self._n_bytes = self._batch, [], 0
        if batch:
            self._comparing.append(self._thread.submit(self._compare_all, batch))

    def _compare_all(self, batch: list[_Waiting]) -> None:
        begin, end = min(each.bounds[0] for each in batch), max(each.bounds[1] for each in batch)
        to_the_drive(self._out, self._room + begin, end - begin)
        for each in batch:
            if self._stopped:
                return
            if not self._is_same(each):
                raise BadCheckpoint(
                    f"{self._target.name}: tensor {each.name!r} differs from the source after it was written: the drive"
                    " or the memory of this machine makes errors. The source was not touched; run the command again"
                )

    def _is_same(self, written: _Waiting) -> bool:
        name, entry, parts = written
        raw = self._source.bytes_of(self._source.tensors[name])
        if entry.block is None:
            at = self._offset(parts[name])
            bands = (raw[start : start + _BAND_BYTES] for start in range(0, raw.nbytes, _BAND_BYTES))
            return all(
                _equal(self._read(name, at + n * _BAND_BYTES, band.nbytes), band) for n, band in enumerate(bands)
            )
        try:
            tensor = self._tensor(written, entry.block)
            tensor.check()
            matrix, grid = raw.reshape(tensor.grid.rows, -1), tensor.grid
            step = grid.block_rows * max(1, _BAND_BYTES // (grid.block_rows * matrix.shape[1]))
            for first in range(0, grid.rows, step):
                rows = slice(first, min(grid.rows, first + step))
                band = self._buffer("", matrix[rows].nbytes)
                decoded = tensor.decode(rows, slice(0, grid.columns), band, self._read_plane)
                if not _equal(decoded.reshape(-1), matrix[rows].reshape(-1)):
                    return False
        except BadCheckpoint:  # its blocks differ from their checksums, for instance
            return False
        return True

    def _tensor(self, written: _Waiting, block: tuple[int, int]) -> LosslessTensor:
        name, entry, parts = written
        rest, coded, table = parts[name + REST], parts[name + CODED], parts[name + BLOCKS]
        n_bytes = table.data_offsets[1] - table.data_offsets[0]
        blocks = np.frombuffer(self._read(BLOCKS, self._offset(table), n_bytes).tobytes(), "<u8").reshape(-1, 3)
        whole = Grid.of(entry.shape)
        assert entry.dtype in WIDTHS
        return LosslessTensor(
            name, self._target, entry.dtype, Grid(whole.rows, whole.columns, *block), self._mapped(coded),
            self._mapped(rest), self._offset(coded), self._offset(rest), blocks, lambda first, last: None,
        )  # fmt: skip

    def _mapped(self, part: SafeTensor) -> Bytes:
        mapped: Bytes = np.memmap(self._out, np.uint8, "r", self._offset(part), part.shape)
        return mapped

    def _offset(self, part: SafeTensor) -> int:
        return self._room + part.data_offsets[0]

    def _read_plane(self, plane: PlaneBytes) -> Bytes:
        return self._read(CODED if plane.is_coded else REST, plane.offset, plane.mapped.nbytes)

    def _read(self, key: str, offset: int, n: int) -> Bytes:
        """Read bytes of the file into the buffer `key`."""
        buffer, have = self._buffer(key, n), 0
        while have < n and (got := os.preadv(self._out.fileno(), [buffer[have:].data], offset + have)):
            have += got
        return buffer[:have]

    def _buffer(self, key: str, n: int) -> Bytes:
        if key not in self._buffers or self._buffers[key].nbytes < n:
            self._buffers[key] = np.empty(n + n // 8, np.uint8)
        return self._buffers[key][:n]


def to_the_drive(out: BinaryIO, offset: int, n: int) -> None:
    """Write some bytes of a file to the drive, and drop them from the page cache: what is read then is the drive's."""
    out.flush()
    getattr(os, "fdatasync", os.fsync)(out.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(out.fileno(), offset, n, os.POSIX_FADV_DONTNEED)


def _equal(some: Bytes, others: Bytes) -> bool:
    """True if bytes are the same; 64-bit words are compared, with an eighth of the memory for the result."""
    whole = some.nbytes - some.nbytes % 8
    return some.nbytes == others.nbytes and bool(
        np.array_equal(some[:whole].view("<u8"), others[:whole].view("<u8"))
        and np.array_equal(some[whole:], others[whole:])
    )
