# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment"
"""Top-k routing and token permutation in one launch, without the host: a captured step serves any routing.

Each program scores the experts of one token, selects the best and appends the token's pairs to the experts' lists. The
last program to finish divides the lists into blocks of pairs for the grouped GEMM. A list has room for every token, so
a pair's place needs no prefix sum over the other experts. The order of a list varies between runs; no result depends on
it, because a pair's row of a product does not depend on the rows beside it.

For one token `norm_and_route` does that together with the norm and the router before it: three launches in one, whose
last program to finish makes the choice.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.gpu.launch import (
    cdiv,
    launch_options,
    next_power_of_two,
    pdl_launch_early,
    pdl_wait,
    sm_count,
)
from emberline.kernels.routing import MAX_EXPERTS, Routing

BLOCK_FIELDS = 4  # of a block: expert, index of its first pair in the expert's list, number of pairs, unused
_ALIGNED = 4  # words: 16 bytes


@dataclass(frozen=True, slots=True)
class Permutation:
    """Memory for the routing of a step, and the routing itself after `route_tokens`."""

    ids: Tensor  # int32 [tokens, slots]: experts of this rank, or -1
    weights: Tensor  # float32 [tokens, slots]
    lists: Tensor  # int32 [experts, capacity]: pairs
    blocks: Tensor  # int32 [max_blocks, BLOCK_FIELDS]; only the first `n_blocks` are meaningful
    n_blocks: Tensor  # int32 [1]
    block_tokens: int  # pairs of a block, at most

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def slots(self) -> int:
        return self.ids.shape[1]

    @property
    def max_blocks(self) -> int:
        return max_blocks(self.tokens, self.slots, len(self.lists), self.block_tokens)


def max_blocks(tokens: int, slots: int, experts: int, block_tokens: int) -> int:
    """Blocks that any routing of `tokens` needs at most: a token uses an expert once."""
    pairs = tokens * min(slots, experts)
    touched = min(pairs, experts)  # each may leave its last block unfilled
    return min(pairs, touched * cdiv(tokens, block_tokens), touched + (pairs - touched) // block_tokens)


def permutation_ints(tokens: int, slots: int, experts: int) -> int:
    """32-bit words that `make_permutation` takes, for the smallest blocks."""
    return sum(_sizes(tokens, slots, experts, max_blocks(tokens, slots, experts, 8)))


def _sizes(tokens: int, slots: int, experts: int, n_blocks: int) -> list[int]:
    """Words of blocks, their number, ids, weights and lists, each aligned: Triton recompiles kernels for others."""
    sizes = (BLOCK_FIELDS * n_blocks, 1, tokens * slots, tokens * slots, experts * tokens)
    return [cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]


def make_permutation(memory: Tensor, tokens: int, slots: int, experts: int, block_tokens: int) -> Permutation:
    """Divide int32 `memory` among the tensors of a permutation of `experts` experts of this rank."""
    pairs, n_blocks = tokens * slots, max_blocks(tokens, slots, experts, block_tokens)
    sizes = _sizes(tokens, slots, experts, n_blocks)
    blocks, count, ids, weights, lists = torch.split(memory[: sum(sizes)], sizes)
    return Permutation(
        ids[:pairs].view(tokens, slots), weights[:pairs].view(torch.float32).view(tokens, slots),
        lists[: experts * tokens].view(experts, tokens), blocks.view(n_blocks, BLOCK_FIELDS), count[:1], block_tokens,
    )  # fmt: skip


@triton.jit
def _sortable(score):
    """int32 that compares as the score does: integers are reduced over a warp in one instruction."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_best(keys, index, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Index of the largest key, the smallest index of equal ones."""
    best = tl.max(keys, AXIS)
    if AXIS == 1:
        best = best[:, None]
    return tl.min(tl.where(keys == best, index, COUNT), AXIS)


@triton.jit
def _exclude_groups(choice, expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EXPERTS: tl.constexpr):
    """-inf for the experts outside the best groups; a group's score is the sum of its two best."""
    PER_GROUP: tl.constexpr = EXPERTS // GROUPS
    scores = tl.reshape(choice, [GROUPS, PER_GROUP])
    member = tl.arange(0, PER_GROUP)[None, :]
    first = _first_best(_sortable(scores), member, 1, PER_GROUP)
    best = tl.max(scores, 1)
    second = tl.max(tl.where(member == first[:, None], float("-inf"), scores), 1)
    group = tl.arange(0, GROUPS)
    left = _sortable(best + second)
    chosen = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        top = _first_best(left, group, 0, GROUPS)
        chosen = tl.where(group == top, 1, chosen)
        left = tl.where(group == top, -(2**31), left)
    return tl.reshape(tl.where(chosen[:, None] != 0, scores, float("-inf")), [EXPERTS])


