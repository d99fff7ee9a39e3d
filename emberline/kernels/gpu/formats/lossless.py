"""Losslessly compressed BF16 matrices: packed on the device while the checkpoint is read, some rows at a time.

A format that a checkpoint does not have: the user asks for it (`--weights compressed`), and it takes any BF16 matrix
that becomes smaller. Deterministic mode decodes the matrix for the batch-invariant matmul, so its tokens are BF16's.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu.elementwise import gated_activation
from emberline.kernels.gpu.formats.matrix_format import (
    GATES,
    SLICE_ROWS,
    SLICED_BYTES,
    Fusion,
    Launcher,
    MatrixFormat,
    rows_at_once,
)
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.kernels.gpu.lossless import ROW_PIECE, TILES, LosslessMatrix, decode_rows
from emberline.kernels.gpu.lossless_gemm import (
    MAX_GATED,
    MAX_GEMV_COLS,
    lossless_gemm,
    lossless_gemm_floats,
    lossless_gemm_tile,
    lossless_gemv,
    lossless_gemv_tile,
)
from emberline.kernels.gpu.lossless_packing import MAX_COLUMNS, PACKING_BYTES, LosslessPacker, lossless_bytes

MAX_HOPPER = 256  # tokens; above, the matrix is decoded for cuBLAS
WORTHWHILE = 0.9  # a matrix is packed if it takes less than this share of its bytes as BF16


class Lossless(MatrixFormat):
    matrix = LosslessMatrix
    workspace_needs = frozenset({"quantized", "sliced"})
    sliced = True
    loading_bytes = PACKING_BYTES

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
            weight.read_rows(lambda rows, at, first=first: packer.pack(rows, first + at))
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
        if m == 1 and k <= MAX_GEMV_COLS and k % 2 == 0 and not INTERPRETED:
            lossless_gemv(
                x, matrix, out, lossless_gemv_tile(k), norm=fusion.norm, eps=fusion.eps, gate=fusion.gate,
                add=fusion.add, pdl=on.pdl,
            )  # fmt: skip
            return
        if self._multiply_on_hopper(on, x, matrix, out, fusion):
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

    def unfused(self, on: Launcher, x: Tensor, matrix: LosslessMatrix, out: Tensor, fusion: Fusion) -> None:
        """Launch norm, product and gate one after the other. Gate and up of some neurons are decoded at a time, once
        for all tokens."""
        if not fusion.gate:
            super().unfused(on, x, matrix, out, fusion)
            return
        x, width, k = on.normed(x, fusion), out.shape[1], matrix.k
        step = min(SLICE_ROWS, rows_at_once(2 * width, k * x.element_size(), SLICED_BYTES)) // 2
        for first in range(0, width, step):
            end = min(width, first + step)
            n, weight = end - first, on.workspace.take("dequantized", 2 * (end - first), k)
            self.write_rows(matrix, weight[:n], first=first)
            self.write_rows(matrix, weight[n:], first=width + first)
            gate_up, bias = on.workspace.take("gate_up", len(x), 2 * n), matrix.bias
            if bias is not None:
                bias = torch.cat([bias[first:end], bias[width + first : width + end]])
            on.library(x, weight, bias, gate_up, False)
            gated_activation(gate_up, GATES[fusion.gate], out[:, first:end], pdl=on.pdl)

    def product(self, on: Launcher, x: Tensor, matrix: LosslessMatrix, out: Tensor, add: bool) -> None:
        """Multiply the matrix in pieces of rows if it is too large for the workspace, or decode it for the library."""
        if on.deterministic or len(x) > MAX_HOPPER or _hopper() is None or matrix.shape[0] <= ROW_PIECE:
            super().product(on, x, matrix, out, add)
            return
        for first in range(0, matrix.shape[0], ROW_PIECE):
            rows = slice(first, min(matrix.shape[0], first + ROW_PIECE))
            piece, part = matrix.rows(rows.start, rows.stop), out[:, rows]
            if not self._multiply_on_hopper(on, x, piece, part, Fusion(add=add)):
                super().product(on, x, piece, part, add)

    def _multiply_on_hopper(
        self, on: Launcher, x: Tensor, matrix: LosslessMatrix, out: Tensor, fusion: Fusion
    ) -> bool:  # fmt: skip
        """Multiply by the kernels for Hopper. Returns False if others must do it: on other GPUs, for other sizes, and
        where the sums have no room."""
        modules, m, (rows, k) = _hopper(), len(x), matrix.shape
        if modules is None or m > MAX_HOPPER or k % TILES[0] or x.dtype != torch.bfloat16 or out.dtype != x.dtype:
            return False
        hopper, small_batch = modules
        is_small, room = small_batch.takes_small_batch(m, rows), SLICED_BYTES // 4
        tile = None if is_small else hopper.lossless_hopper_tile(m, rows, k, bool(fusion.gate))
        if is_small:
            floats = small_batch.lossless_small_batch_floats(rows, k)
        elif tile is not None:
            floats = hopper.lossless_hopper_floats(rows, k, m, tile)
        else:
            return False
        if floats > room:
            return False
        if fusion.norm is None and (x.stride(0) % 8 or x.data_ptr() % 16):  # not what the copy engine reads
            return False
        x, partial = on.normed(x, fusion), on.workspace.take("dequantized", room, dtype=torch.float32)
        options: dict[str, Any] = {"gate": fusion.gate, "add": fusion.add, "pdl": on.pdl}
        if is_small:
            small_batch.lossless_small_batch_gemm(x, matrix, out, partial, **options)
        else:
            hopper.lossless_hopper_gemm(x, matrix, out, tile, partial, **options)
        return True


@cache
def _hopper() -> tuple[Any, Any] | None:
    """The modules of the kernels for Hopper, where they run: not with a Triton that has no Gluon."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from emberline.kernels.gpu import lossless_hopper, lossless_small_batch
    except ImportError:
        return None
    return lossless_hopper, lossless_small_batch
