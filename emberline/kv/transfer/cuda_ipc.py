"""CUDA IPC: a pool on a device, exported as a raw handle that another process on the same machine opens.

Memory of torch's own allocator cannot be exported when its segments expand: a pool that others write is allocated by
the driver. Pointers only; who computes with them is the engine.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from emberline.kv.transfer.messages import Opened
from emberline.kv.transfer.transport import TransportClosed, host_name

NAME = "cuda_ipc"
LINGER_S = 2.0  # a killed process's last copies may run until the driver has torn its context down
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportClosed(f"no CUDA driver: {error}") from None


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise TransportClosed(f"{what}: {(text.value or b'').decode() or code}")


def allocate(n_bytes: int) -> int:
    """A device pointer in the current context; never freed: a pool lives as long as its process."""
    pointer = ctypes.c_uint64()
    _check(
        _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(n_bytes)), f"{n_bytes} bytes of device memory"
    )
    return pointer.value


def export(pointer: int) -> bytes:
    """The handle of an allocation, by its first byte."""
    handle = _Handle()
    _check(
        _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer)), "this memory cannot be exported"
    )
    return bytes(handle)


def open_handle(raw: bytes) -> int:
    """Another process's allocation, in our address space."""
    if len(raw) != _HANDLE_BYTES:
        raise TransportClosed(f"a handle has {_HANDLE_BYTES} bytes, not {len(raw)}")
    pointer = ctypes.c_uint64()
    code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), _Handle.from_buffer_copy(raw), 1)
    _check(code, "the other engine's memory cannot be opened here")
    return pointer.value


def close_handle(pointer: int) -> None:
    _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))


class Span:
    """Device memory as other libraries take it in: `__cuda_array_interface__`, bytes."""

    def __init__(self, pointer: int, n_bytes: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class CudaInlet:
    """Handles of the pools and their sizes, behind the name of the machine and of the device."""

    name = NAME
    linger_s = LINGER_S

    def __init__(self, pools: Sequence[Span], sizes: Sequence[int]) -> None:
        self._handles = [export(pool.pointer) + size.to_bytes(8, "little") for pool, size in zip(pools, sizes)]

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [host_name().encode(), *self._handles], []


def opened_pools(opened: Opened, n_groups: int) -> list[tuple[int, int]]:
    """Pointer and bytes of each of the other's pools."""
    if len(opened.handles) != n_groups + 1:
        raise TransportClosed(f"{len(opened.handles) - 1} pools are exported, {n_groups} are needed")
    if opened.handles[0].decode(errors="replace") != host_name():
        raise TransportClosed("the other engine is on another machine")
    pools = []
    for raw in opened.handles[1:]:
        handle, size = raw[:_HANDLE_BYTES], int.from_bytes(raw[_HANDLE_BYTES:], "little")
        pools.append((open_handle(handle), size))
    return pools
