# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Weights of 4 or 8 bits in groups of 32, `w = scale * code + offset`: layout, dequantization, GEMV and skinny GEMM.

Codes are packed into 32-bit words, a group in adjacent words; code i of a group's word j is column i * W + j, where W
is the number of words per group. A thread that loads 16 bytes of a row thus stays within one group (or half of one),
and code i of adjacent words belongs to adjacent columns. A group's float16 scale and offset share one more word. These
words are stored separately with the rows of a group adjacent, because a program takes several rows and each group once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.gemm import epilogue, reduce_split_k
from emberline.kernels.gpu.launch import (
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_launch_late,
    pdl_wait,
    sm_count,
)

GROUP = 32
MAX_GEMV_WORDS = 8192  # of a row, that one program can hold in registers
_PACKED_ROWS = 1024  # packed at a time: bounds the temporary memory of loading


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    codes: Tensor  # int32 [n, k * bits / 32]
    affine: Tensor  # int32 [k / GROUP, n]: float16 scale in the low half, float16 offset in the high one
    bits: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.affine.shape[1], self.affine.shape[0] * GROUP


def pack_quantized(parts: list[Any], bias: Tensor | None, device: str) -> QuantizedMatrix:
    """`emberline.weights.tensors.Affine` parts stacked by rows; 4 bits only if all parts have 4."""
    bits, k = max(part.bits for part in parts), parts[0].codes.shape[1]
    n = sum(len(part.codes) for part in parts)
    codes = torch.empty(n, k * bits // 32, dtype=torch.int32, device=device)
    halves = [
        np.concatenate([getattr(part, name) for part in parts]).astype(np.float16) for name in ("scale", "offset")
    ]
    affine = torch.from_numpy(np.stack(halves, axis=-1).view(np.int32)[..., 0]).to(device).T.contiguous()
    done = 0
    for part in parts:
        for start in range(0, len(part.codes), _PACKED_ROWS):
            rows = torch.from_numpy(part.codes[start : start + _PACKED_ROWS]).to(device)
            codes[done : done + len(rows)] = _pack_words(rows, bits)
            done += len(rows)
    return QuantizedMatrix(codes, affine, bits, bias)


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, k], one code each, to int32 [n, k * bits / 32]."""
    each = 32 // bits
    by_word = codes.view(len(codes), -1, each, GROUP // each).transpose(2, 3)  # [n, groups, words, codes of a word]
    if bits == 4:
        by_word = by_word[..., 0::2] | by_word[..., 1::2] << 4
    return by_word.contiguous().view(torch.int32).flatten(1)


def dequantize_reference(matrix: QuantizedMatrix) -> Tensor:
    """float32 [n, k]."""
    n, _ = matrix.shape
    each = 32 // matrix.bits
    shifts = torch.arange(each, dtype=torch.int32, device=matrix.codes.device) * matrix.bits
    by_word = (matrix.codes.view(n, -1, GROUP // each)[..., None] >> shifts) & (2**matrix.bits - 1)
    grouped = by_word.transpose(2, 3).flatten(2).float()  # [n, groups, GROUP]
    scale, offset = matrix.affine.T.contiguous().view(torch.float16).view(n, -1, 2).float().unbind(-1)
    dense: Tensor = grouped * scale[..., None] + offset[..., None]
    return dense.flatten(1)


BITS_OF_256, BITS_OF_16 = 0x43800000, 0x41800000  # bit patterns of 256.0 and 16.0


@triton.jit
def biased_codes(word, of_256, of_16, BITS: tl.constexpr):
    """The codes of each word as floats plus a bias: 256 in even positions and, for 4 bits, 16 in odd ones.

    A code's bits are placed directly into a mantissa, which needs no conversion, and two 4-bit codes share a shift.
    The remaining bits are run-time values, because the instruction that masks and sets bits takes only one immediate.
    """
    shift_0, shift_1, shift_2, shift_3 = word << 15, word << 7, word >> 1, word >> 9
    if BITS == 8:
        return (
            ((shift_0 & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((shift_1 & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((shift_2 & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
            ((shift_3 & 0x7F8000) | of_256).to(tl.float32, bitcast=True),
        )
    else:
        return (
            ((shift_0 & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((shift_0 & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((shift_1 & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((shift_1 & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((shift_2 & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((shift_2 & 0x780000) | of_16).to(tl.float32, bitcast=True),
            ((shift_3 & 0x78000) | of_256).to(tl.float32, bitcast=True),
            ((shift_3 & 0x780000) | of_16).to(tl.float32, bitcast=True),
        )


@triton.jit
def scale_offset(affine):
    scale = (affine & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = (affine >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def dequantize_words(word, affine, of_256, of_16, BITS: tl.constexpr):
    """The weights of each word, float32, in the order of its codes."""
    scale, offset = scale_offset(affine)
    even, odd = offset - 256.0 * scale, offset - 16.0 * scale
    q = biased_codes(word, of_256, of_16, BITS)
    if BITS == 8:
        return (q[0] * scale + even, q[1] * scale + even, q[2] * scale + even, q[3] * scale + even)
    else:
        return (
            q[0] * scale + even, q[1] * scale + odd, q[2] * scale + even, q[3] * scale + odd,
            q[4] * scale + even, q[5] * scale + odd, q[6] * scale + even, q[7] * scale + odd,
        )  # fmt: skip


@triton.jit
def _in_order(w, BITS: tl.constexpr, WORDS: tl.constexpr):
    """The weights of words, a tuple of [WORDS], as one tensor in the order of the columns."""
    if BITS == 8:
        by_word = tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3]))
    else:
        even = tl.join(tl.join(w[0], w[4]), tl.join(w[2], w[6]))
        odd = tl.join(tl.join(w[1], w[5]), tl.join(w[3], w[7]))
        by_word = tl.join(even, odd)
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    grouped = tl.reshape(by_word, [WORDS * CODES_PER_WORD // 32, BITS, CODES_PER_WORD])  # group, word, code
    return tl.reshape(tl.permute(grouped, (0, 2, 1)), [WORDS * CODES_PER_WORD])


@triton.jit(do_not_specialize=["first", "of_256", "of_16"])
def _dequantize(
    codes, affine, ids, out, first, n, k, factor, of_256, of_16,
    BITS: tl.constexpr, IDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    WORDS_PER_GROUP: tl.constexpr = 32 // CODES_PER_WORD
    row = first + tl.program_id(0)
    if IDS:
        row = tl.load(ids + tl.program_id(0))
    wide_row = row.to(tl.int64)
    word_index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = word_index < k // CODES_PER_WORD
    group = word_index // WORDS_PER_GROUP
    word = tl.load(codes + wide_row * (k // CODES_PER_WORD) + word_index, mask=mask, other=0)
    w = dequantize_words(word, tl.load(affine + group * n + row, mask=mask, other=0), of_256, of_16, BITS)
    # In the order of the columns: stored word by word, a warp would touch four times as many sectors.
    values = _in_order(w, BITS, WORDS) * factor
    col = tl.program_id(1) * (WORDS * CODES_PER_WORD) + tl.arange(0, WORDS * CODES_PER_WORD)
    out_row = out + tl.program_id(0).to(tl.int64) * k
    tl.store(out_row + col, values.to(out.dtype.element_ty), mask=col < k)


def dequantize_rows(
    matrix: QuantizedMatrix, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
) -> None:
    """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
    rows, k = out.shape
    if rows:
        _dequantize[(rows, cdiv(matrix.codes.shape[1], 512))](
            matrix.codes, matrix.affine, matrix.codes if ids is None else ids, out, first, matrix.shape[0], k, factor,
            BITS_OF_256, BITS_OF_16, BITS=matrix.bits, IDS=ids is not None, WORDS=512,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedGemvTile:
    rows: int  # of the matrix, per iteration
    warps: int
    per_sm: int  # programs per SM


@triton.jit
def _load_token(x, norm, word, word_mask, k, eps, NORM: tl.constexpr, CODES_PER_WORD: tl.constexpr):
    """The token in the layout of the words: for each code of a word the value of its column, normed."""
    WORDS_PER_GROUP: tl.constexpr = 32 // CODES_PER_WORD
    col = word // WORDS_PER_GROUP * 32 + word % WORDS_PER_GROUP
    values = ()
    for i in tl.static_range(CODES_PER_WORD):
        # Triton's tuples cannot be unpacked into new ones.
        values = values + (tl.load(x + col + i * WORDS_PER_GROUP, mask=word_mask, other=0.0).to(tl.float32),)  # noqa: RUF005
    if NORM:
        squares = values[0] * values[0]
        for i in tl.static_range(1, CODES_PER_WORD):
            squares += values[i] * values[i]
        inverse_rms = tl.rsqrt(tl.sum(squares) / k + eps)
        normed = ()
        for i in tl.static_range(CODES_PER_WORD):
            weight = tl.load(norm + col + i * WORDS_PER_GROUP, mask=word_mask, other=0.0)
            normed = normed + (values[i] * inverse_rms * weight,)  # noqa: RUF005
        values = normed
    return values


@triton.jit
def _sum_of_four_words(p, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Sums over four words, the 16 bytes that a thread loads: they share a scale."""
    return tl.sum(tl.reshape(p, [ROWS, WORDS // 4, 4]), 2)


@triton.jit
def _dot_rows(
    words, affine, values, bias_sum, token_sums, of_256, of_16, BITS: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Rows times the token: [ROWS]. bias_sum: what the codes' biases add up to; token_sums: of the token's values."""
    codes = biased_codes(words, of_256, of_16, BITS)
    products = codes[0] * values[0][None, :] - bias_sum[None, :]
    for i in tl.static_range(1, 32 // BITS):
        products += codes[i] * values[i][None, :]
    scale, offset = scale_offset(affine)
    return tl.sum(_sum_of_four_words(products, ROWS, WORDS) * scale + token_sums * offset, 1)


@triton.jit(do_not_specialize=["x_stride", "of_256", "of_16"])
def _quantized_gemv(
    x, codes, affine, bias, norm, out, n, groups, x_stride, of_256, of_16, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    pdl_launch_early(PDL)
    token = tl.program_id(1)
    x += token * x_stride
    out += token * n
    word, quad = tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    width, k = groups * (32 // CODES_PER_WORD), groups * 32
    word_mask, quad_mask = word < width, quad < width // 4
    group = quad // (8 // CODES_PER_WORD)
    stride = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    code_ptrs = codes + row.to(tl.int64)[:, None] * width + word[None, :]
    affine_ptrs = affine + (group * (n * (2 if GATE else 1)))[None, :] + row[:, None]
    row_mask = (row < n)[:, None]
    words = tl.load(code_ptrs, mask=row_mask & word_mask[None, :], other=0, eviction_policy="evict_first")
    affines = tl.load(affine_ptrs, mask=row_mask & quad_mask[None, :], other=0)
    if GATE:
        up_offset = n.to(tl.int64) * width
        up_words = tl.load(
            code_ptrs + up_offset, mask=row_mask & word_mask[None, :], other=0, eviction_policy="evict_first"
        )
        up_affines = tl.load(affine_ptrs + n, mask=row_mask & quad_mask[None, :], other=0)
    pdl_wait(PDL)
    values = _load_token(x, norm, word, word_mask, k, eps, NORM, CODES_PER_WORD)
    bias_sum, total = values[0] * 256.0, values[0]
    for i in tl.static_range(1, CODES_PER_WORD):
        bias_sum += values[i] * (16.0 if BITS == 4 and i % 2 == 1 else 256.0)
        total += values[i]
    token_sums = _sum_of_four_words(total[None, :], 1, WORDS)
    for start in range(tl.program_id(0) * ROWS, n, stride):
        row = start + tl.arange(0, ROWS)
        next_mask = (row + stride < n)[:, None]
        code_ptrs += stride.to(tl.int64) * width
        affine_ptrs += stride
        current, current_affines = words, affines
        words = tl.load(code_ptrs, mask=next_mask & word_mask[None, :], other=0, eviction_policy="evict_first")
        affines = tl.load(affine_ptrs, mask=next_mask & quad_mask[None, :], other=0)
        up_result = 0.0
        if GATE:
            current_up, current_up_affines = up_words, up_affines
            up_words = tl.load(
                code_ptrs + up_offset, mask=next_mask & word_mask[None, :], other=0, eviction_policy="evict_first"
            )
            up_affines = tl.load(affine_ptrs + n, mask=next_mask & quad_mask[None, :], other=0)
            up_result = _dot_rows(
                current_up, current_up_affines, values, bias_sum, token_sums, of_256, of_16, BITS, ROWS, WORDS
            )
        result = _dot_rows(current, current_affines, values, bias_sum, token_sums, of_256, of_16, BITS, ROWS, WORDS)
        epilogue(result, up_result, bias + row, out + row, row < n, row < n, BIAS, GATE, ADD)
    pdl_launch_late(PDL)


def quantized_gemv(
    x: Tensor, matrix: QuantizedMatrix, out: Tensor, tile: QuantizedGemvTile, *, norm: Tensor | None = None,
    eps: float = 0.0, gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k], out: [m, n]; as `gemm.persistent_gemv`. Each token's programs read the whole matrix."""
    (m, n), k = out.shape, x.shape[1]
    _quantized_gemv[(min(cdiv(n, tile.rows), tile.per_sm * sm_count()), m)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, x if norm is None else norm, out,
        n, k // 32, x.stride(0), BITS_OF_256, BITS_OF_16, eps,
        NORM=norm is not None, BIAS=matrix.bias is not None, GATE=gate, ADD=add, BITS=matrix.bits, ROWS=tile.rows,
        WORDS=max(4, next_power_of_two(matrix.codes.shape[1])), PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedGemmTile:
    rows: int
    words: int  # of a row, per iteration
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["m"])
def _quantized_skinny_gemm(
    x, codes, affine, bias, out, partial, counters, m, n, groups,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    WORDS_PER_GROUP: tl.constexpr = 32 // CODES_PER_WORD
    pdl_launch_early(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    word, t = tl.arange(0, WORDS), tl.arange(0, TOKENS)
    width, k = groups * WORDS_PER_GROUP, groups * 32
    words_per_split = tl.cdiv(tl.cdiv(width, WORDS), SPLITS) * WORDS
    begin, end = split * words_per_split, tl.minimum(split * words_per_split + words_per_split, width)
    safe_row = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    affine_row = row
    if not EVEN:
        affine_row = tl.minimum(row, n - 1)
    pdl_wait(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    kind = x.dtype.element_ty
    for start in tl.range(begin, end, WORDS, num_stages=STAGES):
        word_index = start + word
        word_mask = (word_index < end)[None, :]
        affine_ptrs = affine + (word_index // WORDS_PER_GROUP * (n * (2 if GATE else 1)))[None, :]
        x_ptrs = x + t[:, None] * k + (word_index // WORDS_PER_GROUP * 32 + word_index % WORDS_PER_GROUP)[None, :]
        words = tl.load(codes + safe_row * width + word_index[None, :], mask=word_mask, other=0)
        affines = tl.load(affine_ptrs + affine_row[:, None], mask=word_mask, other=0)
        # Immediates here: with run-time values the compiler moves the weights through shared memory.
        weights = dequantize_words(words, affines, 0x43800000, 0x41800000, BITS)
        if GATE:
            up_row = safe_row + n
            up_words = tl.load(codes + up_row * width + word_index[None, :], mask=word_mask, other=0)
            up_affines = tl.load(affine_ptrs + affine_row[:, None] + n, mask=word_mask, other=0)
            up_weights = dequantize_words(up_words, up_affines, 0x43800000, 0x41800000, BITS)
        for i in tl.static_range(CODES_PER_WORD):
            x_tile = tl.trans(tl.load(x_ptrs + i * WORDS_PER_GROUP, mask=(t < m)[:, None] & word_mask, other=0.0))
            acc = tl.dot(weights[i].to(kind), x_tile, acc)
            if GATE:
                acc_up = tl.dot(up_weights[i].to(kind), x_tile, acc_up)
    pdl_launch_late(PDL)
    last = True
    if SPLITS > 1:
        acc, acc_up, last = reduce_split_k(acc, acc_up, partial, counters, tile, split, GATE, SPLITS, ROWS, TOKENS)
    if last:
        mask = (row < n)[:, None] & (t < m)[None, :]
        out_ptrs = out + t.to(tl.int64)[None, :] * n + row[:, None]
        epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def quantized_skinny_gemm(
    x: Tensor, matrix: QuantizedMatrix, out: Tensor, tile: QuantizedGemmTile, partial: Tensor, counters: Tensor, *,
    gate: int = 0, add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k], out: [m, n]; m at most 64. As `gemm.skinny_gemm`, dequantizing in registers."""
    (m, n), k = out.shape, x.shape[1]
    _quantized_skinny_gemm[(cdiv(n, tile.rows), tile.splits)](
        x, matrix.codes, matrix.affine, x if matrix.bias is None else matrix.bias, out, partial, counters,
        m, n, k // 32, BIAS=matrix.bias is not None, GATE=gate, ADD=add,
        SPLITS=tile.splits, BITS=matrix.bits, ROWS=tile.rows, WORDS=tile.words, TOKENS=max(16, next_power_of_two(m)),
        EVEN=n % tile.rows == 0, STAGES=tile.stages, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
