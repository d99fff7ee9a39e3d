"""Every projection of a model: selects the kernel and tile config by token count and matrix shape, and launches it.

The tables were measured on an H200 (docs/design/gpu-kernels.md); nothing is tuned at run time. The norm before a
projection and the gate or residual after it are fused where that pays, and are separate launches where it does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu.backend.workspace import DEQUANTIZED_BYTES, MLP_TOKENS, Workspace
from emberline.kernels.gpu.elementwise import add_norm, gated_activation
from emberline.kernels.gpu.fp8_gemm import (
    MAX_GEMV_COLS,
    FP8Matrix,
    FP8Rows,
    dequantize_fp8_rows,
    fp8_gemm,
    fp8_gemm_floats,
    fp8_gemm_tile,
    fp8_gemv,
    fp8_gemv_tile,
    library_multiplies,
    scaled_mm,
)
from emberline.kernels.gpu.fp8_quantize import gated_quantize, quantize_rows, scale_shape
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
from emberline.kernels.gpu.launch import INTERPRETED, cdiv, next_power_of_two, sm_count
from emberline.kernels.gpu.packed_gemm import (
    PackedMatrix,
    dequantize_packed_rows,
    packed_gemm,
    packed_gemm_floats,
    packed_gemm_tile,
)
from emberline.kernels.gpu.quantized_gemm import (
    MAX_GEMV_WORDS,
    QuantizedGemmTile,
    QuantizedGemvTile,
    QuantizedMatrix,
    dequantize_rows,
    quantized_gemv,
    quantized_skinny_gemm,
)

GATES = ("", "silu", "gelu_tanh")
MAX_SKINNY = 64  # tokens; above, cuBLAS
MAX_GATED = 128  # tokens up to which gate and up use the skinny GEMM, whose activation is free
MAX_WHOLE_ROW = 8192  # columns that one program can hold in registers
# Products of a small model take as long as their launch: for a few tokens a GEMV, which may start before its input is
# ready and reads the matrix for each of them from L2, is faster than a norm and a GEMM.
MAX_GEMV_TOKENS = 5
SMALL_BYTES = 1 << 20  # of a quantized matrix
SMALL_DENSE_BYTES = 8 << 20
MAX_WARPS = 32  # of a program


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    weight: Tensor  # [n, k]; gate and up of an MLP are stacked
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


Matrix = DenseMatrix | QuantizedMatrix | PackedMatrix | FP8Matrix


def workspace_needs(matrices: Iterable[Matrix]) -> dict[str, bool]:
    """Arguments of `WorkspaceSizes.of`: the optional regions that products with these matrices use."""
    matrices = list(matrices)
    return {
        "quantized": any(isinstance(matrix, QuantizedMatrix | PackedMatrix | FP8Matrix) for matrix in matrices),
        "fp8": any(isinstance(matrix, FP8Matrix) for matrix in matrices),
    }


def dequantize_matrix_rows(
    matrix: Matrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
) -> None:
    """out [rows, k] = `factor` times the rows `ids` of a quantized matrix, or the rows from `first` on."""
    if isinstance(matrix, QuantizedMatrix):
        dequantize_rows(matrix, out, ids=ids, first=first, factor=factor)
    elif isinstance(matrix, PackedMatrix):
        dequantize_packed_rows(matrix, out, ids=ids, first=first, factor=factor)
    else:
        assert isinstance(matrix, FP8Matrix)
        dequantize_fp8_rows(matrix, out, ids=ids, first=first, factor=factor)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operations that are fused with a product: out = rms_norm(x) · matrixᵀ + bias, then gated, or added to out."""

    norm: Tensor | None = None
    eps: float = 0.0
    gate: int = 0  # index into GATES
    add: bool = False


def _has_blocks(matrix: Matrix) -> bool:
    return isinstance(matrix, FP8Matrix) and matrix.row_block > 0


# --- tile configs -----------------------------------------------------------------------------------------------------


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


