# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Once a step, for all layers: the rotary table, and how decode rows are split into pieces of like size.

A piece is a stretch of one row's cached tokens. The device cuts them, from lengths only it needs to know, so that a
captured graph stays balanced whatever it is replayed with. The number of pieces is bounded by what the host knows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import Rope
from emberline.kernels.gpu.launch import SM_COUNT, cdiv, power_of_two

PIECE_FIELDS = 8  # row, split, n_splits, first token, end, context; the rest is padding to one sector
TARGET_PROGRAMS = 6 * SM_COUNT  # pieces times KV heads, when there is enough to read
MIN_PIECE = 64  # tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    table: Tensor  # int32 [n, PIECE_FIELDS]; row -1: nothing to do

    @property
    def n(self) -> int:
        return self.table.shape[0]


def n_pieces(rows: int, kv_heads: int) -> int:
    """A bound: every row's last piece, and as many full ones as the target allows."""
    return rows + cdiv(TARGET_PROGRAMS, kv_heads) if rows else 0


@triton.jit
def _lengths(context_lens, shares, rows, r, window, SHARED: tl.constexpr, WINDOWED: tl.constexpr):
    """Contexts, and the cached tokens each row must read: from `first` up to its newest token."""
    ok = r < rows
    context = tl.load(context_lens + r, mask=ok, other=0)
    first = tl.zeros_like(context)
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    if SHARED:
        first = tl.load(shares + r, mask=ok, other=0)
    return context, first, tl.maximum(context - 1 - first, 0)


@triton.jit(do_not_specialize=["rows", "n_pieces"])
def _cut(
    context_lens, shares, pieces, rows, n_pieces, kv_heads, window, target,
    SHARED: tl.constexpr, WINDOWED: tl.constexpr, MIN: tl.constexpr, ROWS: tl.constexpr, MINE: tl.constexpr,
):  # fmt: skip
    total = 0
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        _, _, n = _lengths(context_lens, shares, rows, r, window, SHARED, WINDOWED)
        total += tl.sum(n)
    length = tl.maximum(tl.cdiv(total * kv_heads, target), MIN)
    length = tl.cdiv(length, MIN) * MIN
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    row = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)  # pieces of the rows before mine
    carry = 0
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        context, _, n = _lengths(context_lens, shares, rows, r, window, SHARED, WINDOWED)
        splits = tl.where(context > 0, tl.maximum(tl.cdiv(n, length), 1), 0)
        ends = carry + tl.cumsum(splits, 0)
        passed = (ends[None, :] <= mine[:, None]) & (r < rows)[None, :]
        row += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        carry += tl.sum(splits)
    exists = mine < carry
    ok = exists & (mine < n_pieces)
    context, first, n = _lengths(context_lens, shares, rows, tl.where(exists, row, 0), window, SHARED, WINDOWED)
    splits = tl.maximum(tl.cdiv(n, length), 1)
    split = mine - before
    each = tl.cdiv(tl.cdiv(n, splits), MIN) * MIN  # even pieces, in whole tiles
    begin = tl.minimum(first + split * each, first + n)
    end = tl.minimum(begin + each, first + n)
    at = pieces + mine * 8
    stored = mine < n_pieces
    tl.store(at, tl.where(ok, row, -1), mask=stored)
    tl.store(at + 1, split, mask=ok)
    tl.store(at + 2, splits, mask=ok)
    tl.store(at + 3, begin, mask=ok)
    tl.store(at + 4, end, mask=ok)
    tl.store(at + 5, context, mask=ok)


def cut(
    context_lens: Tensor, rows: int, kv_heads: int, window: int | None, shares: Tensor | None, out: Tensor
) -> Pieces:
    """Pieces of the first `rows` rows. A row's last piece ends before its newest token, which is not yet cached."""
    n = n_pieces(rows, kv_heads)
    table = out[: n * PIECE_FIELDS].view(n, PIECE_FIELDS)
    if rows:
        _cut[(cdiv(n, 32),)](
            context_lens, context_lens if shares is None else shares, table, rows, n, kv_heads, window or 0,
            TARGET_PROGRAMS, SHARED=shares is not None, WINDOWED=window is not None, MIN=MIN_PIECE, ROWS=256, MINE=32,
        )  # fmt: skip
    return Pieces(table)


@triton.jit
def _angles(positions, frequencies, cosine, sine, half, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ok = at < half
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(frequencies + at, mask=ok, other=0.0)
    tl.store(cosine + token * half + at, tl.cos(angle) * scale, mask=ok)
    tl.store(sine + token * half + at, tl.sin(angle) * scale, mask=ok)


def angles(positions: Tensor, rope: Rope, out: Tensor) -> tuple[Tensor, Tensor]:
    """cosine, sine: float32 [tokens, head_dim / 2], in `out`."""
    tokens, half = positions.shape[0], rope.inverse_frequencies.shape[0]
    cosine = out[: tokens * half].view(tokens, half)
    sine = out[tokens * half : 2 * tokens * half].view(tokens, half)
    if tokens:
        _angles[(tokens,)](
            positions, rope.inverse_frequencies, cosine, sine, half, rope.scale, BLOCK=power_of_two(half)
        )
    return cosine, sine


def angles_reference(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    turned = torch.outer(positions.float(), rope.inverse_frequencies)
    return turned.cos() * rope.scale, turned.sin() * rope.scale
