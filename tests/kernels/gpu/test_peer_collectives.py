"""The kernel of peer-mapped collectives, one rank at a time: its peers' parts and flags are put there by the test."""

import pytest
import torch

from emberline.kernels.gpu.launch import INTERPRETED, sm_count
from emberline.kernels.gpu.peer_collectives import (
    BLOCK,
    EXCHANGE,
    GATHER,
    MAX_BYTES,
    MAX_PROGRAMS,
    REDUCE,
    new_counts,
    peer_collective,
    program_count,
    region_bytes,
)

DEVICE = "cpu" if INTERPRETED else "cuda"


class Machine:
    """All ranks' regions. `message` does what every rank but one would have done by now."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = [torch.zeros(region_bytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        self.addresses = torch.tensor([each.data_ptr() for each in self.memory], device=DEVICE)
        self.counts = [new_counts(DEVICE) for _ in range(size)]
        self.n_messages = 0

    def flags(self, rank: int) -> torch.Tensor:
        return self.memory[rank][: 8 * self.size * MAX_PROGRAMS].view(torch.int64).view(self.size, MAX_PROGRAMS)

    def run(self, kind: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self.n_messages += 1
        data_at = 8 * self.size * MAX_PROGRAMS + self.n_messages % 2 * MAX_BYTES
        for rank, part in enumerate(parts):
            as_bytes = part.flatten().view(torch.uint8)
            self.memory[rank][data_at : data_at + len(as_bytes)] = as_bytes
            for peer in range(self.size):
                self.flags(peer)[rank] = self.n_messages
        results = []
        for rank, part in enumerate(parts):
            self.memory[rank][data_at : data_at + BLOCK].zero_()  # its own part is for the kernel to write
            for peer in range(self.size):
                self.flags(peer)[rank] = 0
            out = part.clone() if kind == REDUCE else torch.empty(
                part.shape if kind == EXCHANGE else (self.size, *part.shape), dtype=part.dtype, device=DEVICE
            )  # fmt: skip
            given = out if kind == REDUCE else part
            self.flags(rank)[rank] = 0
            peer_collective(given, out, self.addresses, self.counts[rank], rank, self.size, kind)
            n_programs = program_count(part.numel() // (self.size if kind == EXCHANGE else 1), self.size)
            assert all((self.flags(peer)[rank, :n_programs] == self.n_messages).all() for peer in range(self.size))
            assert self.counts[rank].tolist() == [self.n_messages, 0]
            results.append(out)
        return results


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_messages_of_every_kind_follow_each_other(dtype: torch.dtype) -> None:
    size, generator = 3, torch.Generator().manual_seed(0)
    machine = Machine(size)
    few = 4 * sm_count() // size
    for shape in ((1,), (5, 33), (2, BLOCK + 7), (few + 1, BLOCK)):
        parts = [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(size)]
        total = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
        for result in machine.run(REDUCE, [part.clone() for part in parts]):
            assert torch.equal(result, total)
        for result in machine.run(GATHER, parts):
            assert torch.equal(result, torch.stack(parts))
        slices = [torch.randn(size, *shape, generator=generator).to(dtype).to(DEVICE) for _ in range(size)]
        for rank, result in enumerate(machine.run(EXCHANGE, slices)):
            assert torch.equal(result, torch.stack([each[rank] for each in slices]))
