# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Scattered blocks of one pool into scattered blocks of another, which may be another process's, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048  # of 8 bytes, copied by one program at a time
PER_BLOCK = 8  # programs that share a block: 132 multiprocessors are busy with few blocks


@triton.jit
def _copy(source, target, pairs, n_words, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr):
    pair, part = tl.program_id(0), tl.program_id(1)
    taken = source + tl.load(pairs + 2 * pair).to(tl.int64) * n_words
    given = target + tl.load(pairs + 2 * pair + 1).to(tl.int64) * n_words
    for start in range(part * WORDS, n_words, WORDS * PER_BLOCK):
        at = start + tl.arange(0, WORDS)
        tl.store(given + at, tl.load(taken + at, mask=at < n_words), mask=at < n_words)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """pairs: [n, 2] int32, (block of source, block of target). Pools are [blocks, words] of int64."""
    n_words = source.shape[1]
    assert source.dtype == target.dtype == torch.int64
    assert target.shape[1] == n_words
    if len(pairs):
        _copy[len(pairs), PER_BLOCK](source, target, pairs, n_words, WORDS, PER_BLOCK, num_warps=8)


def copy_blocks_plain(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """What the kernel does, in plain torch."""
    target[pairs[:, 1].long()] = source[pairs[:, 0].long()]
