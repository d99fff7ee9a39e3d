"""The CUDA IPC transport: a device pool is exported as a handle that another process on the same machine opens, on the
same GPU or on one that has peer access to it.

A GPU that is opened need not be visible to the process that opens it: the driver enables peer access, or fails. That it
succeeds does not prove that bytes arrive (IOMMUs and virtual machines have lost them, and drivers have mapped other
memory), so behind the blocks of each pool lie some bytes that a sender reads, and room for some that it writes.

Memory of torch's allocator cannot be exported with expandable segments, so a pool that others write is allocated by
the driver. This module handles pointers only; engine/runners/gpu/transfer.py copies blocks.
"""

import ctypes
import secrets
from collections.abc import Sequence
from typing import Any

from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.transport import TransportUnavailable, host_id

CUDA_IPC = "cuda_ipc"
LINGER_S = 2.0  # copies of a killed process may run until the driver has destroyed its context
PROBE_WORDS = 16  # of 8 bytes: what a sender reads or writes at once; a multiple of 16, as in most blocks
PROBE_ROWS = 128  # the first is read; each sender writes one of the others
PROBE_BYTES = 8 * PROBE_WORDS * PROBE_ROWS
_HANDLE_BYTES = 64
_GPU_BYTES = 40  # of a probe: the text of a UUID
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"no CUDA driver: {error}") from None


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise TransportUnavailable(f"{what}: {(text.value or b'').decode() or code}")


def allocate(n_bytes: int) -> int:
    """A device pointer in the current context. Never freed: a pool lives as long as its process."""
    pointer = ctypes.c_uint64()
    _check(
        _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(n_bytes)), f"{n_bytes} bytes of device memory"
    )
    return pointer.value


def export(pointer: int) -> bytes:
    """The IPC handle of an allocation that begins at `pointer`."""
    handle = _Handle()
    _check(
        _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer)), "this memory cannot be exported"
    )
    return bytes(handle)


def open_handle(raw: bytes) -> int:
    """Map an allocation of another process."""
    if len(raw) != _HANDLE_BYTES:
        raise TransportUnavailable(f"a handle has {_HANDLE_BYTES} bytes, not {len(raw)}")
    pointer = ctypes.c_uint64()
    code = _driver().cuIpcOpenMemHandle_v2(
        ctypes.byref(pointer), _Handle.from_buffer_copy(raw), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
    )
    _check(code, "the memory of the other engine cannot be opened")
    return pointer.value


def close_handle(pointer: int) -> None:
    _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))


class DeviceSpan:
    """Device memory as bytes for other libraries: `__cuda_array_interface__`."""

    def __init__(self, pointer: int, n_bytes: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def new_probe(gpu: str) -> bytes:
    """Random bytes, with the UUID of the GPU that they lie on."""
    name = gpu.encode()[:_GPU_BYTES].ljust(_GPU_BYTES, b"\0")
    return name + secrets.token_bytes(8 * PROBE_WORDS - _GPU_BYTES)


def probed_gpu(probe: bytes) -> str:
    """The UUID in a probe."""
    return probe[:_GPU_BYTES].rstrip(b"\0").decode(errors="replace")


class CudaIpcReceiveTransport:
    """Receives by CUDA IPC. Its handles are the machine, then IPC handle and size of each pool.

    `probe` lies behind the blocks of each pool."""

    name = CUDA_IPC
    linger_s = LINGER_S

    def __init__(self, pools: Sequence[DeviceSpan], sizes: Sequence[int], probe: bytes) -> None:
        self._probe = probe
        self._handles = [export(pool.pointer) + size.to_bytes(8, "little") for pool, size in zip(pools, sizes)]

    def opened(self) -> tuple[TransportOpened, list[int]]:
        return TransportOpened([host_id().encode(), *self._handles], probe=self._probe), []


def opened_pools(opened: TransportOpened, n_groups: int) -> list[tuple[int, int]]:
    """Pointer and size in bytes of each pool of the receiver."""
    if len(opened.handles) != n_groups + 1:
        raise TransportUnavailable(f"{len(opened.handles) - 1} pools are exported, {n_groups} are needed")
    if opened.handles[0].decode(errors="replace") != host_id():
        raise TransportUnavailable("the other engine is on another machine")
    pools: list[tuple[int, int]] = []
    try:
        for raw in opened.handles[1:]:
            if len(raw) != _HANDLE_BYTES + 8:
                raise TransportUnavailable(f"a handle of {len(raw)} bytes, where {_HANDLE_BYTES + 8} were expected")
            handle, size = raw[:_HANDLE_BYTES], int.from_bytes(raw[_HANDLE_BYTES:], "little")
            pools.append((open_handle(handle), size))
    except TransportUnavailable:
        for pointer, _ in pools:
            close_handle(pointer)
        raise
    return pools
