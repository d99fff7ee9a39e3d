"""Decoding of 4- and 8-bit weights: the layout round trips, and the device functions give every code's value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
import triton.language as tl

from emberline.kernels.gpu.dequantize import (
    HALVES,
    TILE,
    code_values,
    codes_to_values,
    dequantize_reference,
    fp8_values,
    pack_nibbles,
    pack_scales,
    scale_words_per_tile,
    slice_scale,
    unpack_codes,
    unpack_scales,
)
from tests.kernels.gpu.batches import DEVICE


@given(rows=st.integers(1, 5), pairs=st.integers(1, 200), kind=st.sampled_from(["int4", "mxfp4"]), seed=st.integers(0))
def test_layout_keeps_every_code(rows: int, pairs: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    raw = torch.randint(0, 256, (rows, pairs), dtype=torch.uint8, generator=generator)
    halves = pack_nibbles(raw, kind)
    assert halves.shape == (rows, -(-2 * pairs // TILE) * HALVES)
    codes = unpack_codes(halves)
    assert torch.equal(codes[:, 0 : 2 * pairs : 2], raw & 15)
    assert torch.equal(codes[:, 1 : 2 * pairs : 2], raw >> 4)
    assert not codes_to_values(codes[:, 2 * pairs :], kind).any()


def test_words_of_eight_codes_are_the_same_bytes() -> None:
    codes = torch.randint(0, 16, (3, TILE), dtype=torch.int64)
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    assert isinstance(words, torch.Tensor)
    raw = words.to(torch.uint32).view(torch.uint8)
    assert torch.equal(unpack_codes(pack_nibbles(raw, "int4")).long(), codes)


def scales_of(n: int, groups: int, kind: str) -> torch.Tensor:
    if kind == "mxfp4":
        return torch.randint(90, 140, (n, groups), dtype=torch.uint8)
    return torch.rand(n, groups).bfloat16()


FORMATS = [("int4", 32), ("int4", 64), ("int4", 128), ("mxfp4", 32)]


@pytest.mark.parametrize(("kind", "group"), FORMATS)
@pytest.mark.parametrize("tiles", [1, 1.5, 3])
def test_scale_words_keep_every_scale(kind: str, group: int, tiles: float) -> None:
    groups = int(tiles * TILE) // group
    scale = scales_of(3, groups, kind)
    words = pack_scales(scale, kind, group)
    assert words.shape == (-(-groups * group // TILE) * scale_words_per_tile(kind, group), 3)
    want = torch.exp2(scale.float() - 127) if kind == "mxfp4" else scale.float()
    assert torch.equal(unpack_scales(words, kind, group)[:, :groups], want)


def test_reference_applies_the_scale_of_each_group() -> None:
    raw = torch.randint(0, 256, (2, 48), dtype=torch.uint8)
    scale = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]).bfloat16()
    dense = dequantize_reference(pack_nibbles(raw, "int4"), pack_scales(scale, "int4", 32), "int4", 32, 96)
    plain = torch.stack([raw & 15, raw >> 4], -1).flatten(1).float() - 8
    assert torch.equal(dense, plain * scale.float().repeat_interleave(32, 1))


@triton.jit
def _decode(codes, scales, out, MXFP4: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr):
    row, half = tl.arange(0, ROWS), tl.arange(0, 32)
    halves = tl.load(codes + row[:, None] * 32 + half[None, :])
    first = tl.load(scales + row)
    second = tl.load(scales + (WORDS - 1) * ROWS + row)
    for i in tl.static_range(4):
        values = code_values(halves, i, MXFP4) * slice_scale(first, second, i, WORDS, MXFP4)[:, None]
        tl.store(out + row[:, None] * 128 + i * 32 + half[None, :], values.to(tl.float32))


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_device_functions_decode_every_code(kind: str, group: int) -> None:
    raw = torch.randint(0, 256, (16, TILE // 2), dtype=torch.uint8)
    raw[0] = torch.arange(64) * 4
    halves = pack_nibbles(raw, kind).to(DEVICE)
    words = pack_scales(scales_of(16, TILE // group, kind), kind, group).to(DEVICE)
    out = torch.full((16, TILE), torch.nan, device=DEVICE)
    _decode[(1,)](halves, words, out, MXFP4=kind == "mxfp4", WORDS=scale_words_per_tile(kind, group), ROWS=16)
    want = dequantize_reference(halves, words, kind, group, TILE)
    torch.testing.assert_close(out, want, rtol=2**-8, atol=0)


@triton.jit
def _decode_fp8(codes, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, fp8_values(tl.load(codes + at)).to(tl.float32))


def test_device_function_decodes_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[(codes & 127) != 127]  # not the NaNs
    codes = torch.cat([codes, codes[:2]])
    out = torch.full((256,), torch.nan, device=DEVICE)
    _decode_fp8[(1,)](codes, out, N=256)
    assert torch.equal(out, codes.view(torch.float8_e4m3fn).float())
