"""Latent attention of a layer: its projections and kernels in the workspace's memory, and their plan for a step.

Decode rows and the chunks of captured steps attend absorbed. Other chunks attend expanded if a library supports it.
Under decode context parallelism (`shares`) a rank plans with the tokens that it has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import LatentAttention
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.workspace import LatentShape, PrefillChunk, StepShape, Workspace
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.long_attention import LongAttention
from emberline.kernels.gpu.mla import prefill
from emberline.kernels.gpu.mla.attention import (
    LSE_ROOM,
    LatentTile,
    latent_attention,
    latent_tile,
    partial_floats,
    tile_tokens,
)
from emberline.kernels.gpu.mla.prefill import attend_expanded
from emberline.kernels.gpu.mla.projections import absorb_queries, project_values, rotate_and_cache
from emberline.kernels.gpu.mla.shares import LatentShares, merge_shares
from emberline.kernels.gpu.mla.splits import ITEM_FIELDS, LatentSplits, max_items, plan_latent_splits
from emberline.kernels.token_share import TokenShare


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """Rows whose tokens attend absorbed, together."""

    tokens: slice  # of the step
    tables: Tensor
    query_starts: Tensor  # within `tokens`
    context_lens: Tensor
    splits: LatentSplits
    tile: LatentTile


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Plan of a step, which all layers of a KV group share."""

    absorbed: list[AbsorbedRows]
    expanded: list[PrefillChunk]
    deterministic: bool
    shares: LatentShares | None = None


class _Planner:
    def __init__(
        self, workspace: Workspace, group: int, tables: Tensor, shape: LatentShape, step: Any, deterministic: bool,
        shares: LatentShares | None,
    ) -> None:  # fmt: skip
        self._workspace, self._group, self._tables, self._shape = workspace, group, tables, shape
        self._step, self._deterministic, self._shares = step, deterministic, shares
        self.found: list[AbsorbedRows] = []

    def add(self, rows: slice, tokens: slice, *, decodes_only: bool = False) -> None:
        """Plan rows that have these tokens of the step; a single row may have more tokens than these."""
        step, n = self._step, tokens.stop - tokens.start
        starts, contexts = step.query_starts[rows.start : rows.stop + 1], step.context_lens[rows]
        if tokens.start or n < len(step.token_ids):  # computed on the device: the host would wait for a copy to it
            end = starts[-1:]
            starts = (starts - tokens.start).clamp(0, n)
            contexts = contexts - (end - tokens.stop) if rows.stop - rows.start == 1 else contexts
        self._add(rows, tokens, starts, contexts, decodes_only)

    def _add(self, rows: slice, tokens: slice, starts: Tensor, contexts: Tensor, decodes_only: bool) -> None:
        """Plan the tiles of rows. In deterministic mode keys are not split, and every step has the same tiles."""
        shape, n = self._shape, tokens.stop - tokens.start
        heads, kept = shape.attended_heads, contexts if self._shares is None else self._shares.contexts(contexts)
        per_tile = 1 if decodes_only and not self._deterministic else tile_tokens(heads)
        tile = latent_tile(per_tile * heads, shape.kv_lora, shape.rope_dim, shape.shares)
        head_tiles = cdiv(per_tile * heads, tile.queries)
        floats = partial_floats(head_tiles * tile.queries, shape.kv_lora)
        max_partials = 0 if self._deterministic else self._workspace.region("latent_partials").numel() // floats
        memory = self._workspace.region(f"latent_items{self._group}", torch.int32)
        if self.found:  # never in a captured step
            memory = torch.empty(
                max_items(n, len(contexts), per_tile) * ITEM_FIELDS, dtype=torch.int32, device=memory.device
            )
        splits = plan_latent_splits(
            starts, kept, n, head_tiles, per_tile, tile.keys, tile.programs_per_sm, max_partials, memory
        )
        self.found.append(AbsorbedRows(tokens, self._tables[rows], starts, contexts, splits, tile))


