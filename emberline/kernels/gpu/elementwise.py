# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Memory-bound kernels: gated activation, residual add with RMS norm, embedding lookup, block copies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import cdiv, launch_options, next_power_of_two, pdl_launch_early, pdl_wait
from emberline.kernels.moe import gated_activation as gated
from emberline.kernels.reference import rms_norm

COPY_WORDS = 2048  # of 8 bytes, copied by one program at a time
PROGRAMS_PER_BLOCK = 8  # programs that share a block: a few blocks keep all SMs busy


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(activation, gate, up)


@triton.jit
def activation_fn(x, GELU: tl.constexpr):
    """SiLU or tanh-GELU of float32 values; tanh(z) = 1 - 2 / (e^2z + 1)."""
    if GELU:
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        out = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        out = x / (1.0 + tl.exp(-x))
    return out


@triton.jit
def _gated_activation(gate_up, out, out_stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < width
    pdl_wait(PDL)
    gate = tl.load(gate_up + row * 2 * width + col, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + col, mask=ok, other=0.0).to(tl.float32)
    gate = activation_fn(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + col, (gate * up).to(out.dtype.element_ty), mask=ok)


def gated_activation(gate_up: Tensor, activation: str, out: Tensor, pdl: bool = False) -> None:
    """out = activation(gate) * up. gate_up: [tokens, 2 * width], out: [tokens, width], with any stride between rows."""
    tokens, width = out.shape
    if tokens:
        _gated_activation[(tokens, cdiv(width, 2048))](
            gate_up, out, out.stride(0), width, GELU=activation == "gelu_tanh", BLOCK=2048, PDL=int(pdl),
            **launch_options(pdl, num_warps=4),
        )  # fmt: skip


def add_norm_reference(
    x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, post: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual, and its RMS norm. `post` is the weight of a norm applied to `added` first."""
    if added is not None:
        x = x + (added if post is None else rms_norm(added, post, eps))
    return x, x if weight is None else rms_norm(x, weight, eps)


@triton.jit
def _add_norm(
    x, added, weight, post, out, x_stride, width, eps,
    ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < width
    pdl_wait(PDL)
    value = tl.load(x + row * x_stride + col, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(added + row * width + col, mask=ok, other=0.0).to(tl.float32)
        if POST:
            scaled = more * tl.rsqrt(tl.sum(more * more) / width + eps)
            scaled *= tl.load(post + col, mask=ok, other=0.0)
            more = scaled.to(x.dtype.element_ty).to(tl.float32)
        value = (value + more).to(x.dtype.element_ty).to(tl.float32)
        tl.store(x + row * x_stride + col, value.to(x.dtype.element_ty), mask=ok)
    if NORM:
        normed = value * tl.rsqrt(tl.sum(value * value) / width + eps)
        normed *= tl.load(weight + col, mask=ok, other=0.0)
        tl.store(out + row * width + col, normed.to(out.dtype.element_ty), mask=ok)


def add_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, out: Tensor | None, eps: float,
    post: Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """x += added, normed with `post` first if given; out = rms_norm(x) if a weight is given.

    All are [tokens, width]; x may be columns of a wider tensor.
    """
    tokens, width = x.shape
    if not tokens:
        return
    block = next_power_of_two(width)
    _add_norm[(tokens,)](
        x, x if added is None else added, x if weight is None else weight, x if post is None else post,
        x if out is None else out, x.stride(0), width, eps,
        ADD=added is not None, POST=post is not None, NORM=weight is not None, BLOCK=block, PDL=int(pdl),
        **launch_options(pdl, num_warps=8 if block >= 4096 else 4),
    )  # fmt: skip


def embedding_reference(weight: Tensor, ids: Tensor, factor: float) -> Tensor:
    return weight[ids.long()] * factor


@triton.jit(do_not_specialize=["first", "rows"])
def _embedding(weight, ids, out, width, factor, first, rows, SOME: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < width
    row = tl.load(ids + token).to(tl.int64)
    exists = ok
    if SOME:
        row -= first
        exists = col < tl.where((row >= 0) & (row < rows), width, 0)
    value = tl.load(weight + row * width + col, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + token * width + col, (value * factor).to(out.dtype.element_ty), mask=ok)


def embedding(weight: Tensor, ids: Tensor, factor: float, out: Tensor, first: int | None = None) -> None:
    """weight: [vocab, width], ids: int32 [tokens], out: [tokens, width].

    first: the weight's rows are those of the ids from `first` on; other ids give zeros.
    """
    tokens, width = out.shape
    if tokens:
        _embedding[(tokens, cdiv(width, 1024))](
            weight, ids, out, width, factor, first or 0, len(weight), SOME=first is not None, BLOCK=1024
        )


@triton.jit
def _copy_blocks(source, target, pairs, n_words, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr):
    pair, part = tl.program_id(0), tl.program_id(1)
    source_block = source + tl.load(pairs + 2 * pair).to(tl.int64) * n_words
    target_block = target + tl.load(pairs + 2 * pair + 1).to(tl.int64) * n_words
    for start in range(part * WORDS, n_words, WORDS * PER_BLOCK):
        word = start + tl.arange(0, WORDS)
        tl.store(target_block + word, tl.load(source_block + word, mask=word < n_words), mask=word < n_words)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy KV blocks between pools, both int64 [blocks, words]. pairs: int32 [n, 2], (source block, target block)."""
    n_words = source.shape[1]
    assert source.dtype == target.dtype == torch.int64
    assert target.shape[1] == n_words
    if len(pairs):
        _copy_blocks[len(pairs), PROGRAMS_PER_BLOCK](
            source, target, pairs, n_words, COPY_WORDS, PROGRAMS_PER_BLOCK, num_warps=8
        )


def copy_blocks_reference(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    target[pairs[:, 1].long()] = source[pairs[:, 0].long()]


@triton.jit
def _copy_block_runs(
    source, target, pairs, runs, n_runs, source_words, target_words, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr
):
    pair, part = tl.program_id(0), tl.program_id(1)
    source_block = source + tl.load(pairs + 2 * pair).to(tl.int64) * source_words
    target_block = target + tl.load(pairs + 2 * pair + 1).to(tl.int64) * target_words
    word = tl.arange(0, WORDS)
    for run in range(part, n_runs, PER_BLOCK):
        ok = word < tl.load(runs + 3 * run + 2)
        value = tl.load(source_block + tl.load(runs + 3 * run) + word, mask=ok)
        tl.store(target_block + tl.load(runs + 3 * run + 1) + word, value, mask=ok)


def copy_block_runs(source: Tensor, target: Tensor, pairs: Tensor, runs: Tensor) -> None:
    """Copy parts of KV blocks between pools, both int64 [blocks, words], whose blocks may have other sizes.

    pairs: as for `copy_blocks`. runs: int32 [n, 3], (first word in a source block, first in a target block, words); at
    most COPY_WORDS words each.
    """
    assert source.dtype == target.dtype == torch.int64
    if len(pairs) and len(runs):
        _copy_block_runs[len(pairs), PROGRAMS_PER_BLOCK](
            source,
            target,
            pairs,
            runs,
            len(runs),
            source.shape[1],
            target.shape[1],
            COPY_WORDS,
            PROGRAMS_PER_BLOCK,
            num_warps=8,
        )


def copy_block_runs_reference(source: Tensor, target: Tensor, pairs: Tensor, runs: Tensor) -> None:
    for source_first, target_first, n in runs.tolist():
        values = source[pairs[:, 0].long(), source_first : source_first + n]
        target[pairs[:, 1].long(), target_first : target_first + n] = values


@triton.jit
def _add_tower_norm(
    x, added, weight, bias, out, width, eps, BLOCK: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr
):  # fmt: skip
    start, i = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    mask = i < width
    values = tl.load(x + start + i, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added + start + i, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + start + i, rounded, mask=mask)
        values = rounded.to(tl.float32)
    if LAYER:
        values = tl.where(mask, values - tl.sum(values) / width, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    values *= tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    if LAYER:
        values += tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + i, values.to(out.dtype.element_ty), mask=mask)


def add_tower_norm(x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Add to x [patches, width] of a vision tower in place. Returns its LayerNorm, or without a bias its RMSNorm."""
    out = torch.empty_like(x)
    patches, width = x.shape
    _add_tower_norm[(patches,)](
        x, x if added is None else added, weight, weight if bias is None else bias, out, width, eps,
        BLOCK=next_power_of_two(width), ADD=added is not None, LAYER=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
