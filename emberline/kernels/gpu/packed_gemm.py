# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Products with INT4 and MXFP4 weights, decoded in the registers that feed the tensor cores, for any number of tokens.

Weights are the instruction's M side and tokens its N side, as in `gemm.skinny_gemm`. For few tokens the kernel reads
packed weights at the memory's rate, with split-K where there are too few tiles; for more, programs of neighboring
token tiles share a weight tile through the L2 cache. Layout and decoding: `dequantize.py`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.dequantize import (
    HALVES,
    TILE,
    code_values,
    dequantize_reference,
    scale_words_per_tile,
    slice_scale,
)
from emberline.kernels.gpu.gemm import epilogue, reduce_split_k, split_k_floats
from emberline.kernels.gpu.launch import (
    INTERPRETED,
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
    sm_count,
)

MAX_TOKENS = 512  # above, dequantizing the matrix for cuBLAS takes less time than decoding it for every token tile


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    codes: Tensor  # int16 [n, ceil(k / TILE) * HALVES], the layout of `dequantize.pack_nibbles`
    scale: Tensor  # int32 [words, n], of `dequantize.pack_scales`
    kind: str  # "int4" or "mxfp4"
    group: int  # columns that share a scale
    k: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.k

    @property
    def words_per_tile(self) -> int:
        return scale_words_per_tile(self.kind, self.group)

    def dense(self) -> Tensor:
        """float32 [n, k]."""
        return dequantize_reference(self.codes, self.scale, self.kind, self.group, self.k)


@dataclass(frozen=True, slots=True)
class PackedGemmTile:
    rows: int  # of the matrix
    tokens: int
    splits: int
    stages: int
    warps: int


