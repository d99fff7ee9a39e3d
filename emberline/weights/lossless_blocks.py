"""Blocks of a losslessly compressed tensor: how a tensor is cut, and how a block is coded.

A block is a rectangle of some 128 thousand numbers, whose exponents zstd codes with a Huffman table of their own. Signs
and mantissas have no pattern and are kept as they are. A rank decodes only the blocks that its rows or columns touch,
and threads decode blocks independently.

    numbers    top plane  (a float's exponent)          zstd, one frame a block
               rest plane (sign and mantissa)           as it is
               checksum of the numbers' bytes           checked whenever the block is decoded
"""

import math
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from emberline.kernels.byte_planes import Checksum, join_planes, split_planes
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Bytes, Shape

BLOCK_NUMBERS = 1 << 17  # the largest block of which zstd makes a single block, with one Huffman table
_SEGMENTS = 8  # blocks across a row: as many ranks can divide the columns and decode no number twice
_LEAST_COLUMNS = 256
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}  # bytes of a number, of the dtypes that are compressed
# Fast matching over long distances finds repeated rows and little else: exponents are nearly independent.
_ZSTD = {"window_log": 17, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7, "target_length": 0}


class Grid(NamedTuple):
    """A tensor as a matrix of numbers, cut into blocks row by row."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @classmethod
    def of(cls, shape: Shape) -> "Grid":
        columns = shape[-1]
        rows, segments = math.prod(shape[:-1]), _SEGMENTS
        while segments > 1 and (columns % segments or columns // segments < _LEAST_COLUMNS):
            segments //= 2
        width = min(columns // segments, BLOCK_NUMBERS)
        return cls(rows, columns, max(1, BLOCK_NUMBERS // width), width)

    @property
    def across(self) -> int:
        """Blocks from the first column to the last."""
        return -(-self.columns // self.block_columns)

    @property
    def n_blocks(self) -> int:
        return -(-self.rows // self.block_rows) * self.across

    def place(self, block: int) -> tuple[slice, slice]:
        """Rows and columns of a block."""
        row, column = divmod(block, self.across)
        top, left = row * self.block_rows, column * self.block_columns
        bottom, right = min(self.rows, top + self.block_rows), min(self.columns, left + self.block_columns)
        return slice(top, bottom), slice(left, right)

    def size(self, block: int) -> int:
        """Numbers in a block."""
        rows, columns = self.place(block)
        n: int = (rows.stop - rows.start) * (columns.stop - columns.start)
        return n

    def preceding(self, block: int) -> int:
        """Numbers in all earlier blocks."""
        rows, columns = self.place(block)
        n: int = rows.start * self.columns + columns.start * (rows.stop - rows.start)
        return n

    def runs(self, rows: slice, columns: slice) -> list[range]:
        """The blocks that hold some of these rows and columns, in runs of blocks that follow each other."""
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return []
        top, bottom = rows.start // self.block_rows, (rows.stop - 1) // self.block_rows + 1
        left, right = columns.start // self.block_columns, (columns.stop - 1) // self.block_columns + 1
        if right - left == self.across:
            return [range(top * self.across, bottom * self.across)]
        return [range(row * self.across + left, row * self.across + right) for row in range(top, bottom)]


class CodedBlock(NamedTuple):
    coded: bytes  # the top plane
    rest: Bytes
    checksum: Checksum
    n_numbers: int


def encode_block(numbers: Bytes, width: int) -> CodedBlock:
    """Code contiguous numbers of `width` bytes."""
    planes = split_planes(numbers, width)
    coded: bytes = _codec().compressor.compress(planes.top.data)
    return CodedBlock(coded, planes.rest, planes.checksum, planes.top.size)


def decode_block(coded: Bytes, rest: Bytes, n: int, width: int, checksum: Checksum) -> Bytes:
    """The bytes of `n` numbers. Raises ValueError if they are not those that were coded."""
    codec = _codec()
    try:
        if codec.frame_content_size(coded.data) != n:  # checked first: the decoder allocates what the frame asks for
            raise ValueError("its exponents are not those of this block")
        top = np.frombuffer(codec.decompressor.decompress(coded.data), np.uint8)
    except codec.error as error:
        raise ValueError(f"its exponents cannot be decoded ({error})") from None
    if len(top) != n:
        raise ValueError("its exponents are not those of this block")
    numbers, found = join_planes(top, rest, width)
    if found != checksum:
        raise ValueError("its numbers differ from their checksum")
    return numbers


class _Codec(threading.local):
    """zstd's contexts, which only one thread at a time may use."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise BadCheckpoint(
                "compressed weights need the Python package zstandard: `pip install zstandard`"
            ) from None
        settings = zstandard.ZstdCompressionParameters(**_ZSTD, strategy=zstandard.STRATEGY_FAST)
        self.compressor: Any = zstandard.ZstdCompressor(compression_params=settings)
        self.decompressor: Any = zstandard.ZstdDecompressor()
        self.frame_content_size: Any = zstandard.frame_content_size
        self.error: Any = zstandard.ZstdError


@cache
def _codec() -> _Codec:
    return _Codec()
