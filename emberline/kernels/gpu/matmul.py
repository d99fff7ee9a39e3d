"""Every projection: which kernel multiplies, by the number of tokens and the matrix's shape.

The tables were measured on an H200 (docs/design/gpu-kernels.md); nothing is tuned at run time. The norm before, the
gate or the residual behind are folded in where that pays, and are launches of their own where not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu import quantized_gemm as quantised
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.elementwise import gated_activation as apply_gate
from emberline.kernels.gpu.gemm import (
    GemvTile,
    PersistentGemvTile,
    SkinnyGemmTile,
    batch_invariant_matmul,
    gemv,
    persistent_gemv,
    skinny_gemm,
    skinny_gemm_floats,
)
from emberline.kernels.gpu.launch import INTERPRETED, SM_COUNT, cdiv, next_power_of_two
from emberline.kernels.gpu.quantized_gemm import (
    MAX_GEMV_WORDS,
    QuantizedGemmTile,
    QuantizedGemvTile,
    QuantizedMatrix,
    quantized_gemv,
    quantized_skinny_gemm,
)
from emberline.kernels.gpu.workspace import DEQUANTIZED_BYTES, MLP_TOKENS, Workspace

GATES = ("", "silu", "gelu_tanh")
MAX_SKINNY = 64  # tokens; above, cuBLAS
MAX_GATED = 128  # tokens up to which gate and up are still ours: the gate comes for nothing
MAX_WHOLE_ROW = 8192  # columns that one program holds in registers


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: Tensor  # [n, k]; gate and up of an MLP are stacked
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Fusion:
    """out = rms_norm(x) · matrixᵀ + bias, gated, or added to out."""

    norm: Tensor | None = None
    eps: float = 0.0
    gate: int = 0  # index into GATES
    add: bool = False


def dense_tile(m: int, n: int, k: int, gated: bool) -> GemvTile | PersistentGemvTile | SkinnyGemmTile | None:
    """The kernel for m tokens and n output columns; None: cuBLAS."""
    if m == 1:
        return _gemv_tile(n, k, gated)
    if m <= MAX_SKINNY or (m <= MAX_GATED and gated and n >= 8192):
        return _skinny_tile(m, n, k, gated)
    return None


def _gemv_tile(n: int, k: int, gated: bool) -> GemvTile | PersistentGemvTile:
    if INTERPRETED:
        return PersistentGemvTile(32, 1, 1)  # a step costs the interpreter the same, however many rows it takes
    if k <= MAX_WHOLE_ROW:
        if gated:
            return PersistentGemvTile(1, 8, 4)
        return (
            PersistentGemvTile(2, 8, 4)
            if n >= 6144
            else PersistentGemvTile(4, 8, 2)
            if n >= 2048
            else PersistentGemvTile(1, 4, 4)
        )
    each = 4
    while each > 1 and n // each < 3 * SM_COUNT:
        each //= 2
    return GemvTile(each, 512, 4)


def _skinny_tile(m: int, n: int, k: int, gated: bool) -> SkinnyGemmTile:
    if gated:
        if n >= 8192:
            return SkinnyGemmTile(128, 128, 1, 3, 4) if m <= 16 else SkinnyGemmTile(128, 64, 1, 4, 8)
        return SkinnyGemmTile(64, 64, 1, 6, 4)
    tiles = cdiv(n, 64)
    if tiles >= 8 * SM_COUNT:  # a head
        return SkinnyGemmTile(128, 128, 1, 3, 8) if m <= 16 else SkinnyGemmTile(128, 64, 1, 5, 4)
    if tiles >= SM_COUNT // 2 + 8:
        return SkinnyGemmTile(64, 128, 1, 5, 4)
    splits = 2
    while tiles * splits * 2 <= SM_COUNT and k >= 512 * splits:
        splits *= 2
    if splits == 2 and k % 512 == 0 and m <= 32:
        return SkinnyGemmTile(64, 256, 2, 3, 4, 256)
    return SkinnyGemmTile(64, 128, splits, 5 if splits == 2 else 3, 4)


class Matmul:
    """Multiplies, with the workspace's scratch. `deterministic`: what a token gets does not depend on the others.

    pdl: whether kernels may start before their predecessor has ended. For one token only the kernel behind attention
    does, while that one waits for the cache; else all do, and let their successor start when they stop reading.
    """

    def __init__(self, workspace: Workspace, deterministic: bool, pdl: bool) -> None:
        self._space = workspace
        self._deterministic = deterministic
        self._pdl = pdl

    def __call__(
        self, x: Tensor, matrix: DenseMatrix | QuantizedMatrix, out: Tensor, job: Fusion, overlapped: bool = False
    ) -> None:
        """x: [m, k], out: [m, n] contiguous. Reads x before it writes out; with a gate, n is half the matrix's rows."""
        if not len(x):
            return
        if isinstance(matrix, QuantizedMatrix):
            self._quantised(x, matrix, out, job)
            return
        if self._deterministic:
            self._separate(x, matrix, out, job)
            return
        (m, n), k = out.shape, x.shape[1]
        tile = dense_tile(m, n, k, bool(job.gate))
        if isinstance(tile, GemvTile | PersistentGemvTile):
            self._vector(x, matrix, out, job, tile, overlapped)
        elif tile is not None and skinny_gemm_floats(n, m, tile, bool(job.gate)) <= self._space.matmul.numel():
            if job.norm is not None:
                x = self._normed(x, job)
            skinny_gemm(
                x, matrix.weight, out, tile, self._space.matmul, self._space.counters, bias=matrix.bias,
                gate=job.gate, add=job.add, pdl=2 * self._pdl,
            )  # fmt: skip
        else:
            self._separate(x, matrix, out, job)

    def _vector(
        self,
        x: Tensor,
        matrix: DenseMatrix,
        out: Tensor,
        job: Fusion,
        tile: GemvTile | PersistentGemvTile,
        overlapped: bool,
    ) -> None:
        kernel: Any = gemv if isinstance(tile, GemvTile) else persistent_gemv
        kernel(
            x, matrix.weight, out, tile, bias=matrix.bias, norm=job.norm, eps=job.eps, gate=job.gate, add=job.add,
            pdl=self._pdl and overlapped,
        )  # fmt: skip

    def _normed(self, x: Tensor, job: Fusion) -> Tensor:
        normed = self._space.take("normed", *x.shape)
        add_norm(x, None, job.norm, normed, job.eps, pdl=self._pdl)
        return normed

    def _separate(self, x: Tensor, matrix: DenseMatrix | QuantizedMatrix, out: Tensor, job: Fusion) -> None:
        if job.norm is not None:
            x = self._normed(x, job)
        if not job.gate:
            self._product(x, matrix, out, job.add)
            return
        assert len(x) <= MLP_TOKENS
        both = self._space.take("gate_up", len(x), matrix.shape[0])
        self._product(x, matrix, both, False)
        apply_gate(both, GATES[job.gate], out, pdl=self._pdl)

    def _product(self, x: Tensor, matrix: DenseMatrix | QuantizedMatrix, out: Tensor, add: bool) -> None:
        if isinstance(matrix, DenseMatrix):
            self._plain(x, matrix.weight, matrix.bias, out, add)
            return
        n, k = matrix.shape
        each = DEQUANTIZED_BYTES // (k * x.element_size()) // 64 * 64
        for first in range(0, n, each):
            rows = self._space.take("dequantised", min(each, n - first), k)
            quantised.dequantize_rows(matrix, first, rows)
            bias = None if matrix.bias is None else matrix.bias[first : first + each]
            self._plain(x, rows, bias, out[:, first : first + each], add)

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
        if self._deterministic:
            batch_invariant_matmul(x, weight, bias, out, add, pdl=self._pdl)
        else:
            _cublas(x, weight, bias, out, add)

    def _quantised(self, x: Tensor, matrix: QuantizedMatrix, out: Tensor, job: Fusion) -> None:
        m, words = len(x), matrix.codes.shape[1]
        if m > MAX_SKINNY or self._deterministic:
            self._separate(x, matrix, out, job)
        elif m == 1 and words <= MAX_GEMV_WORDS:
            tile = quantized_gemv_tile(out.shape[1], words, bool(job.gate))
            quantized_gemv(
                x, matrix, out, tile, norm=job.norm, eps=job.eps, gate=job.gate, add=job.add, pdl=self._pdl
            )  # fmt: skip
        else:
            if job.norm is not None:
                x = self._normed(x, job)
            few = quantized_gemm_tile(m, out.shape[1])
            space = self._space
            quantized_skinny_gemm(
                x, matrix, out, few, space.matmul, space.counters, gate=job.gate, add=job.add, pdl=2 * self._pdl
            )  # fmt: skip


def quantized_gemv_tile(n: int, words: int, gated: bool) -> QuantizedGemvTile:
    if INTERPRETED:
        return QuantizedGemvTile(32, 1, 1)
    wide = next_power_of_two(words)
    warps = max(1, wide // 128) if wide <= 1024 else min(16, wide // 256)  # a thread holds 16 or 32 bytes of a row
    rows = 2 if wide > 1024 else 4 if gated or wide > 512 else 8
    while rows > 1 and n // rows < 3 * SM_COUNT:
        rows //= 2
    return QuantizedGemvTile(rows, warps, 16 // warps)


def quantized_gemm_tile(m: int, n: int) -> QuantizedGemmTile:
    splits = 1
    while splits < 4 and cdiv(n, 64) * splits < SM_COUNT:
        splits *= 2
    return QuantizedGemmTile(64, 32, splits, 3, 4) if m <= 16 else QuantizedGemmTile(64, 16, splits, 4, 4)


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    if out.dtype != x.dtype:
        torch.ops.aten.mm.dtype_out(x, weight.T, out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        assert not add
        torch.addmm(bias, x, weight.T, out=out)
    elif add:
        out.addmm_(x, weight.T)
    else:
        torch.mm(x, weight.T, out=out)
