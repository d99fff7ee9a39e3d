"""Collectives over gloo, for ranks on CPUs: torch.distributed without its process-wide state.

Sums are taken in the order of the ranks, so a row's result does not depend on what else is in the message. Tensors of
a GPU go through host memory: that is for checks on a host whose GPUs cannot reach each other, and is not graph-safe.
"""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from emberline.kernels.collectives import CollectiveError

LOOPBACK = "127.0.0.1"

_dist: Any = torch.distributed  # its process groups and stores have no types
Store = Any  # torch.distributed.Store


class GlooCollectives:
    """Rank `rank` of `size`. All ranks meet in `store` under one name, within `meet_s`; `host` is our address for the
    others. `timeout_s`: of each collective."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, host: str, timeout_s: float, meet_s: float = 120.0
    ) -> None:
        self.rank, self.size = rank, size
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=meet_s)
        try:
            self._group = _dist.ProcessGroupGloo(_dist.PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise CollectiveError(f"rank {rank} of {size} did not meet the others: {error}") from None
        self._group._set_default_timeout(timedelta(seconds=timeout_s))
        self._sending: deque[tuple[Any, Tensor]] = deque()  # gloo reads the tensor until the work is done

    def all_reduce(self, x: Tensor) -> None:
        torch.sum(self._gathered(x), 0, out=x)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        everyone = self._gathered(x)
        return everyone if out is None else out.copy_(everyone)

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        given = x.cpu()
        taken = torch.empty_like(given)
        self._wait(self._group.alltoall_base(taken, given, [], []))
        taken = taken.to(x.device)
        return taken if out is None else out.copy_(taken)

    def send(self, x: Tensor, to: int) -> None:
        while self._sending and self._sending[0][0].is_completed():
            self._wait(self._sending.popleft()[0])
        copy = x.cpu().clone()
        self._sending.append((self._group.send([copy], to, 0), copy))

    def recv(self, x: Tensor, source: int) -> None:
        host = torch.empty_like(x, device="cpu")
        self._wait(self._group.recv([host], source, 0))
        x.copy_(host)

    def _gathered(self, x: Tensor) -> Tensor:  # [size, *x.shape]
        given = x.cpu().contiguous()
        everyone = given.new_empty(self.size, *given.shape)
        self._wait(self._group.allgather([list(everyone.unbind(0))], [given]))
        return everyone.to(x.device)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank} of {self.size}: {error}") from None


def open_store(address: str, n_ranks: int, is_leader: bool, timeout_s: float) -> Store:
    """Open the store through which gloo's ranks find each other: file:PATH in a private folder, or tcp:HOST:PORT of
    rank 0."""
    kind, _, rest = address.partition(":")
    limit = timedelta(seconds=timeout_s)
    if kind == "file":
        store: Store = _dist.FileStore(rest, n_ranks)
        store.set_timeout(limit)
        return store
    host, _, port = rest.rpartition(":")
    return _dist.TCPStore(host, int(port), n_ranks, is_leader, timeout=limit, wait_for_workers=False)
