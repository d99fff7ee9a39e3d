"""Byte planes of numbers: the highest byte of each, which holds a float's exponent, apart from the bytes below.

Each number is rotated left by one bit first, so that BF16 and F32 have all 8 bits of their exponent in the highest
byte, and the sign in the lowest. The C kernel and its numpy twin also return a checksum of the numbers' bytes.
"""

import ctypes
import logging
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


def split_planes(numbers: Bytes, width: int) -> Planes:
    """Split contiguous numbers of `width` bytes: 1, 2 or 4."""
    library = _library()
    if library is None:
        return split_planes_reference(numbers, width)
    n = numbers.size // width
    top, rest, sums = np.empty(n, np.uint8), np.empty(n * (width - 1), np.uint8), (ctypes.c_uint64 * 2)()
    library.em_split_planes(numbers.ctypes.data, n, width, top.ctypes.data, rest.ctypes.data, sums)
    return Planes(top, rest, Checksum(*sums))


def join_planes(top: Bytes, rest: Bytes, width: int, into: Bytes | None = None) -> tuple[Bytes, Checksum]:
    """The bytes of the numbers, [n * width], and their checksum.

    into: memory for the bytes, [rows, columns * width]; rows may be apart from each other. It is returned then.
    """
    out = np.empty((1, top.size * width), np.uint8) if into is None else into
    library, (rows, row_bytes) = _library(), out.shape
    if library is None or (rows > 1 and row_bytes % 8):
        numbers, checksum = join_planes_reference(top, rest, width)
        out[:] = numbers.reshape(out.shape)
    else:
        sums = (ctypes.c_uint64 * 2)()
        n, stride = row_bytes // width, out.strides[0]
        library.em_join_planes(top.ctypes.data, rest.ctypes.data, rows, n, width, out.ctypes.data, stride, sums)
        checksum = Checksum(*sums)
    return (out[0] if into is None else out), checksum


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
    return Planes(rotated[:, -1].copy(), rotated[:, :-1].reshape(-1), checksum)


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
