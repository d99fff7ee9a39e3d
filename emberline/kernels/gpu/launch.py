# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What every launch shares: whether kernels run interpreted, and how one kernel may start before the last has ended.

Dependent launch: a kernel marked PDL may start while its predecessor still runs. It loads what no kernel writes
(weights) at once, and calls `await_inputs` before it touches anything else. Every program of every marked kernel
calls it, also one with nothing to do: only so does the end of a kernel imply the end of all before it.
PDL is 0 (off), 1 (the next may start as soon as this one has), or 2 (as soon as this one's reading is done).
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SM_COUNT = 2 if INTERPRETED else 132  # of the H200 the tables were measured on; others run, less well balanced


def supports_pdl() -> bool:
    """Whether this device can start kernels early."""
    return not INTERPRETED and torch.cuda.get_device_capability()[0] >= 9


def launch_options(pdl: bool, **more: Any) -> dict[str, Any]:
    """Launch options; the interpreter knows none of them."""
    if INTERPRETED:
        return {}
    return {**more, "launch_pdl": True} if pdl else more


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_early(PDL: tl.constexpr):
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def pdl_launch_late(PDL: tl.constexpr):
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(rows, BYTES: tl.constexpr):
    """Starts moving BYTES (a power of two, 128 at least) from each pointer to the L2 cache; waits for nothing."""
    lines = rows.to(tl.pointer_type(tl.int8))[:, None] + tl.arange(0, BYTES // 128)[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
