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

from emberline.kernels.backend import MoE
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, GroupedTile, block_tokens, combine_pairs, grouped_gemm
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.kernels.gpu.matmul import GATES, DenseMatrix, Fusion, Matmul
from emberline.kernels.gpu.moe_routing import make_permutation, route_tokens
from emberline.kernels.gpu.workspace import Workspace, mlp_tokens

NULL_BLOCK = 0  # of a KV pool: padding refers to it


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


def run_moe(moe: MoE, x: Tensor, valid: Tensor, workspace: Workspace, matmul: Matmul, pdl: bool) -> None:
    """Add the experts' outputs to the residual x [tokens, hidden]; valid: 0 for padding, which no expert computes."""
    assert moe.post_norm is None, "no architecture has a norm behind experts"
    for part, mask in zip(torch.split(x, workspace.sizes.moe_tokens), torch.split(valid, workspace.sizes.moe_tokens)):
        normed = workspace.take("normed", *part.shape)
        add_norm(part, None, moe.norm, normed, moe.eps, pdl=pdl)
        if moe.shared is not None:
            _add_shared(moe, normed, part, workspace, matmul)
        _add_routed(moe, normed, part, mask, workspace, matmul, pdl)


def _add_shared(moe: MoE, normed: Tensor, x: Tensor, workspace: Workspace, matmul: Matmul) -> None:
    shared, n = moe.shared, mlp_tokens(len(x))
    assert shared is not None
    for given, to in zip(torch.split(normed, n), torch.split(x, n)):
        activated = workspace.take("activated", len(given), shared.down.shape[1])
        matmul(given, shared.gate_up, activated, Fusion(gate=GATES.index(shared.activation)))
        matmul(activated, shared.down, to, Fusion(add=True))


def _add_routed(
    moe: MoE, normed: Tensor, x: Tensor, valid: Tensor, workspace: Workspace, matmul: Matmul, pdl: bool
) -> None:
    tokens, (n_experts, hidden, width), slots = len(x), moe.down.shape, moe.routing.slots
    logits = workspace.take("router_logits", tokens, n_experts, dtype=torch.float32)
    matmul(normed, DenseMatrix(moe.router, moe.router_bias), logits, Fusion())
    size = block_tokens(tokens, slots, n_experts)
    memory = workspace.region("permutation", torch.int32)
    to = make_permutation(memory, tokens, slots, n_experts, size)
    route_tokens(logits, moe.routing, to, workspace.expert_counts, correction=moe.correction_bias, valid=valid, pdl=pdl)
    activated = workspace.take("expert_activated", tokens * slots, width)
    results = workspace.take("expert_results", tokens * slots, hidden)
    on_input, gate = moe.weight_on_input, EXPERT_GATES.index(moe.activation)
    tile = GroupedTile(32, 32, 2, 4) if INTERPRETED else GroupedTile(64, 128, 4, 4)
    grouped_gemm(normed, moe.gate_up, activated, to, tile, gate=gate, weight=2 if on_input else 0, pdl=pdl)
    grouped_gemm(activated, moe.down, results, to, tile, weight=0 if on_input else 1, pdl=pdl)
    combine_pairs(results, to, x, pdl=pdl)
