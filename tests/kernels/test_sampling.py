"""CPU sampling: C against NumPy, and both against the definition of the parameters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kernels import sampling
from emberline.kernels.sampling import INVALID, SamplerRow, choose_reference, sample
from tests.examples import n_examples


def logits(seed: int, vocab: int = 1000, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * spread).astype(np.float32)


def sample_one(row: SamplerRow, values: np.ndarray) -> int:
    return sample(torch.from_numpy(values.copy())[None], [row])[0].token_id


rows = st.builds(
    SamplerRow,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 500, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10**6),
)


@settings(max_examples=n_examples(200), deadline=None)
@given(row=rows, seed=st.integers(0, 1000), vocab=st.sampled_from([5, 16, 1003]), spread=st.sampled_from([0.1, 3.0]))
def test_c_matches_numpy(row: SamplerRow, seed: int, vocab: int, spread: float) -> None:
    assert sampling._native() is not None
    values = logits(seed, vocab, spread)
    assert sample_one(row, values) == choose_reference(values, row)


def test_frequencies_match_probabilities() -> None:
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    n = 20_000
    table = torch.from_numpy(np.tile(values, (n, 1)))
    sampled = [s.token_id for s in sample(table, [SamplerRow(seed=1, position=i) for i in range(n)])]
    np.testing.assert_allclose(np.bincount(sampled, minlength=4) / n, [0.5, 0.3, 0.15, 0.05], atol=0.01)


def test_noise_is_finite() -> None:
    row = SamplerRow(seed=5241)  # its token 3470 gets the one of 2^24 numbers that would round to 1
    assert np.isfinite(sampling._noise(row.seed, row.position, np.array([3470])))
    values = logits(0, 4500)
    values[3470] = -60.0
    assert sample_one(row, values) == choose_reference(values, row) != 3470


def test_a_row_does_not_depend_on_the_batch() -> None:
    batch = [SamplerRow(seed=5, position=i, top_p=0.9) for i in range(9)]
    table = np.stack([logits(i) for i in range(9)])
    together = [s.token_id for s in sample(torch.from_numpy(table.copy()), batch)]
    assert together == [sample_one(row, values) for row, values in zip(batch, table, strict=True)]


def test_filters() -> None:
    values = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))

    def support(**params: float) -> set[int]:
        return {sample_one(SamplerRow(seed=s, **params), values) for s in range(300)}

    assert support() == {0, 1, 2, 3}
    assert support(top_k=2) == {0, 1}
    assert support(top_p=0.5) == {0, 1}
    assert support(top_p=0.001) == {0}
    assert support(min_p=0.4) == {0, 1, 2}
    assert support(top_k=3, top_p=0.7) == {0, 1}  # of the three kept, the first two have 7/9


def test_penalties_bias_and_bans() -> None:
    values = np.array([5.0, 4.9, 4.8, -1.0], np.float32)
    greedy = dict(temperature=0.0)
    seen = np.array([0], np.uint32)
    assert sample_one(SamplerRow(**greedy), values) == 0
    assert sample_one(SamplerRow(**greedy, repetition_penalty=1.5, prompt_ids=seen), values) == 1
    assert (
        sample_one(SamplerRow(**greedy, presence_penalty=0.5, prompt_ids=seen), values) == 0
    )  # counts only the output
    assert sample_one(SamplerRow(**greedy, presence_penalty=0.5, output_ids=seen), values) == 1
    twice = np.array([0, 0, 1], np.uint32)
    assert sample_one(SamplerRow(**greedy, frequency_penalty=0.15, output_ids=twice), values) == 2
    assert sample_one(SamplerRow(**greedy, logit_bias={3: 100.0}), values) == 3
    assert sample_one(SamplerRow(**greedy, banned=(0, 1)), values) == 2


def test_logprobs_are_before_bias() -> None:
    values = logits(3)
    row = SamplerRow(temperature=0.0, logprobs=4, logit_bias={7: 100.0})
    got = sample(torch.from_numpy(values.copy())[None], [row])[0]
    want = torch.from_numpy(values).log_softmax(0)
    assert got.token_id == 7
    assert got.logprob == pytest.approx(float(want[7]), abs=1e-5)
    assert [i for i, _ in got.top] == want.topk(4).indices.tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 17, 999])
def test_nan_and_infinite_logits_give_no_token(poison: float, where: int) -> None:
    bad = logits(1)
    bad[where] = poison
    table = torch.from_numpy(np.stack([logits(0), bad]))
    good, invalid = sample(table, [SamplerRow(), SamplerRow()])
    assert good.token_id >= 0
    assert invalid.token_id == INVALID
    assert choose_reference(bad, SamplerRow()) == INVALID


# --- masks ------------------------------------------------------------------------------------------------------------


def bits_of(allowed: np.ndarray, words: int) -> np.ndarray:
    """A mask of `words` words, which may be fewer or more than the vocabulary needs."""
    wide = np.zeros(words * 32, np.uint8)
    wide[: min(len(allowed), words * 32)] = allowed[: words * 32]
    return np.packbits(wide, bitorder="little").view(np.uint32)


@settings(max_examples=n_examples(60))
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 31, 32, 33, 500, 4099]),
    st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    st.integers(-1, 1),
    st.sampled_from([0.0, 1.0]),
)
def test_c_mask_matches_numpy(seed: int, vocab: int, share: float, more_words: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocab).astype(np.float32)
    words = max(1, -(-vocab // 32) + more_words)
    bits = bits_of(rng.random(vocab) < share, words)
    row = SamplerRow(temperature=temperature, seed=seed, allowed=bits, top_p=0.9 if seed % 2 else 1.0)
    [sampled] = sample(torch.from_numpy(logits.copy())[None], [row])
    expected = logits.copy()
    sampling.apply_mask(expected, bits)
    assert sampled.token_id == choose_reference(expected, row)
    if sampled.token_id != INVALID:
        assert bits[sampled.token_id // 32] >> (sampled.token_id % 32) & 1


def test_logprobs_are_before_the_mask() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    row = SamplerRow(temperature=0.0, logprobs=2, allowed=np.array([0b0100], np.uint32))
    [sampled] = sample(logits.clone(), [row])
    assert sampled.token_id == 2
    assert sampled.logprob == pytest.approx(float(logits[0].log_softmax(0)[2]))
    assert [token_id for token_id, _ in sampled.top] == [0, 1]


def test_a_mask_applies_to_its_row_only() -> None:
    logits = torch.tensor([[5.0, 1.0], [5.0, 1.0]])
    rows = [SamplerRow(temperature=0.0), SamplerRow(temperature=0.0, allowed=np.array([0b10], np.uint32))]
    assert [sampled.token_id for sampled in sample(logits, rows)] == [0, 1]


def test_an_empty_mask_gives_no_token() -> None:
    row = SamplerRow(allowed=np.zeros(1, np.uint32))
    assert sample(torch.zeros(1, 8), [row])[0].token_id == INVALID
