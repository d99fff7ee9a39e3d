"""Byte planes of numbers: the highest byte of each, which holds a float's exponent, apart from the bytes below.

Each number is rotated left by one bit first, so that BF16 and F32 have all 8 bits of their exponent in the highest
byte, and the sign in the lowest. The C kernels and their numpy twins also return a checksum of the numbers' bytes.

`decode_blocks` decodes many blocks of a compressed tensor in one call, during which other threads can run Python.
"""

import ctypes
import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.native_library import BuildError, load_library

Bytes = NDArray[np.uint8]

_log = logging.getLogger(__name__)


class Checksum(NamedTuple):
    """Fletcher's checksum over 64-bit words: it notices damage and a wrong order, not a forger."""

    total: int
    running: int  # the sum of the running totals


class Planes(NamedTuple):
    top: Bytes  # [n]
    rest: Bytes  # [n * (width - 1)]
    checksum: Checksum


class StoredPlanes(NamedTuple):
    """Memory with some of the planes of a compressed tensor, and where in the planes it begins, in bytes."""

    coded: Bytes
    rest: Bytes
    coded_from: int = 0
    rest_from: int = 0


class Rectangle(NamedTuple):
    """Rows top .. bottom - 1 and columns left .. right - 1 of a matrix."""

    top: int
    bottom: int
    left: int
    right: int


def split_planes(numbers: Bytes, width: int) -> Planes:
    """Split contiguous numbers of `width` bytes: 1, 2 or 4."""
    library = _library()
    if library is None:
        return split_planes_reference(numbers, width)
    n = numbers.size // width
    top, rest, sums = np.empty(n, np.uint8), np.empty(n * (width - 1), np.uint8), (ctypes.c_uint64 * 2)()
    library.em_split_planes(numbers.ctypes.data, n, width, top.ctypes.data, rest.ctypes.data, sums)
    return Planes(top, rest, Checksum(*sums))


def join_planes(top: Bytes, rest: Bytes, width: int) -> tuple[Bytes, Checksum]:
    """The bytes of the numbers, [n * width], and their checksum."""
    library = _library()
    if library is None:
        return join_planes_reference(top, rest, width)
    out, sums = np.empty(top.size * width, np.uint8), (ctypes.c_uint64 * 2)()
    library.em_join_planes(top.ctypes.data, rest.ctypes.data, 1, top.size, width, out.ctypes.data, 0, sums)
    return out, Checksum(*sums)


class _Scratch(threading.local):
    """Memory in which a thread decodes blocks."""

    def __init__(self, n_bytes: int) -> None:
        self.memory = np.empty(n_bytes, np.uint8)


@cache
def _scratch() -> _Scratch:
    return _Scratch(_library().em_block_scratch_bytes())


def decode_blocks(
    planes: StoredPlanes, table: NDArray[np.uint64], blocks: Sequence[int], grid: tuple[int, int, int, int],
    part: Rectangle, width: int, into: Bytes,
) -> int:  # fmt: skip
    """Decode some blocks of a matrix, and copy what they hold of `part` into its bytes, [rows, columns * width].

    table: [n_blocks, 3], of each block where it ends in the coded plane, and its checksum. grid: rows and columns of
    the matrix and of a block. Returns how many blocks were decoded, in order. The next one, if there is one, is damaged
    or coded in a way that the C kernel does not read. Without the kernels that is the first.
    """
    library = _library()
    if library is None:
        return 0
    coded, rest, coded_from, rest_from = planes
    done: int = library.em_decode_blocks(
        coded.ctypes.data, coded_from, rest.ctypes.data, rest_from, table.ctypes.data, _int64s(blocks), len(blocks),
        _int64s(grid), _int64s(part), width, into.ctypes.data, into.strides[0], _scratch().memory.ctypes.data,
    )  # fmt: skip
    return done


def _int64s(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


@cache
def _library() -> Any:
    """The C kernels. Returns None if they cannot be built here: numpy takes several times as long."""
    try:
        library = load_library()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        sums = ctypes.POINTER(ctypes.c_uint64)
        for function in (library.em_split_planes, library.em_join_planes):
            function.restype = None
        library.em_split_planes.argtypes = [pointer, number, ctypes.c_int32, pointer, pointer, sums]
        library.em_join_planes.argtypes = [pointer, pointer, number, number, ctypes.c_int32, pointer, number, sums]
        library.em_block_scratch_bytes.restype = library.em_decode_blocks.restype = number
        library.em_decode_blocks.argtypes = [
            pointer, number, pointer, number, pointer, pointer, number, pointer, pointer, ctypes.c_int32, pointer,
            number, pointer,
        ]  # fmt: skip
    except (BuildError, OSError, AttributeError) as error:
        _log.warning("%s; compressed weights are decoded by numpy, which is slower", error)
        return None
    return library


# --- reference --------------------------------------------------------------------------------------------------------


def split_planes_reference(numbers: Bytes, width: int) -> Planes:
    """The plain numpy twin of `split_planes`."""
    checksum = _fletcher(numbers)
    if width == 1:
        return Planes(numbers.copy(), np.empty(0, np.uint8), checksum)
    words = numbers.view(f"<u{width}")
    rotated = (words << 1 | words >> (8 * width - 1)).view(np.uint8).reshape(-1, width)
    return Planes(rotated[:, -1].copy(), rotated[:, :-1].copy().reshape(-1), checksum)


def join_planes_reference(top: Bytes, rest: Bytes, width: int) -> tuple[Bytes, Checksum]:
    """The plain numpy twin of `join_planes`."""
    if width == 1:
        return top.copy(), _fletcher(top)
    planes = np.concatenate([rest.reshape(-1, width - 1), top[:, None]], axis=1)
    rotated = planes.reshape(-1).view(f"<u{width}")
    out = (rotated >> 1 | rotated << (8 * width - 1)).view(np.uint8)
    return out, _fletcher(out)


def _fletcher(numbers: Bytes) -> Checksum:
    words = np.concatenate([numbers, np.zeros(-numbers.size % 8, np.uint8)]).view("<u8")
    weights = np.arange(len(words), 0, -1, dtype=np.uint64)
    return Checksum(int(words.sum(dtype=np.uint64)), int((words * weights).sum(dtype=np.uint64)))
