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
from emberline.kernels.gpu.launch import cdiv, compiling_only, next_power_of_two
from emberline.kernels.gpu.lossless import DecodingTile, LosslessMatrix, decode_rows
from emberline.kernels.gpu.lossless_gemm import (
    LosslessGemmTile,
    LosslessGemvTile,
    lossless_gemm,
    lossless_gemm_floats,
    lossless_gemv,
)
from emberline.kernels.gpu.lossless_hopper import LosslessHopperTile, lossless_hopper_gemm
from emberline.kernels.gpu.lossless_packing import pack_lossless
from emberline.kernels.gpu.lossless_small_batch import MAX_SMALL_BATCH, lossless_small_batch_gemm

DECODING = ((16, 128, 4), (8, 128, 4))
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
        return [LosslessGemvTile(16, 1), LosslessGemvTile(8, 2, 128)]
    return [LosslessGemvTile(4, 4), LosslessGemvTile(4, 5, 96)]


def gemm_tiles(shape: Shape, m: int) -> list[LosslessGemmTile]:
    if m <= 16:
        t = 8 if m <= 8 else 16
        found = [(64, 64, t, 4, 4), (64, 64, t, 3, 4), (64, 64, t, 2, 4)]
    elif m <= 64:
        found = [(64, 64, 64, 3, 4), (64, 64, 64, 2, 4), (128, 32, 64, 4, 8), (128, 64, 64, 2, 8)]
    else:
        found = [(128, 32, 128, 3, 8), (128, 64, 128, 2, 8)]
    tiles = [
        LosslessGemmTile(rows, halves, tokens, splits, stages, warps)
        for rows, halves, tokens, stages, warps in found
        for splits in (1, 2, 4, 8)
    ]
    programs = [cdiv(shape.n, tile.rows) * cdiv(m, tile.tokens) * tile.splits for tile in tiles]
    return [
        tile
        for tile, count in zip(tiles, programs, strict=True)
        if tile.splits == 1 or (64 <= count <= 600 and shape.k >= 1024 * tile.splits)
    ]


def hopper_tiles(m: int) -> list[LosslessHopperTile]:
    tokens = max(8, next_power_of_two(m))
    others = {32: [(3, 6), (4, 3)], 64: [(2, 6), (3, 4)], 128: [(2, 3), (3, 2)], 256: [(2, 2)]}
    tiles = [LosslessHopperTile(tokens, *each) for each in others.get(tokens, [(4, 4), (3, 4)])]
    return [*tiles, *(LosslessHopperTile(128, *each) for each in others[128][:1] if tokens > 128)]


class Bench:
    def __init__(self, card: Card, most: int, hopper: bool) -> None:
        self.card, self.hopper = card, hopper
        attention = (AttentionShape(32, 8, 128),)
        sizes = WorkspaceSizes(HIDDEN, 128_256, attention, WIDTH, most, 64, 64, 2, True)
        self.workspace = Workspace(sizes, card.device, card.dtype)
        self.multiply = Matmul(self.workspace, False, True)
        self.norm = torch.rand(HIDDEN, device=card.device) + 0.5
        self.partial = torch.empty(64 << 20, dtype=torch.float32, device=card.device)
        self.made: dict[Shape, tuple[list[Tensor], list[LosslessMatrix]]] = {}

    def weights(self, shape: Shape) -> tuple[list[Tensor], list[LosslessMatrix]]:
        """Enough matrices to come from memory in turn."""
        if shape in self.made:
            return self.made[shape]
        n = shape.n * (1 + shape.gate)
        count = max(2, cdiv(260_000_000, 2 * n * shape.k))
        dense = []
        for _ in range(count):
            weight = self.card.noise(n, shape.k, scale=shape.k**-0.5)
            n_escapes = int(ESCAPES * n * shape.k)
            rows, cols = (torch.randint(0, top, (n_escapes,), device=weight.device) for top in weight.shape)
            weight[rows, cols] *= 2.0**-30
            dense.append(weight)
        self.made[shape] = dense, [pack_lossless(weight) for weight in dense]
        return self.made[shape]

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
                for pdl in (0, 1):
                    runs[f"{each.warps} {each.per_sm} {each.registers} pdl {pdl}"] = (
                        lambda i, tile=each, pdl=pdl: lossless_gemv(
                            x, packed[i % len(packed)], out, tile, norm=norm, eps=EPS, gate=int(shape.gate),
                            add=shape.add, pdl=pdl,
                        )
                    )  # fmt: skip
        else:
            for tile in gemm_tiles(shape, m):
                for apart in (False, True) if shape.gate and m > 8 else (False,):
                    gated, n = shape.gate and not apart, shape.n * (2 if apart else 1)
                    if (tile.splits > 1 or tile.tokens > 128) and gated:
                        continue
                    if lossless_gemm_floats(n, m, tile, gated) <= self.workspace.matmul.numel():
                        name = f"{tile.rows} {tile.halves} {tile.tokens} /{tile.splits} {tile.stages} {tile.warps}"
                        runs[name + " apart" * apart] = lambda i, tile=tile, apart=apart: self._gemm(
                            x, packed[i % len(packed)], out, shape, tile, apart
                        )
        if self.hopper and (m > 1 or not shape.norm):
            for hopper in hopper_tiles(m):
                name = f"hopper {hopper.tokens} {hopper.stages} {hopper.pairs}"
                runs[name] = lambda i, tile=hopper: lossless_hopper_gemm(
                    x, packed[i % len(packed)], out, tile, self.partial, gate=int(shape.gate), add=shape.add, pdl=1
                )
            if m <= MAX_SMALL_BATCH:
                runs["small batch"] = lambda i: lossless_small_batch_gemm(
                    x, packed[i % len(packed)], out, self.partial, gate=int(shape.gate), add=shape.add, pdl=1
                )
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

    def _gemm(
        self, x: Tensor, packed: LosslessMatrix, out: Tensor, shape: Shape, tile: LosslessGemmTile, apart: bool
    ) -> None:
        partial, counters = self.workspace.matmul, self.workspace.counters
        if apart:
            both = self.workspace.take("gate_up", len(x), 2 * shape.n)
            lossless_gemm(x, packed, both, tile, partial, counters, pdl=2)
            gated_activation(both, "silu", out, pdl=True)
            return
        lossless_gemm(x, packed, out, tile, partial, counters, gate=int(shape.gate), add=shape.add, pdl=2)

    def decoding(self, shape: Shape, m: int) -> dict[str, float]:
        """Microseconds to decode a matrix in pieces of several sizes, and for the products of m tokens with them."""
        dense, packed = self.weights(shape)
        n, found = dense[0].shape[0], dict[str, float]()
        x, out = self.card.noise(m, shape.k), self.card.noise(m, n)
        found["bf16"] = time_us(lambda i: torch.mm(x, dense[i % len(dense)].T, out=out), 4)
        for mib in (32, 128, 256):
            rows = (mib << 20) // (2 * shape.k) // 64 * 64
            if mib > 32 and rows >= 4 * n:
                continue
            memory = torch.empty(min(n, rows), shape.k, dtype=self.card.dtype, device=self.card.device)
            for each in DECODING if mib == 32 else DECODING[:1]:
                tile = DecodingTile(*each)

                def decode(i: int, rows: int = rows, tile: DecodingTile = tile, memory: Tensor = memory) -> None:
                    for first in range(0, n, rows):
                        decode_rows(packed[i % len(packed)], memory[: min(rows, n - first)], first=first, tile=tile)

                found[f"decode {mib} {each}"] = round(time_us(decode, 4), 1)

            def both(i: int, rows: int = rows, memory: Tensor = memory) -> None:
                for first in range(0, n, rows):
                    part = memory[: min(rows, n - first)]
                    decode_rows(packed[i % len(packed)], part, first=first)
                    torch.mm(x, part.T, out=out[:, first : first + rows])

            found[f"both {mib}"] = round(time_us(both, 4), 1)
        print(f"{shape.name:9} {m}  " + ", ".join(f"{name}: {us:.1f}" for name, us in found.items()), flush=True)
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


