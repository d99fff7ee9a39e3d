# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A mixture of experts of a layer: norm, shared experts, router, experts, all in the workspace's memory.

norm ── shared experts ──────────────────────────────────▶ residual
   └─── router ── permutation ── gate, up ── down ── sum ─▶ residual
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import MLP, MoE
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.expert_matrix import PACKED
from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, block_tokens, combine_pairs, grouped_gemm, grouped_tile
from emberline.kernels.gpu.matmul import GATES, DenseMatrix, Fusion, Matmul
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation, route_tokens
from emberline.kernels.gpu.workspace import Workspace, mlp_tokens, result_columns

NULL_BLOCK = 0  # of a KV pool: padding refers to it
_DETERMINISTIC_BLOCK = 64


@triton.jit(do_not_specialize=["n_rows", "table_stride"])
def _mark_valid(
    query_starts, context_lens, positions, tables, valid, n_rows, table_stride, NULL: tl.constexpr, ROWS: tl.constexpr
):
    token = tl.program_id(0)
    row = -1  # found by counting the row starts at or before the token
    for first in range(0, n_rows, ROWS):
        i = first + tl.arange(0, ROWS)
        starts = tl.load(query_starts + i, mask=i < n_rows, other=2147483647)
        row += tl.sum((starts <= token).to(tl.int32))
    context = tl.load(context_lens + row)
    position = tl.maximum(tl.load(positions + token), 0)
    block = tl.load(tables + row * table_stride.to(tl.int64) + position // 16, mask=context > 0, other=NULL)
    tl.store(valid + token, (block != NULL).to(tl.int32))


def mark_valid(step: Any, valid: Tensor) -> Tensor:
    """1 for each token of a step, 0 for its padding: a row without context, or whose new token is in the null block."""
    tokens, table = len(step.token_ids), step.block_tables[0]
    if tokens:
        _mark_valid[(tokens,)](
            step.query_starts, step.context_lens, step.positions, table, valid, len(step.context_lens),
            table.stride(0), NULL=NULL_BLOCK, ROWS=128,
        )  # fmt: skip
    return valid[:tokens]


def run_moe(
    moe: MoE, x: Tensor, valid: Tensor, workspace: Workspace, matmul: Matmul, *, deterministic: bool, pdl: bool
) -> None:  # fmt: skip
    """Add the experts' outputs to the residual x [tokens, hidden]; valid: 0 for padding, which no expert computes.

    deterministic: one size of blocks and tiles, so that a token's result does not depend on the batch.
    """
    assert moe.post_norm is None, "no architecture has a norm behind experts"
    normed = workspace.take("normed", *x.shape)
    add_norm(x, None, moe.norm, normed, moe.eps, pdl=pdl)
    if moe.shared is not None:
        _add_shared(moe.shared, normed, x, workspace, matmul)
    # One token of 4-bit experts is a program per SM; started early they share SMs, and it takes 108 instead of 93 µs.
    pdl = pdl and (len(x) > 1 or moe.gate_up.kind not in PACKED)
    to = _permute(moe, normed, valid, workspace, matmul, _DETERMINISTIC_BLOCK if deterministic else None, pdl)
    _add_routed(moe, normed, x, to, workspace, pdl)


def _add_shared(shared: MLP, normed: Tensor, x: Tensor, workspace: Workspace, matmul: Matmul) -> None:
    n = mlp_tokens(len(x))
    for given, to in zip(torch.split(normed, n), torch.split(x, n), strict=True):
        activated = workspace.take("activated", len(given), shared.down.shape[1])
        matmul(given, shared.gate_up, activated, Fusion(gate=GATES.index(shared.activation)))
        matmul(activated, shared.down, to, Fusion(add=True))


def _permute(
    moe: MoE, normed: Tensor, valid: Tensor, workspace: Workspace, matmul: Matmul, block: int | None, pdl: bool
) -> Permutation:
    tokens, n_experts, slots = len(normed), moe.down.shape[0], moe.routing.slots
    logits = workspace.take("router_logits", tokens, len(moe.router), dtype=torch.float32)
    matmul(normed, DenseMatrix(moe.router, moe.router_bias), logits, Fusion())
    block = block or block_tokens(moe.gate_up.kind, tokens, slots, n_experts)
    memory = workspace.region("permutation", torch.int32)
    to = make_permutation(memory, tokens, slots, n_experts, block)
    route_tokens(logits, moe.routing, to, workspace.expert_counts, correction=moe.correction_bias, valid=valid, pdl=pdl)
    return to


def _add_routed(moe: MoE, normed: Tensor, x: Tensor, to: Permutation, workspace: Workspace, pdl: bool) -> None:
    pairs, (_, hidden, width) = to.tokens * to.slots, moe.down.shape
    activated = workspace.take("expert_activated", pairs, width)
    grouped_gemm(
        normed, moe.gate_up, activated, to, grouped_tile(moe.gate_up.kind, to.block_tokens, True),
        gate=EXPERT_GATES.index(moe.activation), weight=2 if moe.weight_on_input else 0, pdl=pdl,
    )  # fmt: skip
    tile, columns = grouped_tile(moe.down.kind, to.block_tokens, False), result_columns(pairs, hidden, x.element_size())
    for first in range(0, hidden, columns):
        part = x[:, first : first + columns]
        results = workspace.take("expert_results", pairs, part.shape[1])
        weight = 0 if moe.weight_on_input else 1
        grouped_gemm(activated, moe.down, results, to, tile, weight=weight, first_row=first, pdl=pdl)
        combine_pairs(results, to, part, pdl=pdl)
