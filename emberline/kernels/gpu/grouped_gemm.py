# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Grouped GEMM: every block of tokens times the matrix of its expert, for the two products of a mixture of experts.

As in the skinny GEMM the weights are the operand of the tensor core instruction that takes 64 rows and the tokens the
one that takes as few as 8: at decode sizes an expert has one or two tokens, and the time is that of reading its weights
once. The first product applies the gated activation, the second the routing weight; `combine_pairs` adds the results of
a token's experts to the residual, always in the same order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.dequantize import biased_int4_values, code_values, fp8_values, wide_slice_scale
from emberline.kernels.gpu.elementwise import activation_fn
from emberline.kernels.gpu.expert_matrix import FORMATS, PACKED, ROW_BLOCK, ExpertMatrix
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
from emberline.kernels.gpu.moe_routing import BLOCK_FIELDS, Permutation
from emberline.kernels.gpu.packed_gemm import weight_slice

EXPERT_GATES = ("", "silu", "gelu_tanh", "swiglu_clamped")


@dataclass(frozen=True, slots=True)
class GroupedTile:
    rows: int  # of an expert's matrix; with a gate, of gate and up each
    cols: int  # per iteration
    stages: int
    warps: int


@triton.jit
def expert_gate(gate, up, GATE: tl.constexpr):
    """Like `moe.gated_activation`, by the index into EXPERT_GATES."""
    if GATE == 3:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        out = activation_fn(gate, GATE == 2) * up
    return out


@triton.jit
def _load_block(blocks, lists, block, capacity, TOKENS: tl.constexpr, FIELDS: tl.constexpr):
    """The expert of a block, its pairs and which of them exist."""
    entry = blocks + block * FIELDS
    expert, first, n_pairs = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    t = tl.arange(0, TOKENS)
    exists = t < n_pairs
    pair = tl.load(lists + expert.to(tl.int64) * capacity + first + t, mask=exists, other=0)
    return expert.to(tl.int64), pair, exists


