# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A mixture of experts of a layer: norm, shared experts, router, experts, all in the workspace's memory.

norm ── router ── permutation ── gate, up ── down ── sum ─▶ residual
   └─── shared experts ────────────────────────────────────▶ residual
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import MLP, MoE
from emberline.kernels.collectives import Collectives
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import BESIDE_TOKENS, Workspace, result_columns
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.formats.dense import MAX_WHOLE_ROW, DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import GATES, Fusion
from emberline.kernels.gpu.formats.registry import format_of
from emberline.kernels.gpu.grouped_gemm import EXPERT_GATES, block_tokens, combine_pairs, grouped_gemm, grouped_tile
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation, norm_and_route, route_tokens

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
    """Write 1 for each token of a step and 0 for padding: rows without context, or with a token in the null block."""
    tokens, table = len(step.token_ids), step.block_tables[0]
    if tokens:
        _mark_valid[(tokens,)](
            step.query_starts, step.context_lens, step.positions, table, valid, len(step.context_lens),
            table.stride(0), NULL=NULL_BLOCK, ROWS=128,
        )  # fmt: skip
    return valid[:tokens]


@dataclass(frozen=True, slots=True)
class Beside:
    """A second stream, which computes the shared experts of a few tokens alongside the routed ones.

    In a captured step the stream is a branch. Its kernels write to memory of their own, and are launched without PDL.
    """

    workspace: Workspace
    matmul: Matmul
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, workspace: Workspace) -> "Beside":
        own = workspace.beside()
        return cls(own, Matmul(own, False, False), torch.cuda.Stream(priority=-1))

    def add_shared(self, shared: MLP, normed: Tensor, x: Tensor, add: bool = True) -> None:
        """Compute the shared experts after what the current stream has launched so far."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            _add_shared(shared, normed, x, self.workspace, self.matmul, add)

    def join(self) -> None:
        """Let the current stream wait for the shared experts."""
        torch.cuda.current_stream().wait_stream(self.stream)


def run_moe(
    moe: MoE, x: Tensor, valid: Tensor, workspace: Workspace, matmul: Matmul, *, deterministic: bool, pdl: bool,
    beside: Beside | None = None, tp: Collectives | None = None, added: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the experts' outputs to the residual x [tokens, hidden]; valid: 0 for padding, which no expert computes.

    deterministic: one size of blocks and tiles, so that a token's result does not depend on the batch. tp: the ranks
    that have the other experts, or the rest of each; the sum of all outputs is added. added: what the block before
    leaves to be added to x first, in the same launch as the norm.
    """
    if not 1 < len(x) <= BESIDE_TOKENS or moe.shared is None or not format_of(moe.shared.down).beside_experts:
        beside = None
    assert moe.post_norm is None, "no architecture has a norm behind experts"
    normed, out = workspace.take("normed", *x.shape), x
    if tp is not None:
        out = workspace.take("block_output", *x.shape)  # where `added` is, until the norm
    to = _permutation(moe, len(x), workspace, _DETERMINISTIC_BLOCK if deterministic else None)
    logits = workspace.take("router_logits", len(x), len(moe.router), dtype=torch.float32)
    counts, correction = workspace.expert_counts, moe.correction_bias
    if len(x) == 1 and x.shape[1] <= MAX_WHOLE_ROW and not deterministic:
        if added is not None:
            add_norm(x, added, None, None, moe.eps, pdl=pdl)
        norm_and_route(
            x, moe.norm, moe.eps, moe.router, moe.router_bias, normed, logits, moe.routing, to, counts,
            correction=correction, valid=valid, first_expert=moe.first_expert, pdl=pdl,
        )  # fmt: skip
    else:
        add_norm(x, added, moe.norm, normed, moe.eps, pdl=pdl)
        if beside is not None and moe.shared is not None:
            beside.add_shared(moe.shared, normed, out, tp is None)
        matmul(normed, DenseMatrix(moe.router, moe.router_bias), logits, Fusion())
        route_tokens(
            logits, moe.routing, to, counts, correction=correction, valid=valid, first_expert=moe.first_expert, pdl=pdl
        )
    if moe.shared is not None and beside is None:
        _add_shared(moe.shared, normed, out, workspace, matmul, tp is None)
    if moe.shared is None and tp is not None:
        out.zero_()
    _add_routed(moe, normed, out, to, workspace, pdl, beside)
    if tp is not None:
        tp.all_reduce(out)
        add_norm(x, out, None, None, moe.eps, pdl=False)


def _add_shared(
    shared: MLP, normed: Tensor, x: Tensor, workspace: Workspace, matmul: Matmul, add: bool = True
) -> None:  # fmt: skip
    """Compute the shared experts into x, or add them to x if `add`."""
    n = workspace.mlp_tokens(shared.gate_up, len(x))
    for given, to in zip(torch.split(normed, n), torch.split(x, n), strict=True):
        activated = workspace.take("activated", len(given), shared.down.shape[1])
        matmul(given, shared.gate_up, activated, Fusion(gate=GATES.index(shared.activation)))
        matmul(activated, shared.down, to, Fusion(add=add))


def _permutation(moe: MoE, tokens: int, workspace: Workspace, block: int | None) -> Permutation:
    n_experts, slots = moe.down.shape[0], moe.routing.slots
    block = block or block_tokens(moe.gate_up.kind, tokens, slots, max(n_experts, len(moe.router)))
    return make_permutation(workspace.region("permutation", torch.int32), tokens, slots, n_experts, block)


def _add_routed(
    moe: MoE, normed: Tensor, x: Tensor, to: Permutation, workspace: Workspace, pdl: bool, beside: Beside | None
) -> None:
    pairs, (_, hidden, width) = to.tokens * to.slots, moe.down.shape
    activated = workspace.take("expert_activated", pairs, width)
    grouped_gemm(
        normed, moe.gate_up, activated, to,
        grouped_tile(moe.gate_up.kind, to.block_tokens, True, to.max_blocks * width),
        gate=EXPERT_GATES.index(moe.activation), weight=2 if moe.weight_on_input else 0, pdl=pdl,
    )  # fmt: skip
    columns = result_columns(pairs, hidden, x.element_size())
    tile = grouped_tile(moe.down.kind, to.block_tokens, False, to.max_blocks * columns)
    for first in range(0, hidden, columns):
        part = x[:, first : first + columns]
        results = workspace.take("expert_results", pairs, part.shape[1])
        weight = 0 if moe.weight_on_input else 1
        grouped_gemm(activated, moe.down, results, to, tile, weight=weight, first_row=first, pdl=pdl)
        if beside is not None:
            beside.join()  # both add to the residual
        combine_pairs(results, to, part, pdl=pdl and beside is None)
