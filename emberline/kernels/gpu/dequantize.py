# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Weights of 4 and 8 bits as bfloat16 in registers: INT4, MXFP4 (e2m1) and FP8 (e4m3), and the layout they are kept in.

The 4-bit layout: a tile of 128 columns of a row is 32 half-words of 16 bits, and code i of half-word h is column
32 i + h. So `int4_values(halves, i)` of a tile [rows, 32] are 32 adjacent columns, whose activations are contiguous,
and for groups of 32 they share one scale. Two half-words fill a register, so that one instruction decodes two codes and
none moves bits between lanes. Columns are padded to whole tiles with codes that mean zero; callers mask activations.

Scales are stored in words of 32 bits, [words, n]: two bfloat16 of INT4, or the four exponents (e8m0) of MXFP4 of a
tile, with the rows adjacent. Loaded inside the loop over tiles, words are copied asynchronously like the codes, and the
products are computed in the layout that the tensor cores read (narrower loads or loop-carried values prevent both).

A value of 4 or 8 bits times a bfloat16 scale is rounded once, as in a matrix that was dequantized to bfloat16. In the
interpreter, which has no inline PTX, values are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import INTERPRETED

TILE = 128  # columns whose 4-bit codes are interleaved
HALVES = TILE // 4  # half-words of a tile
ZERO_CODES = {"int4": 8, "mxfp4": 0}
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0  # of e4m3

_INTERPRETED = tl.constexpr(INTERPRETED)


# --- layout -----------------------------------------------------------------------------------------------------------


def pack_nibbles(raw: Tensor, kind: str) -> Tensor:
    """Codes as checkpoints store them to the 4-bit layout.

    raw: uint8 [..., k / 2], the even column in the low half of a byte (little-endian int32 words of eight codes are the
    same bytes); the result: int16 [..., ceil(k / TILE) * HALVES].
    """
    codes = torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2)  # [..., k]
    missing = -codes.shape[-1] % TILE
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing), value=ZERO_CODES[kind])
    codes = codes.unflatten(-1, (-1, 4, HALVES))
    low, high = codes[..., 0, :] | codes[..., 1, :] << 4, codes[..., 2, :] | codes[..., 3, :] << 4
    return torch.stack([low, high], dim=-1).view(torch.int16).flatten(-3)


def unpack_codes(halves: Tensor) -> Tensor:
    """The 4-bit layout to codes: uint8 [..., columns padded to whole tiles]."""
    tiles = halves.unflatten(-1, (-1, 1, HALVES))
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=halves.device)[:, None]
    codes: Tensor = ((tiles >> shifts) & 15).to(torch.uint8).flatten(-3)
    return codes


def codes_to_values(codes: Tensor, kind: str) -> Tensor:
    """float32 values of 4-bit codes, without their scales."""
    if kind == "int4":
        return codes.float() - 8
    table = torch.tensor([*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)], device=codes.device)
    return table[codes.long()]


def scale_words_per_tile(kind: str, group: int) -> int:
    """Groups are 32, 64 or 128 columns of INT4, or 32 of MXFP4."""
    return 2 if kind == "int4" and group == 32 else 1


def pack_scales(scale: Tensor, kind: str, group: int) -> Tensor:
    """Scales as checkpoints store them, [..., n, groups], to int32 [..., words, n].

    Those of INT4 are rounded to bfloat16 if they have another dtype; those of MXFP4 are uint8 exponents.
    """
    each = scale if kind == "mxfp4" else scale.to(torch.bfloat16).view(torch.int16)
    if kind == "int4" and group == TILE:
        each = each.repeat_interleave(2, dim=-1)  # the two halves of a word
    in_word = 4 if kind == "mxfp4" else 2
    per_tile = in_word * scale_words_per_tile(kind, group)
    each = torch.nn.functional.pad(each, (0, -each.shape[-1] % per_tile))  # of padding columns
    return each.contiguous().view(torch.int32).transpose(-1, -2).contiguous()


def unpack_scales(words: Tensor, kind: str, group: int) -> Tensor:
    """The stored scales as float32 [..., n, groups], with those of padding columns."""
    each = words.transpose(-1, -2).clone(memory_format=torch.contiguous_format)  # also the strides of a single word
    if kind == "mxfp4":
        return torch.exp2(each.view(torch.uint8).float() - 127)
    scales = each.view(torch.bfloat16).float()
    return scales[..., ::2] if group == TILE else scales