@triton.jit
def _score(logit, largest, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    else:
        return tl.exp(logit - largest) / total


@triton.jit
def _permute_token(
    row, token, correction, valid, ids, weights, lists, counts, blocks, n_blocks,
    n_tokens, n_experts, capacity, first_expert, n_local, scale,
    TOP_K: tl.constexpr, N_SHARED: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    CORRECTED: tl.constexpr, MASKED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a token by its row of logits; the program of the last token makes the blocks.

    counts: int32 [n_local + 1], zero before the launch and after it; the last one counts the tokens.
    """
    expert = tl.arange(0, EXPERTS)
    exists = expert < n_experts
    logit = tl.load(row + expert, mask=exists, other=float("-inf"), cache_modifier=".cg")
    largest, total = 0.0, 1.0
    if not SIGMOID:
        largest = tl.max(logit, 0)
        total = tl.sum(tl.exp(logit - largest), 0)
    choice = _score(logit, largest, total, SIGMOID)
    if CORRECTED:
        choice += tl.load(correction + expert, mask=exists, other=0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:  # then EXPERTS is n_experts
        choice = _exclude_groups(choice, expert, GROUPS, TOP_GROUPS, EXPERTS)
    left = tl.where(exists, _sortable(choice), -(2**31))
    slot = tl.arange(0, SLOTS)
    chosen = tl.where(slot < TOP_K, -1, n_experts + slot - TOP_K)
    for i in tl.static_range(TOP_K):
        top = _first_best(left, expert, 0, EXPERTS)
        chosen = tl.where(slot == i, top, chosen)
        left = tl.where(expert == top, -(2**31), left)
    # Read again: to find them in the registers of all threads takes longer.
    routed = slot < TOP_K
    weight = _score(
        tl.load(row + chosen, mask=routed, other=float("-inf"), cache_modifier=".cg"), largest, total, SIGMOID
    )
    weight = tl.where(routed, weight, 0.0)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight = tl.where(routed, weight * scale, 1.0)
    used = slot < TOP_K + N_SHARED
    local = chosen - first_expert
    mine = used & (local >= 0) & (local < n_local)
    if MASKED:
        mine = mine & (slot < tl.load(valid + token) * SLOTS)
    pair = token * (TOP_K + N_SHARED) + slot
    tl.store(ids + pair, tl.where(mine, local, -1), mask=used)
    tl.store(weights + pair, tl.where(mine, weight, 0.0), mask=used)
    place = tl.atomic_add(counts + local, 1, mask=mine, sem="relaxed")
    tl.store(lists + local.to(tl.int64) * capacity + place, pair, mask=mine)
    tl.debug_barrier()  # all threads have counted before the program does
    if tl.atomic_add(counts + n_local, 1, sem="acq_rel") == n_tokens - 1:
        e = tl.arange(0, LOCAL)
        count = tl.load(counts + e, mask=e < n_local, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # threads may load the same one
        tl.store(counts + e, 0, mask=e <= n_local)
        of_expert = (count + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        first_block = tl.cumsum(of_expert, 0) - of_expert
        tl.store(n_blocks, tl.sum(of_expert, 0))
        for nth in range(tl.max(of_expert, 0)):
            to = blocks + (first_block + nth) * FIELDS
            tl.store(to, e, mask=nth < of_expert)
            tl.store(to + 1, nth * BLOCK_TOKENS, mask=nth < of_expert)
            tl.store(to + 2, tl.minimum(count - nth * BLOCK_TOKENS, BLOCK_TOKENS), mask=nth < of_expert)


@triton.jit(do_not_specialize=["n_tokens", "capacity", "first_expert", "n_local"])
def _route(
    logits, correction, valid, ids, weights, lists, counts, blocks, n_blocks,
    n_tokens, n_experts, capacity, first_expert, n_local, scale,
    TOP_K: tl.constexpr, N_SHARED: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    CORRECTED: tl.constexpr, MASKED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_early(PDL)
    token = tl.program_id(0)
    pdl_wait(PDL)
    _permute_token(
        logits + token.to(tl.int64) * n_experts, token, correction, valid, ids, weights, lists, counts, blocks,
        n_blocks, n_tokens, n_experts, capacity, first_expert, n_local, scale, TOP_K, N_SHARED, SLOTS, EXPERTS, LOCAL,
        GROUPS, TOP_GROUPS, SIGMOID, NORMALIZE, CORRECTED, MASKED, BLOCK_TOKENS, FIELDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "first_expert", "n_local"])
def _norm_and_route(
    x, norm, router, bias, normed, logits, correction, valid, ids, weights, lists, counts, blocks, n_blocks,
    width, eps, n_experts, capacity, first_expert, n_local, scale,
    BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, N_SHARED: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    CORRECTED: tl.constexpr, MASKED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts: as in `_permute_token`, and one more, which counts the programs. The last program chooses."""
    pdl_launch_early(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    row_mask, col_mask = row < n_experts, col < width
    weight = tl.load(
        router + row[:, None] * width + col[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0.0
    )
    scales = tl.load(norm + col, mask=col_mask, other=0.0)
    pdl_wait(PDL)
    value = tl.load(x + col, mask=col_mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / width + eps)
    rounded = (value * scales).to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + col, rounded, mask=col_mask)
    logit = tl.sum(weight.to(tl.float32) * rounded.to(tl.float32)[None, :], 1)
    if BIAS:
        logit += tl.load(bias + row, mask=row_mask, other=0.0)
    tl.store(logits + row, logit, mask=row_mask)
    tl.debug_barrier()  # all threads have stored before the program is counted
    if tl.atomic_add(counts + n_local + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counts + n_local + 1, 0)
        _permute_token(
            logits, 0, correction, valid, ids, weights, lists, counts, blocks, n_blocks, 1, n_experts, capacity,
            first_expert, n_local, scale, TOP_K, N_SHARED, SLOTS, EXPERTS, LOCAL, GROUPS, TOP_GROUPS, SIGMOID,
            NORMALIZE, CORRECTED, MASKED, BLOCK_TOKENS, FIELDS,
        )  # fmt: skip


def route_tokens(
    logits: Tensor, routing: Routing, to: Permutation, counts: Tensor, *, correction: Tensor | None = None,
    valid: Tensor | None = None, first_expert: int = 0, pdl: bool = False,
) -> None:  # fmt: skip
    """Choose experts by float32 logits [tokens, experts] and permute the tokens. As `moe.route`.

    counts: int32 zeros, one more than the experts of this rank; reset to zero. valid: int32 [tokens], 0 for padding and
    else 1. The experts of this rank are `first_expert` and the following ones, as many as `to` has lists, the shared
    ones included.
    """
    tokens, n_experts = logits.shape
    if not tokens:
        to.n_blocks.zero_()
        return
    _route[(tokens,)](
        logits, logits if correction is None else correction, logits if valid is None else valid, to.ids, to.weights,
        to.lists, counts, to.blocks, to.n_blocks, tokens, n_experts, to.lists.shape[1], first_expert, len(to.lists),
        routing.scale, **_constants(routing, n_experts, to), CORRECTED=correction is not None,
        MASKED=valid is not None, PDL=int(pdl), **launch_options(pdl, num_warps=1),
    )  # fmt: skip


def norm_and_route(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, normed: Tensor, logits: Tensor,
    routing: Routing, to: Permutation, counts: Tensor, *, correction: Tensor | None = None,
    valid: Tensor | None = None, first_expert: int = 0, pdl: bool = False,
) -> None:  # fmt: skip
    """One token: RMS norm, router and `route_tokens` in one launch. x, normed: [1, width]; router: [experts, width].

    counts: int32 zeros, two more than the experts; reset to zero.
    """
    (n_experts, width), sms = router.shape, sm_count()
    rows = next_power_of_two(cdiv(n_experts, sms))
    columns = next_power_of_two(width)
    _norm_and_route[(cdiv(n_experts, rows),)](
        x, norm, router, logits if bias is None else bias, normed, logits, logits if correction is None else correction,
        logits if valid is None else valid, to.ids, to.weights, to.lists, counts, to.blocks, to.n_blocks, width, eps,
        n_experts, to.lists.shape[1], first_expert, len(to.lists), routing.scale, BIAS=bias is not None, ROWS=rows,
        WIDTH=columns, **_constants(routing, n_experts, to), CORRECTED=correction is not None,
        MASKED=valid is not None, PDL=int(pdl), **launch_options(pdl, num_warps=8 if columns >= 4096 else 4),
    )  # fmt: skip


def _constants(routing: Routing, n_experts: int, to: Permutation) -> dict[str, Any]:
    experts = max(2, next_power_of_two(n_experts))
    assert n_experts + routing.n_shared <= MAX_EXPERTS
    assert routing.n_groups == 1 or experts == n_experts
    return {
        "TOP_K": routing.top_k,
        "N_SHARED": routing.n_shared,
        "SLOTS": max(2, next_power_of_two(routing.slots)),
        "EXPERTS": experts,
        "LOCAL": next_power_of_two(len(to.lists) + 1),
        "GROUPS": routing.n_groups,
        "TOP_GROUPS": routing.top_groups,
        "SIGMOID": routing.scoring == "sigmoid",
        "NORMALIZE": routing.normalize,
        "BLOCK_TOKENS": to.block_tokens,
        "FIELDS": BLOCK_FIELDS,
    }
