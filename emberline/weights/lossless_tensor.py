"""A losslessly compressed tensor of a file, and the rows of it that a reader asks for, decoded when they are read."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.byte_planes import Checksum, Rectangle, StoredPlanes, decode_blocks
from emberline.weights.lossless_blocks import BLOCK_NUMBERS, WIDTHS, Grid, decode_block
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Bytes, Shape

MAX_THREADS = 16
_BLOCKS_PER_CALL = 16  # some 2 ms

# Returns memory with some bytes of a file, which stays as it is until the next bytes of that plane are asked for.
ReadPlane = Callable[["PlaneBytes"], Bytes]


@cache
def n_threads() -> int:
    """The number of threads that decode."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, n_cores)


@cache
def decoding_threads() -> ThreadPoolExecutor:
    """The threads that decode blocks of all tensors. A job on them never waits for another one."""
    return ThreadPoolExecutor(n_threads(), "lossless")


class PlaneBytes(NamedTuple):
    """Some bytes of a plane."""

    path: Path
    offset: int  # of the first, in the file
    mapped: Bytes  # the same bytes in the mapped file
    is_coded: bool


class Span(NamedTuple):
    """Blocks that follow each other in the planes, and their bytes."""

    blocks: range
    coded: PlaneBytes
    rest: PlaneBytes


