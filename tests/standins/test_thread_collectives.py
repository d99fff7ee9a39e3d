"""Ranks that are threads: every collective, the groups of a layout, and the end when one fails."""

import pytest
import torch

from emberline.kernels.collectives import CollectiveError, Collectives, ParallelGroups
from standins.thread_collectives import ThreadCollectives, run_ranks, thread_groups


def test_threads_sum_gather_and_exchange() -> None:
    def run(groups: ParallelGroups) -> tuple[torch.Tensor, ...]:
        own: Collectives = groups.tp
        x = torch.full((2, 3), float(own.rank + 1))
        own.all_reduce(x)
        gathered = own.all_gather(torch.tensor([own.rank, 10 * own.rank]), torch.empty(3, 2, dtype=torch.int64))
        exchanged = own.exchange(torch.tensor([[100 * own.rank + to] for to in range(3)]))
        return x, gathered, exchanged

    for rank, (x, gathered, exchanged) in enumerate(run_ranks(thread_groups(tp=3), run)):
        assert torch.equal(x, torch.full((2, 3), 6.0))
        assert gathered.tolist() == [[0, 0], [1, 10], [2, 20]]
        assert exchanged.flatten().tolist() == [rank, 100 + rank, 200 + rank]


def test_groups_of_a_layout() -> None:
    groups = thread_groups(tp=4, pp=2, dcp=2)
    assert [(g.tp.rank, g.dcp.rank, g.pp.rank) for g in groups] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 0), (3, 1, 0), (0, 0, 1), (1, 1, 1), (2, 0, 1), (3, 1, 1),
    ]  # fmt: skip
    assert {(g.tp.size, g.dcp.size, g.pp.size) for g in groups} == {(4, 2, 2)}

    def run(own: ParallelGroups) -> list[int]:
        x, y = torch.tensor([own.tp.rank]), torch.tensor([own.tp.rank + 10 * own.pp.rank])
        own.dcp.all_reduce(x)
        if own.pp.rank == 0:
            own.pp.send(y, 1)
        else:
            own.pp.recv(y, 0)
        return [int(x), int(y)]

    assert run_ranks(groups, run) == [[1, 0], [1, 1], [5, 2], [5, 3]] * 2


def test_a_thread_that_fails_ends_the_group() -> None:
    def run(own: ParallelGroups) -> None:
        if own.tp.rank == 1:
            raise ValueError("broken")
        with pytest.raises(CollectiveError):
            own.tp.all_reduce(torch.zeros(1))
        with pytest.raises(CollectiveError):
            own.tp.recv(torch.zeros(1), 1)

    with pytest.raises(ValueError, match="broken"):
        run_ranks(thread_groups(tp=2), run)


def test_a_group_of_one_thread() -> None:
    assert ThreadCollectives.group(1)[0].all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]]