@triton.jit
def _store_block(
    acc, acc_up, bias, weights, out, expert, row, pair, exists, n, first_row, n_out,
    GATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """WEIGHT: 0 none, 1 of the output, 2 of the input: a product is linear, so its result may be scaled instead."""
    row_mask = row < first_row + n_out
    if WEIGHT == 2:
        weight = tl.load(weights + pair, mask=exists, other=0.0)[None, :]
        acc *= weight
        acc_up *= weight
    if BIAS:
        bias_ptrs = bias + expert * (n * (2 if GATE else 1)) + row
        acc += tl.load(bias_ptrs, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        if GATE:
            acc_up += tl.load(bias_ptrs + n, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    if GATE:
        acc = expert_gate(acc, acc_up, GATE)
    if WEIGHT == 1:
        acc *= tl.load(weights + pair, mask=exists, other=0.0)[None, :]
    out_ptrs = out + pair.to(tl.int64)[None, :] * n_out + (row - first_row)[:, None]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & exists[None, :])


@triton.jit
def _dense_product(
    x_ptrs, exists, weight, expert, row, n, k,
    GATE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of gate (or of the only matrix) and of up times the tokens: two of [ROWS, TOKENS]."""
    col = tl.arange(0, COLS)
    w_ptrs = weight + (expert * (n * (2 if GATE else 1)) + row)[:, None] * k + col[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * k
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, k, COLS, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_ptrs + start)
            x_tile = tl.load(x_ptrs[:, None] + (start + col)[None, :], mask=exists[:, None], other=0.0)
        else:
            col_mask = (start + col < k)[None, :]
            w = tl.load(w_ptrs + start, mask=col_mask, other=0.0)
            x_tile = tl.load(x_ptrs[:, None] + (start + col)[None, :], mask=exists[:, None] & col_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x_tile), acc)
        if GATE:
            if EVEN:
                w_up = tl.load(up_ptrs + start)
            else:
                w_up = tl.load(up_ptrs + start, mask=col_mask, other=0.0)
            acc_up = tl.dot(w_up, tl.trans(x_tile), acc_up)
    return acc, acc_up


@triton.jit
def _packed_offsets(expert, row, rows, tiles, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of the first tile's codes and scale words of each row: see `expert_matrix`."""
    block = expert * tl.cdiv(rows, BLOCK) + row // BLOCK
    return block * (tiles * 32 * BLOCK) + row % BLOCK * 32, block * (tiles * WORDS * BLOCK) + row % BLOCK


@triton.jit
def _unscaled_slice(halves, AT: tl.constexpr, MXFP4: tl.constexpr, BIASED: tl.constexpr):
    """Columns 32 AT .. 32 AT + 31 of a tile, [rows, 32]; BIASED: plus 136."""
    if BIASED:
        return biased_int4_values(halves, AT)
    else:
        return code_values(halves, AT, MXFP4)


@triton.jit
def _packed_product(
    x_ptrs, exists, codes, scale, expert, row, n, k,
    MXFP4: tl.constexpr, WORDS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like `_dense_product`, for 4-bit codes with WORDS words of scales per tile of 128 columns: see `dequantize`.

    For few tokens scales multiply accumulators, which are fewer than weights. A tile of many rows also takes INT4's -8
    from them: the product of codes plus 128 with x begins at that of -136 with x, which all rows share.
    """
    BIASED: tl.constexpr = TOKENS <= 16 and ROWS >= 128 and not MXFP4
    tiles = tl.cdiv(k, 128)
    rows = n * (2 if GATE else 1)
    half = tl.arange(0, 32)
    at, scale_at = _packed_offsets(expert, row, rows, tiles, WORDS, BLOCK)
    up_at, up_scale_at = _packed_offsets(expert, row + n, rows, tiles, WORDS, BLOCK)
    code_ptrs, scale_ptrs = codes + at[:, None] + half[None, :], scale + scale_at
    up_ptrs, up_scale_ptrs = codes + up_at[:, None] + half[None, :], scale + up_scale_at
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    less = tl.full([ROWS, 32], -136.0, dtype)
    start = tl.zeros([ROWS, TOKENS], tl.float32)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        halves = tl.load(code_ptrs + tile * (32 * BLOCK))
        word = tile * (WORDS * BLOCK)
        first = tl.load(scale_ptrs + word)
        second = first
        if WORDS == 2:
            second = tl.load(scale_ptrs + word + BLOCK)
        if GATE:
            up_halves = tl.load(up_ptrs + tile * (32 * BLOCK))
            up_first = tl.load(up_scale_ptrs + word)
            up_second = up_first
            if WORDS == 2:
                up_second = tl.load(up_scale_ptrs + word + BLOCK)
        for i in tl.static_range(4):
            col = tile * 128 + i * 32 + half
            mask = exists[:, None]
            if not EVEN:
                mask = exists[:, None] & (col < k)[None, :]
            x_slice = tl.trans(tl.load(x_ptrs[:, None] + col[None, :], mask=mask, other=0.0))
            if TOKENS > 16:
                acc = tl.dot(weight_slice(halves, first, second, i, WORDS, MXFP4, dtype), x_slice, acc)
                if GATE:
                    up = weight_slice(up_halves, up_first, up_second, i, WORDS, MXFP4, dtype)
                    acc_up = tl.dot(up, x_slice, acc_up)
            else:
                if BIASED:
                    start = tl.dot(less, x_slice)
                values = _unscaled_slice(halves, i, MXFP4, BIASED).to(dtype)
                acc += tl.dot(values, x_slice, start) * wide_slice_scale(first, second, i, WORDS, MXFP4)[:, None]
                if GATE:
                    values = _unscaled_slice(up_halves, i, MXFP4, BIASED).to(dtype)
                    up_scale = wide_slice_scale(up_first, up_second, i, WORDS, MXFP4)
                    acc_up += tl.dot(values, x_slice, start) * up_scale[:, None]
    return acc, acc_up


@triton.jit
def _fp8_product(
    x_ptrs, exists, codes, scale, expert, row, n, k,
    BLOCKS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `_dense_product`, for FP8 codes. BLOCKS: a scale per 128 x 128 block, else one per row, applied at the
    end."""
    stride = n * (2 if GATE else 1)
    col = tl.arange(0, COLS)
    code_ptrs = codes + (expert * stride + row)[:, None] * k + col[None, :]
    up_ptrs = code_ptrs + n.to(tl.int64) * k
    col_blocks = tl.cdiv(k, 128)
    if BLOCKS:
        scale_ptrs = scale + (expert * tl.cdiv(stride, 128) + row // 128) * col_blocks
        up_scale_ptrs = scale + (expert * tl.cdiv(stride, 128) + (row + n) // 128) * col_blocks
    else:
        scale_ptrs = scale + expert * stride + row
        up_scale_ptrs = scale_ptrs + n
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, k, COLS, num_stages=STAGES):
        mask = exists[:, None]
        if EVEN:
            w = tl.load(code_ptrs + start)
        else:
            col_mask = (start + col < k)[None, :]
            mask = mask & col_mask
            w = tl.load(code_ptrs + start, mask=col_mask, other=0)
        x_tile = tl.trans(tl.load(x_ptrs[:, None] + (start + col)[None, :], mask=mask, other=0.0))
        if BLOCKS:
            acc += tl.dot(fp8_values(w).to(dtype), x_tile) * tl.load(scale_ptrs + start // 128)[:, None]
        else:
            acc = tl.dot(fp8_values(w).to(dtype), x_tile, acc)
        if GATE:
            if EVEN:
                up = tl.load(up_ptrs + start)
            else:
                up = tl.load(up_ptrs + start, mask=col_mask, other=0)
            if BLOCKS:
                acc_up += tl.dot(fp8_values(up).to(dtype), x_tile) * tl.load(up_scale_ptrs + start // 128)[:, None]
            else:
                acc_up = tl.dot(fp8_values(up).to(dtype), x_tile, acc_up)
    if not BLOCKS:
        acc *= tl.load(scale_ptrs)[:, None]
        if GATE:
            acc_up *= tl.load(up_scale_ptrs)[:, None]
    return acc, acc_up


@triton.jit(do_not_specialize=["capacity"])
def _grouped_gemm(
    x, codes, scale, bias, weights, out, lists, blocks, n_blocks, capacity, n, k, first_row, n_out,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, SLOTS: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    WEIGHT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FORMAT: index into FORMATS. SLOTS: pairs of a token if x has a row per token; 1 if it has one per pair.

    BLOCK: rows of a block of 4-bit matrices.
    """
    pdl_launch_early(PDL)
    n_tiles = tl.cdiv(n_out, ROWS)
    tile, block = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    pdl_wait(PDL)
    if block < tl.load(n_blocks):
        expert, pair, exists = _load_block(blocks, lists, block, capacity, TOKENS, FIELDS)
        row = first_row + tile * ROWS + tl.arange(0, ROWS)
        safe_row = tl.minimum(row, n - 1)  # a tile past the end reads the last row again
        x_ptrs = x + (pair // SLOTS).to(tl.int64) * k
        if FORMAT == 0:
            acc, acc_up = _dense_product(
                x_ptrs, exists, codes, expert, safe_row, n, k, GATE, EVEN, ROWS, COLS, TOKENS, STAGES
            )
        elif FORMAT <= 2:
            acc, acc_up = _packed_product(
                x_ptrs, exists, codes, scale, expert, safe_row, n, k, FORMAT == 2, WORDS, GATE, EVEN, ROWS,
                TOKENS, STAGES, BLOCK,
            )  # fmt: skip
        else:
            acc, acc_up = _fp8_product(
                x_ptrs, exists, codes, scale, expert, safe_row, n, k, FORMAT == 4, GATE, EVEN, ROWS, COLS,
                TOKENS, STAGES,
            )  # fmt: skip
        pdl_launch_late(PDL)
        _store_block(
            acc,
            acc_up,
            bias,
            weights,
            out,
            expert,
            row,
            pair,
            exists,
            n,
            first_row,
            n_out,
            GATE,
            BIAS,
            WEIGHT,
        )


def grouped_gemm(
    x: Tensor, experts: ExpertMatrix, out: Tensor, to: Permutation, tile: GroupedTile, *, gate: int = 0,
    weight: int = 0, first_row: int = 0, pdl: bool = False,
) -> None:  # fmt: skip
    """out [pairs, n]: rows of x times rows of their experts' matrices, from `first_row` on.

    A pair that no block holds is not written. x: [tokens, k], or [pairs, k]. gate: index into EXPERT_GATES; matrices
    then hold gate and up. weight: 0 none, 1 the routing weight multiplies the result, 2 the input.
    """
    (pairs, n_out), (n_experts, n, k) = out.shape, experts.shape
    if not pairs:
        return
    n //= 2 if gate else 1
    assert n_experts == len(to.lists)
    assert x.shape[1] == k
    assert first_row + n_out <= n
    cols = 128 if experts.kind in PACKED else tile.cols
    assert experts.kind != "fp8_blocks" or 128 % cols == 0
    _grouped_gemm[(to.max_blocks * cdiv(n_out, tile.rows),)](
        x, experts.weight, experts.weight if experts.scale is None else experts.scale,
        x if experts.bias is None else experts.bias, to.weights, out, to.lists, to.blocks, to.n_blocks,
        to.lists.shape[1], n, k, first_row, n_out, FORMAT=FORMATS.index(experts.kind), WORDS=experts.words_per_tile,
        SLOTS=to.slots if len(x) == to.tokens else 1, GATE=gate, BIAS=experts.bias is not None, WEIGHT=weight,
        EVEN=k % cols == 0, ROWS=tile.rows, COLS=cols,
        TOKENS=to.block_tokens, STAGES=tile.stages, BLOCK=ROW_BLOCK, FIELDS=BLOCK_FIELDS, PDL=2 * pdl,
        **launch_options(pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


@triton.jit
def _combine_pairs(pairs, ids, residual, n, stride, SLOTS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_early(PDL)
    token = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = col < n
    to = residual + token.to(tl.int64) * stride + col
    pdl_wait(PDL)
    total = tl.zeros([COLS], tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        n_written = tl.where(tl.load(ids + pair) >= 0, n, 0)
        total += tl.load(pairs + pair.to(tl.int64) * n + col, mask=col < n_written, other=0.0).to(tl.float32)
    total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(residual.dtype.element_ty), mask=mask)


def combine_pairs(results: Tensor, to: Permutation, residual: Tensor, pdl: bool = False) -> None:
    """Add each token's rows of `results` [pairs, n] to its row of `residual` [tokens, n], whose rows may be apart."""
    tokens, n = residual.shape
    if tokens:
        cols = min(1024, next_power_of_two(n))
        _combine_pairs[(tokens, cdiv(n, cols))](
            results, to.ids, residual, n, residual.stride(0), SLOTS=to.slots, COLS=cols, PDL=int(pdl),
            **launch_options(pdl, num_warps=4),
        )  # fmt: skip


# --- tile configs -----------------------------------------------------------------------------------------------------


def block_tokens(kind: str, tokens: int, slots: int, experts: int) -> int:
    """Pairs of a block: about the average of a touched expert, so that most experts are one block and are read once.

    More of them would be padding that the tensor cores multiply for nothing; fewer would read a matrix several times.
    Of 4-bit weights blocks of 64 are as fast as larger ones, whose accumulators leave no registers to decode in.
    """
    if INTERPRETED:
        return 16
    average = tokens * slots / min(experts, tokens * slots)
    if kind in PACKED:
        return 8 if average <= 6 else 16 if average <= 12 else 64
    return 16 if average <= 12 else 32 if average <= 24 else 64 if average <= 96 else 128


def grouped_tile(kind: str, block: int, gated: bool, rows: int) -> GroupedTile:
    """Tile measured on an H200 with the shapes of Kimi K2.5 (INT4) and GLM-4.7-Flash (BF16).

    Figures: docs/lab/2026-11-mixture-of-experts.md.

    rows: of the matrices of all blocks. Few tokens: as many bytes in flight as two or three programs per SM can have.
    Many: tiles that reuse both operands; a gate doubles the accumulators.
    """
    if INTERPRETED:
        return GroupedTile(128 if rows % 128 == 0 else 64, 64, 2, 4)
    if kind in PACKED:
        if block <= 32:  # the experts of one or two tokens would not give each SM two large tiles
            return GroupedTile(128, 128, 4, 4) if rows >= 256 * sm_count() else GroupedTile(32, 128, 5, 2)
        return (
            GroupedTile(128, 128, 3, 4) if gated and block == 64 else GroupedTile(128, 128, 4 if block == 64 else 3, 8)
        )
    if kind == "dense":
        if block <= 32:
            return GroupedTile(64, 128, 4, 4)
        return GroupedTile(128, 64, 4, 8) if gated or block == 64 else GroupedTile(256, 64, 3, 8)
    return GroupedTile(64, 128, 4, 4) if block <= 32 else GroupedTile(128, 128, 3, 8)
