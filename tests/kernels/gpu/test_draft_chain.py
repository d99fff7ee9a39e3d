"""The launches around a draft head's layer against plain PyTorch."""

import pytest
import torch

from emberline.kernels import draft_chain as reference
from emberline.kernels.decode_inputs import MAX_DRAFTS, PADDING, SlotState
from emberline.kernels.draft_chain import NOT_KNOWN, CarriedStates, ChainInputs
from emberline.kernels.sampling import SamplerRow

triton = pytest.importorskip("triton")
from emberline.kernels.gpu import draft_chain as kernels  # noqa: E402
from emberline.kernels.gpu.sampler_table import SamplerTable  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_SLOTS, WIDTH, HIDDEN, VOCAB = 6, 8, 20, 300


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def carried_states(positions):
    torch.manual_seed(1)
    return [CarriedStates(torch.randn(N_SLOTS, HIDDEN).to(DEVICE), ints(positions)) for _ in range(2)]


def both_carried(positions):
    one, _ = carried_states(positions)
    return one, CarriedStates(one.hidden.clone(), one.positions.clone())


def assert_same(one, other):
    assert torch.equal(one.hidden, other.hidden)
    assert torch.equal(one.positions, other.positions)


@pytest.mark.parametrize("drafts", [False, True])
def test_the_state_before_each_token(drafts):
    """A row behind its carried state, one whose state is not known, one of padding, and one without tokens."""
    starts = [0, 3, 6, 8, 8, 11, 11] if drafts else [0, 4, 5, 5, 8]
    n = starts[-1]
    positions = ints([10, 11, 12, 0, 1, 2, 0, 1, 7, 8, 9] if drafts else [10, 11, 12, 13, 0, 7, 8, 9])
    slots = [0, 0, PADDING, 2, 2, 2, PADDING, -1, 1, 1, PADDING] if drafts else [0, 2, 4, 1]
    hidden = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    kept = both_carried([9, 3, -2, 5, 0, NOT_KNOWN])
    outs = [torch.full((n, HIDDEN), 7.0, device=DEVICE) for _ in range(2)]
    for module, carried, out in zip((reference, kernels), kept, outs):
        module.carry(hidden, ints(starts), ints(slots), positions, carried, out, drafts)
    assert torch.equal(*outs)
    assert_same(*kept)
    assert torch.equal(outs[0][1], hidden[0])
    if not drafts:
        assert torch.equal(kept[0].hidden[1], hidden[7])
    else:
        n_accepted = ints([1, 0, 2, 0, 0, 0])
        for module, carried in zip((reference, kernels), kept):
            module.keep_accepted(hidden, ints(starts), ints(slots), positions, n_accepted, carried)
        assert_same(*kept)
        assert torch.equal(kept[0].hidden[0], hidden[1])
        assert kept[0].positions.tolist()[:3] == [11, 7, 2]


def test_a_chain():
    """Positions within a block and at its end; a slot whose hidden state is not known; padding."""
    torch.manual_seed(0)
    positions = [5, 16, 31, 100, 1, 64]
    tables = torch.randint(1, 50, (2, N_SLOTS, WIDTH), dtype=torch.int32).to(DEVICE)
    drafts = torch.zeros(N_SLOTS, MAX_DRAFTS, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(N_SLOTS, dtype=torch.int32, device=DEVICE)
    last = torch.arange(40, 40 + N_SLOTS, dtype=torch.int32, device=DEVICE)
    states = [SlotState(last, tables, ints(positions), zeros, drafts.clone()) for _ in range(2)]
    kept = both_carried([4, 15, 20, 99, 0, 63])
    rows = ints([3, 1, PADDING, 0, 2, 5])
    chains = [
        ChainInputs(rows, *(torch.full((6,), -9, dtype=torch.int32, device=DEVICE) for _ in range(3)),
                    torch.full((6, WIDTH), -9, dtype=torch.int32, device=DEVICE), torch.ones(6, HIDDEN, device=DEVICE),
                    torch.full((6, MAX_DRAFTS), -9, dtype=torch.int32, device=DEVICE))
        for _ in range(2)
    ]  # fmt: skip
    for module, state, carried, chain in zip((reference, kernels), states, kept, chains):
        module.begin_chain(state, carried, 1, 200, chain)
    for name in ("token_ids", "positions", "context_lens"):
        assert torch.equal(getattr(chains[0], name), getattr(chains[1], name)), name
    real = [0, 1, 3, 4, 5]
    assert torch.equal(chains[0].hidden[real], chains[1].hidden[real])
    assert not chains[0].hidden[4].any()  # its state is not known
    for row in real:
        n = -(-int(chains[0].positions[row]) // 16) + 1
        assert torch.equal(chains[0].tables[row, :n], chains[1].tables[row, :n])
        assert chains[1].tables[row, n - 1] == 200 + rows[row]
    assert chains[1].tables[2, 0] == 0
    sampled = {
        slot: SamplerRow(temperature=(0.0, 1.0, 0.6)[slot % 3], seed=slot, top_k=slot == 4) for slot in range(N_SLOTS)
    }
    table = SamplerTable(N_SLOTS, VOCAB, DEVICE)
    for slot, row in sampled.items():
        table.set(slot, row)
    table.upload()
    target_ids = torch.randperm(VOCAB)[:100].sort().values.int().to(DEVICE)
    for step in range(3):
        logits = torch.randn(6, 100).to(DEVICE)
        logits[5, 3] = torch.nan if step == 1 else 0.0
        reference.draw_drafts(logits, sampled.get, target_ids, VOCAB, step, states[0].drafts, chains[0])
        kernels.draw_drafts(logits, table, target_ids, step, states[1].drafts, chains[1])
        assert torch.equal(states[0].drafts, states[1].drafts)
        for name in ("token_ids", "positions", "context_lens"):
            assert torch.equal(getattr(chains[0], name)[real], getattr(chains[1], name)[real]), name
        assert torch.equal(chains[0].drafts[real], chains[1].drafts[real])
    assert chains[1].drafts[5, :3].tolist()[1] == -1
    assert (chains[1].drafts[5, 0] >= 0).item()
