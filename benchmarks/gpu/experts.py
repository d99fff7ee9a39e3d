"""Time a layer's experts at the shapes of published models, tokens routed evenly: `python -m benchmarks.gpu.experts`.

The floor is the bytes of the experts that the tokens touch, or the operations, at the rates measured on this card. The
block and tiles are those that the engine uses. Prints a table and, with --out, JSON.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernels import Card, time_us
from emberline.kernels.gpu.backend.workspace import result_columns
from emberline.kernels.gpu.dequantize import pack_nibbles, pack_scales
from emberline.kernels.gpu.expert_matrix import ExpertMatrix, divide_codes, divide_words, empty_packed
from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, block_tokens, combine_pairs, grouped_gemm, grouped_tile
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation, permutation_ints, route_tokens
from emberline.kernels.routing import Routing


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    width: int
    kind: str  # of expert_matrix.FORMATS
    activation: str = "silu"
    scoring: str = "sigmoid"


MODELS = {
    "kimi-k2.5": Shape(384, 8, 7168, 2048, "int4"),
    "glm-4.7-flash": Shape(64, 4, 2048, 1536, "dense"),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, "dense", scoring="softmax"),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "mxfp4", "swiglu_clamped", "softmax"),
    "llama-4-scout": Shape(16, 1, 5120, 8192, "dense"),
}
ROWS = (1, 8, 32, 64, 256, 2048, 8192)


def random_experts(shape: Shape, n: int, k: int, card: Card) -> ExpertMatrix:
    if shape.kind == "dense":
        return ExpertMatrix("dense", k, card.noise(shape.experts, n, k, scale=k**-0.5))
    matrix = empty_packed(shape.kind, shape.experts, n, k, 32, None, card.device)
    scales = torch.full((1, n, k // 32), 120, dtype=torch.uint8, device=card.device)
    if shape.kind == "int4":
        scales = torch.rand(1, n, k // 32, device=card.device).bfloat16() * 0.3 * k**-0.5
    assert matrix.scale is not None
    matrix.scale[:] = divide_words(pack_scales(scales, shape.kind, 32))
    for codes in matrix.weight:
        raw = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8, device=card.device)
        codes.copy_(divide_codes(pack_nibbles(raw, shape.kind))[0])
    return matrix


def measure(shape: Shape, rows: int, card: Card, gate_up: ExpertMatrix, down: ExpertMatrix) -> dict[str, float]:
    """Microseconds of the parts and of the whole, over several routings where experts would stay in the L2 cache."""
    routing = Routing(shape.top_k, shape.scoring)
    n_sets = 4 if rows <= 64 else 1
    logits = [torch.rand(rows, shape.experts, device=card.device) for _ in range(n_sets)]
    x, residual = card.noise(rows, shape.hidden), card.noise(rows, shape.hidden)
    pairs, block = rows * shape.top_k, block_tokens(shape.kind, rows, shape.top_k, shape.experts)
    activated = card.noise(pairs, shape.width)
    columns = result_columns(pairs, shape.hidden, x.element_size())
    results = torch.empty(pairs, columns, dtype=card.dtype, device=card.device)
    counts = torch.zeros(shape.experts + 1, dtype=torch.int32, device=card.device)
    permutations: list[Permutation] = []
    for _ in range(n_sets):
        memory = torch.empty(permutation_ints(rows, shape.top_k, shape.experts), dtype=torch.int32, device=card.device)
        permutations.append(make_permutation(memory, rows, shape.top_k, shape.experts, block))

    def route(i: int) -> None:
        route_tokens(logits[i % n_sets], routing, permutations[i % n_sets], counts)

    def first(i: int) -> None:
        tile = grouped_tile(shape.kind, block, True, permutations[0].max_blocks * shape.width)
        gate = EXPERT_GATES.index(shape.activation)
        grouped_gemm(x, gate_up, activated, permutations[i % n_sets], tile, gate=gate)

    def second(i: int) -> None:
        to = permutations[i % n_sets]
        tile = grouped_tile(shape.kind, block, False, to.max_blocks * columns)
        for start in range(0, shape.hidden, columns):
            part: Tensor = residual[:, start : start + columns]
            out = results.view(-1)[: pairs * part.shape[1]].view(pairs, -1)
            grouped_gemm(activated, down, out, to, tile, weight=1, first_row=start)
            combine_pairs(out, to, part)

    def whole(i: int) -> None:
        route(i)
        first(i)
        second(i)

    for i in range(n_sets):
        whole(i)
    touched = sum(len(set(to.ids.flatten().tolist())) for to in permutations) / n_sets
    tensors = [t for matrix in (gate_up, down) for t in (matrix.weight, matrix.scale) if t is not None]
    n_bytes = touched * sum(t.nbytes for t in tensors) / shape.experts
    flop = 6 * pairs * shape.hidden * shape.width
    parts: dict[str, Callable[[int], None]] = {"route": route, "gate_up": first, "down": second, "whole": whole}
    found = {name: time_us(run, max(n_sets, 2)) for name, run in parts.items()}
    floor = max(n_bytes / card.bytes_s, flop / card.flop_s) * 1e6
    more = {"tb_s": n_bytes / found["whole"] / 1e6, "tflop_s": flop / found["whole"] / 1e6}
    return {"touched": touched, "floor": floor, **found, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    card, figures = Card.measured(), dict[str, Any]()
    print(f"{'model':14} {'rows':>5} touched    floor    whole   of it: route, gate and up, down    TB/s  TFLOP/s")
    for name in args.models:
        shape = MODELS[name]
        gate_up = random_experts(shape, 2 * shape.width, shape.hidden, card)
        down = random_experts(shape, shape.hidden, shape.width, card)
        for rows in args.rows:
            found = figures[f"{name} {rows}"] = measure(shape, rows, card, gate_up, down)
            print(
                f"{name:14} {rows:5} {found['touched']:7.1f} {found['floor']:8.1f} {found['whole']:8.1f}"
                f" {found['route']:10.1f} {found['gate_up']:10.1f} {found['down']:10.1f}"
                f" {found['tb_s']:10.2f} {found['tflop_s']:8.0f}",
                flush=True,
            )
        del gate_up, down
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
