"""Grouped GEMM and the combination of pairs, against the experts in plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, DenseExperts, GroupedTile, combine_pairs, grouped_gemm
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation, permutation_ints, route_tokens
from emberline.kernels.moe import Routing, TorchExperts, route, run_experts
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, noise

TILE = GroupedTile(32, 32, 2, 4)


def permutation(tokens: int, experts: int, routing: Routing, block: int, valid: torch.Tensor | None) -> Permutation:
    logits = noise(tokens, experts, seed=7).float()
    n_local = experts + routing.n_shared
    memory = torch.empty(permutation_ints(tokens, routing.slots, n_local), dtype=torch.int32, device=DEVICE)
    to = make_permutation(memory, tokens, routing.slots, n_local, block)
    counts = torch.zeros(n_local + 1, dtype=torch.int32, device=DEVICE)
    route_tokens(logits, routing, to, counts, valid=valid)
    return to


def run(
    x: torch.Tensor, to: Permutation, gate_up: DenseExperts, down: DenseExperts, activation: str, on_input: bool
) -> torch.Tensor:
    pairs, (_, hidden, width) = to.tokens * to.slots, down.shape
    activated = torch.full((pairs, width), torch.nan, dtype=DTYPE, device=DEVICE)
    results = torch.full((pairs, hidden), torch.nan, dtype=DTYPE, device=DEVICE)
    grouped_gemm(x, gate_up, activated, to, TILE, gate=EXPERT_GATES.index(activation), weight=2 * on_input)
    grouped_gemm(activated, down, results, to, TILE, weight=int(not on_input))
    residual = noise(len(x), hidden, seed=11)
    out = residual.clone()
    combine_pairs(results, to, out)
    return out.double() - residual.double()


@pytest.mark.parametrize(
    ("tokens", "routing", "activation", "bias", "on_input", "block"),
    [
        (5, Routing(2), "silu", False, False, 16),
        (20, Routing(3, "sigmoid", n_shared=1, scale=2.0), "silu", False, False, 16),
        (7, Routing(1, "sigmoid", normalize=False), "silu", False, True, 16),
        (6, Routing(2), "swiglu_clamped", True, False, 16),
        (40, Routing(2), "gelu_tanh", False, False, 32),
    ],
)
def test_experts(tokens: int, routing: Routing, activation: str, bias: bool, on_input: bool, block: int) -> None:
    experts, hidden, width = 6, 40, 48
    n_local = experts + routing.n_shared
    valid = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    valid[-2:] = 0
    x = noise(tokens, hidden, seed=1)
    x[-1] = torch.nan  # padding touches no expert
    to = permutation(tokens, experts, routing, block, valid)
    parts = [noise(n_local, 2 * width, hidden, seed=2, scale=0.2), noise(n_local, hidden, width, seed=3, scale=0.2)]
    biases = [noise(n_local, 2 * width, seed=4), noise(n_local, hidden, seed=5)] if bias else [None, None]
    logits = noise(tokens, experts, seed=7).float()
    ids, weights = route(logits, routing, valid=valid)
    gate_up, down = (
        TorchExperts(w.float(), None if b is None else b.float()) for w, b in zip(parts, biases, strict=True)
    )
    want = run_experts(x.float(), ids, weights, gate_up, down, activation, on_input)
    stacked, second = (DenseExperts(w, b) for w, b in zip(parts, biases, strict=True))
    assert error(run(x, to, stacked, second, activation, on_input), want) < LIMIT

    def alternate(rows: torch.Tensor) -> torch.Tensor:  # gate and up on alternate rows, as GPT-OSS has them
        return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2).contiguous()

    gate_up_bias = None if biases[0] is None else alternate(biases[0])
    alternating = DenseExperts(alternate(parts[0]), gate_up_bias, alternate=True)
    assert error(run(x, to, alternating, second, activation, on_input), want) < LIMIT
