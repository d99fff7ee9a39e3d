"""Losslessly compressed BF16 weights against BF16, by shape and batch: `python -m benchmarks.gpu.lossless`.

First checks on the device that every bit pattern survives. Then times the projections of a Llama-3.1-8B layer and its
head, compressed with every tile config of a list and BF16 with the engine's own choice, weights from memory in both.
Weights are normal, with a share of escapes like that of trained ones. Prints a table and, with --out, JSON.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernels import Card, time_us
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.elementwise import gated_activation
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.launch import cdiv, compiling_only
from emberline.kernels.gpu.lossless import LosslessMatrix, decode_rows, pack_lossless
from emberline.kernels.gpu.lossless_gemm import (
    LosslessGemmTile,
    LosslessGemvTile,
    lossless_gemm,
    lossless_gemm_floats,
    lossless_gemv,
)

HIDDEN, WIDTH = 4096, 14336
ESCAPES = 2e-4  # share of weights, of trained matrices
EPS = 1e-5


class Shape(NamedTuple):
    name: str
    n: int  # output columns
    k: int
    norm: bool
    gate: bool = False
    add: bool = False


SHAPES = (
    Shape("qkv", 6144, HIDDEN, True),
    Shape("output", HIDDEN, HIDDEN, False, add=True),
    Shape("gate, up", WIDTH, HIDDEN, True, gate=True),
    Shape("down", HIDDEN, WIDTH, False, add=True),
    Shape("head", 128_256, HIDDEN, True),
)


def gemv_tiles(shape: Shape) -> list[LosslessGemvTile]:
    if shape.k > 8192:
        found = [(1, 16, 1), (2, 16, 1), (4, 16, 1), (1, 8, 1), (1, 8, 2), (2, 8, 1), (1, 16, 2)]
    elif shape.gate:
        found = [(1, 4, 3), (1, 4, 4), (1, 4, 5), (2, 4, 2), (2, 4, 3), (1, 8, 2), (1, 8, 3), (2, 8, 2), (1, 2, 6)]
    else:
        found = [(1, 4, 4), (1, 4, 6), (2, 4, 3), (2, 4, 4), (2, 4, 5), (4, 4, 2), (4, 4, 3), (2, 8, 2), (4, 8, 2)]
    return [LosslessGemvTile(*each) for each in found]


def gemm_tiles(shape: Shape, m: int) -> list[LosslessGemmTile]:
    if m <= 16:
        t = 8 if m <= 8 else 16
        found = [(64, 64, t, 4, 4), (64, 64, t, 6, 4), (64, 32, t, 8, 4), (128, 64, t, 3, 8), (64, 128, t, 3, 4)]
        if shape.gate:
            found = [(64, 64, t, 3, 4), (64, 64, t, 4, 4), (64, 32, t, 6, 4), (128, 64, t, 2, 8), (128, 32, t, 4, 8)]
    elif m <= 64:
        found = [(64, 64, 64, 3, 4), (64, 32, 64, 5, 4), (128, 32, 64, 4, 8), (128, 64, 64, 2, 8)]
        if shape.gate:
            found = [(64, 32, 64, 4, 4), (128, 32, 64, 3, 8), (64, 64, 64, 2, 4), (128, 64, 64, 2, 8)]
    else:
        found = [
            (128, 32, 256, 2, 8), (128, 16, 256, 4, 8), (128, 32, 128, 3, 8), (64, 32, 256, 2, 4), (128, 16, 128, 5, 8),
        ]  # fmt: skip
    tiles = [
        LosslessGemmTile(rows, halves, tokens, splits, stages, warps)
        for rows, halves, tokens, stages, warps in found
        for splits in (1, 2, 4, 8)
    ]
    programs = [cdiv(shape.n, tile.rows) * cdiv(m, tile.tokens) * tile.splits for tile in tiles]
    return [
        tile
        for tile, count in zip(tiles, programs, strict=True)
        if tile.splits == 1 or (not shape.gate and 64 <= count <= 400 and shape.k >= 1024 * tile.splits)
    ]


class Bench:
    def __init__(self, card: Card, most: int) -> None:
        self.card = card
        attention = (AttentionShape(32, 8, 128),)
        sizes = WorkspaceSizes(HIDDEN, 128_256, attention, WIDTH, most, 64, 64, 2, True)
        self.workspace = Workspace(sizes, card.device, card.dtype)
        self.multiply = Matmul(self.workspace, False, True)
        self.norm = torch.rand(HIDDEN, device=card.device) + 0.5

    def weights(self, shape: Shape) -> tuple[list[Tensor], list[LosslessMatrix]]:
        """Enough matrices to come from memory in turn."""
        n = shape.n * (1 + shape.gate)
        count = max(2, cdiv(260_000_000, 2 * n * shape.k))
        dense = []
        for _ in range(count):
            weight = self.card.noise(n, shape.k, scale=shape.k**-0.5)
            n_escapes = int(ESCAPES * n * shape.k)
            rows, cols = (torch.randint(0, top, (n_escapes,), device=weight.device) for top in weight.shape)
            weight[rows, cols] *= 2.0**-30
            dense.append(weight)
        return dense, [pack_lossless(weight) for weight in dense]

    def tune(self, shape: Shape, m: int) -> dict[str, Any]:
        """Microseconds of BF16 and of every tile config."""
        dense, packed = self.weights(shape)
        x, start = self.card.noise(m, shape.k), self.card.noise(m, shape.n)
        norm = self.norm if shape.norm and m == 1 else None  # else a launch of its own, the same for both
        fusion = Fusion(norm, EPS, int(shape.gate), shape.add)
        want, out = start.clone(), start.clone()
        matrices = [DenseMatrix(weight) for weight in dense]
        self.multiply(x, matrices[0], want, fusion)
        bf16 = time_us(lambda i: self.multiply(x, matrices[i % len(dense)], out, fusion), 12)
        runs: dict[str, Callable[[int], None]] = {}
        if m == 1:
            for each in gemv_tiles(shape):
                runs[f"{each.rows} {each.warps} {each.per_sm}"] = lambda i, tile=each: lossless_gemv(
                    x, packed[i % len(packed)], out, tile, norm=norm, eps=EPS, gate=int(shape.gate), add=shape.add
                )
        else:
            for tile in gemm_tiles(shape, m):
                if lossless_gemm_floats(shape.n, m, tile, shape.gate) <= self.workspace.matmul.numel():
                    name = f"{tile.rows} {tile.halves} {tile.tokens} /{tile.splits} {tile.stages} {tile.warps}"
                    runs[name] = lambda i, tile=tile: self._gemm(x, packed[i % len(packed)], out, shape, tile)
        with compiling_only():
            for run in runs.values():
                run(0)
        found: dict[str, float] = {}
        for name, run in runs.items():
            try:
                out.copy_(start)
                run(0)
                off = float((out.float() - want.float()).norm() / want.float().norm())
                found[name] = round(time_us(run, 12), 2) if off < 1e-2 else float("nan")
                if off >= 1e-2:
                    print(f"    {shape.name} {m}: {name} is off by {off}")
            except Exception as error:  # such as too much shared memory: other tiles may fit
                print(f"    {shape.name} {m}: {name}: {str(error)[:100]}")
        best = sorted((us, name) for name, us in found.items() if us == us)[:4]
        again = [round(time_us(runs[name], 12), 2) for _, name in best[:1]]
        print(
            f"{shape.name:9} {m:4}  bf16 {bf16:7.1f}  best {best[0][0]:7.1f} ({bf16 / best[0][0]:.2f}x, again {again})"
            f"  {'; '.join(f'{name}: {us:.1f}' for us, name in best)}",
            flush=True,
        )
        return {"bf16": bf16, "tiles": found}

    def _gemm(self, x: Tensor, packed: LosslessMatrix, out: Tensor, shape: Shape, tile: LosslessGemmTile) -> None:
        partial, counters = self.workspace.matmul, self.workspace.counters
        if shape.gate and len(x) > 64:
            both = self.workspace.take("gate_up", len(x), 2 * shape.n)
            lossless_gemm(x, packed, both, tile, partial, counters, pdl=2)
            gated_activation(both, "silu", out, pdl=True)
            return
        lossless_gemm(x, packed, out, tile, partial, counters, gate=int(shape.gate), add=shape.add, pdl=2)

    def decoding(self, shape: Shape) -> dict[str, float]:
        """Microseconds to decode a matrix in pieces of 32 MiB, and for the products of 2,048 tokens with them."""
        dense, packed = self.weights(shape)
        n, rows = dense[0].shape[0], (32 << 20) // (2 * shape.k) // 64 * 64
        memory = torch.empty(rows, shape.k, dtype=self.card.dtype, device=self.card.device)
        x = self.card.noise(2048, shape.k)
        out = self.card.noise(2048, n)

        def decode(i: int) -> None:
            for first in range(0, n, rows):
                decode_rows(packed[i % len(packed)], memory[: min(rows, n - first)], first=first)

        def both(i: int) -> None:
            for first in range(0, n, rows):
                part = memory[: min(rows, n - first)]
                decode_rows(packed[i % len(packed)], part, first=first)
                torch.mm(x, part.T, out=out[:, first : first + rows])

        found = {
            "decode": time_us(decode, 4),
            "decode, multiply": time_us(both, 4),
            "bf16": time_us(lambda i: torch.mm(x, dense[i % len(dense)].T, out=out), 4),
        }
        print(f"{shape.name:9} 2048  " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()), flush=True)
        return found


def check_bits(device: str) -> None:
    """Every pattern of 16 bits, and generated weights, packed and decoded by the kernels."""
    patterns = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    normal = torch.randn(3000, 4096, device=device).bfloat16()
    normal[torch.rand_like(normal) < ESCAPES] *= 1e-8
    for weight in (patterns.view(64, 1024), patterns.view(256, 256).T.contiguous(), normal, normal[:77, :700].clone()):
        packed, out = pack_lossless(weight), torch.full_like(weight, torch.nan)
        decode_rows(packed, out)
        for got in (out, packed.dense()):
            if not torch.equal(got.view(torch.int16), weight.view(torch.int16)):
                raise AssertionError(f"a weight of {tuple(weight.shape)} came back with other bits")
    print("bits: equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    check_bits("cuda")
    card = Card.measured()
    print(f"copy {card.bytes_s / 1e12:.2f} TB/s, matmul {card.flop_s / 1e12:.0f} TFLOP/s")
    bench, figures = Bench(card, 2048), dict[str, Any]()
    for m in args.batches:
        totals = [0.0, 0.0]
        for shape in SHAPES:
            if m > 64 and shape.name == "head":
                continue
            figures[f"{shape.name} {m}"] = found = bench.tune(shape, m)
            if shape.name != "head":
                totals[0] += found["bf16"]
                totals[1] += min((us for us in found["tiles"].values() if us == us), default=float("nan"))
            torch.cuda.empty_cache()
        print(
            f"layer     {m:4}  bf16 {totals[0]:7.1f}  best {totals[1]:7.1f} ({totals[0] / totals[1]:.2f}x)", flush=True
        )
    for shape in SHAPES[:4]:
        figures[f"{shape.name} decoding"] = bench.decoding(shape)
    figures["median bf16"] = statistics.median(f["bf16"] for f in figures.values() if "tiles" in f)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
