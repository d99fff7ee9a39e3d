"""Which bytes of a mapped file are in memory already."""

import ctypes
import mmap
from functools import cache
from typing import Any

_FIRST_BIT = bytes(n & 1 for n in range(256))  # of what is told of a page: it is in memory


@cache
def _mincore() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):  # not here
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return function


def resident(address: int, n_bytes: int) -> bool:
    """Whether nearly all pages of a mapping are in memory; False where nobody can tell."""
    function = _mincore()
    if function is None or not n_bytes:
        return False
    start = address - address % mmap.PAGESIZE
    n_pages = -(-(address + n_bytes - start) // mmap.PAGESIZE)
    pages = ctypes.create_string_buffer(n_pages)
    if function(start, n_pages * mmap.PAGESIZE, pages):
        return False
    return pages.raw.translate(_FIRST_BIT).count(1) > 0.9 * n_pages
