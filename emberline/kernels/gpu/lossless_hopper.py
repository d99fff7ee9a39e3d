# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Products of many tokens with losslessly compressed BF16 weights on Hopper, the pipeline written out in Gluon.

One warp loads codes and tokens by the copy engine, into memory of their own. The other warps decode codes into the
registers that the tensor cores read, while these multiply what was decoded before. The sums are stored as float32, and
a second kernel adds up splits, applies scales, escapes, raw rows, bias and gate, and writes the result.
"""

from dataclasses import dataclass

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
from emberline.kernels.gpu.lossless_gemm import load_escapes, tile_escapes, tile_raw

HALVES = TILES[0] // 4  # half-words of a tile, and columns of a slice
# Names of Triton 3.6, and of later versions:
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_SHARED = gl.NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True, slots=True)
class LosslessHopperTile:
    rows: int  # of the matrix: 64 for each 4 warps
    tokens: int
    splits: int
    stages: int  # tiles of codes in shared memory
    token_stages: int  # slices of the tokens in shared memory


def lossless_hopper_tile(m: int, rows: int, k: int) -> LosslessHopperTile | None:
    """The tile config for m tokens and a matrix [rows, k]. Returns None if another kernel is faster."""
    if m <= 64:
        return LosslessHopperTile(128, 64, 1, 3, 8) if m > 32 and rows >= 16384 else None
    if m > 128 and rows >= 16384:
        return LosslessHopperTile(128, 256, 1, 2, 4)
    tiles = cdiv(rows, 128) * cdiv(m, 128)
    return LosslessHopperTile(128, 128, 2 if tiles < sm_count() // 2 + 8 and k >= 2048 else 1, 2, 4)


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
def _load(loaded, shared, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, TOKEN_STAGES: gl.constexpr):
    """The loading warp: for every tile the three planes of its codes, and four slices of the tokens."""
    x_map, code_map, first_row, first_token, width, begin, end = loaded
    codes, slices, ready, free, slice_ready, slice_free = shared
    for i in range(end - begin):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES % 2) ^ 1)
        mbarrier.expect(ready.index(stage), 3 * ROWS * 64 * 2)
        for p in gl.static_range(3):
            _copy(code_map, [first_row, p * width + (begin + i) * 64], ready.index(stage), codes.index(stage * 3 + p))
        for c in gl.static_range(4):
            j = i * 4 + c
            to = j % TOKEN_STAGES
            mbarrier.wait(slice_free.index(to), (j // TOKEN_STAGES % 2) ^ 1)
            mbarrier.expect(slice_ready.index(to), TOKENS * 64 * 2)
            _copy(x_map, [first_token, (begin + i) * 256 + c * 64], slice_ready.index(to), slices.index(to))


@gluon.jit
def _multiply_pair(acc, first, second, j, slices, slice_ready, TOKEN_STAGES: gl.constexpr):
    """Begin to multiply slices j and j + 1."""
    at = j % TOKEN_STAGES
    mbarrier.wait(slice_ready.index(at), j // TOKEN_STAGES % 2)
    acc = warpgroup_mma(first, slices.index(at).permute((1, 0)), acc, is_async=True)
    at = (j + 1) % TOKEN_STAGES
    mbarrier.wait(slice_ready.index(at), (j + 1) // TOKEN_STAGES % 2)
    return warpgroup_mma(second, slices.index(at).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiply(
    product, shared, GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, TOKEN_STAGES: gl.constexpr
):
    """A warp group, which decodes and multiplies 64 rows, independently of the other one."""
    partial, all_rows, m, pitch, first_row, first_token, split, begin, end = product
    codes, slices, ready, free, slice_ready, slice_free = shared
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    acc = gl.full([64, TOKENS], 0.0, gl.float32, acc_layout)
    for i in range(end - begin):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES % 2)
        high = codes.index(stage * 3 + 2).slice(GROUP * 64, 64, dim=0).load(layout)
        w0, w1 = _decoded(codes.index(stage * 3).slice(GROUP * 64, 64, dim=0).load(layout), high, False)
        acc = _multiply_pair(acc, w0, w1, i * 4, slices, slice_ready, TOKEN_STAGES)
        w2, w3 = _decoded(codes.index(stage * 3 + 1).slice(GROUP * 64, 64, dim=0).load(layout), high, True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()  # the group's warps have read the codes, and the tensor cores two slices
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(slice_free.index(i * 4 % TOKEN_STAGES), count=1)
        mbarrier.arrive(slice_free.index((i * 4 + 1) % TOKEN_STAGES), count=1)
        acc = _multiply_pair(acc, w2, w3, i * 4 + 2, slices, slice_ready, TOKEN_STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()
        mbarrier.arrive(slice_free.index((i * 4 + 2) % TOKEN_STAGES), count=1)
        mbarrier.arrive(slice_free.index((i * 4 + 3) % TOKEN_STAGES), count=1)
    row = first_row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
    t = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, acc_layout))
    to = partial + (split * all_rows + row).to(gl.int64)[:, None] * pitch + t[None, :]
    gl.store(to, acc, mask=(row < all_rows)[:, None] & (t < m)[None, :])


@gluon.jit(do_not_specialize=["m"])
def _lossless_hopper(
    x_map, code_map, partial, all_rows, m, pitch, width, token_tiles, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, TOKEN_STAGES: gl.constexpr,
):  # fmt: skip
    """width: half-words of a plane, whole tiles. partial: float32 [SPLITS, all_rows, pitch]."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_row = gl.program_id(0) // token_tiles * ROWS
    first_token = gl.program_id(0) % token_tiles * TOKENS
    split = gl.program_id(1)
    tiles = width // 64
    begin, end = tiles * split // SPLITS, tiles * (split + 1) // SPLITS
    codes = gl.allocate_shared_memory(gl.int16, [STAGES * 3, ROWS, 64], SHARED)
    slices = gl.allocate_shared_memory(gl.bfloat16, [TOKEN_STAGES, TOKENS, 64], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slice_ready = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    slice_free = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=ROWS // 64)
    for i in gl.static_range(TOKEN_STAGES):
        mbarrier.init(slice_ready.index(i), count=1)
        mbarrier.init(slice_free.index(i), count=ROWS // 64)
    fence_async_shared()
    shared = (codes, slices, ready, free, slice_ready, slice_free)
    product = (partial, all_rows, m, pitch, first_row, first_token, split, begin, end)
    loaded = (x_map, code_map, first_row, first_token, width, begin, end)
    if ROWS == 128:
        gl.warp_specialize(
            [
                (_multiply, (product, shared, 0, TOKENS, STAGES, TOKEN_STAGES)),
                (_multiply, (product, shared, 1, TOKENS, STAGES, TOKEN_STAGES)),
                (_load, (loaded, shared, ROWS, TOKENS, STAGES, TOKEN_STAGES)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (product, shared, 0, TOKENS, STAGES, TOKEN_STAGES)),
                (_load, (loaded, shared, ROWS, TOKENS, STAGES, TOKEN_STAGES)),
            ],
            [1], [24],
        )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _finish_product(
    partial, x, scale, starts, places, values, raw, bias, out, out_stride, m, n, k, pitch, BIAS: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial: float32 [SPLITS, rows of the matrix, pitch], sums of decoded weights without their rows' scales."""
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
    pdl_wait(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    ptrs = partial + row.to(tl.int64)[:, None] * pitch + t[None, :]
    for s in tl.static_range(SPLITS):
        acc += tl.load(ptrs + s * all_rows.to(tl.int64) * pitch, mask=mask, other=0.0)
        if GATE:
            acc_up += tl.load(ptrs + (s * all_rows + n).to(tl.int64) * pitch, mask=mask, other=0.0)
    acc *= row_scale[:, None]
    acc = tile_escapes(acc, escapes, x, row_scale, places, values, row, t, m, k, 1, SLOTS)
    acc = tile_raw(acc, x, raw, raw_rows(row_scale), t, m, k, 0, k, 64)
    if GATE:
        acc_up *= up_scale[:, None]
        acc_up = tile_escapes(acc_up, up_escapes, x, up_scale, places, values, n + row, t, m, k, 1, SLOTS)
        acc_up = tile_raw(acc_up, x, raw, raw_rows(up_scale), t, m, k, 0, k, 64)
    out_ptrs = out + t.to(tl.int64)[None, :] * out_stride + row[:, None]
    epilogue(acc, acc_up, bias + row[:, None], out_ptrs, (row < n)[:, None], mask, BIAS, GATE, ADD)


def lossless_hopper_floats(all_rows: int, m: int, tile: LosslessHopperTile) -> int:
    """Workspace of `lossless_hopper_gemm`."""
    return tile.splits * all_rows * cdiv(m, 16) * 16


def lossless_hopper_gemm(
    x: Tensor, matrix: LosslessMatrix, out: Tensor, tile: LosslessHopperTile, partial: Tensor, *, gate: int = 0,
    add: bool = False, pdl: int = 0,
) -> None:  # fmt: skip
    """x: [m, k] with k a multiple of the larger tile, out: [m, n] with any stride between rows; with a gate, n is half
    the matrix's rows. partial: at least `lossless_hopper_floats`.
    """
    (m, n), (all_rows, k) = out.shape, matrix.shape
    pitch, token_tiles = cdiv(m, 16) * 16, cdiv(m, tile.tokens)
    lines = matrix.codes.view(all_rows, -1)
    x_map = TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.tokens, HALVES], _SHARED)
    code_map = TensorDescriptor(lines, [all_rows, lines.shape[1]], [lines.shape[1], 1], [tile.rows, HALVES], _SHARED)
    _lossless_hopper[(cdiv(all_rows, tile.rows) * token_tiles, tile.splits)](
        x_map, code_map, partial, all_rows, m, pitch, lines.shape[1] // PLANES, token_tiles, SPLITS=tile.splits,
        ROWS=tile.rows, TOKENS=tile.tokens, STAGES=tile.stages, TOKEN_STAGES=tile.token_stages,
        num_warps=4,
    )  # fmt: skip
    tokens = min(64, max(16, next_power_of_two(m)))
    _finish_product[(cdiv(n, 64), cdiv(m, tokens))](
        partial, x, matrix.scale, matrix.starts, matrix.places, matrix.values, matrix.raw,
        x if matrix.bias is None else matrix.bias, out, out.stride(0), m, n, k, pitch, BIAS=matrix.bias is not None,
        GATE=gate, ADD=add, SPLITS=tile.splits, ROWS=64, TOKENS=tokens, SLOTS=64, PDL=int(pdl),
        **launch_options(bool(pdl), num_warps=4),
    )  # fmt: skip
