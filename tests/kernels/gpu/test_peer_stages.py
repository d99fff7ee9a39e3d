"""Messages from stage to stage over mapped memory: their bytes, and what the two sides tell each other."""

import pytest
import torch

from emberline.kernels.gpu import peer_stages
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.kernels.gpu.peer_stages import BLOCK, N_PROGRAMS, new_counts, recv, region_bytes, send

DEVICE = "cpu" if INTERPRETED else "cuda"


class Machine:
    """All stages' regions, in one process."""

    def __init__(self, size: int) -> None:
        self.memory = [torch.zeros(region_bytes(), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        self.regions = torch.tensor([each.data_ptr() for each in self.memory], device=DEVICE)
        self.sent = [new_counts(DEVICE) for _ in range(size)]
        self.received = [new_counts(DEVICE) for _ in range(size)]

    def send(self, x: torch.Tensor, rank: int) -> None:
        send(x, self.regions, self.sent[rank], rank)

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        x = torch.empty_like(like)
        recv(x, self.regions, self.received[rank], rank)
        return x

    def flags(self, rank: int) -> list[int]:
        """The last message that has arrived, and the last that the next stage has read."""
        found: list[int] = self.memory[rank][:16].view(torch.int64).tolist()
        return found


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def test_a_stage_runs_two_messages_ahead() -> None:
    machine = Machine(2)
    shapes = [(1, 8), (3, BLOCK), (N_PROGRAMS + 2, BLOCK), (5, 33), (2, 7)]  # other programs for each
    xs = [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]
    machine.send(xs[0], 0)
    for n, x in enumerate(xs, 1):
        if n < len(xs):
            machine.send(xs[n], 0)  # the stage behind it has not read the one before yet
        assert machine.flags(1)[0] == min(n + 1, len(xs))
        assert machine.flags(0)[1] == n - 1
        assert torch.equal(machine.recv(x, 1), x)
        assert machine.flags(0)[1] == n
    assert machine.sent[0].tolist() == machine.received[1].tolist() == [len(xs), 0]


def test_a_middle_stage_receives_and_sends() -> None:
    machine = Machine(3)
    for n in range(3):
        x = numbers(2, 40, seed=n)
        machine.send(x, 0)
        machine.send(machine.recv(x, 1) + 1, 1)
        assert torch.equal(machine.recv(x, 2), x + 1)
    assert [machine.flags(rank) for rank in range(3)] == [[0, 3], [3, 3], [3, 0]]


def test_a_large_tensor_takes_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_stages, "MAX_BYTES", 4096)
    machine, x = Machine(2), numbers(3, 1200)
    machine.send(x, 0)
    assert machine.flags(1)[0] == 2
    assert torch.equal(machine.recv(x, 1), x)
    assert machine.flags(0)[1] == 2
