"""The Backend protocol in Triton: one workspace, no allocation inside a layer, all of it CUDA graph capturable."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels.backend import (
    MLP,
    Attention,
    FeedForward,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    MoE,
    Rope,
    WeightSource,
)
from emberline.kernels.collectives import ALONE, ParallelGroups
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.mla_block import LatentPlan, attend_latents, plan_latent
from emberline.kernels.gpu.backend.moe_block import Beside, mark_valid, run_moe
from emberline.kernels.gpu.backend.workspace import (
    LatentShape,
    PrefillChunk,
    StepShape,
    Workspace,
    WorkspaceSizes,
)
from emberline.kernels.gpu.decode_attention import decode_attention, shared_prefix_attention
from emberline.kernels.gpu.elementwise import add_norm
from emberline.kernels.gpu.expert_loading import load_expert_matrix
from emberline.kernels.gpu.expert_matrix import ExpertMatrix
from emberline.kernels.gpu.formats.matrix_format import GATES, Fusion, Matrix
from emberline.kernels.gpu.formats.registry import format_of, load_stacked
from emberline.kernels.gpu.launch import INTERPRETED, supports_pdl
from emberline.kernels.gpu.long_attention import MIN_TOKENS, is_long, long_attention
from emberline.kernels.gpu.mla.prefill import warm_up_expanded
from emberline.kernels.gpu.mla.shares import LatentShares
from emberline.kernels.gpu.prefill_attention import plan_prefill_splits, prefill_attention
from emberline.kernels.gpu.rope import rope_and_cache, rotary_table
from emberline.kernels.gpu.split_kv import DecodeSplits, PrefillSplits, locality, plan_decode_splits
from emberline.kernels.gpu.verify_attention import verifies, verify_attention, verify_queries
from emberline.protocol.block_hash import KVGroup


@dataclass(frozen=True, slots=True)
class TritonStep:
    """State that all layers of a step share; lists and dictionaries are per KV group."""

    step: Any
    shape: StepShape
    kv: list[Tensor]
    rotary: list[tuple[Tensor, Tensor]]
    decode_splits: dict[int, DecodeSplits]
    prefill_splits: dict[int, PrefillSplits | None]
    latent: dict[int, LatentPlan]
    valid: Tensor | None  # int32 [tokens], 0 for padding; None: no block needs to know


class TritonBackend:
    name = "triton"
    kv_keys = "token"

    def __init__(
        self, device: str = "cuda", dtype: torch.dtype | None = None, *, deterministic: bool = False,
        groups: ParallelGroups = ALONE, compress: bool = False,
    ) -> None:  # fmt: skip
        """compress: keep BF16 matrices losslessly packed, see `lossless`."""
        self.device, self.groups = device, groups
        self._compress = compress
        self._tp = groups.tp if groups.tp.size > 1 else None
        self._shares = LatentShares(groups.dcp) if groups.dcp.size > 1 else None
        self.dtype = dtype or (torch.float32 if INTERPRETED else torch.bfloat16)
        self.kv_dtype = str(self.dtype).removeprefix("torch.")
        self._deterministic = deterministic
        self._pdl = supports_pdl()
        self._long = long_attention()
        self.long_plans = True  # a library may use plans: cuDNN takes a second to make one it was not prepared for
        self._workspace: Workspace  # set by `reserve`, as is _matmul
        self._matmul: Matmul
        self._beside: Beside | None = None

    @property
    def _long_usable(self) -> bool:
        return self.long_plans or not self._long.has_plans

    # --- memory and weights -------------------------------------------------------------------------------------------

    def reserve(self, sizes: WorkspaceSizes) -> None:
        """Allocate the workspace. Must be called once, before the first step."""
        self._workspace = Workspace(sizes, self.device, self.dtype)
        self._matmul = Matmul(self._workspace, self._deterministic, self._pdl)
        if sizes.experts is not None and self._pdl and not self._deterministic:
            self._beside = Beside.of(self._workspace)

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def constant(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> Matrix:
        stacked_bias = None if bias is None else self._load_biases([bias])[0]
        return load_stacked(weights, stacked_bias, self.dtype, self.device, self._compress)

    def load_vector(self, weight: WeightSource) -> Tensor:
        return weight.tensor(torch.float32, self.device)

    def load_tensor(self, weight: WeightSource) -> Tensor:
        tensor = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        weight.into(tensor)
        return tensor

    def load_experts(
        self, experts: list[list[WeightSource]], bias: list[list[WeightSource]] | None = None, *, gated: bool = False
    ) -> ExpertMatrix:
        biases = None if bias is None else self._load_biases(bias)
        return load_expert_matrix(experts, biases, self.dtype, self.device)

    def _load_biases(self, bias: list[list[WeightSource]]) -> Tensor:
        """Stack each list to one vector: [lists, rows]. (torch.cat imports a compiler for tensors without memory.)"""
        rows = [part.shape[0] for part in bias[0]]
        stacked = torch.empty(len(bias), sum(rows), dtype=self.dtype, device=self.device)
        for parts, vector in zip(bias, stacked, strict=True):
            for part, target in zip(parts, torch.split(vector, rows), strict=True):
                target.copy_(part.tensor(self.dtype, self.device))
        return stacked

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(
        self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope], first_group: int = 0
    ) -> TritonStep:
        """Plan what all layers share. first_group: number of the first of the groups in the workspace."""
        shape, workspace = step.shape or _shape_of(step), self._workspace
        context = TritonStep(step, shape, kv, [], {}, {}, {}, self._mark_valid(step))
        for i, (group, rope) in enumerate(zip(groups, ropes, strict=True)):
            n = first_group + i
            context.rotary.append(rotary_table(step.rotary_positions, rope, workspace.region(f"rotary{n}")))
            attention = workspace.sizes.attentions[n]
            if isinstance(attention, LatentShape):
                library = self._long if self._long_usable and self._expands(attention.q_dim, attention.v_dim) else None
                context.latent[i] = plan_latent(
                    workspace,
                    n,
                    step.block_tables[i],
                    attention,
                    step,
                    shape,
                    library,
                    self._deterministic,
                    self._shares,
                )
                continue
            prefix_lens = shape.prefix_lens if group.window is None else None
            memory = workspace.region(f"decode_splits{n}", torch.int32)
            per_kv_head = attention.heads // attention.kv_heads
            rows = self._split_rows(shape, per_kv_head)
            starts, queries = (step.query_starts, verify_queries(per_kv_head)) if shape.drafts else (None, 0)
            context.decode_splits[i] = plan_decode_splits(
                step.context_lens, rows, group.kv_heads, _locality(group), prefix_lens, memory, starts, queries
            )
            context.prefill_splits[i] = self._plan_prefill(n, step, shape, group)
        return context

    def _split_rows(self, shape: StepShape, group: int) -> int:
        """Number of decode rows whose attention is by split-KV; the others are computed as chunks are."""
        if self._deterministic or (shape.drafts and not verifies(group)):
            return 0
        return shape.decode_rows

    def _expands(self, q_dim: int, v_dim: int) -> bool:
        """True if the library computes chunks of MLA, expanded. If False, they attend absorbed like decode rows."""
        return not self._deterministic and not INTERPRETED and self._long.supports_expanded(q_dim, v_dim)

    def _mark_valid(self, step: Any) -> Tensor | None:
        if self._workspace.sizes.experts is None:
            return None
        return mark_valid(step, self._workspace.region("valid", torch.int32))

    def _plan_prefill(self, index: int, step: Any, shape: StepShape, group: KVGroup) -> PrefillSplits | None:
        workspace, first = self._workspace, 0 if shape.chunks is None else shape.decode_rows
        heads = workspace.sizes.attentions[index].heads
        decode_rows = self._split_rows(shape, heads // group.kv_heads)
        if self._deterministic or not (shape.max_query or (shape.drafts and not decode_rows)):
            return None
        if _last_visible(step) is not None:
            return None  # keys of a query tile then end where the host does not know
        return plan_prefill_splits(
            heads, group.kv_heads, group.head_dim, _locality(group), step.query_starts, step.context_lens,
            len(step.token_ids) - first, decode_rows, workspace.region(f"work_items{index}", torch.int32),
            workspace.prefill_scratch,
        )  # fmt: skip

    def embed(self, matrix: Matrix, ids: Tensor, factor: float, first: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self._workspace.take("residual", len(ids), matrix.shape[1])
        format_of(matrix).embed(matrix, ids, factor, out, None if self._tp is None else first)
        if self._tp is not None:
            self._tp.all_reduce(out)
        return out

    def residual(self, n_tokens: int, hidden: int) -> Tensor:
        return self._workspace.take("residual", n_tokens, hidden)

    def draft_embeds(self, n_tokens: int, hidden: int) -> Tensor:
        """Memory for the embeddings that a draft head reads. Its first projection is done before another use."""
        return self._workspace.take("draft_embeds", n_tokens, hidden)

    def gather_logits(self, logits: Tensor, sizes: Sequence[int]) -> Tensor:
        if self._tp is None:
            return logits
        n, widest = len(logits), max(sizes)
        if logits.shape[1] < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        parts = self._workspace.take("all_logits", len(sizes), n, widest, dtype=torch.float32)
        self._tp.all_gather(logits, parts)
        out = self._workspace.take("logits", n, sum(sizes), dtype=torch.float32)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1, out=out)

    def norm_linear(self, x: Tensor, matrix: Matrix, norm: Tensor, eps: float) -> Tensor:
        out = self._workspace.take("logits", len(x), matrix.shape[0], dtype=torch.float32)
        self._matmul(x, matrix, out, Fusion(norm, eps))
        return out

    def run_layers(self, layers: Sequence[Layer], x: Tensor, context: TritonStep) -> None:
        for layer in layers:
            if isinstance(layer.attention, LatentAttention):
                added = self._latent_attention(layer.attention, x, context, layer.feed_forward)
            else:
                added = self._grouped_query_attention(layer.attention, x, context, layer.feed_forward)
            if isinstance(layer.feed_forward, MoE):
                assert context.valid is not None
                run_moe(
                    layer.feed_forward, x, context.valid, self._workspace, self._matmul,
                    deterministic=self._deterministic, pdl=self._pdl, beside=self._beside, tp=self._tp,
                    added=added,
                )  # fmt: skip
                continue
            self.mlp(layer.feed_forward, x)

    def _latent_attention(
        self, attn: LatentAttention, x: Tensor, context: TritonStep, following: FeedForward
    ) -> Tensor | None:
        projected = self._workspace.take("qkv", len(x), attn.qkv_a.shape[0])
        self._matmul(x, attn.qkv_a, projected, Fusion(attn.norm, attn.eps))
        return self._add_attended(self._attend_to_latents(projected, attn, context), attn, x, following)

    def _attend_to_latents(self, projected: Tensor, attn: LatentAttention, context: TritonStep) -> Tensor:
        group = attn.kv_group
        return attend_latents(
            attn, projected, self._workspace, self._matmul, context.latent[group], context.step, context.rotary[group],
            context.kv[group][:, attn.layer_index], self._long, self._pdl,
        )  # fmt: skip

    def _grouped_query_attention(
        self, attn: GroupedQueryAttention, x: Tensor, context: TritonStep, following: FeedForward
    ) -> Tensor | None:
        qkv = self._workspace.take("qkv", len(x), attn.qkv.shape[0])
        self._matmul(x, attn.qkv, qkv, Fusion(attn.norm, attn.eps))
        attended = self.attention(qkv, attn, context)
        return self._add_attended(attended, attn, x, following)

    def _add_attended(self, attended: Tensor, attn: Attention, x: Tensor, following: FeedForward) -> Tensor | None:
        """Add the output projection to the residual and return None; or, for experts of several ranks, return its sum
        over all ranks, which the launch of their norm adds."""
        if self._tp is None or attn.post_norm is not None or not isinstance(following, MoE):
            self.linear_add(attended, attn.output, x, attn.post_norm, attn.eps, after_attention=True)
            return None
        out = self._workspace.take("block_output", *x.shape)
        self._matmul(attended, attn.output, out, Fusion(), True)
        self._tp.all_reduce(out)
        return out

    def linear_add(
        self, x: Any, matrix: Any, residual: Tensor, post_norm: Tensor | None, eps: float,
        after_attention: bool = False,
    ) -> None:  # fmt: skip
        if post_norm is None and self._tp is None:
            self._matmul(x, matrix, residual, Fusion(add=True), after_attention)
            return
        out = self._workspace.take("block_output", *residual.shape)
        self._matmul(x, matrix, out, Fusion(), after_attention)
        if self._tp is not None:
            self._tp.all_reduce(out)
        add_norm(residual, out, None, None, eps, post=post_norm, pdl=self._pdl)

    def mlp(self, mlp: MLP, residual: Tensor) -> None:
        fusion = Fusion(mlp.norm, mlp.eps, gate=GATES.index(mlp.activation))
        for x in torch.split(residual, self._workspace.mlp_tokens(mlp.gate_up, len(residual))):
            activated = self._matmul.gated(x, mlp.gate_up, fusion, mlp.down)
            self.linear_add(activated, mlp.down, x, mlp.post_norm, mlp.eps)

    # --- attention ----------------------------------------------------------------------------------------------------

    def attention(self, qkv: Tensor, attn: Attention, context: TritonStep) -> Tensor:
        if isinstance(attn, LatentAttention):
            return self._attend_to_latents(qkv, attn, context)
        return self._attend(qkv, self._workspace.take("normed", len(qkv), attn.output_dim), attn, context)

    def project(self, x: Tensor, matrix: Matrix, out: Tensor, norm: Tensor | None, eps: float, *, add: bool) -> None:
        """Write x times the matrix to out, or add it. With a norm x is normed first."""
        self._matmul(x, matrix, out, Fusion(norm, eps, add=add))

    def normalize(self, x: Tensor, norm: Tensor, eps: float) -> None:
        """Replace x by rms_norm(x)."""
        add_norm(x, None, norm, x, eps, pdl=self._pdl)

    def joint_projection(
        self, embeds: Tensor, embed_norm: Tensor, of_embeds: Any, hidden: Tensor, attn: Attention
    ) -> Tensor:
        """The first projection of a draft head's attention, which reads two normed inputs."""
        own = attn.qkv_a if isinstance(attn, LatentAttention) else attn.qkv
        projected = self._workspace.take("qkv", len(hidden), own.shape[0])
        self._matmul(embeds, of_embeds, projected, Fusion(embed_norm, attn.eps))
        self._matmul(hidden, own, projected, Fusion(attn.norm, attn.eps, add=True))
        return projected

    def write_kv(self, qkv: Tensor, attn: GroupedQueryAttention, context: TritonStep) -> None:
        """Write new tokens to the cache without attention, for rows of any length."""
        step, pool = context.step, context.kv[attn.kv_group][:, attn.layer_index]
        queries = self._workspace.take("queries", len(qkv), attn.heads * attn.head_dim)
        rope_and_cache(
            qkv, queries, attn, context.rotary[attn.kv_group], pool, step.block_tables[attn.kv_group],
            step.query_starts, step.positions, pdl=self._pdl,
        )  # fmt: skip

    def rotate_only(self, step: Any, pool: Tensor, rope: Rope, group: int) -> TritonStep:
        """Prepare the part of a step that `write_kv` needs. group: number of the KV group in the workspace."""
        rotary = rotary_table(step.positions, rope, self._workspace.region(f"rotary{group}"))
        return TritonStep(step, step.shape, [pool], [rotary], {}, {}, {}, None)

    def _attend(self, qkv: Tensor, out: Tensor, attn: GroupedQueryAttention, context: TritonStep) -> Tensor:
        """Compute the attention of all rows. Returns `out`, or another tensor that holds the result."""
        shape, workspace = context.shape, self._workspace
        pool, tables = context.kv[attn.kv_group][:, attn.layer_index], context.step.block_tables[attn.kv_group]
        rotary = context.rotary[attn.kv_group]
        n_decodes = self._split_rows(shape, attn.heads // attn.kv_heads)
        if n_decodes and shape.drafts:
            verify_attention(
                qkv, out, attn, rotary, pool, tables, context.step.query_starts, context.decode_splits[attn.kv_group],
                workspace.verify_partials, workspace.row_counters, pdl=self._pdl,
            )  # fmt: skip
        elif n_decodes:
            prefix = None
            if shape.shared_prefix is not None and shape.prefix_lens is not None and _is_full(attn):
                n_splits = shared_prefix_attention(
                    qkv, attn, rotary, pool, tables, shape.shared_prefix, context.step.positions,
                    workspace.prefix_partial, workspace.prefix_stats, n_decodes, pdl=self._pdl,
                )  # fmt: skip
                prefix = (workspace.prefix_partial, workspace.prefix_stats, shape.prefix_lens, n_splits)
            decode_attention(
                qkv, out, attn, rotary, pool, tables, context.decode_splits[attn.kv_group], workspace.decode_partial,
                workspace.decode_stats, workspace.row_counters, n_decodes, prefix, pdl=self._pdl and n_decodes > 1,
                release=self._pdl,
            )  # fmt: skip
        if shape.max_query or not n_decodes:
            return self._attend_chunks(qkv, out, attn, context, pool, tables, n_decodes)
        return out

    def _attend_chunks(
        self,
        qkv: Tensor,
        out: Tensor,
        attn: GroupedQueryAttention,
        context: TritonStep,
        pool: Tensor,
        tables: Tensor,
        n_decodes: int,
    ) -> Tensor:
        step, workspace, tokens = context.step, self._workspace, len(qkv)
        first = 0 if context.shape.chunks is None else n_decodes  # captured: only the device knows which rows decode
        n_new = tokens - first
        queries = workspace.take("queries", tokens, attn.heads * attn.head_dim)
        last_visible = _last_visible(step)
        chunks = [] if self._deterministic or last_visible is not None else context.shape.chunks or []
        library, memory = self._long, workspace.region("gathered_kv", self.dtype)
        long = [chunk for chunk in chunks if self._long_usable and is_long(library, attn, chunk.n)]
        new_kv = library.new_kv(memory, attn, n_new, long[0].n == n_new) if long else None
        rope_and_cache(
            qkv, queries, attn, context.rotary[attn.kv_group], pool, tables, step.query_starts, step.positions, first,
            n_decodes, copy_to=new_kv, pdl=self._pdl,
        )  # fmt: skip
        if len(long) < len(chunks) or not chunks:
            prefill_attention(
                queries, out, attn, pool, tables, step.query_starts, step.context_lens, n_new, n_decodes,
                max_tokens=MIN_TOKENS - 1 if long else 2**31 - 1,
                splits=context.prefill_splits[attn.kv_group], pdl=self._pdl, last_visible=last_visible,
            )  # fmt: skip
        for chunk in long:
            new, copied = slice(chunk.start, chunk.start + chunk.n), slice(chunk.start - first, None)
            chunk_kv = None if new_kv is None else tuple(t[copied][: chunk.n] for t in new_kv)
            result = library.attend(
                queries[new], chunk_kv, attn, pool, tables[chunk.row], chunk.context, memory, out[new]
            )
            if chunk.n == tokens:
                return result
            if result.data_ptr() != out[new].data_ptr():
                out[new] = result
        return out

    def warm_up(self, attentions: Sequence[Attention], kv: Sequence[Tensor]) -> Iterator[bool]:
        """Compile kernels and make the library plans that the first long prompts would wait for, one per iteration."""
        workspace, tokens = self._workspace, self._workspace.sizes.max_tokens
        grouped = [attn for attn in attentions if isinstance(attn, GroupedQueryAttention)]
        for attn in {_is_full(attn): attn for attn in grouped}.values():  # large steps do not split keys
            zeros = torch.zeros(1, 16, dtype=torch.int32, device=self.device)
            queries, out = (workspace.take(name, 1, attn.heads * attn.head_dim) for name in ("queries", "normed"))
            pool = kv[attn.kv_group][:, attn.layer_index]
            prefill_attention(queries, out, attn, pool, zeros, zeros[0, :2], zeros[0, :1], 1, pdl=self._pdl)
            yield True
        latent = next((attn for attn in attentions if isinstance(attn, LatentAttention)), None)
        q_dim = 0 if latent is None else latent.nope_dim + latent.rope_dim
        if latent is not None and latent.q_b is not None and self._expands(q_dim, latent.v_dim):
            queries = workspace.take("queries", tokens, latent.heads, q_dim)
            yield from warm_up_expanded(queries, latent, self._long, workspace.region("expanded", self.dtype))
        long = next((attn for attn in grouped if is_long(self._long, attn, tokens)), None)
        if long is None or self._deterministic:
            return
        queries, out = (workspace.take(name, tokens, long.heads * long.head_dim) for name in ("queries", "normed"))
        pool, memory = kv[long.kv_group][:, long.layer_index], workspace.region("gathered_kv", self.dtype)
        yield from self._long.warm_up(queries, long, pool, memory, out)


def _is_full(attn: GroupedQueryAttention) -> bool:
    """True if every token attends to all tokens before it."""
    return attn.window is None and attn.chunk is None


def _last_visible(step: Any) -> Tensor | None:
    """Positions up to which the tokens of a step see. Returns None if every token sees as far as itself."""
    images = step.images
    return None if images is None else images.last_visible


def _locality(group: KVGroup) -> tuple[int, int]:
    return locality(None, group.window) if group.chunked else locality(group.window, None)


def _shape_of(step: Any) -> StepShape:
    """Shape of a step that comes without one. Waits for the device."""
    starts, contexts = step.query_starts.tolist(), step.context_lens.tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    n_decodes = next((row for row, n in enumerate(lengths) if n != 1), len(lengths))
    chunks = [PrefillChunk(row, starts[row], lengths[row], contexts[row]) for row in range(n_decodes, len(lengths))]
    return StepShape(n_decodes, max((chunk.n for chunk in chunks), default=0), chunks=chunks)
