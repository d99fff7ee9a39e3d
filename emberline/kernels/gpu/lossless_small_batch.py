# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Products of 2 to 16 tokens with losslessly compressed BF16 weights on Hopper, written in Gluon.

One warp loads codes and tokens by the copy engine, into memory of their own. Two groups of warps decode codes into the
registers that the tensor cores read, while these multiply what was decoded before. The work is cut into as many equal
parts as there are multiprocessors (stream-K): a part may begin and end within a tile of 128 rows. The sums of each part
are stored as float32.

A second kernel multiplies escapes and raw rows while the first one runs, for which that leaves registers. Then it adds
up the sums of all parts, applies scales, bias and gate, and writes the result. `lossless_hopper.py` is for more tokens.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from emberline.kernels.gpu.gemm import epilogue
from emberline.kernels.gpu.launch import cdiv, launch_options, sm_count
from emberline.kernels.gpu.lossless import PLANES, ROW_PIECE, TILES, LosslessMatrix, raw_rows
from emberline.kernels.gpu.lossless_gemm import smallest
from emberline.kernels.gpu.lossless_hopper import part_of, parts_of_tile, programs_for, units_of_part

MAX_SMALL_BATCH = 16  # tokens
ROWS = 64  # of a tile, for each of two warp groups
COLS = TILES[0] // 4  # of a slice, whose weights are as many half-words of a plane
STAGES = 3  # units of codes in shared memory, 48 KiB each
PAIRS = 4  # pairs of slices of the tokens in shared memory
FINISHED_ROWS = 32  # that a program of the second kernel finishes at a time
# Registers of a thread. Two programs of the second kernel fit beside each one of the first:
MULTIPLYING, LOADING, ON_AVERAGE, FINISHING = 144, 24, 104, 96
# Names of Triton 3.6, and of later versions:
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_TOKENS_SHARED, _CODES_SHARED = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 32, 2)


