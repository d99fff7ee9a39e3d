"""Grouped GEMM and the combination of pairs, against the experts in plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.dequantize import pack_nibbles, pack_scales
from emberline.kernels.gpu.expert_matrix import FP8_BLOCK, ExpertMatrix, packed_experts
from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, GroupedTile, combine_pairs, grouped_gemm
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation, permutation_ints, route_tokens
from emberline.kernels.moe import TorchExperts, route, run_experts
from emberline.kernels.routing import Routing
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, noise

TILE = GroupedTile(64, 64, 2, 4)


def permutation(tokens: int, experts: int, routing: Routing, block: int, valid: torch.Tensor | None) -> Permutation:
    logits = noise(tokens, experts, seed=7).float()
    n_local = experts + routing.n_shared
    memory = torch.empty(permutation_ints(tokens, routing.slots, n_local), dtype=torch.int32, device=DEVICE)
    to = make_permutation(memory, tokens, routing.slots, n_local, block)
    counts = torch.zeros(n_local + 1, dtype=torch.int32, device=DEVICE)
    route_tokens(logits, routing, to, counts, valid=valid)
    return to


def run(
    x: torch.Tensor, to: Permutation, gate_up: ExpertMatrix, down: ExpertMatrix, activation: str, on_input: bool,
    tile: GroupedTile = TILE,
) -> torch.Tensor:  # fmt: skip
    pairs, (_, hidden, width) = to.tokens * to.slots, down.shape
    activated = torch.full((pairs, width), torch.nan, dtype=DTYPE, device=DEVICE)
    grouped_gemm(x, gate_up, activated, to, tile, gate=EXPERT_GATES.index(activation), weight=2 * on_input)
    residual = noise(len(x), hidden, seed=11)
    out = residual.clone()
    for first, last in ((0, 64), (64, hidden)):  # of the columns, a part at a time
        results = torch.full((pairs, last - first), torch.nan, dtype=DTYPE, device=DEVICE)
        grouped_gemm(activated, down, results, to, tile, weight=int(not on_input), first_row=first)
        combine_pairs(results, to, out[:, first:last])
    return out.double() - residual.double()


@pytest.mark.parametrize(
    ("tokens", "routing", "activation", "bias", "on_input", "block"),
    [
        (5, Routing(2), "silu", False, False, 16),
        (10, Routing(3, "sigmoid", n_shared=1, scale=2.0), "silu", False, False, 16),
        (7, Routing(1, "sigmoid", normalize=False), "silu", False, True, 16),
        (6, Routing(2), "swiglu_clamped", True, False, 16),
        (25, Routing(1), "gelu_tanh", False, False, 8),
    ],
)
def test_experts(tokens: int, routing: Routing, activation: str, bias: bool, on_input: bool, block: int) -> None:
    experts, hidden, width = 4, 72, 80
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
    stacked, second = (ExpertMatrix("dense", w.shape[2], w, bias=b) for w, b in zip(parts, biases, strict=True))
    assert error(run(x, to, stacked, second, activation, on_input), want) < LIMIT


def quantized(kind: str, experts: int, n: int, k: int, seed: int) -> ExpertMatrix:
    generator = torch.Generator().manual_seed(seed)

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)

    def scales(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=generator) * 0.05 + 0.01).to(DEVICE)

    if kind.startswith("int4"):
        group = int(kind.removeprefix("int4-"))
        words = pack_scales(scales(experts, n, k // group).bfloat16(), "int4", group)
        return packed_experts("int4", k, pack_nibbles(bytes_of(experts, n, k // 2), "int4"), words, group)
    if kind == "mxfp4":
        words = pack_scales((bytes_of(experts, n, k // 32) % 4 + 121).to(torch.uint8), kind, 32)
        codes = pack_nibbles(bytes_of(experts, n, k // 2), kind)
        return packed_experts(kind, k, codes, words, 32)
    codes = bytes_of(experts, n, k)
    codes = torch.where(codes & 127 == 127, 0, codes)  # not NaN
    if kind == "fp8":
        return ExpertMatrix(kind, k, codes, scales(experts, n) * 0.01)
    return ExpertMatrix(kind, k, codes, scales(experts, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)) * 0.01)


# Scales multiply accumulators, those of codes or of codes plus 136, or weights.
@pytest.mark.parametrize(("block", "rows"), [(16, 64), (16, 128), (32, 64)])
@pytest.mark.parametrize("kind", ["int4-32", "int4-128", "mxfp4", "fp8", "fp8_blocks"])
def test_quantized_experts(kind: str, block: int, rows: int) -> None:
    tokens, experts, routing = 5, 3, Routing(2, "sigmoid", scale=2.0)
    hidden, width = (160, 96) if kind == "mxfp4" else (256, 128)  # MXFP4: rows that end within a tile, as GPT-OSS has
    gate_up = quantized(kind, experts, 2 * width, hidden, 1)
    down = quantized(kind, experts, hidden, width, 2)
    x = noise(tokens, hidden, seed=1)
    to = permutation(tokens, experts, routing, block, None)
    ids, weights = route(noise(tokens, experts, seed=7).float(), routing)
    want = run_experts(x.float(), ids, weights, TorchExperts(gate_up.dense()), TorchExperts(down.dense()), "silu")
    assert error(run(x, to, gate_up, down, "silu", False, GroupedTile(rows, 64, 2, 4)), want) < LIMIT