@dataclass(frozen=True, slots=True, eq=False)
class LosslessTensor:
    """The planes of a compressed tensor, as views of the mapped file."""

    name: str
    path: Path
    dtype: str  # as safetensors call it
    grid: Grid
    coded: Bytes
    rest: Bytes
    coded_at: int  # offset of `coded` in the file
    rest_at: int
    blocks: NDArray[np.uint64]  # [n_blocks, 3]: end in `coded`, and both parts of the checksum
    will_need: Callable[[int, int], None]  # (first block, last block): have their bytes read ahead

    def check(self) -> None:
        """Raise BadCheckpoint where the planes are too short for the tensor, its blocks are larger than the kernels
        expect, or the table of blocks is damaged."""
        ends, grid = self.blocks[:, 0], self.grid
        if grid.block_rows * grid.block_columns > BLOCK_NUMBERS:  # nothing else bounds a tensor of one byte a number
            raise self.damage(f"its blocks have more than {BLOCK_NUMBERS:,} numbers")
        expected = grid.rows * grid.columns * (self.width - 1)
        if len(self.blocks) != grid.n_blocks or len(self.rest) < expected:
            raise self.damage("its planes do not have the size of its shape")
        if grid.n_blocks and (bool((ends[1:] < ends[:-1]).any()) or int(ends[-1]) > len(self.coded)):
            raise self.damage("its table of blocks does not fit its exponents")

    def damage(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path.name}: tensor {self.name!r} is damaged: {why}. Copy the file again, or compress the model"
            " again"
        )

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def stored_bytes(self) -> int:
        return self.coded.nbytes + self.rest.nbytes + self.blocks.nbytes

    def _bounds(self, first: int, last: int) -> tuple[int, int, int, int]:
        """Where the blocks first .. last begin and end in `coded`, and in `rest`."""
        start = int(self.blocks[first - 1, 0]) if first else 0
        before, end = self.grid.preceding(first), self.grid.preceding(last) + self.grid.size(last)
        return start, int(self.blocks[last, 0]), before * (self.width - 1), end * (self.width - 1)

    def block(self, number: int, planes: StoredPlanes | None = None) -> Bytes:
        """The bytes of a block's numbers, [rows, columns * width], checked, decoded by zstd."""
        start, end, rest_start, rest_end = self._bounds(number, number)
        coded, rest, coded_from, rest_from = planes or StoredPlanes(self.coded, self.rest)
        _, total, running = map(int, self.blocks[number])
        try:
            numbers = decode_block(
                coded[start - coded_from : end - coded_from], rest[rest_start - rest_from : rest_end - rest_from],
                self.grid.size(number), self.width, Checksum(total, running),
            )  # fmt: skip
        except ValueError as error:
            raise self.damage(f"block {number}: {error}") from None
        rows, _ = self.grid.place(number)
        return numbers.reshape(rows.stop - rows.start, -1)

    def spans(self, rows: slice, columns: slice) -> Iterator[Span]:
        """The blocks that hold a rectangle of numbers, and where they are in the file."""
        for blocks in self.grid.runs(rows, columns):
            a, b, c, d = self._bounds(blocks[0], blocks[-1])
            coded = PlaneBytes(self.path, self.coded_at + a, self.coded[a:b], True)
            rest = PlaneBytes(self.path, self.rest_at + c, self.rest[c:d], False)
            yield Span(blocks, coded, rest)

    def decode(self, rows: slice, columns: slice, into: Bytes | None = None, read: ReadPlane | None = None) -> Bytes:
        """The bytes of a rectangle of numbers, [rows, columns * width].

        into: contiguous memory for them. read: reads the planes' bytes from the file; everything is then decoded on
        the calling thread. Without it, threads decode from the mapped file.
        """
        shape = (rows.stop - rows.start, (columns.stop - columns.start) * self.width)
        out = np.empty(shape, np.uint8) if into is None else into.reshape(shape)
        part = Rectangle(rows.start, rows.stop, columns.start, columns.stop)
        if read is not None:
            for blocks, coded, rest in self.spans(rows, columns):
                planes = StoredPlanes(read(coded), read(rest), coded.offset - self.coded_at, rest.offset - self.rest_at)
                self._decode(planes, blocks, part, out)
            return out
        numbers = [number for blocks in self.grid.runs(rows, columns) for number in blocks]
        mapped = StoredPlanes(self.coded, self.rest)
        if numbers:
            self.will_need(numbers[0], numbers[-1])
        size = min(_BLOCKS_PER_CALL, -(-len(numbers) // n_threads()))
        jobs = [numbers[first : first + size] for first in range(0, len(numbers), max(1, size))]
        decode = decoding_threads().map if len(jobs) > 1 else map
        for _ in decode(lambda some: self._decode(mapped, some, part, out), jobs):
            pass
        return out

    def _decode(self, planes: StoredPlanes, blocks: Sequence[int], part: Rectangle, out: Bytes) -> None:
        """Decode blocks on this thread; those that the C kernel does not read by zstd, which knows what is wrong."""
        done = 0
        while done < len(blocks):
            done += decode_blocks(planes, self.blocks, blocks[done:], self.grid, part, self.width, out)
            if done < len(blocks):
                self._copy(blocks[done], planes, part, out)
                done += 1

    def _copy(self, number: int, planes: StoredPlanes, part: Rectangle, out: Bytes) -> None:
        rows, columns = self.grid.place(number)
        top, bottom = max(part.top, rows.start), min(part.bottom, rows.stop)
        left, right, width = max(part.left, columns.start), min(part.right, columns.stop), self.width
        out[top - part.top : bottom - part.top, (left - part.left) * width : (right - part.left) * width] = self.block(
            number, planes
        )[top - rows.start : bottom - rows.start, (left - columns.start) * width : (right - columns.start) * width]


@dataclass(frozen=True, slots=True, eq=False)
class LosslessRows:
    """Some rows and columns of a compressed tensor, with as much of an array's interface as `Weight.raw` needs.

    A row of the array is `per_row` rows of the tensor's matrix: more than one where an array has a row for each expert.
    """

    tensor: LosslessTensor
    rows: slice
    columns: slice
    per_row: int = 1

    @classmethod
    def of(cls, tensor: LosslessTensor, shape: Shape) -> "LosslessRows":
        """All of a tensor, with a row for each index of the first dimension."""
        grid = tensor.grid
        return cls(tensor, slice(0, grid.rows), slice(0, grid.columns), grid.rows // shape[0])

    @property
    def row_bytes(self) -> int:
        n: int = self.per_row * (self.columns.stop - self.columns.start) * self.tensor.width
        return n

    def __len__(self) -> int:
        n: int = (self.rows.stop - self.rows.start) // self.per_row
        return n

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.row_bytes

    @property
    def nbytes(self) -> int:
        """When decoded."""
        return len(self) * self.row_bytes

    def read(self, into: Bytes | None = None, read: ReadPlane | None = None) -> Bytes:
        """Decode the rows; into, read: as `LosslessTensor.decode` takes them."""
        return self.tensor.decode(self.rows, self.columns, into, read).reshape(self.shape)

    def stored(self) -> Iterator[PlaneBytes]:
        """The bytes of the file that hold the rows, in the order in which `read` reads them."""
        for span in self.tensor.spans(self.rows, self.columns):
            yield from (span.coded, span.rest)

    def rows_within(self, n_bytes: int) -> int:
        """Rows that have up to `n_bytes`: whole blocks if one has no more, and at least one row."""
        band = max(1, self.tensor.grid.block_rows // self.per_row)
        step = n_bytes // max(1, band * self.row_bytes) * band
        return step or max(1, n_bytes // max(1, self.row_bytes))

    def pieces(self, n_bytes: int) -> "Iterator[LosslessRows]":
        """The rows in parts of up to `n_bytes`, divided between blocks where they begin at one."""
        step = self.rows_within(n_bytes)
        return (self._part(start, min(len(self), start + step)) for start in range(0, len(self), step))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:
        return self.read()

    def __getitem__(self, key: Any) -> "LosslessRows | Bytes":
        if isinstance(key, int | np.integer):
            return self._part(int(key), int(key) + 1)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, "rows are taken without gaps"
            return self._part(start, max(start, stop))
        if isinstance(key, tuple):
            rows, columns = key
            assert rows == slice(None), "columns are taken of all rows"
            start, stop, _ = columns.indices(self.row_bytes)
            width = self.tensor.width
            if self.per_row > 1 or start % width or stop % width:
                return self.read()[:, start:stop]
            first = self.columns.start
            return replace(self, columns=slice(first + start // width, first + stop // width))
        order = np.asarray(key)
        if not len(order):
            return np.empty((0, self.row_bytes), np.uint8)
        low = int(order.min())
        ordered: Bytes = self._part(low, int(order.max()) + 1).read()[order - low]
        return ordered

    def _part(self, start: int, stop: int) -> "LosslessRows":
        first = self.rows.start
        return replace(self, rows=slice(first + start * self.per_row, first + stop * self.per_row))

    def reshape(self, *shape: int) -> "LosslessRows | Bytes":
        """Divide or merge whole rows; any other shape decodes them."""
        grid, n_rows = self.tensor.grid, self.rows.stop - self.rows.start
        whole = self.columns == slice(0, grid.columns)
        if whole and len(shape) == 2 and shape[1] == -1 and shape[0] > 0 and n_rows % shape[0] == 0:
            return replace(self, per_row=n_rows // shape[0])
        return self.read().reshape(shape)

    @property
    def stored_bytes(self) -> int:
        """On disk: of a part of the tensor, its share."""
        grid = self.tensor.grid
        return self.tensor.stored_bytes * self.nbytes // max(1, grid.rows * grid.columns * self.tensor.width)
