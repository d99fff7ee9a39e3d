"""Experts loaded from a checkpoint's tensors, at once or by a loader, against the numbers of those tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.dequantize import pack_nibbles
from emberline.kernels.gpu.expert_loading import interleave_codes, load_expert_matrix
from emberline.kernels.gpu.expert_matrix import divide_codes, empty_packed
from emberline.weights.loader import WeightLoader
from emberline.weights.quantized_weight import QuantizedWeight
from emberline.weights.tensors import FileLocation, Weight
from tests.kernels.gpu.batches import DEVICE


def random_bytes(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(shape[-1]).integers(0, 256, shape, dtype=np.uint8)


def bf16(numbers: Any) -> Any:
    rows = len(numbers)
    return (np.asarray(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)


def weight(
    name: str, kind: str, n: int, k: int, folder: Path | None, loader: Any, order: bool = False
) -> Weight | QuantizedWeight:
    """Random, in memory or in a file of its own. `order`: every other row of twice as many, as GPT-OSS has them."""
    rng = np.random.default_rng(len(name) + n)
    rows = np.arange(0, 2 * n, 2) if order else None
    m = 2 * n if order else n
    if kind == "bf16":
        raw = bf16(rng.normal(size=(m, k)))
    else:
        raw = random_bytes(m, k if kind.startswith("fp8") else k // 2)
        if kind.startswith("fp8"):
            raw = np.where(raw & 127 == 127, 0, raw).astype(np.uint8)  # not NaN
    location = None
    if folder is not None:
        path = folder / f"{name}.bin"
        path.write_bytes(b"x" * 64 + raw.tobytes())
        location = FileLocation(path, 64)
    plain: dict[str, Any] = {"order": rows, "location": location, "loader": loader}
    if kind == "bf16":
        return Weight(name, (n, k), "bf16", raw, **plain)
    group = {"int4-32": 32, "int4-128": 128, "mxfp4": 32, "fp8": 0, "fp8-blocks": 128}[kind]
    if kind == "mxfp4":
        scale = Weight(f"{name}.scale", (m, k // group), "u8", rng.integers(118, 124, (m, k // group), dtype=np.uint8))
    elif kind.startswith("int4"):
        scale = Weight(f"{name}.scale", (m, k // group), "bf16", bf16(rng.uniform(0.01, 0.1, (m, k // group))))
    else:
        shape = (-(-n // 128), -(-k // 128)) if group else (n, 1)
        numbers = rng.uniform(0.01, 0.1, shape).astype(np.float32)
        scale = Weight(f"{name}.scale", shape, "f32", numbers.view(np.uint8).reshape(shape[0], -1))
    return QuantizedWeight(name, (n, k), kind.partition("-")[0], raw, **plain, scale=scale, group=group)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("kind", "k", "order"),
    [
        ("bf16", 64, False),
        ("int4-32", 256, False),
        ("int4-128", 128, False),
        ("mxfp4", 160, True),
        ("fp8", 96, False),
        ("fp8-blocks", 256, False),
    ],
)
def test_experts_keep_every_number(kind: str, k: int, order: bool, deferred: bool, tmp_path: Path) -> None:
    loader = WeightLoader(DEVICE) if deferred else None
    n = 128 if kind == "fp8-blocks" else 24
    folder = tmp_path if deferred else None
    experts = [[weight(f"{p}{e}", kind, n, k, folder, loader, order) for p in ("gate", "upper")] for e in range(3)]
    matrix = load_expert_matrix(experts, None, torch.float32, DEVICE)  # type: ignore[arg-type]
    if loader is not None:
        loader.finish()
    want = np.stack([np.concatenate([part.dense() for part in parts]) for parts in experts])
    assert matrix.shape == (3, 2 * n, k)
    torch.testing.assert_close(matrix.dense().cpu(), torch.from_numpy(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [24, 128, 130])
def test_codes_are_divided_into_blocks_of_rows(n: int) -> None:
    raw = torch.from_numpy(random_bytes(2, n, 192)).to(DEVICE)
    codes = empty_packed("int4", 2, n, 384, 32, None, DEVICE).weight
    want = divide_codes(pack_nibbles(raw, "int4"))
    interleave_codes(raw, codes)
    for got, expected in zip(codes.transpose(2, 3), want.transpose(2, 3), strict=True):
        assert torch.equal(got.flatten(0, 1)[:n], expected.flatten(0, 1)[:n])


def test_experts_that_differ_are_refused() -> None:
    experts = [[weight("a", "int4-32", 8, 256, None, None)], [weight("b", "bf16", 8, 256, None, None)]]
    with pytest.raises(ValueError, match="experts differ"):
        load_expert_matrix(experts, None, torch.float32, DEVICE)  # type: ignore[arg-type]
