"""Preparing decode inputs against plain PyTorch: random block tables, packets and sampled tokens."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from emberline.kernels import decode_inputs as reference
from emberline.kernels.decode_inputs import (
    DRAFT_HEADER_ROWS,
    HEADER_ROWS,
    LAST_DRAFTED,
    LAST_SAMPLED,
    MAX_DRAFTS,
    NO_BLOCK,
    PADDING,
    DecodeInputs,
    SlotState,
)

triton = pytest.importorskip("triton")
from emberline.kernels.gpu import decode_inputs as kernels  # noqa: E402
from emberline.kernels.gpu.sampler_table import SamplerTable  # noqa: E402
from emberline.kernels.sampling import SamplerRow  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_SLOTS = 7
EMPTY = np.empty(0, np.uint32)


def ints(low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.int32)


def packet(groups, rows, width, lengths=()):
    """lengths: tokens of each row, of a step that verifies drafts."""
    header = DRAFT_HEADER_ROWS if lengths else HEADER_ROWS
    made = torch.zeros(header + 2 * groups, rows, dtype=torch.int32)
    made[0] = torch.randperm(N_SLOTS)[:rows]
    made[1] = ints(0, width * 16 - max(lengths, default=1) + 1, rows)
    made[2] = torch.where(torch.rand(rows) < 0.5, LAST_SAMPLED, ints(0, 50, rows))
    if lengths:
        made[3] = torch.tensor([int(ints(min(1, max(n - 1, 0)), max(n, 1), 1)) for n in lengths])
        made[4] = torch.tensor(list(accumulate(lengths[:-1], initial=0)))
    made[header : header + groups] = torch.where(torch.rand(groups, rows) < 0.5, NO_BLOCK, ints(1, 999, groups, rows))
    made[header + groups :] = torch.where(torch.rand(groups, rows) < 0.5, 0, made[1] // 16)
    if rows > 2:
        made[1, -1] = PADDING
    return made


def buffers(groups, width, n=8):
    of_tokens = [ints(-9, -8, n).to(DEVICE) for _ in range(7)]
    return DecodeInputs(*of_tokens[:4], ints(-9, -8, groups, n, width).to(DEVICE), *of_tokens[4:])


def states_of(groups, width, made):
    """Two copies of one; the device is up to two tokens behind what packets say."""
    positions = torch.zeros(N_SLOTS, dtype=torch.int32)
    positions[made[0].long()] = (made[1] - ints(0, 3, made.shape[1])).clamp(min=0)
    drafts = ints(0, 60, N_SLOTS, MAX_DRAFTS)
    one = SlotState(ints(0, 60, N_SLOTS), ints(1, 999, groups, N_SLOTS, width), positions, ints(0, 9, N_SLOTS), drafts)
    tensors = one.last_tokens, one.tables, one.positions, one.n_accepted, one.drafts
    return [SlotState(*(each.clone().to(DEVICE) for each in tensors)) for _ in range(2)]


def assert_equal_states(one, other):
    for name in ("last_tokens", "tables", "positions", "n_accepted"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("width", [1, 5, 130, 2100])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_prepare_and_keep(width, groups, rows):
    torch.manual_seed(width + 10 * groups + rows)
    made, tokens = packet(groups, rows, width), ints(-1, 50, rows).to(DEVICE)
    states, made = states_of(groups, width, made), made.to(DEVICE)
    results = [buffers(groups, width), buffers(groups, width)]
    for module, state, to in zip((reference, kernels), states, results):
        module.prepare(made, state, to)
        module.keep(tokens, to.slots[:rows], to.context_lens[:rows], state)
    for name in ("slots", "token_ids", "positions", "context_lens"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name)), name
    for row, context in enumerate(results[0].context_lens[:rows].tolist()):
        n = max(1, -(-context // 16))  # of a padding row the first entry: its position is 0
        assert torch.equal(results[0].tables[:, row, :n], results[1].tables[:, row, :n])
    assert_equal_states(*states)


@pytest.mark.parametrize(
    ("width", "groups", "lengths"),
    [
        (2, 1, (9, 9, 2)),
        (5, 2, (5, 1, 16, 3, 1, 9, 0)),
        (130, 1, (16,) * 7),
        (3, 1, (1, 7, 4, 16)),
    ],
)
def test_prepare_and_accept_drafts(width, groups, lengths):
    """Rows of different lengths; the last one, of padding, may have no token."""
    rows = len(lengths)
    torch.manual_seed(width + rows + 2)
    made = packet(groups, rows, width, lengths)
    states, made = states_of(groups, width, made), made.to(DEVICE)
    n, starts = sum(lengths), [*accumulate(lengths, initial=0)]
    drafts = torch.where(torch.rand(n) < 0.4, LAST_DRAFTED, ints(0, 4, n)).to(torch.int32)
    for first, length in zip(starts, lengths):
        drafts[first + 1 + MAX_DRAFTS : first + length] = 2  # a slot keeps no more
    drafts = drafts.to(DEVICE)
    results = [buffers(groups, width, n), buffers(groups, width, n)]
    table = SamplerTable(N_SLOTS, 60, DEVICE)
    for slot in range(N_SLOTS):
        table.set(slot, SamplerRow(guided=slot % 3 == 0, presence_penalty=float(slot % 2), prompt_ids=EMPTY))
    table.upload()
    for module, state, to in zip((reference, kernels), states, results):
        module.prepare(made, state, to, drafts)
    assert results[0].starts[: rows + 1].tolist() == starts
    for name in ("slots", "token_ids", "positions", "context_lens", "draw_positions", "starts", "offsets"):
        n_entries = {"context_lens": rows, "starts": rows + 1}.get(name, n)
        assert torch.equal(getattr(results[0], name)[:n_entries], getattr(results[1], name)[:n_entries]), name
    for row in range(rows):
        last = int(results[0].positions[starts[row + 1] - 1]) // 16 + 1 if lengths[row] else 1
        assert torch.equal(results[0].tables[:, row, :last], results[1].tables[:, row, :last])
    draws = torch.where(
        torch.rand(n) < 0.8, torch.cat([results[0].token_ids[1:n].cpu(), ints(0, 4, 1)]), ints(-1, 4, n)
    )
    draws = draws.to(torch.int32).to(DEVICE)
    drawn_again = draws.clone()
    counted = reference.accept(draws, results[0], states[0], rows)
    for guided in (False, True):
        kernels.accept(drawn_again, results[1], table, states[1], rows, guided)
    assert_equal_states(*states)
    assert torch.equal(draws, drawn_again)
    assert all(draws[starts[row] + len(run) : starts[row + 1]].eq(-1).all() for row, run in enumerate(counted) if run)
    assert max(map(len, counted)) > 1
    for row, drawn in enumerate(counted):
        slot = int(results[0].slots[starts[row]]) if lengths[row] else PADDING
        if slot >= 0:
            want = torch.bincount(torch.tensor([t for t in drawn if t >= 0], dtype=torch.int64), minlength=60)
            assert torch.equal(table.counts[slot].cpu().long(), want * (slot % 2))
