# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""RMSNorm over a residual, with the addition before it."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import await_inputs, options, power_of_two, release_next
from emberline.kernels.reference import rms_norm


def add_norm_reference(
    x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, post: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual, and it normed. `post` norms what is added first."""
    if added is not None:
        x = x + (added if post is None else rms_norm(added, post, eps))
    return x, x if weight is None else rms_norm(x, weight, eps)


@triton.jit
def _add_norm(
    x, added, weight, post, out, width, eps,
    ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < width
    await_inputs(PDL)
    value = tl.load(x + row * width + at, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(added + row * width + at, mask=ok, other=0.0).to(tl.float32)
        if POST:
            scaled = more * tl.rsqrt(tl.sum(more * more) / width + eps)
            scaled *= tl.load(post + at, mask=ok, other=0.0)
            more = scaled.to(x.dtype.element_ty).to(tl.float32)
        value = (value + more).to(x.dtype.element_ty).to(tl.float32)
        tl.store(x + row * width + at, value.to(x.dtype.element_ty), mask=ok)
    if NORM:
        normed = value * tl.rsqrt(tl.sum(value * value) / width + eps)
        normed *= tl.load(weight + at, mask=ok, other=0.0)
        tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=ok)


def add_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    post: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += added (normed by `post` first), in place; out = rms_norm(x) where a weight is given. All [tokens, width]."""
    tokens, width = x.shape
    if not tokens:
        return
    block = power_of_two(width)
    _add_norm[(tokens,)](
        x, x if added is None else added, x if weight is None else weight, x if post is None else post,
        x if out is None else out, width, eps,
        ADD=added is not None, POST=post is not None, NORM=weight is not None, BLOCK=block, PDL=int(pdl),
        **options(pdl, num_warps=8 if block >= 4096 else 4),
    )  # fmt: skip