@triton.jit
def weight_slice(
    halves, first, second, AT: tl.constexpr, WORDS_PER_TILE: tl.constexpr, MXFP4: tl.constexpr, DTYPE: tl.constexpr
):
    """Columns 32 AT .. 32 AT + 31 of a tile, [rows, 32], times the rows' scales; see `dequantize.slice_scale`."""
    return (code_values(halves, AT, MXFP4) * slice_scale(first, second, AT, WORDS_PER_TILE, MXFP4)[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["m"])
def _packed_gemm(
    x, codes, scale, bias, out, partial, counters, m, n, k, token_tiles,
    WORDS_PER_TILE: tl.constexpr, MXFP4: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    output_tile, split = tl.program_id(0), tl.program_id(1)
    row = output_tile // token_tiles * ROWS + tl.arange(0, ROWS)
    t = output_tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, 32)
    tiles = tl.cdiv(k, 128)
    per_split = tl.cdiv(tiles, SPLITS)
    begin, end = split * per_split, tl.minimum(split * per_split + per_split, tiles)
    begin = tl.minimum(begin, end)
    safe_row = tl.minimum(row, n - 1)
    stride = n.to(tl.int64) * (2 if GATE else 1)
    code_ptrs = codes + safe_row.to(tl.int64)[:, None] * (tiles * 32) + half[None, :]
    up_ptrs = code_ptrs + n.to(tl.int64) * (tiles * 32)
    scale_ptrs = scale + safe_row
    pdl_wait(PDL)
    x_ptrs = x + t.to(tl.int64)[:, None] * k + half[None, :]
    token_mask = (t < m)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for tile in tl.range(begin, end, num_stages=STAGES):
        halves = tl.load(code_ptrs + tile * 32, eviction_policy="evict_first")
        word_ptrs = scale_ptrs + stride * (tile * WORDS_PER_TILE)
        first = tl.load(word_ptrs)
        second = first
        if WORDS_PER_TILE == 2:
            second = tl.load(word_ptrs + stride)
        if GATE:
            up_halves = tl.load(up_ptrs + tile * 32, eviction_policy="evict_first")
            up_first = tl.load(word_ptrs + n)
            up_second = up_first
            if WORDS_PER_TILE == 2:
                up_second = tl.load(word_ptrs + stride + n)
        for i in tl.static_range(4):
            mask = token_mask
            if not EVEN:
                mask = token_mask & (tile * 128 + i * 32 + half < k)[None, :]
            x_slice = tl.trans(tl.load(x_ptrs + (tile * 128 + i * 32), mask=mask, other=0.0))
            acc = tl.dot(weight_slice(halves, first, second, i, WORDS_PER_TILE, MXFP4, dtype), x_slice, acc)
            if GATE:
                up = weight_slice(up_halves, up_first, up_second, i, WORDS_PER_TILE, MXFP4, dtype)
                acc_up = tl.dot(up, x_slice, acc_up)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc_up, last = reduce_split_k(
            acc, acc_up, partial, counters, output_tile, split, GATE, SPLITS, ROWS, TOKENS
        )
    if last:
        mask = (row < n)[:, None] & (t < m)[None, :]
        out_ptrs = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def packed_gemm_floats(n: int, m: int, tile: PackedGemmTile, gated: bool) -> int:
    """Split-K workspace of `packed_gemm` for m tokens and n output columns."""
    tiles = cdiv(n, tile.rows) * cdiv(m, tile.tokens)
    return split_k_floats(tiles, tile.splits, tile.rows, tile.tokens, gated)


def packed_gemm(
    x: Tensor, matrix: PackedMatrix, out: Tensor, tile: PackedGemmTile, partial: Tensor, counters: Tensor, *,
    gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k], out: [m, n]; with a gate, n is half the matrix's rows. counters: int32 zeros, reset to zero."""
    (m, n), k = out.shape, x.shape[1]
    token_tiles = cdiv(m, tile.tokens)
    _packed_gemm[(cdiv(n, tile.rows) * token_tiles, tile.splits)](
        x, matrix.codes, matrix.scale, x if matrix.bias is None else matrix.bias, out, partial, counters, m, n, k,
        token_tiles, WORDS_PER_TILE=matrix.words_per_tile, MXFP4=matrix.kind == "mxfp4", BIAS=matrix.bias is not None,
        GATE=gate, ADD=add, SPLITS=tile.splits, ROWS=tile.rows, TOKENS=tile.tokens, EVEN=k % TILE == 0,
        STAGES=tile.stages, PDL=int(pdl), **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def packed_gemm_tile(m: int, n: int, k: int, gated: bool) -> PackedGemmTile | None:
    """The tile config for m tokens and n output columns; None: dequantize and use cuBLAS, for many tokens."""
    if m > MAX_TOKENS:
        return None
    tokens = min(128, max(8, next_power_of_two(m)))
    if INTERPRETED:
        return PackedGemmTile(64, max(16, tokens), 1, 2, 4)
    rows, stages, warps = (64, 4, 4) if tokens > 8 else (64, 6, 4)
    if tokens == 128:  # not gated, two programs fit on an SM: one decodes while the other multiplies
        rows, stages, warps = (128, 3, 8) if gated else (64, 3, 4)
    tiles, splits = cdiv(n, rows) * cdiv(m, tokens), 1
    # Large tiles decode as long as they load: two thirds of the places on the SMs (two each) are enough.
    enough = 4 * sm_count() // 3 if tokens == 128 else 3 * sm_count()
    while not gated and tiles * splits < enough and k >= 2048 * splits:
        splits *= 2
    return PackedGemmTile(rows, tokens, splits, stages, warps)


@triton.jit(do_not_specialize=["first", "rows"])
def _dequantize_packed(
    codes, scale, ids, out, first, rows, n, k, factor,
    WORDS_PER_TILE: tl.constexpr, MXFP4: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Whole tiles of ROWS rows: each slice of 32 columns is stored contiguously."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    out_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 32)
    row = tl.minimum(first + out_row, n - 1)
    if IDS:
        row = tl.load(ids + out_row, mask=out_row < rows, other=0)
    halves = tl.load(codes + row.to(tl.int64)[:, None] * (tiles * 32) + tile * 32 + half[None, :])
    word_ptrs = scale + (tile * WORDS_PER_TILE).to(tl.int64) * n + row
    word = tl.load(word_ptrs)
    second = word
    if WORDS_PER_TILE == 2:
        second = tl.load(word_ptrs + n)
    for i in tl.static_range(4):
        col = tile * 128 + i * 32 + half
        value = weight_slice(halves, word, second, i, WORDS_PER_TILE, MXFP4, tl.float32) * factor
        mask = (out_row < rows)[:, None] & (col < k)[None, :]
        tl.store(out + out_row.to(tl.int64)[:, None] * k + col[None, :], value.to(out.dtype.element_ty), mask=mask)


def dequantize_packed_rows(
    matrix: PackedMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
) -> None:
    """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
    rows, k = out.shape
    if rows:
        n, block = matrix.shape[0], min(32, next_power_of_two(rows))
        _dequantize_packed[(matrix.codes.shape[1] // HALVES, cdiv(rows, block))](
            matrix.codes, matrix.scale, matrix.codes if ids is None else ids, out, first, rows, n, k, factor,
            WORDS_PER_TILE=matrix.words_per_tile, MXFP4=matrix.kind == "mxfp4", IDS=ids is not None, ROWS=block,
        )  # fmt: skip
