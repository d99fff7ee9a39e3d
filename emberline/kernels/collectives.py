"""Collectives of a rank group during a step: sums, gathers and exchanges of tensors, and the messages between pipeline
stages.

All ranks of a group call the same collectives in the same order, with tensors of the same shape and dtype. A transport
is one class of these protocols: the two here are of one rank alone, those of real groups are in `engine.ranks`.

Every rank gets bit-identical results, so that ranks which decide by them (sampling, routing) decide alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CollectiveError(Exception):
    """A rank of the group is gone or does not answer. The group cannot go on."""


class Collectives(Protocol):
    """Rank `rank` of `size`. Tensors are contiguous; on a GPU everything is ordered by the current stream."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by its sum over all ranks."""

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[size, *x.shape]: the x of every rank. In `out` where given, which a CUDA graph needs."""
        ...

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [size, ...], slice r is for rank r. The result's slice r came from rank r: an all-to-all."""
        ...


class Stages(Protocol):
    """Stage `rank` of `size`. Each sends to the next only, contiguous tensors, which that receives in the same order;
    on a GPU both are ordered by the current stream, which may wait for the other stage."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, x: Tensor, to: int) -> None:
        """To stage `to`, which calls `recv`. What is queued behind it may overwrite x."""

    def recv(self, x: Tensor, source: int) -> None:
        """Replace x by what stage `source` sends."""


class ParallelGroups(NamedTuple):
    """The groups that one rank of a layout belongs to."""

    tp: Collectives  # of a stage: the ranks that divide heads, widths and experts
    dcp: Collectives  # ranks of the TP group, neighbors, that divide the tokens of the KV cache
    pp: Stages  # ranks of the same number in each stage: rank s is stage s


class NoCollectives:
    """A group of one. Models never call it: they ask for `size` first."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x[None] if out is None else out.copy_(x[None])

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x if out is None else out.copy_(x)

    def send(self, x: Tensor, to: int) -> None:
        raise CollectiveError("a group of one has nobody to send to")

    def recv(self, x: Tensor, source: int) -> None:
        raise CollectiveError("a group of one has nobody to receive from")


ALONE = ParallelGroups(NoCollectives(), NoCollectives(), NoCollectives())


class Loopback:
    """Rank `rank` of `size`, alone: it takes its own part for everyone's. Memory and times of the rank are true (but
    for the communication, which takes none), tokens are not."""

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        everyone = x.expand(self.size, *x.shape)
        return everyone.contiguous() if out is None else out.copy_(everyone)

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x.clone() if out is None else out.copy_(x)

    def send(self, x: Tensor, to: int) -> None:
        pass

    def recv(self, x: Tensor, source: int) -> None:
        x.zero_()
