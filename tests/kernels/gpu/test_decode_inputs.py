"""Preparing decode inputs against plain PyTorch: random block tables, packets and sampled tokens."""

import pytest
import torch

from emberline.kernels import decode_inputs as reference
from emberline.kernels.decode_inputs import LAST_SAMPLED, NO_BLOCK, PADDING, DecodeInputs, SlotState

triton = pytest.importorskip("triton")
from emberline.kernels.gpu import decode_inputs as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_SLOTS = 7


def ints(low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.int32)


def packet(groups, rows, width):
    made = torch.zeros(3 + 2 * groups, rows, dtype=torch.int32)
    made[0] = torch.randperm(N_SLOTS)[:rows]
    made[1] = ints(0, width * 16, rows)
    made[2] = torch.where(torch.rand(rows) < 0.5, LAST_SAMPLED, ints(0, 50, rows))
    made[3 : 3 + groups] = torch.where(torch.rand(groups, rows) < 0.5, NO_BLOCK, ints(1, 999, groups, rows))
    made[3 + groups :] = torch.where(torch.rand(groups, rows) < 0.5, 0, made[1] // 16)
    if rows > 2:
        made[1, -1] = PADDING
    return made


def buffers(groups, width):
    return DecodeInputs(*(ints(-9, -8, 8).to(DEVICE) for _ in range(4)), ints(-9, -8, groups, 8, width).to(DEVICE))


@pytest.mark.parametrize("width", [1, 5, 130, 2100])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_prepare_and_keep(width, groups, rows):
    torch.manual_seed(width + 10 * groups + rows)
    states = [SlotState(ints(0, 99, N_SLOTS).to(DEVICE), ints(1, 999, groups, N_SLOTS, width).to(DEVICE))]
    states.append(SlotState(states[0].last_tokens.clone(), states[0].tables.clone()))
    made, tokens = packet(groups, rows, width).to(DEVICE), ints(-1, 50, rows).to(DEVICE)
    results = [buffers(groups, width), buffers(groups, width)]
    for module, state, to in zip((reference, kernels), states, results):
        module.prepare(made, state, to)
        module.keep(tokens, to.slots[:rows], state)
    for name in ("slots", "token_ids", "positions", "context_lens"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name)), name
    for row, context in enumerate(results[0].context_lens[:rows].tolist()):
        n = max(1, -(-context // 16))  # of a padding row the first entry: its position is 0
        assert torch.equal(results[0].tables[:, row, :n], results[1].tables[:, row, :n])
    assert torch.equal(states[0].tables, states[1].tables)
    assert torch.equal(states[0].last_tokens, states[1].last_tokens)