def plan_latent(
    workspace: Workspace, group: int, tables: Tensor, shape: LatentShape, step: Any, step_shape: StepShape,
    library: LongAttention | None, deterministic: bool, shares: LatentShares | None = None,
) -> LatentPlan:  # fmt: skip
    """Plan a step. group: number of the KV group in the workspace. tables: its block tables, by row. library: attends
    to expanded chunks; None: all attend absorbed. shares: divide a block's tokens."""
    planner = _Planner(workspace, group, tables, shape, step, deterministic, shares)
    limit = workspace.sizes.absorbed_tokens
    if not step_shape.max_query or step_shape.chunks is None:
        every = slice(0, len(step.context_lens)), slice(0, len(step.token_ids))
        planner.add(*every, decodes_only=not step_shape.max_query and not step_shape.drafts)
        return LatentPlan(planner.found, [], deterministic, shares)
    if step_shape.decode_rows:
        rows = slice(0, step_shape.decode_rows)
        planner.add(rows, rows, decodes_only=True)
    expanded: list[PrefillChunk] = []
    together: list[PrefillChunk] = []  # neighbors

    def add_together() -> None:
        if together:
            first, last = together[0], together[-1]
            planner.add(slice(first.row, last.row + 1), slice(first.start, last.start + last.n))
        together.clear()

    for chunk in step_shape.chunks:
        if library is not None and chunk.n >= prefill.MIN_TOKENS:
            add_together()
            expanded.append(chunk)
        elif chunk.n > limit:
            add_together()
            for begin in range(chunk.start, chunk.start + chunk.n, limit):
                part = slice(begin, min(begin + limit, chunk.start + chunk.n))
                planner.add(slice(chunk.row, chunk.row + 1), part)
        else:
            if together and chunk.start + chunk.n - together[0].start > limit:
                add_together()
            together.append(chunk)
    add_together()
    return LatentPlan(planner.found, expanded, deterministic, shares)


def attend_latents(
    attn: LatentAttention, projected: Tensor, workspace: Workspace, matmul: Matmul, plan: LatentPlan, step: Any,
    rotary: tuple[Tensor, Tensor], pool: Tensor, library: LongAttention, pdl: bool,
) -> Tensor:  # fmt: skip
    """Compute the heads' outputs [tokens, heads * v_dim] from the first projection, and write the new tokens to the
    cache."""
    tokens, width, shares = len(projected), attn.kv_lora + attn.rope_dim, plan.shares
    q, kv = projected[:, :-width], projected[:, -width:]
    if attn.q_b is not None:
        queries = workspace.take("queries", tokens, attn.q_b.shape[0])
        matmul(q, attn.q_b, queries, Fusion(attn.q_norm, attn.eps))
        q = queries
    out, own = workspace.take("normed", tokens, attn.output_dim), TokenShare() if shares is None else shares.own
    for rows in plan.absorbed:
        new, n = rows.tokens, rows.tokens.stop - rows.tokens.start
        absorbed = workspace.take("absorbed", n, attn.heads, width)
        of_rows = rows.tables, rows.query_starts, rows.context_lens
        angles = rotary[0][new], rotary[1][new]
        one_tile = plan.deterministic
        absorb_queries(
            q[new], kv[new], absorbed, attn, angles, pool, *of_rows, step.positions[new], one_tile=one_tile, pdl=pdl,
            share=own,
        )  # fmt: skip
        latents = workspace.take("latents", n, attn.heads, attn.kv_lora)
        scratch = workspace.region("latent_partials")
        if shares is None:
            latent_attention(absorbed, latents, attn.scale, pool, *of_rows, rows.splits, rows.tile, scratch, pdl=pdl)
        else:
            sizes = (own.size, n, attn.heads)
            everyone = shares.group.all_gather(absorbed, workspace.take("all_queries", *sizes, width))
            parts, received = (
                workspace.take(name, *sizes, attn.kv_lora + LSE_ROOM) for name in ("parts", "received_parts")
            )
            latent_attention(
                everyone, parts, attn.scale, pool, *of_rows, rows.splits, rows.tile, scratch, pdl=False, share=own
            )
            merge_shares(shares.group.exchange(parts, received), latents)
        project_values(latents, attn.v_up, out[new], one_tile=one_tile, pdl=pdl)
    tables = step.block_tables[attn.kv_group]
    for chunk in plan.expanded:
        new = slice(chunk.start, chunk.start + chunk.n)
        angles = rotary[0][new], rotary[1][new]
        rotate_and_cache(
            q[new], kv[new], attn, angles, pool, tables[chunk.row], step.positions[new], pdl=pdl, share=own
        )
        attend_expanded(
            _by_head(q[new], attn.heads), attn, library, pool, tables[chunk.row], chunk.context,
            workspace.region("expanded", projected.dtype), _by_head(out[new], attn.heads), shares,
        )  # fmt: skip
    return out


def _by_head(x: Tensor, heads: int) -> Tensor:
    """View of x [tokens, heads * dim], which may be columns of a wider tensor, as [tokens, heads, dim]."""
    dim = x.shape[1] // heads
    return x.as_strided((len(x), heads, dim), (x.stride(0), dim, 1))
