"""Kernels run once against their plain PyTorch references: does this device compute what it should?

`emberline doctor --gpus` runs this in seconds. `make test-gpu` is the thorough form, with every kernel and shape.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from emberline.kernels.gpu import elementwise, gemm

TOLERANCE = 0.02  # of the largest value: bf16 has 8 bits
Check = Callable[
    [str, torch.Generator], tuple[Tensor, Tensor]
]  # device and noise; what was computed, and the reference


def _noise(device: str, noise: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers as models compute with them; the interpreter on a CPU has no bf16."""
    return torch.randn(shape, generator=noise).to(device, torch.bfloat16 if device != "cpu" else torch.float32)


def _gated_activation(device: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    x = _noise(device, noise, 5, 2 * 192)
    out = torch.empty(5, 192, device=device, dtype=x.dtype)
    elementwise.gated_activation(x, "silu", out)
    return out, elementwise.gated_activation_reference(x, "silu")


def _add_norm(device: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    x, added = _noise(device, noise, 5, 256), _noise(device, noise, 5, 256)
    weight = torch.rand(256, generator=noise).to(device)
    _, expected = elementwise.add_norm_reference(x, added, weight, 1e-5)
    out = torch.empty_like(x)
    elementwise.add_norm(x, added, weight, out, 1e-5)
    return out, expected


def _embedding(device: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, ids = _noise(device, noise, 64, 128), torch.tensor([3, 63, 0, 7], dtype=torch.int32, device=device)
    out = torch.empty(4, 128, device=device, dtype=weight.dtype)
    elementwise.embedding(weight, ids, 1.0, out)
    return out, elementwise.embedding_reference(weight, ids, 1.0)


def _copy_blocks(device: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    source = torch.randint(0, 1 << 40, (6, 300), generator=noise).to(device)
    out, pairs = torch.zeros_like(source), torch.tensor([[0, 5], [4, 1]], dtype=torch.int32, device=device)
    expected = out.clone()
    elementwise.copy_blocks(source, out, pairs)
    elementwise.copy_blocks_reference(source, expected, pairs)
    return out, expected


def _batch_invariant_matmul(device: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    x, weight = _noise(device, noise, 7, 128), _noise(device, noise, 130, 128)
    out = torch.empty(7, 130, device=device, dtype=x.dtype)
    gemm.batch_invariant_matmul(x, weight, None, out, add=False)
    return out, x.float() @ weight.float().T


CHECKS: dict[str, Check] = {
    "gated activation": _gated_activation,
    "residual and norm": _add_norm,
    "embedding": _embedding,
    "block copy": _copy_blocks,
    "matrix product": _batch_invariant_matmul,
}


def failures(device: str, checks: dict[str, Check] = CHECKS) -> list[str]:
    """Run the kernels on a device. Returns what is wrong, by kernel; empty if nothing is."""
    found = []
    for name, check in checks.items():
        try:
            out, expected = check(device, torch.Generator().manual_seed(1))
        except Exception as error:  # a driver or compiler that fails is what is looked for
            found.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
            continue
        difference = (out.float() - expected.float()).abs().max().item()
        largest = max(1.0, expected.float().abs().max().item())
        if not difference <= TOLERANCE * largest:
            found.append(f"{name}: differs from its reference by {difference:.3g}, of {largest:.3g}")
    return found
