"""GGUF's formats of 4 and 8 bits in groups of 32, and INT4 where its groups divide them: `quantized_gemm`'s layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.formats.matrix_format import Fusion, Launcher, MatrixFormat
from emberline.kernels.gpu.launch import INTERPRETED, cdiv, next_power_of_two, sm_count
from emberline.kernels.gpu.quantized_gemm import (
    MAX_GEMV_WORDS,
    QuantizedGemmTile,
    QuantizedGemvTile,
    QuantizedMatrix,
    dequantize_rows,
    pack_quantized,
    quantized_gemv,
    quantized_skinny_gemm,
)

MAX_SKINNY = 64  # tokens; above, dequantizing for cuBLAS takes less time
# Products of a small model take as long as their launch: for a few tokens a GEMV, which may start before its input is
# ready and reads the matrix for each of them from L2, is faster than a norm and a GEMM.
MAX_GEMV_TOKENS = 5
SMALL_BYTES = 1 << 20
MAX_WARPS = 32  # of a program


class Affine(MatrixFormat):
    matrix = QuantizedMatrix

    def load(
        self, weights: Sequence[WeightSource], bias: Tensor | None, dtype: torch.dtype, device: str
    ) -> QuantizedMatrix | None:
        parts = [weight.affine() for weight in weights]
        return pack_quantized(parts, bias, device) if all(part is not None for part in parts) else None

    def write_rows(
        self, matrix: QuantizedMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        dequantize_rows(matrix, out, ids=ids, first=first, factor=factor)

    def multiply(
        self, on: Launcher, x: Tensor, matrix: QuantizedMatrix, out: Tensor, fusion: Fusion,
        after_attention: bool = False,
    ) -> None:  # fmt: skip
        m, words, workspace = len(x), matrix.codes.shape[1], on.workspace
        small = m <= MAX_GEMV_TOKENS and matrix.codes.nbytes <= SMALL_BYTES
        if m > MAX_SKINNY:
            self.unfused(on, x, matrix, out, fusion)
        elif (m == 1 or small) and words <= MAX_GEMV_WORDS:
            quantized_gemv(
                x, matrix, out, quantized_gemv_tile(out.shape[1], words, bool(fusion.gate)), norm=fusion.norm,
                eps=fusion.eps, gate=fusion.gate, add=fusion.add, pdl=on.pdl,
            )  # fmt: skip
        else:
            quantized_skinny_gemm(
                on.normed(x, fusion), matrix, out, quantized_gemm_tile(m, out.shape[1]), workspace.matmul,
                workspace.counters, gate=fusion.gate, add=fusion.add, pdl=2 * on.pdl,
            )  # fmt: skip


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
