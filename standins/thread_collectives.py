"""Ranks that are threads of one process, and the collectives between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from emberline.kernels.collectives import CollectiveError, ParallelGroups

T = TypeVar("T")


@dataclass(slots=True)
class _Meeting:
    """State that the threads of a group share."""

    size: int
    timeout_s: float
    barrier: threading.Barrier
    given: list[Tensor]
    mail: dict[tuple[int, int], "Queue[Tensor]"] = field(default_factory=dict)


class ThreadCollectives:
    """A rank of such a group. One that fails ends the others' waiting."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    @classmethod
    def group(cls, size: int, timeout_s: float = 60.0) -> "list[ThreadCollectives]":
        meeting = _Meeting(size, timeout_s, threading.Barrier(size, timeout=timeout_s), [torch.empty(0)] * size)
        meeting.mail = {(a, b): Queue() for a in range(size) for b in range(size)}
        return [cls(meeting, rank) for rank in range(size)]

    def abort(self) -> None:
        """Let every rank that waits, now or later, fail."""
        self._meeting.barrier.abort()

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._everyone(x)).sum(0))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.stack(self._everyone(x), out=out)

    def exchange(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        assert len(x) == self.size
        return torch.stack([other[self.rank] for other in self._everyone(x)], out=out)

    def send(self, x: Tensor, to: int) -> None:
        self._meeting.mail[self.rank, to].put(x.clone())

    def recv(self, x: Tensor, source: int) -> None:
        waited_s = 0.0
        while waited_s < self._meeting.timeout_s and not self._meeting.barrier.broken:
            try:
                x.copy_(self._meeting.mail[source, self.rank].get(timeout=0.1))
                return
            except Empty:
                waited_s += 0.1
        raise CollectiveError(f"rank {source} sent nothing to rank {self.rank}")

    def _everyone(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        try:
            meeting.barrier.wait()  # the last collective's tensors are read
            meeting.given[self.rank] = x.clone()
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveError(f"a rank of the group failed while rank {self.rank} waited") from None
        given = list(meeting.given)
        shapes = {(tuple(each.shape), each.dtype) for each in given}
        assert len(shapes) == 1, f"ranks gave different tensors: {shapes}"
        return given


def thread_groups(tp: int = 1, pp: int = 1, dcp: int = 1) -> list[ParallelGroups]:
    """The groups of every rank of a layout, rank `stage * tp + tp_rank`."""
    assert tp % dcp == 0
    tps = [ThreadCollectives.group(tp) for _ in range(pp)]
    dcps = [[ThreadCollectives.group(dcp) for _ in range(tp // dcp)] for _ in range(pp)]
    pps = [ThreadCollectives.group(pp) for _ in range(tp)]
    return [
        ParallelGroups(tps[stage][rank], dcps[stage][rank // dcp][rank % dcp], pps[rank][stage])
        for stage in range(pp)
        for rank in range(tp)
    ]


def run_ranks(groups: list[ParallelGroups], run: Callable[[ParallelGroups], T]) -> list[T]:
    """Call `run` for every rank in a thread of its own; the results by rank. If one fails, all end and it is raised."""
    failures: list[BaseException] = []

    def guarded(own: ParallelGroups) -> T:
        try:
            return run(own)
        except BaseException as error:
            failures.append(error)
            for group in {id(each): each for other in groups for each in other}.values():
                if isinstance(group, ThreadCollectives):
                    group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        results = [pool.submit(guarded, own) for own in groups]
    if failures:
        raise failures[0]
    return [result.result() for result in results]
