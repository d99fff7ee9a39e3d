# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Products of 17 to 256 tokens with losslessly compressed BF16 weights on Hopper, the pipeline written out in Gluon.

One warp loads codes and tokens by the copy engine, into memory of their own. The other warps decode codes into the
registers that the tensor cores read, while these multiply what was decoded before. The work is cut into as many equal
parts as there are multiprocessors (stream-K): a part may begin and end within a tile of the output. The sums of each
part are stored as float32, and a second kernel adds them up, applies scales, escapes, raw rows, bias and gate, and
writes the result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from emberline.kernels.gpu.gemm import epilogue
from emberline.kernels.gpu.launch import (
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_wait,
    sm_count,
)
from emberline.kernels.gpu.lossless import PLANES, TILES, LosslessMatrix, raw_rows
from emberline.kernels.gpu.lossless_gemm import add_escapes, load_escapes, tile_escapes, tile_raw

ROWS = 128  # of a tile: 64 for each of two warp groups
HALVES = TILES[0] // 4  # half-words of a tile, and columns of a slice
# Names of Triton 3.6, and of later versions:
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_SHARED = gl.NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True, slots=True)
class LosslessHopperTile:
    tokens: int
    stages: int  # units of codes in shared memory, 48 KiB each
    pairs: int  # pairs of slices of the tokens in shared memory


def lossless_hopper_tile(m: int, rows: int, k: int, gated: bool) -> LosslessHopperTile | None:
    """The tile config for m tokens and a matrix [rows, k]. Returns None if another kernel is faster."""
    if m <= 16:
        return LosslessHopperTile(16, 3, 4) if m > 8 and gated else None
    if m <= 32:
        return LosslessHopperTile(32, 3, 6)
    if m <= 64:
        return LosslessHopperTile(64, 3, 4) if rows * k > 1 << 24 else None
    return LosslessHopperTile(128, 2, 3) if m <= 128 or rows < 16384 else LosslessHopperTile(256, 2, 2)


@gluon.jit
def _decoded(low, high, SECOND: gl.constexpr):
    """Decode two slices of weights, as `lossless.half_word_values` does."""
    if SECOND:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t, u, c; mov.b32 c, 0x38383838; shr.b32 t, $3, 4; lop3.b32 t, t, 0x07070707, c, 0xEA;"
            " shl.b32 u, $3, 4; lop3.b32 t, u, 0x80808080, t, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x38383838; lop3.b32 t, $3, 0x87878787, c, 0xEA;"
            " prmt.b32 $0, $2, t, 0x6240; prmt.b32 $1, $2, t, 0x7351; }",
            "=r,=r,r,r",
            [low, high],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )


@gluon.jit
def units_of_part(tiles, k_tiles):
    """The units of this program: first and end. A unit is ROWS rows by a tile of columns."""
    units, program, programs = tiles * k_tiles, gl.program_id(0), gl.num_programs(0)
    return units * program // programs, units * (program + 1) // programs


