# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The gate of an MLP: activation(gate) * up."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import await_inputs, cdiv, options, release_next
from emberline.kernels.reference import activate


def gate_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(activation, gate) * up


@triton.jit
def activated(x, GELU: tl.constexpr):
    """SiLU or tanh-GELU of float32 numbers; tanh(z) = 1 - 2 / (e^2z + 1)."""
    if GELU:
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        out = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        out = x / (1.0 + tl.exp(-x))
    return out


@triton.jit
def _gate(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < width
    await_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * width + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=ok, other=0.0).to(tl.float32)
    gate = activated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (gate * up).to(out.dtype.element_ty), mask=ok)


def gate(gate_up: Tensor, activation: str, out: Tensor, pdl: bool = False) -> None:
    """gate_up: [tokens, 2 * width], out: [tokens, width]."""
    tokens, width = out.shape
    if not tokens:
        return
    block = 2048
    _gate[(tokens, cdiv(width, block))](
        gate_up, out, width, GELU=activation == "gelu_tanh", BLOCK=block, PDL=int(pdl), **options(pdl, num_warps=4)
    )
