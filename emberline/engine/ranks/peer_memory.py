"""Between the GPUs of one machine: kernels over memory that every rank of a group maps, by CUDA IPC.

They run inside CUDA graphs, and several ranks may share a GPU. Where each rank has a GPU of its own, NCCL takes what is
larger than a message pays, and what stages of a pipeline send.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emberline.engine.ranks.nccl import NcclCollectives
from emberline.kernels.collectives import CollectiveError
from emberline.kernels.gpu import peer_stages
from emberline.kernels.gpu.peer_collectives import (
    EXCHANGE,
    GATHER,
    REDUCE,
    max_elements,
    new_counts,
    peer_collective,
    region_bytes,
)
from emberline.kv.transfer import cuda_ipc
from emberline.kv.transfer.transport import TransportUnavailable

ONE_SHOT_BYTES = {2: 8 << 20, 4: 1 << 20}  # by ranks: up to here one message beats NCCL; with more ranks, less
MANY_RANKS_BYTES = 256 << 10


class PeerMemory:
    """Rank `rank` of `size` on `device`. `large`: for large messages; None: they are divided into several."""

    def __init__(
        self, store: Any, name: str, rank: int, size: int, device: str, large: NcclCollectives | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._large = large
        limits = [most for ranks, most in ONE_SHOT_BYTES.items() if size <= ranks]
        self._one_shot_bytes = limits[0] if limits else MANY_RANKS_BYTES
        self._counts = new_counts(device)
        self._regions = _map_regions(store, name, rank, size, device, region_bytes(size))

    def all_reduce(self, x: Tensor) -> None:
        if self._is_large(x):
            assert self._large is not None
            self._large.all_reduce(x)
            return
        flat = x.view(-1)
        for part in torch.split(flat, max_elements(x, REDUCE, self.size)):
            self._run(part, part, REDUCE)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(self.size, *x.shape) if out is None else out
        if self._is_large(x):
            assert self._large is not None
            return self._large.all_gather(x, out)
        most = max_elements(x, GATHER, self.size)
        if x.numel() <= most:
            self._run(x, out, GATHER)
            return out
        flat, rows = x.view(-1), out.view(self.size, -1)
        for start in range(0, x.numel(), most):
            part = flat[start : start + most]
            gathered = part.new_empty(self.size, len(part))
            self._run(part, gathered, GATHER)
            rows[:, start : start + most] = gathered
        return out

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        most = max_elements(x, EXCHANGE, self.size)
        slices, to = x.view(self.size, -1), out.view(self.size, -1)
        if slices.shape[1] <= most:
            self._run(x, out, EXCHANGE)
            return out
        for start in range(0, slices.shape[1], most):
            part = slices[:, start : start + most].contiguous()
            taken = torch.empty_like(part)
            self._run(part, taken, EXCHANGE)
            to[:, start : start + most] = taken
        return out

    def _is_large(self, x: Tensor) -> bool:
        return self._large is not None and x.numel() * x.element_size() > self._one_shot_bytes

    def _run(self, x: Tensor, out: Tensor, kind: int) -> None:
        peer_collective(x, out, self._regions, self._counts, self.rank, self.size, kind)


class PeerStages:
    """Stage `rank` of `size` on `device`, where stages share a GPU: NCCL does not run twice on one."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: str) -> None:
        self.rank, self.size = rank, size
        self._sent, self._received = peer_stages.new_counts(device), peer_stages.new_counts(device)
        self._regions = _map_regions(store, name, rank, size, device, peer_stages.region_bytes())

    def send(self, x: Tensor, to: int) -> None:
        assert to == self.rank + 1
        peer_stages.send(x, self._regions, self._sent, self.rank)

    def recv(self, x: Tensor, source: int) -> None:
        assert source == self.rank - 1
        peer_stages.recv(x, self._regions, self._received, self.rank)


def _map_regions(store: Any, name: str, rank: int, size: int, device: str, n_bytes: int) -> Tensor:
    """int64 [size], addresses of all ranks' regions. Returns when every rank's is zeroed and mapped everywhere."""
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the driver's context
            own = cuda_ipc.allocate(n_bytes)
            torch.as_tensor(cuda_ipc.DeviceSpan(own, n_bytes), device=device).zero_()
            torch.cuda.synchronize()
            store.set(f"{name}/region/{rank}", cuda_ipc.export(own))
            addresses = [
                own if each == rank else cuda_ipc.open_handle(store.get(f"{name}/region/{each}"))
                for each in range(size)
            ]
    except TransportUnavailable as error:
        raise CollectiveError(f"rank {rank} of {size} cannot map the memory of another rank: {error}") from None
    store.set(f"{name}/mapped/{rank}", b"1")
    for each in range(size):
        store.get(f"{name}/mapped/{each}")
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def has_own_device(store: Any, rank: int, ranks: Sequence[int], device: str) -> bool:
    """True if no two ranks share a GPU. Every rank tells the others which GPU it has."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    uuids = [bytes(store.get(f"gpu/{each}")) for each in ranks]
    return len(set(uuids)) == len(uuids)
