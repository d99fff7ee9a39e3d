# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Weights of 4 or 8 bits in groups of 32, `w = scale * code + offset`: multiplied as they are for few tokens.

Of 4-bit codes, byte j of a group's 16 holds column j in its low half and column j + 16 in its high half: a tile of
bytes is then two tiles of weights, each with its own columns of x, and nothing is interleaved.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.activation import activated
from emberline.kernels.gpu.launch import await_inputs, cdiv, options, power_of_two, release_next

GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    codes: Tensor  # uint8 [n, k / 2] for 4 bits, [n, k] for 8
    scale: Tensor  # float16 [n, k / GROUP]
    offset: Tensor  # float16 [n, k / GROUP]
    bits: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits


def pack(parts: list[Any], bias: Tensor | None, device: str, dtype: torch.dtype) -> QuantisedMatrix:
    """Affine parts (`emberline.weights.tensor.Affine`) below each other; 4 bits only where all have 4."""
    bits = max(part.bits for part in parts)
    codes = [_halves(part.codes) if bits == 4 else part.codes for part in parts]
    scale, offset = (
        torch.from_numpy(np.concatenate([getattr(part, name) for part in parts]).astype(np.float16)).to(device)
        for name in ("scale", "offset")
    )
    return QuantisedMatrix(torch.from_numpy(np.concatenate(codes)).to(device), scale, offset, bits, bias)


