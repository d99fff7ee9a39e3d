"""Token ids as raw little-endian u32 bytes, the only form in which they cross a process border."""

import sys
from array import array
from collections.abc import Iterable

assert array("I").itemsize == 4


def pack(ids: Iterable[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack(raw: bytes | bytearray | memoryview) -> list[int]:
    ids = array("I")
    ids.frombytes(raw)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids.tolist()


def count(raw: bytes | bytearray | memoryview) -> int:
    return len(raw) // 4
