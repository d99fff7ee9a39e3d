# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What every matmul for few tokens ends with: parts of split columns added up, then bias, gate and residual."""

import triton
import triton.language as tl

from emberline.kernels.gpu.elementwise import activated


@triton.jit
def put(value, other, bias, to, bias_ok, ok, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr):
    """value + bias, as the gate of `other` or added to what is there, to the pointers `to`.

    GATE: 0 none, 1 SiLU, 2 GELU.
    """
    if BIAS:
        value += tl.load(bias, mask=bias_ok, other=0.0).to(tl.float32)
    if GATE:
        value = activated(value, GATE == 2) * other
    if ADD:
        value += tl.load(to, mask=ok, other=0.0).to(tl.float32)
    tl.store(to, value.to(to.dtype.element_ty), mask=ok)


@triton.jit
def join(
    acc, acc2, partial, counters, tile, split,
    GATE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part for the one of its tile that ends last; that one gets the sum, in a fixed order.

    acc, acc2 (the latter with a gate): [ROWS, TOKENS]. counters: zeros, and zeros again afterwards.
    """
    PARTS: tl.constexpr = 2 if GATE else 1
    place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    mine = partial + (tile * SPLITS).to(tl.int64) * (PARTS * ROWS * TOKENS)
    part = mine + split * (PARTS * ROWS * TOKENS)
    tl.store(part + place, acc)
    if GATE:
        tl.store(part + ROWS * TOKENS + place, acc2)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tile, 0)
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            other = mine + s * (PARTS * ROWS * TOKENS)
            acc += tl.load(other + place, cache_modifier=".cg")
            if GATE:
                acc2 += tl.load(other + ROWS * TOKENS + place, cache_modifier=".cg")
    return acc, acc2, last


def partial_floats(tiles: int, splits: int, rows: int, tokens: int, gated: bool) -> int:
    """What `join` needs for its parts."""
    return 0 if splits == 1 else tiles * splits * (1 + gated) * rows * tokens
