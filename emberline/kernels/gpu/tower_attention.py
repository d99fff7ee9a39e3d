# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""RoPE and attention of vision towers: every patch of a tile attends to all patches of the tile.

Towers have heads of 64, 72 or 80 dimensions. A product of matrices needs a power of two, and padding 72 to 128 would
nearly double the work. The kernel divides a head into 64 dimensions and a rest, which is padded to 16.
"""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.decode_attention import LOG2_E
from emberline.kernels.gpu.launch import cdiv, next_power_of_two

QUERIES, KEYS, STAGES, WARPS = 128, 64, 3, 8  # of a program: the fastest on an H200
MAX_HEAD_DIM = 128


@triton.jit
def _rotate(qkv, cosine, sine, heads, HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr):
    patch = tl.program_id(0).to(tl.int64)
    i, h = tl.arange(0, PAD), tl.arange(0, HEADS)
    cos = tl.load(cosine + patch * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sine + patch * HALF + i, mask=i < HALF, other=0.0)[None, :]
    first = qkv + patch * (3 * heads * 2 * HALF) + h[:, None] * (2 * HALF) + i[None, :]
    mask = (h < 2 * heads)[:, None] & (i < HALF)[None, :]
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (x * cos - y * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (y * cos + x * sin).to(qkv.dtype.element_ty), mask=mask)


def rotate_queries_and_keys(qkv: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate q and k of qkv [patches, 3, heads, head_dim] in place. cosine, sine: float32 [patches, head_dim / 2]."""
    patches, _, heads, dim = qkv.shape
    half = dim // 2
    _rotate[(patches,)](
        qkv, cosine, sine, heads, HALF=half, PAD=next_power_of_two(half), HEADS=next_power_of_two(2 * heads),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _attend(
    qkv, out, first_patch, n, scale, heads, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(1), tl.program_id(2)
    start = (first_patch + tile * n).to(tl.int64)
    width = heads * DIM
    base = qkv + start * (3 * width) + head * DIM
    m, d, r = tl.arange(0, QUERIES), tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    query = tl.program_id(0) * QUERIES + m
    has_query = (query < n)[:, None]
    queries = base + query[:, None] * (3 * width)
    q = tl.load(queries + d[None, :], mask=has_query, other=0.0)
    if MAIN < DIM:
        q_rest = tl.load(queries + r[None, :], mask=has_query & (r < DIM)[None, :], other=0.0)
        acc_rest = tl.zeros([QUERIES, REST], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    denom = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, MAIN], tl.float32)
    whole = n // KEYS * KEYS
    if whole < n:  # heads without a rest: see `supports`
        key = whole + tl.arange(0, KEYS)
        keys, has_key = base + width + key[:, None] * (3 * width), (key < n)[:, None]
        scores = tl.dot(q, tl.trans(tl.load(keys + d[None, :], mask=has_key, other=0.0)))
        scores = tl.where((key < n)[None, :], scores, float("-inf"))
        row_max = tl.max(scores, 1) * scale
        weights = tl.exp2(scores * scale - row_max[:, None])
        denom = tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), tl.load(keys + width + d[None, :], mask=has_key, other=0.0))
    for key_start in tl.range(0, whole, KEYS, num_stages=STAGES):
        keys = base + width + (key_start + tl.arange(0, KEYS))[:, None] * (3 * width)
        scores = tl.dot(q, tl.trans(tl.load(keys + d[None, :])))
        if MAIN < DIM:
            k_rest = tl.load(keys + r[None, :], mask=(r < DIM)[None, :], other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        denom = denom * rescale + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(q.dtype)
        acc = tl.dot(weights, tl.load(keys + width + d[None, :]), acc * rescale[:, None])
        if MAIN < DIM:
            v_rest = tl.load(keys + width + r[None, :], mask=(r < DIM)[None, :], other=0.0)
            acc_rest = tl.dot(weights, v_rest, acc_rest * rescale[:, None])
    results = out + (start + query)[:, None] * width + head * DIM
    tl.store(results + d[None, :], (acc / denom[:, None]).to(out.dtype.element_ty), mask=has_query)
    if MAIN < DIM:
        rest = (acc_rest / denom[:, None]).to(out.dtype.element_ty)
        tl.store(results + r[None, :], rest, mask=has_query & (r < DIM)[None, :])


def attend_tiles(
    qkv: Tensor, out: Tensor, first_patch: int, n: int, n_tiles: int, config: tuple[int, int, int, int] | None = None
) -> None:
    """Attention of consecutive tiles of n patches each, from `first_patch` on. qkv: [patches, 3, heads, head_dim]; out:
    [patches, heads, head_dim]. config: queries and keys of a program, stages and warps; None: the fastest."""
    _, _, heads, dim = qkv.shape
    queries, keys, stages, warps = config or (QUERIES, KEYS, STAGES, WARPS)
    main = 1 << (dim.bit_length() - 1)
    _attend[(cdiv(n, queries), heads, n_tiles)](
        qkv, out, first_patch, n, dim**-0.5 * LOG2_E, heads, DIM=dim, MAIN=main,
        REST=max(16, next_power_of_two(dim - main)) if main < dim else 16, QUERIES=queries, KEYS=keys, STAGES=stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def supports(head_dim: int, n: int) -> bool:
    """True if the kernel computes tiles of n patches. Where a head has a rest, Triton 3.6 makes wrong code of the keys
    that do not fill KEYS: so measured on an H200."""
    is_even = n % KEYS == 0 or head_dim & (head_dim - 1) == 0
    return 16 <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0 and is_even
