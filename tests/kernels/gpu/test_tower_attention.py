"""Norms, RoPE and attention of vision towers against plain PyTorch."""

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

pytest.importorskip("triton")

from emberline.kernels.gpu.elementwise import add_tower_norm
from emberline.kernels.gpu.tower_attention import attend_tiles, rotate_queries_and_keys, supports
from emberline.models.vision.blocks import Rotation, Run, TritonTowerKernels
from tests.kernels.gpu.batches import LIMIT, error, noise


@pytest.mark.parametrize(("dim", "n", "n_tiles"), [(72, 48, 2), (64, 33, 1), (80, 32, 1)])
def test_patches_attend_to_their_tile(dim: int, n: int, n_tiles: int) -> None:
    qkv = noise(3 + n * n_tiles, 3, 2, dim, seed=1)
    out = torch.full_like(qkv[:, 0], torch.nan)
    attend_tiles(qkv, out, 3, n, n_tiles, (32, 16, 2, 4))
    q, k, v = (x[3:].view(n_tiles, n, 2, dim).transpose(1, 2) for x in qkv.float().unbind(1))
    expected = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    assert error(out[3:], expected) < LIMIT
    assert out[:3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4, 60, 96, 1024, 5000])
@pytest.mark.parametrize(("dim", "n_tiles"), [(64, 1), (72, 3), (80, 2)])
def test_tiles_of_any_size(dim: int, n: int, n_tiles: int) -> None:
    """The kernel computes those that it supports, and torch the others."""
    qkv, angles = noise(n * n_tiles, 3, 4, dim, seed=1), noise(n * n_tiles, dim // 2, seed=3).float()
    rotation = Rotation.by(angles)
    q, k = rotation(qkv.float()[:, :2]).view(n_tiles, n, 2, 4, dim).transpose(1, 3).unbind(2)
    v = qkv.float()[:, 2].reshape(n_tiles, n, 4, dim).transpose(1, 2)
    expected = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    assert supports(dim, n) == (dim == 64 or n == 1024)
    assert error(TritonTowerKernels().attend(qkv, [Run(0, len(qkv), n_tiles)], rotation), expected) < LIMIT


def test_queries_and_keys_are_rotated() -> None:
    qkv, angles = noise(7, 3, 3, 24, seed=2), noise(7, 12, seed=3).float()
    before, cos, sin = qkv.float().clone(), angles.cos()[:, None, None], angles.sin()[:, None, None]
    rotate_queries_and_keys(qkv, angles.cos(), angles.sin())
    first, second = before[:, :2].chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    assert error(qkv[:, :2], expected) < LIMIT
    assert torch.equal(qkv[:, 2].float(), before[:, 2])


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("width", [48, 1152])
def test_sums_are_normed(width: int, adds: bool) -> None:
    x, added, weight, bias = (noise(*shape, seed=4) for shape in ((5, width), (5, width), (width,), (width,)))
    total = x + added if adds else x.clone()
    found = add_tower_norm(x, added if adds else None, weight, bias, 1e-6)
    assert torch.equal(x, total)
    assert error(found, layer_norm(total.float(), (width,), weight.float(), bias.float(), 1e-6)) < LIMIT
    assert (
        error(add_tower_norm(x, None, weight, None, 1e-6), rms_norm(total.float(), (width,), weight.float(), 1e-6))
        < LIMIT
    )
