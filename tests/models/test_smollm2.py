"""A real model: the quantized CPU backend against the same weights dequantized to float32."""

import math
from pathlib import Path

import pytest
import torch

from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES, load_model
from emberline.text.text_model import TextModel
from emberline.weights.checkpoint import open_checkpoint
from tests.models.step_inputs import all_logits, pools, step

TEXT = (Path(__file__).parent / "prose.txt").read_text()
PROMPTS = [
    "The first ten numbers are one, two, three, four,",
    "2, 4, 6, 8, 10, 12,",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
]
MARGIN = 0.5  # between the two best logits of the reference: more than the error of 8-bit activations


@pytest.fixture(scope="module")
def both(smollm2: Path) -> tuple[Decoder, Decoder]:
    checkpoint = open_checkpoint(smollm2)
    return load_model(checkpoint), Decoder(checkpoint, TorchBackend(), ARCHITECTURES["llama"])


@pytest.fixture(scope="module")
def tokens(smollm2: Path):
    text = TextModel.load(smollm2)
    return lambda prompt: torch.frombuffer(bytearray(text.encode(prompt, special=False)), dtype=torch.int32).tolist()


def greedy(model: Decoder, ids: list[int], n: int) -> list[int]:
    """Tokens of greedy decoding through the KV cache."""
    table, kv, out = torch.arange(16)[None], pools(model, 16), []
    new, past = ids, 0
    for _ in range(n):
        logits = model.forward(step([(new, past)], table, 1, [len(new) - 1]), kv)[0]
        past += len(new)
        new = [int(logits.argmax())]
        out += new
    return out


def perplexity(model: Decoder, ids: list[int]) -> float:
    logits = all_logits(model, ids)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return math.exp(loss.item())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_match_where_the_margin_is_clear(both, tokens, prompt: str) -> None:
    ours, reference = both
    ids, n = tokens(prompt), 12
    got = greedy(ours, ids, n)
    logits = all_logits(reference, ids + got)[len(ids) - 1 : -1]  # before each of these tokens, in one step
    best = logits.topk(2).values
    clear = next((i for i, margin in enumerate((best[:, 0] - best[:, 1]).tolist()) if margin < MARGIN), n)
    assert got[:clear] == logits.argmax(1).tolist()[:clear]
    assert clear >= 6, "the prompt tests too few tokens"


@pytest.mark.slow
def test_perplexity_within_two_percent(both, tokens) -> None:
    ours, reference = both
    ids = tokens(TEXT)[:768]
    assert len(ids) > 500
    assert perplexity(ours, ids) == pytest.approx(perplexity(reference, ids), rel=0.02)


def test_results_do_not_depend_on_batch_or_chunks(both, tokens) -> None:
    ours, _ = both
    ids, other = tokens(TEXT)[:150], tokens(TEXT)[150:400]
    alone = ours.forward(step([(ids, 0)], torch.arange(32)[None], 1, [149]), pools(ours, 64))
    kv = pools(ours, 64)
    tables = torch.stack([torch.randperm(32), torch.randperm(32) + 32])
    ours.forward(step([(ids[:41], 0), (other[:200], 0)], tables, 1, []), kv)
    ours.forward(step([(ids[41:149], 41), (other[200:203], 200)], tables, 1, []), kv)
    together = ours.forward(step([(ids[149:], 149), (other[203:204], 203)], tables, 1, [0]), kv)
    assert torch.equal(alone, together)
