# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Activations to FP8 (e4m3) in the kernel that computes them: RMS norm, or gated activation, then quantization.

The scale is dynamic, the largest magnitude of a token (or of a token's 128 columns) over 448.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.elementwise import activation_fn
from emberline.kernels.gpu.fp8_gemm import BLOCK, FP8Rows
from emberline.kernels.gpu.launch import (
    INTERPRETED,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_wait,
)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _store_quantized(value, out, scale, row, tokens, width, BLOCKED: tl.constexpr, WIDTH: tl.constexpr):
    """value: float32 [WIDTH], zero past `width`."""
    col = tl.arange(0, WIDTH)
    if BLOCKED:
        blocks = tl.reshape(value, [WIDTH // 128, 128])
        block = tl.arange(0, WIDTH // 128)
        by_block = tl.maximum(tl.max(tl.abs(blocks), 1), 1e-10) / 448.0
        tl.store(scale + block * tokens + row, by_block, mask=block < tl.cdiv(width, 128))
        value = tl.reshape(blocks / by_block[:, None], [WIDTH])
    else:
        by_row = tl.maximum(tl.max(tl.abs(value)), 1e-10) / 448.0
        tl.store(scale + row, by_row)
        value = value / by_row
    if _INTERPRETED:  # whose conversion halves a value that rounds up to a power of two: round to four bits first
        wide = value * 1048577.0
        value = wide - (wide - value)
    tl.store(out + row.to(tl.int64) * width + col, value.to(out.dtype.element_ty), mask=col < width)


@triton.jit
def _quantize_rows(
    x, norm, out, scale, x_stride, tokens, width, eps,
    NORM: tl.constexpr, BLOCKED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    row = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    pdl_wait(PDL)
    value = tl.load(x + row.to(tl.int64) * x_stride + col, mask=col < width, other=0.0).to(tl.float32)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value) / width + eps)
        value *= tl.load(norm + col, mask=col < width, other=0.0)
    _store_quantized(value, out, scale, row, tokens, width, BLOCKED, WIDTH)


def quantize_rows(x: Tensor, out: FP8Rows, norm: Tensor | None = None, eps: float = 0.0, pdl: bool = False) -> None:
    """x [tokens, width], normed first if a weight is given, into `out`, whose scale's shape says which kind it is.

    x may have any stride between rows.
    """
    tokens, width = x.shape
    if tokens:
        block = max(BLOCK, next_power_of_two(width))
        _quantize_rows[(tokens,)](
            x, x if norm is None else norm, out.values, out.scale, x.stride(0), tokens, width, eps,
            NORM=norm is not None, BLOCKED=out.scale.dim() == 2, WIDTH=block, PDL=int(pdl),
            **launch_options(pdl, num_warps=_warps(block)),
        )  # fmt: skip


@triton.jit
def _gated_quantize(
    gate_up, out, scale, tokens, width, GELU: tl.constexpr, BLOCKED: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    row = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    mask = col < width
    pdl_wait(PDL)
    row_ptrs = gate_up + row.to(tl.int64) * 2 * width + col
    gate = tl.load(row_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    _store_quantized(activation_fn(gate, GELU) * up, out, scale, row, tokens, width, BLOCKED, WIDTH)


def gated_quantize(gate_up: Tensor, activation: str, out: FP8Rows, pdl: bool = False) -> None:
    """activation(gate) * up of gate_up [tokens, 2 * width] into `out` [tokens, width]."""
    tokens, width = out.values.shape
    if tokens:
        block = max(BLOCK, next_power_of_two(width))
        _gated_quantize[(tokens,)](
            gate_up, out.values, out.scale, tokens, width, GELU=activation == "gelu_tanh",
            BLOCKED=out.scale.dim() == 2, WIDTH=block, PDL=int(pdl), **launch_options(pdl, num_warps=_warps(block)),
        )  # fmt: skip


def _warps(width: int) -> int:
    return max(1, min(16, width // 512))


def scale_shape(tokens: int, width: int, blocked: bool) -> tuple[int, ...]:
    """Return the shape of FP8Rows.scale."""
    return (cdiv(width, BLOCK), tokens) if blocked else (tokens,)