def _halves(codes: Any) -> Any:
    grouped = codes.reshape(len(codes), -1, 2, GROUP // 2)
    return (grouped[:, :, 0] | grouped[:, :, 1] << 4).reshape(len(codes), -1)


def dequantise_reference(matrix: QuantisedMatrix) -> Tensor:
    """float32 [n, k]."""
    codes = matrix.codes
    if matrix.bits == 4:
        bytes_ = codes.view(len(codes), -1, GROUP // 2)
        codes = torch.stack([bytes_ & 15, bytes_ >> 4], dim=2).flatten(1)
    grouped = codes.float().view(*matrix.scale.shape, GROUP)
    return (grouped * matrix.scale.float()[..., None] + matrix.offset.float()[..., None]).flatten(1)


@triton.jit
def _halved(codes, scale, offset, BITS: tl.constexpr):
    """Weights of a tile of bytes, float32: the low halves and the high ones; 8-bit codes are all in the first."""
    first = codes
    if BITS == 4:
        first = codes & 15
    low = first.to(tl.float32) * scale + offset
    high = low
    if BITS == 4:
        high = (codes >> 4).to(tl.float32) * scale + offset
    return low, high


@triton.jit
def _columns(byte, BITS: tl.constexpr):
    """The column in a byte's low half, and the group it belongs to."""
    if BITS == 4:
        return byte // 16 * 32 + byte % 16, byte // 16
    else:
        return byte, byte // 32


@triton.jit(do_not_specialize=["m"])
def _multiply(
    x, codes, scales, offsets, bias, norm, out, partial, counters, m, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, BYTES)
    t = tl.arange(0, TOKENS)
    ok, there = row < n, t < m
    width, groups = k * BITS // 8, k // 32
    each = tl.cdiv(tl.cdiv(width, BYTES), SPLITS) * BYTES
    begin, end = split * each, tl.minimum(split * each + each, width)
    safe = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    await_inputs(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    kind = x.dtype.element_ty
    for start in tl.range(begin, end, BYTES, num_stages=STAGES):
        place = start + byte
        inside = place < end
        col, group = _columns(place, BITS)
        at = tl.load(codes + safe * width + place[None, :], mask=inside[None, :], other=0)
        scale = tl.load(scales + safe * groups + group[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        offset = tl.load(offsets + safe * groups + group[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        low, high = _halved(at, scale, offset, BITS)
        if GATE:
            other = safe + n
            at = tl.load(codes + other * width + place[None, :], mask=inside[None, :], other=0)
            scale = tl.load(scales + other * groups + group[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            offset = tl.load(offsets + other * groups + group[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            low2, high2 = _halved(at, scale, offset, BITS)
        for half in tl.static_range(8 // BITS):
            here = col + half * 16
            mask = there[:, None] & inside[None, :]
            v = tl.load(x + t[:, None] * k + here[None, :], mask=mask, other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                v = (wide * tl.load(norm + here, mask=inside, other=0.0)[None, :]).to(kind)
            if half == 0:
                acc = tl.dot(low.to(kind), tl.trans(v), acc)
                if GATE:
                    acc2 = tl.dot(low2.to(kind), tl.trans(v), acc2)
            else:
                acc = tl.dot(high.to(kind), tl.trans(v), acc)
                if GATE:
                    acc2 = tl.dot(high2.to(kind), tl.trans(v), acc2)
    last = True
    if SPLITS > 1:
        PARTS: tl.constexpr = 2 if GATE else 1
        spot = tl.arange(0, ROWS)[:, None] * TOKENS + t[None, :]
        mine = partial + (tile * SPLITS).to(tl.int64) * (PARTS * ROWS + 1) * TOKENS
        part = mine + split * (PARTS * ROWS + 1) * TOKENS
        tl.store(part + spot, acc)
        if GATE:
            tl.store(part + ROWS * TOKENS + spot, acc2)
        if NORM:
            tl.store(part + PARTS * ROWS * TOKENS + t, squares)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counters + tile, 0)
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            acc2 = tl.zeros([ROWS, TOKENS], tl.float32)
            squares = tl.zeros([TOKENS], tl.float32)
            for s in tl.static_range(SPLITS):
                from_ = mine + s * (PARTS * ROWS + 1) * TOKENS
                acc += tl.load(from_ + spot, cache_modifier=".cg")
                if GATE:
                    acc2 += tl.load(from_ + ROWS * TOKENS + spot, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(from_ + PARTS * ROWS * TOKENS + t, cache_modifier=".cg")
    if last:
        if NORM:
            factor = tl.rsqrt(squares / k + eps)[None, :]
            acc *= factor
            acc2 *= factor
        if BIAS:
            acc += tl.load(bias + row, mask=ok, other=0.0).to(tl.float32)[:, None]
        if GATE:
            acc = activated(acc, GATE == 2) * acc2
        to = out + t.to(tl.int64)[None, :] * n + row[:, None]
        wanted = ok[:, None] & there[None, :]
        if ADD:
            acc += tl.load(to, mask=wanted, other=0.0).to(tl.float32)
        tl.store(to, acc.to(out.dtype.element_ty), mask=wanted)


@dataclass(frozen=True, slots=True)
class QuantisedTile:
    rows: int
    bytes: int  # of codes in a row, per step of the loop
    splits: int
    stages: int
    warps: int


def multiply(
    x: Tensor,
    matrix: QuantisedMatrix,
    out: Tensor,
    tile: QuantisedTile,
    partial: Tensor,
    counters: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """x: [m, k], out: [m, n]; m at most 64. As `skinny.skinny`, with the weights dequantised on the way."""
    (m, n), k = out.shape, x.shape[1]
    _multiply[(cdiv(n, tile.rows), tile.splits)](
        x, matrix.codes, matrix.scale, matrix.offset, x if matrix.bias is None else matrix.bias,
        x if norm is None else norm, out, partial, counters, m, n, k, eps,
        NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate, ADD=add, SPLITS=tile.splits, BITS=matrix.bits,
        ROWS=tile.rows, BYTES=tile.bytes, TOKENS=max(16, power_of_two(m)), STAGES=tile.stages, PDL=int(pdl),
        **options(pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


@triton.jit
def _gemv(
    x, codes, scales, offsets, bias, norm, out, n, k, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, BYTES)
    ok = row < n
    width, groups = k * BITS // 8, k // 32
    safe = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    await_inputs(PDL)
    acc = tl.zeros([ROWS, BYTES], tl.float32)
    acc2 = tl.zeros([ROWS, BYTES], tl.float32)
    squares = tl.zeros([BYTES], tl.float32)
    for start in tl.range(0, width, BYTES):
        place = start + byte
        inside = place < width
        col, group = _columns(place, BITS)
        v = tl.load(x + col, mask=inside, other=0.0).to(tl.float32)
        v2 = tl.zeros([BYTES], tl.float32)
        if BITS == 4:
            v2 = tl.load(x + col + 16, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v + v2 * v2
            v *= tl.load(norm + col, mask=inside, other=0.0)
            if BITS == 4:
                v2 *= tl.load(norm + col + 16, mask=inside, other=0.0)
        mask = inside[None, :]
        at = tl.load(codes + safe * width + place[None, :], mask=mask, other=0)
        scale = tl.load(scales + safe * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
        offset = tl.load(offsets + safe * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
        low, high = _halved(at, scale, offset, BITS)
        acc += low * v[None, :]
        if BITS == 4:
            acc += high * v2[None, :]
        if GATE:
            other = safe + n
            at = tl.load(codes + other * width + place[None, :], mask=mask, other=0)
            scale = tl.load(scales + other * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
            offset = tl.load(offsets + other * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
            low, high = _halved(at, scale, offset, BITS)
            acc2 += low * v[None, :]
            if BITS == 4:
                acc2 += high * v2[None, :]
    result = tl.sum(acc, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares) / k + eps)
        result *= factor
    if BIAS:
        result += tl.load(bias + row, mask=ok, other=0.0).to(tl.float32)
    if GATE:
        result = activated(result, GATE == 2) * (tl.sum(acc2, 1) * factor)
    if ADD:
        result += tl.load(out + row, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=ok)


def gemv(
    x: Tensor,
    matrix: QuantisedMatrix,
    out: Tensor,
    tile: QuantisedTile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = 0,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """x: [1, k], out: [1, n]."""
    n, k = out.shape[1], x.shape[1]
    _gemv[(cdiv(n, tile.rows),)](
        x, matrix.codes, matrix.scale, matrix.offset, x if matrix.bias is None else matrix.bias,
        x if norm is None else norm, out, n, k, eps, NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate,
        ADD=add, BITS=matrix.bits, ROWS=tile.rows, BYTES=tile.bytes, PDL=int(pdl), **options(pdl, num_warps=tile.warps),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _dequantise(codes, scales, offsets, ids, out, first, k, factor, BITS: tl.constexpr, IDS: tl.constexpr,
                BYTES: tl.constexpr):  # fmt: skip
    row = first + tl.program_id(0)
    if IDS:
        row = tl.load(ids + tl.program_id(0))
    wide = row.to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    width, groups = k * BITS // 8, k // 32
    ok = byte < width
    col, group = _columns(byte, BITS)
    at = tl.load(codes + wide * width + byte, mask=ok, other=0)
    scale = tl.load(scales + wide * groups + group, mask=ok, other=0.0).to(tl.float32)
    offset = tl.load(offsets + wide * groups + group, mask=ok, other=0.0).to(tl.float32)
    low, high = _halved(at, scale, offset, BITS)
    to = out + tl.program_id(0).to(tl.int64) * k + col
    tl.store(to, (low * factor).to(out.dtype.element_ty), mask=ok)
    if BITS == 4:
        tl.store(to + 16, (high * factor).to(out.dtype.element_ty), mask=ok)


def quantised_rows(matrix: QuantisedMatrix, ids: Tensor, factor: float, out: Tensor) -> None:
    """Rows of the matrix times a factor: out [tokens, k]."""
    _unpack(matrix, ids, 0, factor, out)


def dequantise(matrix: QuantisedMatrix, first: int, out: Tensor) -> None:
    """Rows first .. of the matrix, as many as out has: out [rows, k]."""
    _unpack(matrix, None, first, 1.0, out)


def _unpack(matrix: QuantisedMatrix, ids: Tensor | None, first: int, factor: float, out: Tensor) -> None:
    rows, k = out.shape
    if rows:
        _dequantise[(rows, cdiv(matrix.codes.shape[1], 1024))](
            matrix.codes, matrix.scale, matrix.offset, matrix.codes if ids is None else ids, out, first, k, factor,
            BITS=matrix.bits, IDS=ids is not None, BYTES=1024,
        )  # fmt: skip
