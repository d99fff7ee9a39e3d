"""Collectives by NCCL, where every rank has a GPU of its own: torch's process group without its process-wide state.

The group's calls are ordered by the current stream and are captured into CUDA graphs.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from emberline.kernels.collectives import CollectiveError
from emberline.kernels.gpu.launch import is_compiling

_dist: Any = torch.distributed  # its process groups have no types


class NcclCollectives:
    """Rank `rank` of `size` on `device`; all ranks meet in `store` under one name."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        torch.cuda.set_device(device)
        try:
            self._group = _dist.ProcessGroupNCCL(_dist.PrefixStore(name, store), rank, size, options)
            self.all_reduce(torch.zeros(1, device=device))  # opens the connections, which a graph cannot
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise CollectiveError(f"NCCL: rank {rank} of {size}: {error}") from None

    def all_reduce(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(self.size, *x.shape) if out is None else out
        self._group._allgather_base(out, x).wait()
        return out

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        self._group.alltoall_base(out, x, [], []).wait()
        return out

    def send(self, x: Tensor, to: int) -> None:
        if not is_compiling():
            self._group.send([x], to, 0).wait()

    def recv(self, x: Tensor, source: int) -> None:
        if not is_compiling():
            self._group.recv([x], source, 0).wait()
