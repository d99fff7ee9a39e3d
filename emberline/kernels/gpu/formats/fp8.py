"""FP8 (e4m3) matrices, whose activations are quantized too where the checkpoint says so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.formats.matrix_format import GATES, Fusion, Launcher, Matrix, MatrixFormat
from emberline.kernels.gpu.fp8_gemm import (
    BLOCK,
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


class FP8(MatrixFormat):
    matrix = FP8Matrix
    workspace_needs = frozenset({"quantized", "fp8"})

    def load(self, weights: Sequence[Any], bias: Tensor | None, dtype: torch.dtype, device: str) -> FP8Matrix | None:
        alike = len({getattr(weight, "group", 0) for weight in weights}) == 1
        return _load(weights, bias, device) if alike and all(weight.kind == "fp8" for weight in weights) else None

    def write_rows(
        self, matrix: FP8Matrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        dequantize_fp8_rows(matrix, out, ids=ids, first=first, factor=factor)

    def n_fp8(self, matrix: FP8Matrix) -> int:
        return matrix.weight.numel() if matrix.quantize_input else 0

    def multiply(
        self, on: Launcher, x: Tensor | FP8Rows, matrix: FP8Matrix, out: Tensor, fusion: Fusion,
        after_attention: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(x, FP8Rows):
            _multiply_rows(on, x, matrix, out, fusion)
            return
        (m, n), k, workspace, gated = out.shape, matrix.shape[1], on.workspace, bool(fusion.gate)
        if m == 1 and k <= MAX_GEMV_COLS and k % 16 == 0:
            fp8_gemv(
                x, matrix, out, fp8_gemv_tile(n, k, gated), norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=on.pdl,
            )  # fmt: skip
            return
        if _takes_rows(on, matrix, m):
            rows = _memory(on, m, matrix)
            quantize_rows(x, rows, fusion.norm, fusion.eps, pdl=on.pdl)
            _multiply_rows(on, rows, matrix, out, fusion)
            return
        tile = fp8_gemm_tile(m, n, k, gated, True)  # decoding is as dear as the scaling of blocks
        if tile is None or fp8_gemm_floats(n, m, tile, gated) > workspace.matmul.numel():
            self.unfused(on, x, matrix, out, fusion)
            return
        fp8_gemm(
            on.normed(x, fusion), matrix, out, tile, workspace.matmul, workspace.counters, gate=fusion.gate,
            add=fusion.add, pdl=2 * on.pdl,
        )  # fmt: skip

    def gated(self, on: Launcher, x: Tensor, matrix: FP8Matrix, fusion: Fusion, consumer: Matrix) -> Tensor | FP8Rows:
        """Multiply and apply the gated activation. With many tokens, the activation is quantized in the same pass."""
        m, width = len(x), consumer.shape[1]
        if (
            isinstance(consumer, FP8Matrix) and _takes_rows(on, matrix, m) and _takes_rows(on, consumer, m)
            and fp8_gemm_tile(m, width, matrix.shape[1], True, _has_blocks(matrix)) is None
        ):  # fmt: skip
            gate_up = on.workspace.take("gate_up", m, matrix.shape[0])
            self.multiply(on, x, matrix, gate_up, replace(fusion, gate=0))
            rows = _memory(on, m, consumer)
            gated_quantize(gate_up, GATES[fusion.gate], rows, pdl=on.pdl)
            return rows
        activated: Tensor = super().gated(on, x, matrix, fusion, consumer)
        return activated


def _has_blocks(matrix: FP8Matrix) -> bool:
    return matrix.row_block > 0


def _takes_rows(on: Launcher, matrix: FP8Matrix, m: int) -> bool:
    """True if the activations of m tokens are quantized."""
    return matrix.quantize_input and m > 1 and not on.deterministic


def _memory(on: Launcher, m: int, matrix: FP8Matrix) -> FP8Rows:
    k = matrix.shape[1]
    shape = scale_shape(m, k, _has_blocks(matrix))
    return FP8Rows(
        on.workspace.take("fp8", m, k, dtype=torch.float8_e4m3fn),
        on.workspace.take("fp8_scale", *shape, dtype=torch.float32),
    )


def _multiply_rows(on: Launcher, rows: FP8Rows, matrix: FP8Matrix, out: Tensor, fusion: Fusion) -> None:
    """Compute the product of quantized activations, whose norm is done."""
    (m, n), workspace, gated = out.shape, on.workspace, bool(fusion.gate)
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
            pdl=2 * on.pdl,
        )  # fmt: skip
        return
    product = workspace.take("gate_up", m, n) if fusion.add else out
    scaled_mm(rows, matrix, product)
    if matrix.bias is not None:
        product.add_(matrix.bias)
    if fusion.add:
        add_norm(out, product, None, None, 0.0, pdl=on.pdl)


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(weights: Sequence[Any], bias: Tensor | None, device: str) -> FP8Matrix:
    rows, k = [weight.shape[0] for weight in weights], weights[0].shape[1]
    codes = torch.empty(sum(rows), k, dtype=torch.uint8, device=device)
    for weight, target in zip(weights, torch.split(codes, rows), strict=True):
        weight.codes.into(target)
    scale, row_block = fp8_scales(weights)
    quantize_input = all(weight.quantize_input for weight in weights)
    scale_tensor = torch.from_numpy(scale).to(device)
    return FP8Matrix(codes.view(torch.float8_e4m3fn), scale_tensor, row_block, quantize_input, bias)


def fp8_scales(weights: Sequence[Any]) -> tuple[Any, int]:
    """The scales of stacked weights, float32 [n] or of blocks, and how many rows share a block's: see FP8Matrix."""
    parts = [weight.fp8_scale() for weight in weights]
    if len({block for _, block in parts}) == 1 and (
        parts[0][1] != BLOCK or all(weight.shape[0] % BLOCK == 0 for weight in weights[:-1])
    ):
        return np.ascontiguousarray(np.concatenate([scale for scale, _ in parts])), parts[0][1]
    # Blocks that a part's end divides: one scale for every row.
    each = [
        scale.repeat(block, axis=0)[: weight.shape[0]] for (scale, block), weight in zip(parts, weights, strict=True)
    ]
    return np.ascontiguousarray(np.concatenate(each)), 1
