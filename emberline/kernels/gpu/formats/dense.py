"""Dense matrices in the activations' dtype: the format of weights that are stored as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.elementwise import embedding
from emberline.kernels.gpu.formats.matrix_format import Fusion, Launcher, MatrixFormat
from emberline.kernels.gpu.gemm import (
    GemvTile,
    PersistentGemvTile,
    SkinnyGemmTile,
    gemv,
    persistent_gemv,
    skinny_gemm,
    skinny_gemm_floats,
)
from emberline.kernels.gpu.launch import INTERPRETED, cdiv, sm_count

MAX_SKINNY = 64  # tokens; above, cuBLAS
MAX_GATED = 128  # tokens up to which gate and up use the skinny GEMM, whose activation is free
MAX_WHOLE_ROW = 8192  # columns that one program can hold in registers
SMALL_BYTES = 8 << 20  # of a matrix whose product takes as long as its launch


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: Tensor  # [n, k]; gate and up of an MLP are stacked
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


class Dense(MatrixFormat):
    matrix = DenseMatrix
    workspace_needs = frozenset()
    beside_experts = True

    def load(
        self, weights: Sequence[WeightSource], bias: Tensor | None, dtype: torch.dtype, device: str
    ) -> DenseMatrix:
        rows = [weight.shape[0] for weight in weights]
        stacked = torch.empty(sum(rows), weights[0].shape[1], dtype=dtype, device=device)
        for weight, target in zip(weights, torch.split(stacked, rows), strict=True):
            weight.into(target)
        return DenseMatrix(stacked, bias)

    def write_rows(
        self, matrix: DenseMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        if ids is not None:
            self.embed(matrix, ids, factor, out, None)
        else:
            torch.mul(matrix.weight[first : first + len(out)], factor, out=out)

    def embed(self, matrix: DenseMatrix, ids: Tensor, factor: float, out: Tensor, first: int | None) -> None:
        embedding(matrix.weight, ids, factor, out, first)

    def multiply(
        self, on: Launcher, x: Tensor, matrix: DenseMatrix, out: Tensor, fusion: Fusion, after_attention: bool = False
    ) -> None:
        (m, n), k, workspace = out.shape, x.shape[1], on.workspace
        tile = dense_tile(m, n, k, bool(fusion.gate))
        if isinstance(tile, GemvTile | PersistentGemvTile):
            kernel: Any = gemv if isinstance(tile, GemvTile) else persistent_gemv
            kernel(
                x, matrix.weight, out, tile, bias=matrix.bias, norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=on.pdl and (after_attention or matrix.weight.nbytes <= SMALL_BYTES),
            )  # fmt: skip
        elif tile is not None and skinny_gemm_floats(n, m, tile, bool(fusion.gate)) <= workspace.matmul.numel():
            skinny_gemm(
                on.normed(x, fusion), matrix.weight, out, tile, workspace.matmul, workspace.counters,
                bias=matrix.bias, gate=fusion.gate, add=fusion.add, pdl=2 * on.pdl,
            )  # fmt: skip
        else:
            self.unfused(on, x, matrix, out, fusion)

    def product(self, on: Launcher, x: Tensor, matrix: DenseMatrix, out: Tensor, add: bool) -> None:
        on.library(x, matrix.weight, matrix.bias, out, add)


def dense_tile(m: int, n: int, k: int, gated: bool) -> GemvTile | PersistentGemvTile | SkinnyGemmTile | None:
    """Kernel and tile config for m tokens and n output columns. Returns None if cuBLAS is faster."""
    if m == 1:
        return _gemv_tile(n, k, gated)
    if m <= MAX_SKINNY or (m <= MAX_GATED and gated and n >= 8192):
        return _skinny_tile(m, n, k, gated)
    return None


def _gemv_tile(n: int, k: int, gated: bool) -> GemvTile | PersistentGemvTile:
    if INTERPRETED:
        return PersistentGemvTile(32, 1, 1)  # an iteration costs the interpreter the same for any number of rows
    if k <= MAX_WHOLE_ROW:
        if gated:
            return PersistentGemvTile(1, 8, 4)
        if n >= 6144:
            return PersistentGemvTile(2, 8, 4)
        return PersistentGemvTile(4, 8, 2) if n >= 2048 else PersistentGemvTile(1, 4, 4)
    rows = 4
    while rows > 1 and n // rows < 3 * sm_count():
        rows //= 2
    return GemvTile(rows, 512, 4)


def _skinny_tile(m: int, n: int, k: int, gated: bool) -> SkinnyGemmTile:
    if gated:
        if n >= 8192:
            return SkinnyGemmTile(128, 128, 1, 3, 4) if m <= 16 else SkinnyGemmTile(128, 64, 1, 4, 8)
        return SkinnyGemmTile(64, 64, 1, 6, 4)
    tiles = cdiv(n, 64)
    if tiles >= 8 * sm_count():  # an LM head
        return SkinnyGemmTile(128, 128, 1, 3, 8) if m <= 16 else SkinnyGemmTile(128, 64, 1, 5, 4)
    if tiles >= sm_count() // 2 + 8:
        return SkinnyGemmTile(64, 128, 1, 5, 4)
    splits = 2
    while tiles * splits * 2 <= sm_count() and k >= 512 * splits:
        splits *= 2
    if splits == 2 and k % 512 == 0 and m <= 32:
        return SkinnyGemmTile(64, 256, 2, 3, 4, 256)
    return SkinnyGemmTile(64, 128, splits, 5 if splits == 2 else 3, 4)
