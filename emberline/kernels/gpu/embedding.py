# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Rows of the embedding, times a factor."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv


def rows_reference(weight: Tensor, ids: Tensor, factor: float) -> Tensor:
    return weight[ids.long()] * factor


@triton.jit
def _rows(weight, ids, out, width, factor, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < width
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(weight + row * width + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, (value * factor).to(out.dtype.element_ty), mask=ok)


def rows(weight: Tensor, ids: Tensor, factor: float, out: Tensor) -> None:
    """weight: [vocab, width], ids: int32 [tokens], out: [tokens, width]."""
    tokens, width = out.shape
    if tokens:
        _rows[(tokens, cdiv(width, 1024))](weight, ids, out, width, factor, BLOCK=1024)
