"""Block formats: how rows of bytes become numbers.

Every quantised format is read as `w = scale * code + offset` over small groups, exactly: a code has at most 8 bits and
a scale at most 18, so the product fits float32's mantissa and only the final sum rounds, as in the reference.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Groups(NamedTuple):
    """Blocks in affine form: codes [n, block], scale and offset [n, block / group]."""

    codes: Bytes
    scale: Floats
    offset: Floats


class Format(NamedTuple):
    block: int  # weights in a block
    block_bytes: int
    # None and 0 for the float kinds.
    unpack: Callable[[Bytes], Groups] | None = None
    bits: int = 0  # of a code, rounded up to 4 or 8
    group: int = 0  # weights that share a scale


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)  # [n, 1]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., k] bytes -> [..., 2k] codes: all low halves, then all high halves."""
    k = packed.shape[-1]
    codes = np.empty((*packed.shape[:-1], 2 * k), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., :k])
    np.right_shift(packed, 4, out=codes[..., k:])
    return codes


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] bytes of bits, lowest first -> [n, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Groups:
    d = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:]), d, d * -8)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    d = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, d * -16)


def _q5_1(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    d = _half(blocks, 0)
    return Groups(blocks[:, 2:] ^ np.uint8(128), d, d * -128)  # two's complement to excess-128 is a flip of the top bit


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """The 12 bytes of 6-bit scales and minima that Q4_K and Q5_K share, times their half-precision factors."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scale, _half(blocks, 2) * -minimum.astype(np.float32)


def _q4_k(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return Groups(codes.reshape(-1, 256), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    for group in range(8):  # bit g of the 32 high bytes belongs to group g
        codes[:, group] |= (blocks[:, 16:48] >> group & 1) << 4
    return Groups(codes.reshape(-1, 256), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [n, 2, 128]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]  # [n, 2, 4, 32]
    codes = low | ((high & np.uint8(3)) << np.uint8(4)).reshape(low.shape)
    scale = _half(blocks, 208) * blocks[:, 192:208].copy().view(np.int8)
    return Groups(codes.reshape(-1, 256), scale, scale * -32)


FORMATS: dict[str, Format] = {
    "f32": Format(1, 4),
    "f16": Format(1, 2),
    "bf16": Format(1, 2),
    "q4_0": Format(32, 18, _q4_0, 4, 32),
    "q4_1": Format(32, 20, _q4_1, 4, 32),
    "q5_0": Format(32, 22, _q5_0, 8, 32),
    "q5_1": Format(32, 24, _q5_1, 8, 32),
    "q8_0": Format(32, 34, _q8_0, 8, 32),
    "q4_k": Format(256, 144, _q4_k, 4, 32),
    "q5_k": Format(256, 176, _q5_k, 8, 32),
    "q6_k": Format(256, 210, _q6_k, 8, 16),
}


def floats(kind: str, rows: Bytes) -> Floats:
    """Rows of bytes of any kind as float32 [rows, cols]."""
    fmt = FORMATS[kind]
    if fmt.unpack is None:
        return _plain(kind, rows)
    codes, scale, offset = fmt.unpack(rows.reshape(-1, fmt.block_bytes))
    out = codes.reshape(*scale.shape, -1).astype(np.float32)  # [n, groups, group]
    out *= scale[..., None]
    out += offset[..., None]
    return out.reshape(len(rows), -1)


def _plain(kind: str, rows: Bytes) -> Floats:
    rows = np.ascontiguousarray(rows)
    if kind == "f32":
        return rows.view("<f4").astype(np.float32)
    if kind == "f16":
        return rows.view("<f2").astype(np.float32)
    return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