def check_hopper() -> None:
    """The Gluon kernel against products of the decoded matrix, on odd sizes, with escapes and raw rows that matter."""
    for m, n, k, sizes in (
        (2, 320, 256, (8, 4, 4)),
        (8, 320, 1024, (8, 3, 4)),
        (13, 77, 512, (16, 3, 4)),
        (31, 1000, 3072, (32, 3, 6)),
        (61, 40_000, 2048, (64, 3, 4)),
        (128, 6144, 4096, (128, 2, 3)),
        (250, 640, 4096, (256, 2, 2)),
        (300, 640, 1024, (128, 2, 3)),
    ):
        tile = LosslessHopperTile(*sizes)
        for gate, add in ((0, False), (1, False), (0, True)):
            weight = torch.randn(n * (1 + gate), k, device="cuda").bfloat16() * 0.02
            weight[5, 9], weight[1, 3], weight[n - 1, :3] = 70.0, 1e-20, 3.0
            weight[7], weight[n // 2, ::2] = 0.0, 1e-9
            x, out = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
            want = x.float() @ weight.float().T
            want = torch.nn.functional.silu(want[:, :n]) * want[:, n:] if gate else want + out * add
            packed, before = pack_lossless(weight), out.clone()
            for is_small in (False, True) if m <= MAX_SMALL_BATCH else (False,):
                out.copy_(before)
                partial = torch.full((16 << 20,), torch.nan, device="cuda")
                if is_small:
                    lossless_small_batch_gemm(x, packed, out, partial, gate=gate, add=add, pdl=1)
                else:
                    lossless_hopper_gemm(x, packed, out, tile, partial, gate=gate, add=add, pdl=1)
                off = float((out.float() - want).norm() / want.norm())
                kernel = "small batch" if is_small else str(tile)
                print(f"hopper {m} {n} {k} gate {gate} add {add} {kernel}: off by {off:.1e}", flush=True)
                if not off < 1e-2:
                    raise AssertionError("the product is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--hopper", action="store_true", help="time the kernels for Hopper too")
    parser.add_argument("--check-hopper", action="store_true", help="only check them")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.check_hopper:
        check_hopper()
        return
    check_bits("cuda")
    card = Card.measured()
    print(f"copy {card.bytes_s / 1e12:.2f} TB/s, matmul {card.flop_s / 1e12:.0f} TFLOP/s")
    bench, figures = Bench(card, 8192, args.hopper), dict[str, Any]()
    for m in args.batches:
        totals = [0.0, 0.0]
        for shape in SHAPES:
            if m > 64 and shape.name == "head":
                continue
            figures[f"{shape.name} {m}"] = found = bench.tune(shape, m)
            if shape.name != "head":
                totals[0] += found["bf16"]
                totals[1] += min((us for us in found["tiles"].values() if us == us), default=float("nan"))
        print(
            f"layer     {m:4}  bf16 {totals[0]:7.1f}  best {totals[1]:7.1f} ({totals[0] / totals[1]:.2f}x)", flush=True
        )
    for shape in SHAPES[:4]:
        for m in (256, 8192):
            figures[f"{shape.name} decoding {m}"] = bench.decoding(shape, m)
    figures["median bf16"] = statistics.median(f["bf16"] for f in figures.values() if "tiles" in f)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