@gluon.jit
def _load_codes(i, begin, code_map, width, token_tiles, k_tiles, codes, ready, free, STAGES: gl.constexpr):
    """Load the three planes of unit i of this program, once their memory is free."""
    stage = i % STAGES
    row, column = (begin + i) // k_tiles // token_tiles * 128, (begin + i) % k_tiles * 64
    mbarrier.wait(free.index(stage), (i // STAGES % 2) ^ 1)
    mbarrier.expect(ready.index(stage), 3 * 128 * 64 * 2)
    for p in gl.static_range(3):
        _copy(code_map, [row, p * width + column], ready.index(stage), codes.index(stage * 3 + p))


@gluon.jit
def _load(
    loaded, shared, TOKENS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: for every unit the three planes of its codes, and two pairs of slices of the tokens."""
    x_map, code_map, width, token_tiles, tiles = loaded
    codes, slices, ready, free, pair_ready, pair_free = shared
    k_tiles = width // 64
    begin, end = units_of_part(tiles, k_tiles)
    n = end - begin
    for i in range(gl.minimum(STAGES - 1, n)):
        _load_codes(i, begin, code_map, width, token_tiles, k_tiles, codes, ready, free, STAGES)
    if PDL:
        gdc_wait()  # codes are never written; the tokens were, by a kernel before
    for i in range(n):
        tile = (begin + i) // k_tiles
        column = (begin + i) % k_tiles
        first_token = tile % token_tiles * TOKENS
        for c in gl.static_range(2):
            j = i * 2 + c
            to = j % PAIRS
            mbarrier.wait(pair_free.index(to), (j // PAIRS % 2) ^ 1)
            mbarrier.expect(pair_ready.index(to), 2 * TOKENS * 64 * 2)
            x_column = column * 256 + c * 128
            _copy(x_map, [first_token, x_column], pair_ready.index(to), slices.index(to * 2))
            _copy(x_map, [first_token, x_column + 64], pair_ready.index(to), slices.index(to * 2 + 1))
        if i + STAGES - 1 < n:
            _load_codes(i + STAGES - 1, begin, code_map, width, token_tiles, k_tiles, codes, ready, free, STAGES)


@gluon.jit
def _multiply_pair(acc, first, second, j, slices, pair_ready, PAIRS: gl.constexpr):
    """Begin to multiply the slices of pair j."""
    at = j % PAIRS
    mbarrier.wait(pair_ready.index(at), j // PAIRS % 2)
    acc = warpgroup_mma(first, slices.index(at * 2).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(second, slices.index(at * 2 + 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _decode_first(codes, ready, i, GROUP: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Decode the first two slices of a group's unit i."""
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), i // STAGES % 2)
    high = codes.index(stage * 3 + 2).slice(GROUP * 64, 64, dim=0).load(LAYOUT)
    return _decoded(codes.index(stage * 3).slice(GROUP * 64, 64, dim=0).load(LAYOUT), high, False)


@gluon.jit
def _transpose(x, x_stride, by_column, m, pitch, blocks, GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """Write this group's share of the tokens by column, 32 columns at a time: escapes are multiplied by them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    t = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    for block in range(gl.program_id(0) * 2 + GROUP, blocks, gl.num_programs(0) * 2):
        column = block * 32 + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
        for first in range(0, m, TOKENS):
            value = gl.load(x + (first + t) * x_stride + column, mask=first + t < m, other=0.0)
            gl.store(by_column + column * pitch + first + t, value, mask=first + t < m)


@gluon.jit
def _multiply(
    product, shared, GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A warp group, which decodes and multiplies 64 rows, independently of the other one.

    While the tensor cores multiply one pair of slices, the next one is decoded.
    """
    x, x_stride, by_column, partial, all_rows, m, pitch, width, token_tiles, tiles = product
    codes, slices, ready, free, pair_ready, pair_free = shared
    k_tiles = width // 64
    begin, end = units_of_part(tiles, k_tiles)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    if PDL:
        gdc_wait()  # a kernel before may still read what this one writes
    _transpose(x, x_stride, by_column, m, pitch, width // 8, GROUP, TOKENS)
    w0, w1 = _decode_first(codes, ready, 0, GROUP, STAGES, layout)
    at = begin
    while at < end:
        tile = at // k_tiles
        stop = gl.minimum(end, (tile + 1) * k_tiles)
        acc = gl.full([64, TOKENS], 0.0, gl.float32, acc_layout)
        for unit in range(at, stop):
            i = unit - begin
            stage = i % STAGES
            acc = _multiply_pair(acc, w0, w1, i * 2, slices, pair_ready, PAIRS)
            high = codes.index(stage * 3 + 2).slice(GROUP * 64, 64, dim=0).load(layout)
            w2, w3 = _decoded(codes.index(stage * 3 + 1).slice(GROUP * 64, 64, dim=0).load(layout), high, True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _barrier()  # the group's warps have read the codes, and the tensor cores a pair
            mbarrier.arrive(free.index(stage), count=1)
            mbarrier.arrive(pair_free.index(i * 2 % PAIRS), count=1)
            acc = _multiply_pair(acc, w2, w3, i * 2 + 1, slices, pair_ready, PAIRS)
            w0, w1 = _decode_first(codes, ready, gl.minimum(i + 1, end - begin - 1), GROUP, STAGES, layout)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _barrier()
            mbarrier.arrive(pair_free.index((i * 2 + 1) % PAIRS), count=1)
        units = tiles * k_tiles
        part = gl.program_id(0) - part_of(tile * k_tiles, units, gl.num_programs(0))
        row = tile // token_tiles * 128 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
        t = tile % token_tiles * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, acc_layout))
        to = partial + (part * all_rows + row).to(gl.int64)[:, None] * pitch + t[None, :]
        gl.store(to, acc, mask=(row < all_rows)[:, None] & (t < m)[None, :])
        at = stop


@triton.jit
def part_of(unit, units, programs):
    """The program that a unit belongs to."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit(do_not_specialize=["m"])
def _lossless_hopper(
    x_map, code_map, x, x_stride, by_column, partial, all_rows, m, pitch, width, token_tiles, tiles,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """width: half-words of a plane, whole tiles. by_column: the tokens transposed, [k, pitch]. partial: float32
    [parts of a tile, all_rows, pitch]."""
    if PDL:
        gdc_launch_dependents()  # they wait for the end of this kernel, but not for their launch
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES * 3, 128, 64], SHARED)
    slices = gl.allocate_shared_memory(gl.bfloat16, [PAIRS * 2, TOKENS, 64], SHARED)
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
    product = (x, x_stride, by_column, partial, all_rows, m, pitch, width, token_tiles, tiles)
    loaded = (x_map, code_map, width, token_tiles, tiles)
    gl.warp_specialize(
        [
            (_multiply, (product, shared, 0, TOKENS, STAGES, PAIRS, PDL)),
            (_multiply, (product, shared, 1, TOKENS, STAGES, PAIRS, PDL)),
            (_load, (loaded, shared, TOKENS, STAGES, PAIRS, PDL)),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip


@triton.jit
def _add_parts(acc, partial, row, t, mask, all_rows, pitch, tile, tiles, k_tiles, programs, PARTS: tl.constexpr):
    """acc [ROWS, TOKENS] plus the sums of all parts that the tiles of its rows were cut into. tile: of each row."""
    first = part_of(tile * k_tiles, tiles * k_tiles, programs)
    count = part_of(tile * k_tiles + k_tiles - 1, tiles * k_tiles, programs) - first + 1
    ptrs = partial + row.to(tl.int64)[:, None] * pitch + t[None, :]
    for part in tl.static_range(PARTS):
        acc += tl.load(ptrs + part * all_rows.to(tl.int64) * pitch, mask=mask & (part < count)[:, None], other=0.0)
    return acc


@triton.jit
def _escape_tokens(escapes, by_column, pitch, t, m, SLOTS: tl.constexpr):
    """The tokens, [SLOTS, TOKENS], that the escapes which were loaded are multiplied by."""
    place, _, at, stop = escapes
    ptrs = by_column + (place & 0xFFFF)[:, None] * pitch + t[None, :]
    return tl.load(ptrs, mask=(at + tl.arange(0, SLOTS) < stop)[:, None] & (t < m)[None, :], other=0.0)


@triton.jit
def _add_escapes(
    acc, escapes, tokens, by_column, pitch, row_scale, places, values, row, t, m, SLOTS: tl.constexpr
):  # fmt: skip
    """acc plus what the escapes of its rows add, `tokens` of the first ones being loaded."""
    place, value, at, stop = escapes
    slot = at + tl.arange(0, SLOTS)
    acc = add_escapes(acc, place, value, slot < stop, tokens, row_scale, row)
    at += SLOTS
    if at < stop:
        slot += SLOTS
        place = tl.load(places + slot, mask=slot < stop, other=0)
        value = tl.load(values + slot, mask=slot < stop, other=0.0)
        more = (place, value, at, stop)
        acc = tile_escapes(acc, more, by_column, 1, pitch, row_scale, places, values, row, t, m, 1, SLOTS)
    return acc


@triton.jit(do_not_specialize=["m"])
def _finish_product(
    partial, by_column, x, x_stride, scale, starts, places, values, raw, bias, out, out_stride, m, n, k, pitch,
    token_tiles, tiles, k_tiles, programs, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """partial: float32 [parts, rows of the matrix, pitch], sums of decoded weights without their rows' scales, by
    `programs` of `_lossless_hopper`."""
    pdl_launch_early(PDL)
    first = tl.program_id(0) * ROWS
    row, t = first + tl.arange(0, ROWS), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    end, safe_row = tl.minimum(first + ROWS, n), tl.minimum(row, n - 1)
    all_rows = n * 2 if GATE else n
    row_scale = tl.load(scale + safe_row)
    escapes = load_escapes(places, values, starts, first, end, 0, 1, SLOTS)
    if GATE:
        up_scale = tl.load(scale + n + safe_row)
        up_escapes = load_escapes(places, values, starts, n + first, n + end, 0, 1, SLOTS)
    mask = (row < n)[:, None] & (t < m)[None, :]
    token_tile = tl.program_id(1) * TOKENS // TILE_TOKENS
    pdl_wait(PDL)
    tokens = _escape_tokens(escapes, by_column, pitch, t, m, SLOTS)
    if GATE:
        up_tokens = _escape_tokens(up_escapes, by_column, pitch, t, m, SLOTS)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    tile = safe_row // 128 * token_tiles + token_tile
    acc = _add_parts(acc, partial, row, t, mask, all_rows, pitch, tile, tiles, k_tiles, programs, PARTS)
    acc *= row_scale[:, None]
    acc = _add_escapes(acc, escapes, tokens, by_column, pitch, row_scale, places, values, row, t, m, SLOTS)
    acc = tile_raw(acc, x, x_stride, raw, raw_rows(row_scale), t, m, k, 0, k, 64)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    if GATE:
        tile = (n + safe_row) // 128 * token_tiles + token_tile
        up_row = n + row
        acc_up = _add_parts(acc_up, partial, up_row, t, mask, all_rows, pitch, tile, tiles, k_tiles, programs, PARTS)
        acc_up *= up_scale[:, None]
        acc_up = _add_escapes(
            acc_up, up_escapes, up_tokens, by_column, pitch, up_scale, places, values, up_row, t, m, SLOTS
        )
        acc_up = tile_raw(acc_up, x, x_stride, raw, raw_rows(up_scale), t, m, k, 0, k, 64)
    out_ptrs = out + t.to(tl.int64)[None, :] * out_stride + row[:, None]
    epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def _finishing_rows(n: int) -> int:
    """Rows of a program that finishes n output columns."""
    return 16 if n < 32768 else 32


def programs_for(tiles: int, k_tiles: int) -> int:
    """Programs that work as long as one for each multiprocessor would, but cut as few tiles as they can."""
    units = tiles * k_tiles
    return cdiv(units, max(2, cdiv(units, sm_count())))


def parts_of_tile(tiles: int, k_tiles: int) -> int:
    """The most parts that a tile may be cut into."""
    least = tiles * k_tiles // programs_for(tiles, k_tiles)  # units of a part
    return 1 if k_tiles == 1 else (k_tiles - 2) // least + 2


def lossless_hopper_floats(all_rows: int, k: int, m: int, tile: LosslessHopperTile) -> int:
    """Workspace of `lossless_hopper_gemm`: sums of all parts of the output's tiles, and the tokens by column."""
    tiles = cdiv(all_rows, ROWS) * cdiv(m, tile.tokens)
    return (parts_of_tile(tiles, k // TILES[0]) * all_rows + cdiv(k, 2)) * cdiv(m, 16) * 16


def lossless_hopper_gemm(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, tile: LosslessHopperTile, partial: Tensor, *, gate: int = 0,
    add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k] with k a multiple of the larger tile, out: [m, n] with any stride between rows; with a gate, n is half
    the matrix's rows. partial: at least `lossless_hopper_floats`.
    """
    (m, n), (all_rows, k) = out.shape, matrix.shape
    pitch, token_tiles, k_tiles = cdiv(m, 16) * 16, cdiv(m, tile.tokens), k // TILES[0]
    tiles = cdiv(all_rows, ROWS) * token_tiles
    programs = programs_for(tiles, k_tiles)
    lines = matrix.codes.view(all_rows, -1)
    x_map = TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.tokens, HALVES], _SHARED)
    code_map = TensorDescriptor(lines, [all_rows, lines.shape[1]], [lines.shape[1], 1], [ROWS, HALVES], _SHARED)
    by_column = partial.view(torch.bfloat16)[: k * pitch]
    partial = partial[cdiv(k, 2) * pitch :]
    _lossless_hopper[(programs,)](
        x_map, code_map, x, x.stride(0), by_column, partial, all_rows, m, pitch, lines.shape[1] // PLANES,
        token_tiles, tiles, TOKENS=tile.tokens, STAGES=tile.stages, PAIRS=tile.pairs, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=4),
    )  # fmt: skip
    tokens = min(64, max(16, next_power_of_two(m)))
    rows = _finishing_rows(n)
    _finish_product[(cdiv(n, rows), cdiv(m, tokens))](
        partial, by_column, x, x.stride(0), matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw,
        x if matrix.bias is None else matrix.bias, out, out.stride(0), m, n, k, pitch, token_tiles, tiles, k_tiles,
        programs, BIAS=matrix.bias is not None, GATE=gate, ADD=add, ROWS=rows, TOKENS=tokens, TILE_TOKENS=tile.tokens,
        PARTS=parts_of_tile(tiles, k_tiles), SLOTS=64 if rows * k > 16 << 13 else 32, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=4),
    )  # fmt: skip
