"""Collectives of one rank: a group of one, and one of several alone."""

import pytest
import torch

from emberline.kernels.collectives import CollectiveError, Loopback, NoCollectives


def test_a_rank_alone_takes_its_part_for_everyones() -> None:
    alone = Loopback(2, 4)
    x = torch.tensor([1.0, 2.0])
    alone.all_reduce(x)
    assert x.tolist() == [1.0, 2.0]
    assert alone.all_gather(x).tolist() == [[1.0, 2.0]] * 4
    assert alone.all_gather(x, torch.empty(4, 2)).tolist() == [[1.0, 2.0]] * 4
    assert alone.exchange(torch.arange(4)).tolist() == [0, 1, 2, 3]
    alone.send(x, 3)
    alone.recv(x, 1)
    assert x.tolist() == [0.0, 0.0]


def test_a_group_of_one() -> None:
    one = NoCollectives()
    assert (one.rank, one.size) == (0, 1)
    assert one.all_gather(torch.ones(2)).shape == (1, 2)
    with pytest.raises(CollectiveError, match="nobody"):
        one.send(torch.ones(1), 1)
