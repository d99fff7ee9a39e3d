# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A matmul whose tiles never change: a token's result is the same alone, in any batch and in any chunk."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import await_inputs, cdiv, options, release_next


@triton.jit(do_not_specialize=["m"])
def _fixed(
    x, weight, bias, out, m, n, k, stride, BIAS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    await_inputs(PDL)
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, COLS):
        inside = (start + col < k)[None, :]
        a = tl.load(x + t.to(tl.int64)[:, None] * k + start + col[None, :], mask=(t < m)[:, None] & inside, other=0.0)
        b = tl.load(
            weight + row.to(tl.int64)[:, None] * k + start + col[None, :], mask=(row < n)[:, None] & inside, other=0.0
        )
        acc = tl.dot(a, tl.trans(b), acc)
    if BIAS:
        acc += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    to = out + t.to(tl.int64)[:, None] * stride + row[None, :]
    ok = (t < m)[:, None] & (row < n)[None, :]
    if ADD:
        acc += tl.load(to, mask=ok, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=ok)


def fixed(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, pdl: bool = False) -> None:
    """x: [m, k], weight: [n, k], out: [m, n], the columns of a row contiguous."""
    (m, n), k = out.shape, x.shape[1]
    _fixed[(cdiv(n, 128), cdiv(m, 64))](
        x, weight, weight if bias is None else bias, out, m, n, k, out.stride(0), BIAS=bias is not None, ADD=add,
        TOKENS=64, ROWS=128, COLS=64, PDL=int(pdl), **options(pdl, num_warps=4, num_stages=4),
    )  # fmt: skip
