"""Collectives over gloo. Its groups are objects without process-wide state, so threads can be ranks, too."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from emberline.engine.ranks.collectives import open_collectives
from emberline.engine.ranks.gloo import LOOPBACK
from emberline.kernels.collectives import CollectiveError, NoCollectives, ParallelGroups
from emberline.protocol.parallel_layout import Layout

T = TypeVar("T")


def run_ranks(layout: Layout, run: Callable[[int, ParallelGroups], T], timeout_s: float = 60.0) -> list[T]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(layout.n_ranks) as pool:
        address = f"file:{Path(folder) / 'store'}"
        opened: list[ParallelGroups] = []  # until all have ended: a rank that leaves breaks the others' connections

        def rank(number: int) -> T:
            groups = open_collectives(address, layout, number, "cpu", LOOPBACK, timeout_s)
            opened.append(groups)
            return run(number, groups)

        return [each.result() for each in [pool.submit(rank, number) for number in range(layout.n_ranks)]]


def test_every_collective() -> None:
    def run(rank: int, groups: ParallelGroups) -> None:
        tp = groups.tp
        assert (tp.rank, tp.size) == (rank, 3)
        x = torch.tensor([[1.0 + rank, 10.0]])
        assert tp.all_gather(x).tolist() == [[[1.0, 10.0]], [[2.0, 10.0]], [[3.0, 10.0]]]
        out = torch.empty(3, 1, 2)
        assert tp.all_gather(x, out) is out
        tp.all_reduce(x)
        assert x.tolist() == [[6.0, 30.0]]
        assert tp.exchange(torch.arange(3) + 10 * rank).tolist() == [rank, 10 + rank, 20 + rank]
        if rank == 0:
            sent = torch.tensor([7.0])
            tp.send(sent, 1)
            sent.zero_()  # the next step overwrites what was sent
        if rank == 1:
            received = torch.empty(1)
            tp.recv(received, 0)
            assert received.item() == 7.0
        assert isinstance(groups.pp, NoCollectives)

    run_ranks(Layout(tp=3), run)


def test_groups_of_a_layout() -> None:
    def run(rank: int, groups: ParallelGroups) -> list[list[int]]:
        own = torch.tensor([rank])
        return [group.all_gather(own).flatten().tolist() for group in groups]

    found = run_ranks(Layout(tp=4, pp=2, dcp=2), run)
    assert found[1] == [[0, 1, 2, 3], [0, 1], [1, 5]]
    assert found[6] == [[4, 5, 6, 7], [6, 7], [2, 6]]


def test_sums_do_not_depend_on_the_rest_of_the_message() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(4, 64, 33, generator=generator)

    def run(rank: int, groups: ParallelGroups) -> tuple[torch.Tensor, torch.Tensor]:
        everything, row = parts[rank].clone(), parts[rank, 5:6].clone()
        groups.tp.all_reduce(everything)
        groups.tp.all_reduce(row)
        return everything, row

    results = run_ranks(Layout(tp=4), run)
    assert all(torch.equal(everything[5], row[0]) for everything, row in results)
    assert all(torch.equal(everything, results[0][0]) for everything, _ in results)


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    def run(rank: int, groups: ParallelGroups) -> None:
        if rank == 0:
            with pytest.raises(CollectiveError, match="rank 0 of 2"):
                groups.tp.all_reduce(torch.ones(1))

    run_ranks(Layout(tp=2), run, timeout_s=0.3)


def test_ranks_have_longer_to_meet_than_for_a_collective() -> None:
    assert run_ranks(Layout(tp=4), lambda rank, groups: groups.tp.size, timeout_s=0.001) == [4, 4, 4, 4]
