"""Losslessly compressed BF16 matrices: packed on the device while the checkpoint is read, some rows at a time.

A format that a checkpoint does not have: the user asks for it (`--weights compressed`), and it takes any BF16 matrix
that becomes smaller. Deterministic mode decodes the matrix for the batch-invariant matmul, so its tokens are BF16's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu.elementwise import gated_activation
from emberline.kernels.gpu.formats.matrix_format import GATES, Fusion, Launcher, MatrixFormat
from emberline.kernels.gpu.lossless import MAX_COLUMNS, LosslessMatrix, LosslessPacker, decode_rows, lossless_bytes
from emberline.kernels.gpu.lossless_gemm import (
    MAX_GATED,
    MAX_GEMV_COLS,
    lossless_gemm,
    lossless_gemm_floats,
    lossless_gemm_tile,
    lossless_gemv,
    lossless_gemv_tile,
)

WORTHWHILE = 0.9  # a matrix is packed if it takes less than this share of its bytes as BF16


class Lossless(MatrixFormat):
    matrix = LosslessMatrix

    def load(
        self, weights: Sequence[Any], bias: Tensor | None, dtype: torch.dtype, device: str
    ) -> LosslessMatrix | None:
        n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        if any(weight.kind != "bf16" or weight.shift for weight in weights) or k > MAX_COLUMNS:
            return None
        if lossless_bytes(n, k) > WORTHWHILE * 2 * n * k:
            return None
        packer, first = LosslessPacker(n, k, device, bias=bias), 0
        for weight in weights:
            weight.read_rows(lambda rows, at, first=first: packer.pack(rows.to(device), first + at))
            first += weight.shape[0]
        weights[0].when_read(packer.finish)
        return packer.matrix

    def write_rows(
        self, matrix: LosslessMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        decode_rows(matrix, out, ids=ids, first=first, factor=factor)

    def multiply(
        self, on: Launcher, x: Tensor, matrix: LosslessMatrix, out: Tensor, fusion: Fusion,
        after_attention: bool = False,
    ) -> None:  # fmt: skip
        (m, n), k, workspace, gated = out.shape, matrix.k, on.workspace, bool(fusion.gate)
        if m == 1 and k <= MAX_GEMV_COLS:
            lossless_gemv(
                x, matrix, out, lossless_gemv_tile(n, k, gated), norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=on.pdl,
            )  # fmt: skip
            return
        apart = gated and m > MAX_GATED  # gate and up are one product of twice the columns
        tile = lossless_gemm_tile(m, 2 * n if apart else n, k, gated and not apart)
        if tile is None or lossless_gemm_floats(2 * n if apart else n, m, tile, gated) > workspace.matmul.numel():
            self.unfused(on, x, matrix, out, fusion)
            return
        product = workspace.take("gate_up", m, 2 * n) if apart else out
        lossless_gemm(
            on.normed(x, fusion), matrix, product, tile, workspace.matmul, workspace.counters,
            gate=0 if apart else fusion.gate, add=fusion.add, pdl=2 * on.pdl,
        )  # fmt: skip
        if apart:
            gated_activation(product, GATES[fusion.gate], out, pdl=on.pdl)
