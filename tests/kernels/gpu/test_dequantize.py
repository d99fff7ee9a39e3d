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
    scale_to_float,
    scale_values,
    unpack_codes,
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


def test_reference_applies_the_scale_of_each_group() -> None:
    raw = torch.randint(0, 256, (2, 48), dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).bfloat16()  # [groups, n]
    dense = dequantize_reference(pack_nibbles(raw, "int4"), scale, "int4", 96)
    plain = torch.stack([raw & 15, raw >> 4], -1).flatten(1).float() - 8
    assert torch.equal(dense, plain * scale.T.float().repeat_interleave(32, 1))


@triton.jit
def _decode(codes, scales, out, MXFP4: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    halves, scale = tl.load(codes + at), scale_values(tl.load(scales + at), MXFP4)
    for i in tl.static_range(4):
        tl.store(out + i * N + at, (code_values(halves, i, MXFP4) * scale).to(tl.float32))


@triton.jit
def _decode_fp8(codes, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, fp8_values(tl.load(codes + at)).to(tl.float32))


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_device_function_decodes_every_code(kind: str) -> None:
    n = 1024
    halves = torch.arange(0, 65536, 64).to(torch.int16) | torch.arange(n).to(torch.int16)
    halves = halves.to(DEVICE)
    if kind == "mxfp4":
        scales = torch.randint(90, 140, (n,), dtype=torch.uint8, device=DEVICE)
    else:
        scales = torch.rand(n, device=DEVICE).bfloat16()
    out = torch.full((4, n), torch.nan, device=DEVICE)
    _decode[(1,)](halves, scales, out, MXFP4=kind == "mxfp4", N=n)
    codes = torch.stack([(halves >> (4 * i)) & 15 for i in range(4)])
    want = codes_to_values(codes, kind) * scale_to_float(scales)
    torch.testing.assert_close(out, want, rtol=2**-8, atol=0)


def test_device_function_decodes_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[(codes & 127) != 127]  # not the NaNs
    codes = torch.cat([codes, codes[:2]])
    out = torch.full((256,), torch.nan, device=DEVICE)
    _decode_fp8[(1,)](codes, out, N=256)
    assert torch.equal(out, codes.view(torch.float8_e4m3fn).float())
