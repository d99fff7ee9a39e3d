"""Time the products of a Llama-3.1-8B layer in every weight format: `python -m benchmarks.gpu.quantized`.

Query, key and value, output, gate and up, and down projections with their norms, gates and residuals, through the
engine's own choice of kernels. Three layers in turn, so that weights come from memory. Prints a table and, with --out,
JSON.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernels import Card, time_us
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.dequantize import pack_nibbles, pack_scales
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import Fusion, Matrix
from emberline.kernels.gpu.formats.registry import workspace_needs
from emberline.kernels.gpu.fp8_gemm import FP8Matrix
from emberline.kernels.gpu.packed_gemm import PackedMatrix
from emberline.kernels.gpu.quantized_gemm import QuantizedMatrix

HIDDEN, WIDTH, QKV = 4096, 14336, 6144
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)


def dense(n: int, k: int, card: Card) -> Matrix:
    return DenseMatrix(card.noise(n, k, scale=k**-0.5))


def packed(kind: str, group: int) -> Callable[[int, int, Card], Matrix]:
    def make(n: int, k: int, card: Card) -> Matrix:
        raw = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=card.device)
        scale = torch.full((n, k // group), 120, dtype=torch.uint8, device=card.device)
        if kind == "int4":
            scale = torch.rand(n, k // group, device=card.device).bfloat16() * 0.3 * k**-0.5
        return PackedMatrix(pack_nibbles(raw, kind), pack_scales(scale, kind, group), kind, group, k)

    return make


def fp8(row_block: int) -> Callable[[int, int, Card], Matrix]:
    def make(n: int, k: int, card: Card) -> Matrix:
        codes = card.noise(n, k, scale=40).to(torch.float8_e4m3fn)
        shape = (n // row_block, k // 128) if row_block else (n,)
        return FP8Matrix(codes, torch.rand(shape, device=card.device) * 0.03 * k**-0.5, row_block)

    return make


def gguf(n: int, k: int, card: Card) -> Matrix:
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=card.device)
    scale = torch.rand(k // 32, n, device=card.device).half() * 0.3 * k**-0.5
    return QuantizedMatrix(codes, torch.stack([scale, scale * -8], -1).view(torch.int32)[..., 0].contiguous(), 4)


FORMATS: dict[str, Callable[[int, int, Card], Matrix]] = {
    "bf16": dense,
    "fp8": fp8(0),
    "fp8 blocks": fp8(128),
    "int4 g32": packed("int4", 32),
    "int4 g128": packed("int4", 128),
    "mxfp4": packed("mxfp4", 32),
    "gguf 4 bits": gguf,
}


def measure(make: Callable[[int, int, Card], Matrix], rows: list[int], card: Card) -> dict[str, float]:
    """Microseconds of a layer's products, by tokens."""
    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    layers = [[make(n, k, card) for n, k in shapes] for _ in range(3)]
    needs = workspace_needs(layers[0])
    attention = (AttentionShape(32, 8, 128),)
    sizes = WorkspaceSizes(HIDDEN, 1000, attention, WIDTH, max(rows), 64, 64, 2, **needs)
    workspace = Workspace(sizes, card.device, card.dtype)
    multiply, norm = Matmul(workspace, False, True), torch.ones(HIDDEN, device=card.device)
    found = {}
    for m in rows:
        x = card.noise(m, HIDDEN)

        def layer(i: int, x: torch.Tensor = x, m: int = m) -> None:
            qkv, output, gate_up, down = layers[i % 3]
            multiply(x, qkv, workspace.take("qkv", m, QKV), Fusion(norm, 1e-5))
            multiply(workspace.take("normed", m, HIDDEN), output, x, Fusion(add=True), after_attention=True)
            for part in torch.split(x, workspace.mlp_tokens(gate_up, m)):
                activated = multiply.gated(part, gate_up, Fusion(norm, 1e-5, gate=1), down)
                multiply(activated, down, part, Fusion(add=True))

        found[str(m)] = time_us(layer, 9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    card, figures = Card.measured(), dict[str, Any]()
    print(f"{'µs a layer':12}" + "".join(f"{m:>8}" for m in args.rows))
    for name in args.formats:
        figures[name] = measure(FORMATS[name], args.rows, card)
        print(f"{name:12}" + "".join(f"{figures[name][str(m)]:8.0f}" for m in args.rows), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
