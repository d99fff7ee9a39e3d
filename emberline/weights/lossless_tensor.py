"""A losslessly compressed tensor of a file, and the rows of it that a reader asks for, decoded when they are read."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.byte_planes import Checksum
from emberline.weights.lossless_blocks import WIDTHS, Grid, decode_block
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Bytes, Shape

MAX_THREADS = 8


@cache
def n_threads() -> int:
    """The number of threads that decode."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, n_cores)


@cache
def decoding_threads() -> ThreadPoolExecutor:
    """The threads that decode blocks of all tensors. A job on them never waits for another one."""
    return ThreadPoolExecutor(n_threads(), "lossless")


@dataclass(frozen=True, slots=True, eq=False)
class LosslessTensor:
    """The planes of a compressed tensor, as views of the mapped file."""

    name: str
    where: str  # the file's name, for messages
    dtype: str  # as safetensors call it
    grid: Grid
    coded: Bytes
    rest: Bytes
    blocks: NDArray[np.uint64]  # [n_blocks, 3]: end in `coded`, and both parts of the checksum
    will_need: Callable[[int, int], None]  # (first block, last block): have their bytes read ahead

    def check(self) -> None:
        """Raise BadCheckpoint where the planes are too short for the tensor, or the table of blocks is damaged."""
        ends, grid = self.blocks[:, 0], self.grid
        expected = grid.rows * grid.columns * (self.width - 1)
        if len(self.blocks) != grid.n_blocks or len(self.rest) < expected:
            raise self.damage("its planes do not have the size of its shape")
        if grid.n_blocks and (bool((ends[1:] < ends[:-1]).any()) or int(ends[-1]) > len(self.coded)):
            raise self.damage("its table of blocks does not fit its exponents")

    def damage(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.where}: tensor {self.name!r} is damaged: {why}. Copy the file again, or compress the model again"
        )

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def stored_bytes(self) -> int:
        return self.coded.nbytes + self.rest.nbytes + self.blocks.nbytes

    def block(self, number: int, into: Bytes | None = None) -> Bytes:
        """The bytes of a block's numbers, [rows, columns * width], checked; into: memory for them."""
        n, before = self.grid.size(number), self.grid.preceding(number) * (self.width - 1)
        start = int(self.blocks[number - 1, 0]) if number else 0
        end, total, running = map(int, self.blocks[number])
        try:
            numbers = decode_block(
                self.coded[start:end], self.rest[before : before + n * (self.width - 1)], n, self.width,
                Checksum(total, running), into,
            )  # fmt: skip
        except ValueError as error:
            raise self.damage(f"block {number}: {error}") from None
        rows, _ = self.grid.place(number)
        return numbers.reshape(rows.stop - rows.start, -1)

    def decode(self, rows: slice, columns: slice, into: Bytes | None = None) -> Bytes:
        """The bytes of a rectangle of numbers, [rows, columns * width]; into: memory for them."""
        width, numbers = self.width, self.grid.covering(rows, columns)
        shape = (rows.stop - rows.start, (columns.stop - columns.start) * width)
        out = np.empty(shape, np.uint8) if into is None else into.reshape(shape)
        if numbers:
            self.will_need(numbers[0], numbers[-1])

        def copy(number: int) -> None:
            in_rows, in_columns = self.grid.place(number)
            top, bottom = max(rows.start, in_rows.start), min(rows.stop, in_rows.stop)
            left, right = max(columns.start, in_columns.start), min(columns.stop, in_columns.stop)
            target = out[
                top - rows.start : bottom - rows.start, (left - columns.start) * width : (right - columns.start) * width
            ]
            if in_rows == slice(top, bottom) and in_columns == slice(left, right):
                self.block(number, target)
                return
            target[:] = self.block(number)[
                top - in_rows.start : bottom - in_rows.start,
                (left - in_columns.start) * width : (right - in_columns.start) * width,
            ]

        def copy_all(some: list[int]) -> None:
            for number in some:
                copy(number)

        n_jobs = min(n_threads(), len(numbers))
        if n_jobs < 2:
            copy_all(numbers)
        else:
            for _ in decoding_threads().map(copy_all, [numbers[first::n_jobs] for first in range(n_jobs)]):
                pass
        return out


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

    def read(self, into: Bytes | None = None) -> Bytes:
        """Decode the rows; into: contiguous memory for their bytes."""
        return self.tensor.decode(self.rows, self.columns, into).reshape(self.shape)

    def pieces(self, n_bytes: int) -> "Iterator[LosslessRows]":
        """The rows in parts of up to `n_bytes`, divided between blocks where they begin at one."""
        band = max(1, self.tensor.grid.block_rows // self.per_row)
        step = max(1, n_bytes // max(1, band * self.row_bytes)) * band
        step = step if step * self.row_bytes <= n_bytes else max(1, n_bytes // self.row_bytes)
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