@gluon.jit
def _decoded(low, high, SECOND: gl.constexpr):
    """Decode two slices of weights, as `lossless.half_word_values` does, into words of two bfloat16."""
    if SECOND:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t, u, c; mov.b32 c, 0x38383838; shr.b32 t, $3, 4; lop3.b32 t, t, 0x07070707, c, 0xEA;"
            " shl.b32 u, $3, 4; lop3.b32 t, u, 0x80808080, t, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x38383838; lop3.b32 t, $3, 0x87878787, c, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _operand(words, LAYOUT: gl.constexpr):
    """Words of two bfloat16 as what the tensor cores read, without moving a bit."""
    low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
    both = gl.join(low, high).reshape([64, 64])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _load_codes(i, begin, loaded, shared, STAGES: gl.constexpr):
    """Load the planes of both groups for unit i of this program, once their memory is free."""
    _, code_map, width, _ = loaded
    codes, ready, free = shared[0], shared[2], shared[3]
    k_tiles = width // 32
    stage, unit = i % STAGES, begin + i
    mbarrier.wait(free.index(stage), (i // STAGES % 2) ^ 1)
    mbarrier.expect(ready.index(stage), 6 * 64 * 32 * 4)
    for group in gl.static_range(2):
        row = (unit // k_tiles * 2 + group) * 64
        for p in gl.static_range(3):
            column = p * width + unit % k_tiles * 32
            _copy(code_map, [row, column], ready.index(stage), codes.index(stage * 6 + group * 3 + p))


@gluon.jit
def _load(loaded, shared, STAGES: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr):
    """The loading warp: for every unit the planes of its codes, and two pairs of slices of the tokens."""
    x_map, _, width, tiles = loaded
    slices, pair_ready, pair_free = shared[1], shared[4], shared[5]
    k_tiles = width // 32
    begin, end = units_of_part(tiles, k_tiles)
    for i in range(gl.minimum(STAGES - 1, end - begin)):
        _load_codes(i, begin, loaded, shared, STAGES)
    if PDL:
        gdc_wait()  # codes are never written; the tokens were, by a kernel before
    for i in range(end - begin):
        for c in gl.static_range(2):
            j = i * 2 + c
            to = j % PAIRS
            mbarrier.wait(pair_free.index(to), (j // PAIRS % 2) ^ 1)
            mbarrier.expect(pair_ready.index(to), 2 * 16 * 64 * 2)
            x_column = (begin + i) % k_tiles * 256 + c * 128
            _copy(x_map, [0, x_column], pair_ready.index(to), slices.index(to * 2))
            _copy(x_map, [0, x_column + 64], pair_ready.index(to), slices.index(to * 2 + 1))
        if i + STAGES - 1 < end - begin:
            _load_codes(i + STAGES - 1, begin, loaded, shared, STAGES)


@gluon.jit
def _multiply_pair(acc, first, second, j, slices, pair_ready, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to multiply the slices of pair j."""
    at = j % PAIRS
    first, second = _operand(first, LAYOUT), _operand(second, LAYOUT)
    mbarrier.wait(pair_ready.index(at), j // PAIRS % 2)
    acc = warpgroup_mma(first, slices.index(at * 2).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(second, slices.index(at * 2 + 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _decode_first(codes, ready, i, GROUP: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Decode the first two slices of a group's unit i."""
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), i // STAGES % 2)
    high = codes.index(stage * 6 + GROUP * 3 + 2).load(LAYOUT)
    return _decoded(codes.index(stage * 6 + GROUP * 3).load(LAYOUT), high, False)


@gluon.jit
def _multiply(
    product, shared, GROUP: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A warp group, which decodes and multiplies 64 rows of each tile, independently of the other one.

    While the tensor cores multiply one pair of slices, the next one is decoded.
    """
    partial, rows, width, tiles = product
    codes, slices, ready, free, pair_ready, pair_free = shared
    k_tiles = width // 32
    begin, end = units_of_part(tiles, k_tiles)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 1)
    if PDL:
        gdc_wait()  # a kernel before may still read what this one writes
        gdc_launch_dependents()  # only now: the next kernel reads the tokens before it waits for this one's end
    w0, w1 = _decode_first(codes, ready, 0, GROUP, STAGES, layout)
    at = begin
    while at < end:
        tile = at // k_tiles
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.full([64, 16], 0.0, gl.float32, acc_layout)
        for unit in range(at, stop):
            i = unit - begin
            stage = i % STAGES
            acc = _multiply_pair(acc, w0, w1, i * 2, slices, pair_ready, PAIRS, operand)
            high = codes.index(stage * 6 + GROUP * 3 + 2).load(layout)
            w2, w3 = _decoded(codes.index(stage * 6 + GROUP * 3 + 1).load(layout), high, True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _barrier()  # the group's warps have read the codes, and the tensor cores a pair
            mbarrier.arrive(free.index(stage), count=1)
            mbarrier.arrive(pair_free.index(i * 2 % PAIRS), count=1)
            acc = _multiply_pair(acc, w2, w3, i * 2 + 1, slices, pair_ready, PAIRS, operand)
            w0, w1 = _decode_first(codes, ready, gl.minimum(i + 1, end - begin - 1), GROUP, STAGES, layout)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _barrier()
            mbarrier.arrive(pair_free.index((i * 2 + 1) % PAIRS), count=1)
        part = gl.program_id(0) - part_of(tile * k_tiles, tiles * k_tiles, gl.num_programs(0))
        row = ((tile * 2 + GROUP) * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc_layout)))[:, None]
        t = gl.arange(0, 16, gl.SliceLayout(0, acc_layout))[None, :]
        gl.store(partial + (part * rows + row) * 16 + t, acc, mask=(row < rows) & (t >= 0))
        at = stop


@gluon.jit
def _multiply_codes(
    x_map, code_map, partial, rows, width, tiles, STAGES: gl.constexpr, PAIRS: gl.constexpr,
    MULTIPLYING: gl.constexpr, LOADING: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """rows: of the matrix. width: words of a plane, whole tiles. partial: float32 [parts of a tile, rows,
    MAX_SMALL_BATCH]."""
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * 6, 64, 32], gl.NVMMASharedLayout(128, 32, 2))
    slices = gl.allocate_shared_memory(gl.bfloat16, [PAIRS * 2, 16, 64], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pair_ready = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    pair_free = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(PAIRS):
        mbarrier.init(pair_ready.index(i), count=1)
        mbarrier.init(pair_free.index(i), count=2)
    fence_async_shared()
    shared = (codes, slices, ready, free, pair_ready, pair_free)
    product = (partial, rows, width, tiles)
    gl.warp_specialize(
        [
            (_multiply, (product, shared, 0, STAGES, PAIRS, PDL)),
            (_multiply, (product, shared, 1, STAGES, PAIRS, PDL)),
            (_load, ((x_map, code_map, width, tiles), shared, STAGES, PAIRS, PDL)),
        ],
        [4, 1], [MULTIPLYING, LOADING],
    )  # fmt: skip


# --- escapes, raw rows and results ------------------------------------------------------------------------------------


@gluon.jit
def _escapes(places, values, begin, stop, col, x_col):
    """Places and values of the escapes from `begin` on, and the columns of the tokens that they multiply."""
    place = gl.load(places + begin + col, mask=begin + col < stop, other=0)
    value = gl.load(values + begin + col, mask=begin + col < stop, other=0.0)
    column = gl.load(places + begin + x_col, mask=begin + x_col < stop, other=0) & 0xFFFF
    return place, value, column[:, None]


@gluon.jit
def _multiply_apart(
    apart, row, end_row, m, k, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Products of the escapes and raw rows among ROWS rows from `row` on, float32 [ROWS, 16]."""
    x, x_stride, scale, starts, places, values, raw = apart
    COLS: gl.constexpr = 16
    left: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    begin, stop = gl.load(starts + row), gl.load(starts + gl.minimum(row + ROWS, end_row))
    col, x_col = gl.arange(0, COLS, gl.SliceLayout(0, left)), gl.arange(0, COLS, gl.SliceLayout(1, right))
    t = gl.arange(0, 16, gl.SliceLayout(0, right))[None, :]
    x_ptrs, t_mask = x + t * x_stride, t < m
    place, value, column = _escapes(places, values, begin, stop, col, x_col)
    x_mask = (begin + x_col < stop)[:, None] & t_mask
    x_tile = gl.load(x_ptrs + column, mask=x_mask, other=0.0)
    next_place, next_value, column = _escapes(places, values, begin + COLS, stop, col, x_col)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, left))
    row_scale = gl.load(scale + rows, mask=rows < end_row, other=1.0)
    own_row, least, raw_row = (rows & 0x7FFF)[:, None], smallest(row_scale)[:, None], raw_rows(row_scale)
    acc = gl.full([ROWS, 16], 0.0, gl.float32, LAYOUT)
    for at in range(begin, stop, COLS):
        following = at + COLS
        x_mask = (following + x_col < stop)[:, None] & t_mask
        next_tile = gl.load(x_ptrs + column, mask=x_mask, other=0.0)
        own = (own_row == ((place >> 16) & 0x7FFF)[None, :]) & (at + col < stop)[None, :]
        more, less = gl.where(own, value[None, :], 0.0).to(gl.bfloat16), gl.where(own, -least, 0.0).to(gl.bfloat16)
        place, value = next_place, next_value
        next_place, next_value, column = _escapes(places, values, following + COLS, stop, col, x_col)
        acc = mma_v2(less, x_tile, mma_v2(more, x_tile, acc))
        x_tile = next_tile
    if gl.max(raw_row, 0) >= 0:
        sums = gl.full([ROWS, 16], 0.0, gl.float32, LAYOUT)
        raw_ptrs = raw + raw_row.to(gl.int64)[:, None] * k + col[None, :]
        for at in range(0, k, COLS):
            x_tile = gl.load(x_ptrs + (at + x_col)[:, None], mask=t_mask, other=0.0)
            sums = mma_v2(gl.load(raw_ptrs + at, mask=(raw_row >= 0)[:, None], other=0.0), x_tile, sums)
        acc = gl.where(_row_scales(scale, row, end_row, ROWS, LAYOUT) < 0, sums, acc)
    return acc


@gluon.jit
def _row_scales(scale, row, end_row, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(scale + rows, mask=rows < end_row, other=1.0)[:, None]


@gluon.jit
def _places_of(row, end_row, m, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows and tokens of a block, and a mask of those that there are."""
    rows = (row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    tokens = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    return rows, tokens, (rows < end_row) & (tokens < m)


@gluon.jit
def _product(sums, scale, row, end_row, m, ROWS: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The products of some rows, float32 [ROWS, 16]: the sums of all parts that their tiles were cut into, with the
    rows' scales, and what escapes and raw rows add."""
    partial, all_rows, tiles, k_tiles, programs = sums
    rows, tokens, mask = _places_of(row, end_row, m, ROWS, LAYOUT)
    units, unit = tiles * k_tiles, rows // 128 * k_tiles
    parts = part_of(unit + k_tiles - 1, units, programs) - part_of(unit, units, programs) + 1
    acc = gl.full([ROWS, 16], 0.0, gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        acc += gl.load(partial + (part * all_rows + rows) * 16 + tokens, mask=mask & (part < parts), other=0.0)
    row_scale = _row_scales(scale, row, end_row, ROWS, LAYOUT)
    apart = gl.load(partial + (PARTS * all_rows + rows) * 16 + tokens, mask=mask, other=0.0)
    return gl.where(row_scale < 0, 0.0, acc * row_scale) + apart


@gluon.jit(do_not_specialize=["m"])
def _finish_product(
    partial, x, x_stride, scale, starts, places, values, raw, bias, out, out_stride, m, n, k, tiles, k_tiles, programs,
    BIAS: gl.constexpr, GATE: gl.constexpr, ADD: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """partial: float32 [parts + 1, rows of the matrix, MAX_SMALL_BATCH], sums of decoded weights without their rows'
    scales, by `programs` of `_multiply_codes`, which has waited for the tokens. The last part is what escapes and raw
    rows add: each thread stores what it loads again."""
    if PDL:
        gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    apart, all_rows = (x, x_stride, scale, starts, places, values, raw), n * 2 if GATE else n
    sums = (partial, all_rows, tiles, k_tiles, programs)
    for row in range(gl.program_id(0) * ROWS, n, gl.num_programs(0) * ROWS):
        for half in gl.static_range(2 if GATE else 1):
            acc = _multiply_apart(apart, half * n + row, half * n + n, m, k, ROWS, layout)
            rows, tokens, mask = _places_of(half * n + row, half * n + n, m, ROWS, layout)
            gl.store(partial + (PARTS * all_rows + rows) * 16 + tokens, acc, mask=mask)
    if PDL:
        gdc_wait()
    for row in range(gl.program_id(0) * ROWS, n, gl.num_programs(0) * ROWS):
        value = _product(sums, scale, row, n, m, ROWS, PARTS, layout)
        up = value
        if GATE:
            up = _product(sums, scale, n + row, n * 2, m, ROWS, PARTS, layout)
        rows, tokens, mask = _places_of(row, n, m, ROWS, layout)
        epilogue(value, up, bias + rows, out + tokens * out_stride + rows, rows < n, mask, BIAS, GATE, ADD)


def lossless_small_batch_floats(rows: int, k: int) -> int:
    """Workspace of `lossless_small_batch_gemm`: the sums of all parts of tiles, and what escapes and raw rows add."""
    return (parts_of_tile(cdiv(rows, 2 * ROWS), k // TILES[0]) + 1) * rows * MAX_SMALL_BATCH


def takes_small_batch(m: int, rows: int) -> bool:
    """True if these kernels are the fastest for m tokens and a matrix of so many rows."""
    return m <= MAX_SMALL_BATCH and rows <= ROW_PIECE


def lossless_small_batch_gemm(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, partial: Tensor, *, gate: int = 0, add: bool = False, pdl: int = 0
) -> None:  # fmt: skip
    """x: [m, k] with m up to MAX_SMALL_BATCH and k a multiple of the larger tile, out: [m, n] with any stride between
    rows; with a gate, n is half the matrix's rows. partial: at least `lossless_small_batch_floats`.
    """
    (m, n), (all_rows, k) = out.shape, matrix.shape
    tiles, k_tiles = cdiv(all_rows, 2 * ROWS), k // TILES[0]
    programs = programs_for(tiles, k_tiles)
    words = matrix.codes.view(all_rows, -1).view(torch.int32)
    box = [ROWS, COLS // 2]
    x_map = TensorDescriptor(x, [m, k], [x.stride(0), 1], [MAX_SMALL_BATCH, COLS], _TOKENS_SHARED)
    code_map = TensorDescriptor(words, [all_rows, words.shape[1]], [words.shape[1], 1], box, _CODES_SHARED)
    _multiply_codes[(programs,)](
        x_map, code_map, partial, all_rows, words.shape[1] // PLANES, tiles, STAGES=STAGES, PAIRS=PAIRS,
        MULTIPLYING=MULTIPLYING, LOADING=LOADING, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=4, maxnreg=ON_AVERAGE),
    )  # fmt: skip
    _finish_product[(min(cdiv(n, FINISHED_ROWS), 2 * sm_count()),)](
        partial, x, x.stride(0), matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw,
        x if matrix.bias is None else matrix.bias, out, out.stride(0), m, n, k, tiles, k_tiles, programs,
        BIAS=matrix.bias is not None, GATE=gate, ADD=add, ROWS=FINISHED_ROWS, PARTS=parts_of_tile(tiles, k_tiles),
        PDL=int(pdl), **launch_options(bool(pdl), num_warps=4, maxnreg=FINISHING),
    )  # fmt: skip
