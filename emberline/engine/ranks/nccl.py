"""NCCL, where every rank has a GPU of its own: torch's process groups without their process-wide state.

From version 2.30 on, NCCL also runs several ranks on one GPU if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it (tests).

A group's calls are ordered by the current stream and are captured into CUDA graphs.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from emberline.kernels.collectives import CollectiveError
from emberline.kernels.gpu.launch import is_compiling

SHARES_SINCE = 23_000  # version 2.30, from which several ranks can share a GPU
_dist: Any = torch.distributed  # its process groups have no types


def shares_gpus() -> bool:
    """True if NCCL runs several ranks on one GPU: it was asked to, and its version can."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= SHARES_SINCE


def nccl_version() -> int:
    """Version of the NCCL that this process has loaded, such as 23102; torch tells the one it was compiled with.
    Returns 0 if NCCL is a part of torch's own library."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


class NcclCollectives:
    """Rank `rank` of `size` on `device`; all ranks meet in `store` under one name."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._group = _open(store, name, rank, size, device, timeout_s)
        with _connecting(rank, size):
            self.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, x: Tensor) -> None:
        if not is_compiling():  # ranks need not compile the same steps
            self._group.allreduce([x]).wait()

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(self.size, *x.shape) if out is None else out
        if not is_compiling():
            self._group._allgather_base(out, x).wait()
        return out

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        if not is_compiling():
            self._group.alltoall_base(out, x, [], []).wait()
        return out


class NcclStages:
    """Stage `rank` of `size` on `device`, with a communicator for each neighbor. A stage that sends waits, on the GPU,
    until the next one receives: it is at most one step ahead."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._group = _open(store, name, rank, size, device, timeout_s)
        x = torch.zeros(1, device=device)
        with _connecting(rank, size):
            if rank:
                self.recv(x, rank - 1)
            if rank < size - 1:
                self.send(x, rank + 1)

    def send(self, x: Tensor, to: int) -> None:
        if not is_compiling():
            self._group.send([x], to, 0).wait()

    def recv(self, x: Tensor, source: int) -> None:
        if not is_compiling():
            self._group.recv([x], source, 0).wait()


def _open(store: Any, name: str, rank: int, size: int, device: str, timeout_s: float) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    torch.cuda.set_device(device)
    with _connecting(rank, size):
        return _dist.ProcessGroupNCCL(_dist.PrefixStore(name, store), rank, size, options)


@contextmanager
def _connecting(rank: int, size: int) -> Iterator[None]:
    """Inside, connections are opened: a CUDA graph cannot."""
    try:
        yield
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise CollectiveError(f"NCCL: rank {rank} of {size}: {error}") from None