def dequantize_reference(halves: Tensor, scale: Tensor, kind: str, group: int, k: int) -> Tensor:
    """float32 [..., n, k] of codes [..., n, halves] and scale words [..., words, n]."""
    values = codes_to_values(unpack_codes(halves)[..., :k], kind)
    scales = unpack_scales(scale, kind, group)[..., : k // group]
    grouped: Tensor = values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return grouped.flatten(-2)


# --- device functions -------------------------------------------------------------------------------------------------
# Bits that a code occupies in a bfloat16 are placed there and the exponent corrected by an exact sum or product.


@triton.jit
def int4_values(halves, AT: tl.constexpr):
    """Code AT of each int16 half-word, minus 8, bfloat16: bits 0x4300 | n are 128 + n."""
    if _INTERPRETED:
        return ((halves >> (4 * AT)) & 15).to(tl.float32) - 8.0
    SHIFT: tl.constexpr = ["0", "4", "8", "12"][AT]
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, one, less; shr.b32 t, $1, "
        + SHIFT
        + "; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308;"
        " fma.rn.bf16x2 $0, t, one, less; }",
        "=r,r",
        [halves],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def biased_int4_values(halves, AT: tl.constexpr):
    """Code AT of each int16 half-word plus 128, bfloat16: without the instruction that subtracts."""
    if _INTERPRETED:
        return ((halves >> (4 * AT)) & 15).to(tl.float32) + 128.0
    SHIFT: tl.constexpr = ["0", "4", "8", "12"][AT]
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.b32 t, $1, " + SHIFT + "; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
        "=r,r",
        [halves],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def mxfp4_values(halves, AT: tl.constexpr):
    """Code AT of each int16 half-word as e2m1, bfloat16: sign to bit 15, the others to bits 6..8, times 2^126."""
    if _INTERPRETED:
        code = (halves >> (4 * AT)) & 15
        exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
        size = tl.where(exponent == 0, 0.5 * mantissa, (1 << exponent).to(tl.float32) * (0.5 + 0.25 * mantissa))
        return tl.where(code >= 8, -size, size)
    SHIFT: tl.constexpr = ["12", "8", "4", "0"][AT]
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, u, factor, zero; shl.b32 t, $1, "
        + SHIFT
        + "; shr.b32 u, t, 6; and.b32 u, u, 0x01C001C0; lop3.b32 u, t, 0x80008000, u, 0xEA;"
        " mov.b32 factor, 0x7E807E80; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, u, factor, zero; }",
        "=r,r",
        [halves],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def code_values(halves, AT: tl.constexpr, MXFP4: tl.constexpr):
    """`mxfp4_values` or `int4_values`."""
    if MXFP4:
        return mxfp4_values(halves, AT)
    else:
        return int4_values(halves, AT)


@triton.jit
def fp8_values(codes):
    """FP8 (e4m3) codes in uint8 as bfloat16: sign to bit 15, the others to bits 4..10, times 2^120."""
    if _INTERPRETED:
        code = codes.to(tl.int32)
        exponent, mantissa = (code >> 3) & 15, (code & 7).to(tl.float32)
        normal = tl.exp2(exponent.to(tl.float32) - 7.0) * (1.0 + mantissa * 0.125)
        size = tl.where(exponent == 0, mantissa * 0.001953125, normal)
        return tl.where(code >= 128, -size, size)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 s, t, u, v, factor, zero; mov.b32 factor, 0x7B807B80; mov.b32 zero, 0x80008000;"
        " prmt.b32 s, $2, 0, 0x1404; shr.b32 u, s, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, s, 0x80008000, u, 0xEA;"
        " prmt.b32 t, $2, 0, 0x3424; shr.b32 v, t, 4; and.b32 v, v, 0x07F007F0; lop3.b32 v, t, 0x80008000, v, 0xEA;"
        " fma.rn.bf16x2 $0, u, factor, zero; fma.rn.bf16x2 $1, v, factor, zero; }",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def slice_scale(first, second, AT: tl.constexpr, WORDS_PER_TILE: tl.constexpr, MXFP4: tl.constexpr):
    """The scale of columns 32 AT .. 32 AT + 31 of a tile from its word, or its two words."""
    if MXFP4:
        exponent = (first >> (8 * AT)) & 0xFF
        if _INTERPRETED:
            return tl.exp2(exponent.to(tl.float32) - 127.0)
        return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    IN_WORD: tl.constexpr = AT % 2 if WORDS_PER_TILE == 2 else AT // 2
    word = second if WORDS_PER_TILE == 2 and AT >= 2 else first
    if _INTERPRETED:
        return ((word >> (16 * IN_WORD)) << 16).to(tl.float32, bitcast=True)
    return ((word >> (16 * IN_WORD)) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def wide_slice_scale(first, second, AT: tl.constexpr, WORDS_PER_TILE: tl.constexpr, MXFP4: tl.constexpr):
    """`slice_scale` as float32, to multiply accumulators."""
    if MXFP4:
        return (((first >> (8 * AT)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    IN_WORD: tl.constexpr = AT % 2 if WORDS_PER_TILE == 2 else AT // 2
    word = second if WORDS_PER_TILE == 2 and AT >= 2 else first
    bits = word & -65536 if IN_WORD else word << 16
    return bits.to(tl.float32, bitcast=True)
