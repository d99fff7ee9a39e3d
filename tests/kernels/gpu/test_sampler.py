"""Sampling on the device against the CPU sampler: the same logits give the same tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from emberline.kernels.gpu.sampler import _sample_ranked, sample_batch
from emberline.kernels.gpu.sampler_table import SampledBatch, SamplerTable, sample_reference
from emberline.kernels.sampling import INVALID, SamplerRow, sample
from tests.kernels.gpu.batches import DEVICE, everyday

VOCAB = 4500  # two chunks, the second partial; more than MAX_RANKED


def logits(rows: int, seed: int = 0, spread: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=(rows, vocab)) * spread
    return torch.from_numpy(values.astype(np.float32)).to(DEVICE)


def both(values: torch.Tensor, rows: list[SamplerRow], steps: int = 1, masks: dict[int, np.ndarray] | None = None):
    """What the kernels and the CPU sampler sample, step after step; slot numbers differ from row numbers."""
    n = len(rows)
    out = []
    for sampler in (sample_batch, sample_reference):
        table = SamplerTable(n + 2, values.shape[1], DEVICE)
        slots = torch.tensor([(r + 1) % (n + 2) for r in range(n)], dtype=torch.int32, device=DEVICE)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            table.set(slot, row)
        sampled = SampledBatch.empty(n, DEVICE)
        for step in range(steps):
            if masks:
                table.allow([slots.tolist()[r] for r in masks], np.stack(list(masks.values())))
            table.upload()
            positions = torch.tensor([r.position + step for r in rows], dtype=torch.int32, device=DEVICE)
            for guided in {row.guided for row in rows}:
                sampler(values, table, slots, positions, sampled, guided)
        out.append(sampled)
    return out


FILTERS = [
    dict(),
    dict(temperature=0.0),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=500, top_p=0.9),
    dict(top_k=100000),
    dict(top_p=0.05),
    dict(top_p=0.95, temperature=0.7),
    dict(min_p=0.05),
    dict(min_p=0.01, top_p=0.9, top_k=50),
    dict(temperature=2.0, top_p=0.5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_filters_over_a_large_vocabulary(spread: float, seed: int) -> None:
    rows = [SamplerRow(**f, seed=2**63 + 7 * i, position=1000 * i) for i, f in enumerate(FILTERS)]
    got, want = both(logits(len(rows), seed, spread, vocab=128_256), rows)
    assert got.token_ids.tolist() == want.token_ids.tolist()


@pytest.mark.parametrize("spread", everyday([0.01, 1.0, 3.0], [0.01, 3.0]))  # flat and peaked
def test_filters_match_the_cpu_sampler(spread: float) -> None:
    rows = [SamplerRow(**f, seed=2**63 + 7 * i, position=1000 * i) for i, f in enumerate(FILTERS)]
    got, want = both(logits(len(rows), 1, spread), rows)
    assert got.token_ids.tolist() == want.token_ids.tolist()


def test_equal_logits_rank_by_id() -> None:
    values = torch.round(logits(4, 2, 0.5) * 4) / 4
    filters = [dict(top_k=9), dict(top_p=0.01), dict(top_k=9, top_p=0.5), dict(top_k=4300, top_p=0.999)]
    rows = [SamplerRow(**f, seed=i) for i, f in enumerate(filters)]
    got, want = both(values, rows, steps=2)
    assert got.token_ids.tolist() == want.token_ids.tolist()


def test_noise_is_finite() -> None:
    values = logits(1, 0)
    values[0, 3470] = -60.0
    got, want = both(values, [SamplerRow(seed=5241)])  # token 3470 has the largest possible noise
    assert got.token_ids.tolist() == want.token_ids.tolist() != [3470]


def test_many_equal_logits_rank_by_id() -> None:
    values = torch.round(logits(4, 2, 0.1))  # nearly all are 0
    filters = [dict(top_k=9), dict(top_k=9, top_p=0.5), dict(top_p=0.3), dict(min_p=0.5, top_p=0.9)]
    got, want = both(values, [SamplerRow(**f, seed=i) for i, f in enumerate(filters)])
    assert got.token_ids.tolist() == want.token_ids.tolist()


def test_penalties_bias_bans_and_masks() -> None:
    values = logits(5, 3)
    top = values.topk(3).indices.tolist()
    mask = np.zeros(VOCAB // 32 + 1, np.uint32)
    mask[[1, 130]] = 0x0F0F0F0F
    seen = np.array(top[0] + [5, 5], np.uint32)
    rows = [
        SamplerRow(temperature=0.0, repetition_penalty=1.5, prompt_ids=seen, output_ids=seen[:2]),
        SamplerRow(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.3, output_ids=np.repeat(seen, 2)),
        SamplerRow(temperature=0.0, logit_bias={17: 50.0, top[2][0]: -9.0}, banned=(17,)),
        SamplerRow(temperature=1.0, seed=3),
        SamplerRow(top_p=0.9, frequency_penalty=1.0, output_ids=seen, seed=4),
    ]
    got, want = both(values, rows, steps=3, masks={3: mask})
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert mask[got.token_ids[3].item() // 32] >> (got.token_ids[3].item() % 32) & 1


def test_logprobs() -> None:
    values = logits(3, 4)
    rows = [SamplerRow(logprobs=0, seed=1), SamplerRow(logprobs=5, temperature=0.0), SamplerRow(logprobs=20, top_k=3)]
    got, want = both(values, rows)
    assert got.token_ids.tolist() == want.token_ids.tolist()
    torch.testing.assert_close(got.logprob, want.logprob, atol=1e-4, rtol=1e-5)
    assert got.top_ids.tolist() == want.top_ids.tolist()
    torch.testing.assert_close(got.top_logprobs, want.top_logprobs, atol=1e-4, rtol=1e-5)


def test_nan_and_infinite_logits_give_no_token() -> None:
    values = logits(5, 5)
    values[0, 4321] = torch.nan
    values[1, 17] = torch.inf
    values[2] = -torch.inf
    rows = [SamplerRow(), SamplerRow(top_p=0.5), SamplerRow(temperature=0.0), SamplerRow(top_k=4), SamplerRow()]
    got, want = both(values, rows)
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.token_ids[:3].tolist() == [INVALID] * 3


def test_padding_is_not_written_and_a_mask_lasts_one_launch() -> None:
    table = SamplerTable(2, VOCAB, DEVICE)
    table.set(0, SamplerRow(temperature=0.0))
    table.allow([0], np.full((1, 1), 1 << 9, np.uint32))
    values, out = logits(2, 6), SampledBatch.empty(2, DEVICE)
    slots = torch.tensor([-1, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.zeros_like(slots)
    out.token_ids.fill_(77)
    table.upload()
    sample_batch(values, table, slots, positions, out)
    assert out.token_ids.tolist() == [77, 9]
    table.upload()
    sample_batch(values, table, slots, positions, out)
    assert out.token_ids.tolist() == [77, values[1].argmax().item()]


def test_slots_with_a_grammar_are_sampled_in_a_launch_of_their_own() -> None:
    table = SamplerTable(2, VOCAB, DEVICE)
    table.set(0, SamplerRow(temperature=0.0, presence_penalty=100.0, prompt_ids=np.empty(0, np.uint32)))
    table.set(1, SamplerRow(temperature=0.0, guided=True))
    values, out = logits(2, 6), SampledBatch.empty(2, DEVICE)
    slots, positions = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32, device=DEVICE)
    out.token_ids.fill_(77)
    table.upload()
    sample_batch(values, table, slots, positions, out)
    best = values.argmax(1).tolist()
    assert out.token_ids.tolist() == [best[0], 77]
    table.allow([1], np.full((1, 1), 1 << 9, np.uint32))
    table.upload()
    sample_batch(values, table, slots, positions, out, guided=True)
    assert out.token_ids.tolist() == [best[0], 9], "the first slot is not sampled again, nor its token counted twice"
    assert table.counts[0].sum().item() == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    values = logits(3, 8, 30.0)
    rows = [SamplerRow(temperature, **filters) for filters in (dict(), dict(top_k=5, top_p=0.9), dict(top_p=0.5))]
    for sampled in both(values, rows):
        assert sampled.token_ids.tolist() == values.argmax(1).tolist()


@triton.jit
def _ranked(values_at, ids_at, n, top_p, state, out, MAX_RANKED: tl.constexpr):
    top_k = tl.load(state + 6)
    chosen = _sample_ranked(values_at, ids_at, n, 0.0, top_k, tl.load(top_p), 0.0, state, tl.load(out), MAX_RANKED)
    tl.store(out, chosen)


def test_a_sample_does_not_depend_on_the_order_of_the_candidates() -> None:
    """Programs list candidates in the order in which they run, and a sum of floats depends on its order."""
    random = np.random.default_rng(3)
    n, top_k = 250, 200
    likelihood = np.sort(random.random(n).astype(np.float32))[::-1].copy()
    likelihood[0] = 1.0
    values, ids = np.log(likelihood), random.permutation(VOCAB)[:n].astype(np.int32)
    mass = np.exp(values).astype(np.float64)
    table, out = SamplerTable(1, VOCAB, DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def choose(top_p: float, order: np.ndarray) -> int:
        listed = (torch.from_numpy(part[order]).to(DEVICE) for part in (values, ids))
        limit = torch.tensor([top_p], device=DEVICE)
        out.fill_(7)  # the position of the token
        _ranked[(1,)](*listed, n, limit, table.state, out, MAX_RANKED=256)
        return out.item()

    for seed in range(4):
        table.set(0, SamplerRow(seed=seed, top_k=top_k))
        table.upload()
        rank = ids.tolist().index(choose(1.0, np.arange(n)))
        borderline = float(np.float32(mass[:rank].sum() / mass[:top_k].sum()))  # it is kept or not by a hair
        assert len({choose(borderline, random.permutation(n)) for _ in range(3)}) == 1


def test_draws_after_drafts_count_them_and_have_masks_of_their_own() -> None:
    """Several rows of a slot, against the CPU sampler with the drafts in its history."""
    drafts = [[7], [9, 11, 4]]
    base = dict(temperature=0.8, top_p=0.9, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3)
    output = np.array([5, 7], np.uint32)
    shared = [SamplerRow(**base, seed=s, prompt_ids=output[:1], output_ids=output, guided=s == 2) for s in (1, 2)]
    values = logits(6)
    masks = np.random.default_rng(3).integers(0, 2**32, (4, -(-VOCAB // 32)), dtype=np.uint32)
    table = SamplerTable(4, VOCAB, DEVICE)
    for slot, row in enumerate(shared):
        table.set(slot, row)
    table.allow([1] * 4, masks)
    table.upload()
    to = dict(dtype=torch.int32, device=DEVICE)
    slots, positions = torch.tensor([0] * 2 + [1] * 4, **to), torch.tensor([20, 21, 30, 31, 32, 33], **to)
    tokens, offsets = torch.tensor([1, *drafts[0], 1, *drafts[1]], **to), torch.tensor([0, 1, 0, 1, 2, 3], **to)
    before, out = table.counts.clone(), SampledBatch.empty(6, DEVICE)
    for guided in (False, True):
        sample_batch(values, table, slots, positions, out, guided, token_ids=tokens, offsets=offsets)
    assert torch.equal(table.counts, before)
    for r in range(6):
        slot, draw = int(slots[r]), int(offsets[r])
        history = np.array([*output, *drafts[slot][:draw]], np.uint32)
        allowed = masks[draw] if slot else None
        row = replace(shared[slot], position=int(positions[r]), output_ids=history, allowed=allowed)
        assert out.token_ids[r].item() == sample(values[r : r + 1].clone(), [row])[0].token_id