def quantized_gemv_tile(n: int, words: int, gated: bool) -> QuantizedGemvTile:
    if INTERPRETED:
        return QuantizedGemvTile(32, 1, 1)
    wide = next_power_of_two(words)
    warps = max(1, wide // 128) if wide <= 1024 else min(16, wide // 256)  # a thread holds 16 or 32 bytes of a row
    rows = 2 if wide > 1024 else 4 if gated or wide > 512 else 8
    while rows > 1 and n // rows < 3 * sm_count():
        rows //= 2
    if n * words * 4 * (1 + gated) <= SMALL_BYTES and 4 * warps <= MAX_WARPS:
        # Programs take longer to start than to compute: few, of more warps.
        return QuantizedGemvTile(8 * rows, 4 * warps, 16 // warps)
    return QuantizedGemvTile(rows, warps, 16 // warps)


def quantized_gemm_tile(m: int, n: int) -> QuantizedGemmTile:
    splits = 1
    while splits < 4 and cdiv(n, 64) * splits < sm_count():
        splits *= 2
    return QuantizedGemmTile(64, 32, splits, 3, 4) if m <= 16 else QuantizedGemmTile(64, 16, splits, 4, 4)


# --- dispatch ---------------------------------------------------------------------------------------------------------


class Matmul:
    """Launches products in the workspace's memory.

    deterministic: batch-invariant kernels only, so that a token's result does not depend on the rest of the batch.
    pdl: use programmatic dependent launch. For one token only the projection after attention starts early, while
    attention waits for the KV cache, and all that have quantized weights or small ones; for more tokens every kernel
    does, and lets its successor start once it has read.
    """

    def __init__(self, workspace: Workspace, deterministic: bool, pdl: bool) -> None:
        self._workspace = workspace
        self._deterministic = deterministic
        self._pdl = pdl

    def __call__(
        self,
        x: Tensor | FP8Rows,
        matrix: Matrix,
        out: Tensor,
        fusion: Fusion,
        after_attention: bool = False,
    ) -> None:
        """Compute out [m, n], contiguous, from x [m, k]; with a gate, n is half the matrix's rows.

        The kernels read x before they write out. With a norm, x may be columns of a wider tensor.
        """
        if not len(x):
            return
        if isinstance(x, FP8Rows):
            assert isinstance(matrix, FP8Matrix)
            self._fp8_rows(x, matrix, out, fusion)
        elif self._deterministic:
            self._unfused(x, matrix, out, fusion)
        elif isinstance(matrix, QuantizedMatrix):
            self._quantized(x, matrix, out, fusion)
        elif isinstance(matrix, PackedMatrix):
            self._packed(x, matrix, out, fusion)
        elif isinstance(matrix, FP8Matrix):
            self._fp8(x, matrix, out, fusion)
        else:
            self._dense(x, matrix, out, fusion, after_attention)

    def gated(self, x: Tensor, matrix: Matrix, fusion: Fusion, consumer: Matrix) -> Tensor | FP8Rows:
        """The gated product in the form that `consumer` reads: for many tokens its activation is quantized at once."""
        m, width = len(x), consumer.shape[1]
        if (
            self._takes_fp8_rows(matrix, m) and self._takes_fp8_rows(consumer, m)
            and fp8_gemm_tile(m, width, matrix.shape[1], True, _has_blocks(matrix)) is None
        ):  # fmt: skip
            gate_up = self._workspace.take("gate_up", m, matrix.shape[0])
            self(x, matrix, gate_up, replace(fusion, gate=0))
            rows = self._fp8_memory(m, consumer)
            gated_quantize(gate_up, GATES[fusion.gate], rows, pdl=self._pdl)
            return rows
        activated = self._workspace.take("activated", m, width)
        self(x, matrix, activated, fusion)
        return activated

    def _dense(self, x: Tensor, matrix: DenseMatrix, out: Tensor, fusion: Fusion, after_attention: bool) -> None:
        (m, n), k, workspace = out.shape, x.shape[1], self._workspace
        tile = dense_tile(m, n, k, bool(fusion.gate))
        if isinstance(tile, GemvTile | PersistentGemvTile):
            kernel: Any = gemv if isinstance(tile, GemvTile) else persistent_gemv
            kernel(
                x, matrix.weight, out, tile, bias=matrix.bias, norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=self._pdl and (after_attention or matrix.weight.nbytes <= SMALL_DENSE_BYTES),
            )  # fmt: skip
        elif tile is not None and skinny_gemm_floats(n, m, tile, bool(fusion.gate)) <= workspace.matmul.numel():
            skinny_gemm(
                self._normed(x, fusion), matrix.weight, out, tile, workspace.matmul, workspace.counters,
                bias=matrix.bias, gate=fusion.gate, add=fusion.add, pdl=2 * self._pdl,
            )  # fmt: skip
        else:
            self._unfused(x, matrix, out, fusion)

    def _quantized(self, x: Tensor, matrix: QuantizedMatrix, out: Tensor, fusion: Fusion) -> None:
        m, words, workspace = len(x), matrix.codes.shape[1], self._workspace
        small = m <= MAX_GEMV_TOKENS and matrix.codes.nbytes <= SMALL_BYTES
        if m > MAX_SKINNY:
            self._unfused(x, matrix, out, fusion)
        elif (m == 1 or small) and words <= MAX_GEMV_WORDS:
            quantized_gemv(
                x, matrix, out, quantized_gemv_tile(out.shape[1], words, bool(fusion.gate)), norm=fusion.norm,
                eps=fusion.eps, gate=fusion.gate, add=fusion.add, pdl=self._pdl,
            )  # fmt: skip
        else:
            quantized_skinny_gemm(
                self._normed(x, fusion), matrix, out, quantized_gemm_tile(m, out.shape[1]), workspace.matmul,
                workspace.counters, gate=fusion.gate, add=fusion.add, pdl=2 * self._pdl,
            )  # fmt: skip

    def _packed(self, x: Tensor, matrix: PackedMatrix, out: Tensor, fusion: Fusion) -> None:
        (m, n), workspace, gated = out.shape, self._workspace, bool(fusion.gate)
        tile = packed_gemm_tile(m, n, matrix.k, gated)
        if tile is None or packed_gemm_floats(n, m, tile, gated) > workspace.matmul.numel():
            self._unfused(x, matrix, out, fusion)
            return
        packed_gemm(
            self._normed(x, fusion), matrix, out, tile, workspace.matmul, workspace.counters, gate=fusion.gate,
            add=fusion.add, pdl=2 * self._pdl,
        )  # fmt: skip

    def _fp8(self, x: Tensor, matrix: FP8Matrix, out: Tensor, fusion: Fusion) -> None:
        (m, n), k, workspace, gated = out.shape, matrix.shape[1], self._workspace, bool(fusion.gate)
        if m == 1 and k <= MAX_GEMV_COLS and k % 16 == 0:
            fp8_gemv(
                x, matrix, out, fp8_gemv_tile(n, k, gated), norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=self._pdl,
            )  # fmt: skip
            return
        if self._takes_fp8_rows(matrix, m):
            rows = self._fp8_memory(m, matrix)
            quantize_rows(x, rows, fusion.norm, fusion.eps, pdl=self._pdl)
            self._fp8_rows(rows, matrix, out, fusion)
            return
        tile = fp8_gemm_tile(m, n, k, gated, True)  # decoding is as dear as the scaling of blocks
        if tile is None or fp8_gemm_floats(n, m, tile, gated) > workspace.matmul.numel():
            self._unfused(x, matrix, out, fusion)
            return
        fp8_gemm(
            self._normed(x, fusion), matrix, out, tile, workspace.matmul, workspace.counters, gate=fusion.gate,
            add=fusion.add, pdl=2 * self._pdl,
        )  # fmt: skip

    def _takes_fp8_rows(self, matrix: Matrix, m: int) -> bool:
        return isinstance(matrix, FP8Matrix) and matrix.quantize_input and m > 1 and not self._deterministic

    def _fp8_memory(self, m: int, matrix: Matrix) -> FP8Rows:
        assert isinstance(matrix, FP8Matrix)
        k = matrix.shape[1]
        shape = scale_shape(m, k, _has_blocks(matrix))
        return FP8Rows(
            self._workspace.take("fp8", m, k, dtype=torch.float8_e4m3fn),
            self._workspace.take("fp8_scale", *shape, dtype=torch.float32),
        )

    def _fp8_rows(self, rows: FP8Rows, matrix: FP8Matrix, out: Tensor, fusion: Fusion) -> None:
        """Compute the product of quantized activations, whose norm is done."""
        (m, n), workspace, gated = out.shape, self._workspace, bool(fusion.gate)
        blocks = _has_blocks(matrix)
        tile = fp8_gemm_tile(m, n, matrix.shape[1], gated, blocks)
        if tile is None and (gated or not library_multiplies(rows, matrix, out)):
            tile = fp8_gemm_tile(64 if blocks else 128, n, matrix.shape[1], gated, blocks)
            assert tile is not None
            tile = replace(tile, splits=1)
        if tile is not None:
            if fp8_gemm_floats(n, m, tile, gated) > workspace.matmul.numel():
                tile = replace(tile, splits=1)
            fp8_gemm(
                rows, matrix, out, tile, workspace.matmul, workspace.counters, gate=fusion.gate, add=fusion.add,
                pdl=2 * self._pdl,
            )  # fmt: skip
            return
        product = workspace.take("gate_up", m, n) if fusion.add else out
        scaled_mm(rows, matrix, product)
        if matrix.bias is not None:
            product.add_(matrix.bias)
        if fusion.add:
            add_norm(out, product, None, None, 0.0, pdl=self._pdl)

    def _normed(self, x: Tensor, fusion: Fusion) -> Tensor:
        if fusion.norm is None:
            return x
        normed = self._workspace.take("normed", *x.shape)
        add_norm(x, None, fusion.norm, normed, fusion.eps, pdl=self._pdl)
        return normed

    def _unfused(self, x: Tensor, matrix: Matrix, out: Tensor, fusion: Fusion) -> None:
        """Launch norm, product and gate one after the other."""
        x = self._normed(x, fusion)
        if not fusion.gate:
            self._product(x, matrix, out, fusion.add)
            return
        assert len(x) <= MLP_TOKENS
        gate_up = self._workspace.take("gate_up", len(x), matrix.shape[0])
        self._product(x, matrix, gate_up, False)
        gated_activation(gate_up, GATES[fusion.gate], out, pdl=self._pdl)

    def _product(self, x: Tensor, matrix: Matrix, out: Tensor, add: bool) -> None:
        if isinstance(matrix, DenseMatrix):
            self._library(x, matrix.weight, matrix.bias, out, add)
            return
        n, k = matrix.shape
        rows = DEQUANTIZED_BYTES // (k * x.element_size()) // 64 * 64
        for first in range(0, n, rows):
            weight = self._workspace.take("dequantized", min(rows, n - first), k)
            dequantize_matrix_rows(matrix, weight, first=first)
            bias = None if matrix.bias is None else matrix.bias[first : first + rows]
            self._library(x, weight, bias, out[:, first : first + rows], add)

    def _library(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
        """Multiply by cuBLAS, or by the batch-invariant matmul in deterministic mode."""
        if self._deterministic:
            batch_invariant_matmul(x, weight, bias, out, add, pdl=self._pdl)
        elif out.dtype != x.dtype:
            torch.ops.aten.mm.dtype_out(x, weight.T, out.dtype, out=out)
            if bias is not None:
                out.add_(bias)
        elif add:
            out.addmm_(x, weight.T)
            if bias is not None:
                out.add_(bias)
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out=out)
