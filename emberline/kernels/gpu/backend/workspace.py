"""The workspace: one allocation that all layers of all steps share, sized before anything is allocated.

residual | normed, attention out | qkv, queries | KV of new tokens or latents, partials | split-K | rotary, splits
                                 | gate, up | activated                                 |
                                 | router logits, permutation, outputs of experts       |
                                 | logits, after the last layer                         |
"""

from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emberline.kernels.backend import MLP, Attention, GroupedQueryAttention, Layer, MoE
from emberline.kernels.gpu import long_attention, prefill_attention, split_kv
from emberline.kernels.gpu.decode_attention import n_prefix_splits
from emberline.kernels.gpu.formats.matrix_format import DEQUANTIZED_BYTES, SLICE_ROWS, SLICED_BYTES, Matrix
from emberline.kernels.gpu.formats.registry import format_of
from emberline.kernels.gpu.launch import cdiv
from emberline.kernels.gpu.mla import splits as latent_splits
from emberline.kernels.gpu.mla.attention import LSE_ROOM, latent_tile, partial_floats, tile_tokens
from emberline.kernels.gpu.mla.prefill import expanded_elements
from emberline.kernels.gpu.moe_routing import permutation_ints
from emberline.kernels.gpu.verify_attention import verifies, verify_partial_floats

ABSORBED_TOKENS = 1024  # of MLA; no captured step has more
MLP_TOKENS = 2048  # for which an MLP's intermediates are computed at a time
UNSLICED_TOKENS = 256  # whose product with gate and up is computed at once in any case
RESULT_BYTES = 256 << 20  # of the experts' results, computed at a time before they are summed
PARTIAL_FLOATS = 4 << 20  # for split-K matmuls
COUNTERS = 1 << 16
BESIDE_TOKENS = 32  # of a step whose shared experts are computed on a second stream
BESIDE_FLOATS = 1 << 20  # for its split-K matmuls
_ALIGN = 256


def result_columns(pairs: int, hidden: int, item: int) -> int:
    """Columns of the experts' results that are computed and summed at a time: all of them except for long chunks."""
    return min(hidden, max(256, RESULT_BYTES // (max(1, pairs) * item) // 256 * 256))


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim


class LatentShape(NamedTuple):
    heads: int
    q_rows: int  # of the first projection
    q_dim: int  # of a head's query: its part without RoPE, and with it
    kv_lora: int
    rope_dim: int
    v_dim: int
    shares: int = 1  # ranks that divide the tokens of a block, each of which attends for the heads of all

    @property
    def attended_heads(self) -> int:
        return self.heads * self.shares


class ExpertsShape(NamedTuple):
    experts: int  # of this rank
    scored: int  # by the router
    slots: int  # experts of a token
    width: int


@dataclass(frozen=True, slots=True)
class WorkspaceSizes:
    """Sizes of a model's blocks and of the largest step, which determine the sizes of the regions."""

    hidden: int
    vocab: int
    attentions: tuple[AttentionShape | LatentShape, ...]  # of each KV group
    mlp: int  # the widest, shared experts included
    max_tokens: int
    max_rows: int
    max_samples: int
    item: int = 2  # bytes of an activation
    quantized: bool = False  # some matrices are, in whatever format
    experts: ExpertsShape | None = None
    fp8: bool = False  # some matrices multiply FP8 activations
    verify_rows: int = 0  # the most rows of a step that verifies drafts
    tp: int = 1  # ranks that divide the blocks, whose outputs are summed
    draft_hidden: int = 0  # of a draft head; 0: there is none
    sliced: bool = False  # MLPs are computed for all tokens at once, in slices of their neurons

    @property
    def absorbed_tokens(self) -> int:
        """Tokens of MLA that attend absorbed at once: those of decode rows, or of a captured step."""
        return min(self.max_tokens, max(self.max_rows, ABSORBED_TOKENS))

    @classmethod
    def of(
        cls, model: Any, max_tokens: int, max_rows: int, max_samples: int, item: int = 2, quantized: bool = False,
        fp8: bool = False, sliced: bool = False, verify_rows: int = 0, head: Layer | None = None,
    ) -> "WorkspaceSizes":  # fmt: skip
        """Sizes of a `models.decoder.Decoder`. head: the layer of its draft head, whose KV group comes last."""
        layout = model.shard.layout
        shapes = {attn.kv_group: _attention_shape(attn, layout.dcp) for attn in model.attentions}
        groups = [shapes[group] for group in range(len(model.kv_groups))]
        if head is not None:
            groups.append(_attention_shape(head.attention, layout.dcp))
        experts = [block for block in model.feed_forwards if isinstance(block, MoE)]
        dense = [block for block in model.feed_forwards if isinstance(block, MLP)]
        if head is not None and isinstance(head.feed_forward, MLP):
            dense.append(head.feed_forward)
        dense += [block.shared for block in experts if block.shared is not None]
        return cls(
            model.config.hidden_size,
            model.config.vocab_size,
            tuple(groups),
            max((block.down.shape[1] for block in dense), default=0),
            max_tokens,
            max_rows,
            max_samples,
            item,
            quantized,
            ExpertsShape(*map(max, zip(*map(_experts_shape, experts), strict=True))) if experts else None,
            fp8,
            verify_rows,
            layout.tp,
            0 if head is None else head.attention.output.shape[0],
            sliced,
        )


def _attention_shape(attn: Attention, shares: int) -> AttentionShape | LatentShape:
    if isinstance(attn, GroupedQueryAttention):
        return AttentionShape(attn.heads, attn.kv_heads, attn.head_dim)
    q_rows = attn.qkv_a.shape[0] - attn.kv_lora - attn.rope_dim
    q_dim = attn.nope_dim + attn.rope_dim
    return LatentShape(attn.heads, q_rows, q_dim, attn.kv_lora, attn.rope_dim, attn.v_dim, shares)


def _experts_shape(moe: MoE) -> ExpertsShape:
    experts, _, width = moe.down.shape
    return ExpertsShape(experts, len(moe.router), moe.routing.slots, width)


class _Regions:
    """Regions of one allocation: name to (offset, bytes)."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}
        self.end = 0  # of all

    def add(self, name: str, size: int, at: int | None = None) -> int:
        """Place a region after all others, or at an offset, over what is there. Returns where the next may begin."""
        start = self.end if at is None else at
        after = cdiv(start + size, _ALIGN) * _ALIGN
        self.found[name] = (start, size)
        self.end = max(self.end, after)
        return after


def _layout(s: WorkspaceSizes) -> dict[str, tuple[int, int]]:
    """Name of each region to its (offset, bytes)."""
    regions = _Regions()
    grouped = {shape for shape in s.attentions if isinstance(shape, AttentionShape)}
    latent = {shape for shape in s.attentions if isinstance(shape, LatentShape)}
    tokens = s.max_tokens * s.item
    outputs = [*(shape.queries for shape in grouped), *(shape.heads * shape.v_dim for shape in latent)]
    regions.add("residual", tokens * s.hidden)
    regions.add("normed", tokens * max(s.hidden, *outputs))
    layer = regions.end
    projected = [shape.queries + 2 * shape.kv_heads * shape.head_dim for shape in grouped]
    projected += [shape.q_rows + shape.kv_lora + shape.rope_dim for shape in latent]
    regions.add("qkv", tokens * max(projected))
    queries = [*(shape.queries for shape in grouped), *(shape.heads * shape.q_dim for shape in latent)]
    regions.add("queries", tokens * max(queries))
    attention = regions.end
    if grouped:
        _add_grouped_query(regions, s, grouped, attention)
    if latent:
        _add_latent(regions, s, latent, attention)
    # The feed-forward block runs after attention and reuses its memory.
    at_once = min(s.max_tokens, MLP_TOKENS)
    both = at_once * 2 * s.mlp
    if s.sliced:
        both = max(min(s.max_tokens, UNSLICED_TOKENS) * 2 * s.mlp, s.max_tokens * min(SLICE_ROWS, 2 * s.mlp))
        at_once = s.max_tokens
    after = regions.add("gate_up", max(both, s.max_tokens * s.hidden) * s.item, layer)
    regions.add("activated", at_once * s.mlp * s.item, after)
    if s.tp == 1:
        regions.add("block_output", tokens * s.hidden, layer)  # of a block, awaiting its norm: over gate and up
    else:
        regions.add("block_output", tokens * max(s.hidden, s.draft_hidden))  # awaiting those of other ranks
    # Embeddings that a draft head's first projection reads, when no block's output is awaited.
    regions.add("draft_embeds", tokens * s.draft_hidden, None if s.tp == 1 else regions.found["block_output"][0])
    if s.experts is not None:
        _add_experts(regions, s, s.experts, layer)
    after = regions.add("logits", s.max_samples * s.vocab * 4, layer)
    if s.tp > 1:
        regions.add("all_logits", s.max_samples * cdiv(s.vocab, s.tp) * s.tp * 4, after)
    regions.add("matmul", PARTIAL_FLOATS * 4)
    regions.add("dequantized", (SLICED_BYTES if s.sliced else DEQUANTIZED_BYTES) if s.quantized else 0)
    if s.fp8:
        elements = max(s.max_tokens * max(s.hidden, *outputs, *projected), at_once * s.mlp)
        regions.add("fp8", elements)
        regions.add("fp8_scale", (elements // 128 + 2 * s.max_tokens) * 4)
    if grouped:
        _add_decode_splits(regions, s, grouped)
    for group, shape in enumerate(s.attentions):
        rotary = shape.head_dim if isinstance(shape, AttentionShape) else shape.rope_dim
        regions.add(f"rotary{group}", s.max_tokens * rotary * 4)
        if isinstance(shape, AttentionShape):
            fields, n_splits = split_kv.DECODE_SPLIT_FIELDS, split_kv.max_decode_splits(s.max_rows, shape.kv_heads)
            regions.add(f"decode_splits{group}", n_splits * fields * 4)
            regions.add(f"work_items{group}", split_kv.work_item_room() * split_kv.WORK_ITEM_FIELDS * 4)
        else:
            regions.add(f"latent_items{group}", _latent_items(s, shape) * latent_splits.ITEM_FIELDS * 4)
    kv_heads = max((shape.kv_heads for shape in grouped), default=0)
    regions.add("counters", (COUNTERS + s.max_rows * kv_heads) * 4)
    regions.add("work_item_counters", split_kv.work_item_room() * 4)
    if s.experts is not None:
        # Not over other memory: shared experts are computed between the choice of experts and its use.
        regions.add("permutation", permutation_ints(s.max_tokens, s.experts.slots, s.experts.experts) * 4)
        regions.add("expert_counts", (s.experts.experts + 2) * 4)
        regions.add("beside_gate_up", BESIDE_TOKENS * 2 * s.mlp * s.item)
        regions.add("beside_activated", BESIDE_TOKENS * s.mlp * s.item)
        regions.add("beside_matmul", BESIDE_FLOATS * 4)
        regions.add("beside_counters", COUNTERS * 4)
        regions.add("valid", s.max_tokens * 4)
    return regions.found


def _add_grouped_query(regions: _Regions, s: WorkspaceSizes, shapes: set[AttentionShape], at: int) -> None:
    kv = max(shape.kv_heads * shape.head_dim for shape in shapes)
    regions.add("gathered_kv", long_attention.gathered_elements(s.max_tokens, kv) * s.item, at)
    # A step uses a library's attention, split-KV prefill, or that of rows with drafts: they share memory.
    partials = max(prefill_attention.prefill_scratch_floats(*shape) for shape in shapes)
    regions.add("prefill_partials", partials * 4, at)
    groups = [(shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim) for shape in shapes]
    verified = [verify_partial_floats(s.verify_rows, *group) for group in groups if verifies(group[1])]
    regions.add("verify_partials", max(verified, default=0) * 4, at)


def _add_decode_splits(regions: _Regions, s: WorkspaceSizes, shapes: set[AttentionShape]) -> None:
    heads, queries = max(shape.heads for shape in shapes), max(shape.queries for shape in shapes)
    n_splits = max(split_kv.max_decode_splits(s.max_rows, shape.kv_heads) for shape in shapes)
    regions.add("decode_partial", n_splits * queries * 4)
    regions.add("decode_stats", n_splits * heads * 2 * 4)
    row_counts = {1, s.max_rows, *(1 << i for i in range(s.max_rows.bit_length()))}
    prefix_rows = max(n_prefix_splits(rows, *shape[:2]) * rows for rows in row_counts for shape in shapes)
    regions.add("prefix_partial", prefix_rows * queries * 4)
    regions.add("prefix_stats", prefix_rows * heads * 2 * 4)


def _add_latent(regions: _Regions, s: WorkspaceSizes, shapes: set[LatentShape], at: int) -> None:
    tokens = s.absorbed_tokens * s.item
    elements = (expanded_elements(x.heads, x.q_dim, x.v_dim, x.kv_lora, s.item, x.rope_dim, x.shares) for x in shapes)
    regions.add("expanded", max(elements) * s.item, at)
    after = regions.add("absorbed", tokens * max(x.heads * (x.kv_lora + x.rope_dim) for x in shapes), at)
    after = regions.add("latents", tokens * max(x.heads * x.kv_lora for x in shapes), after)
    if any(x.shares > 1 for x in shapes):
        after = regions.add(
            "all_queries", tokens * max(x.attended_heads * (x.kv_lora + x.rope_dim) for x in shapes), after
        )
        part = tokens * max(x.attended_heads * (x.kv_lora + LSE_ROOM) for x in shapes)
        after = regions.add("received_parts", part, regions.add("parts", part, after))
    floats = 0
    for shape in shapes:
        heads = shape.attended_heads
        for n_tokens in (1, tile_tokens(heads)):
            tile = latent_tile(n_tokens * heads, shape.kv_lora, shape.rope_dim, shape.shares)
            padded = cdiv(n_tokens * heads, tile.queries) * tile.queries
            floats = max(floats, latent_splits.partial_room() * partial_floats(padded, shape.kv_lora))
    regions.add("latent_partials", floats * 4, after)


def _latent_items(s: WorkspaceSizes, shape: LatentShape) -> int:
    """Maximum number of work items of a step, which only decodes or has chunks."""
    chunks = latent_splits.max_items(s.absorbed_tokens, s.max_rows, tile_tokens(shape.attended_heads))
    return max(latent_splits.max_items(s.max_rows, s.max_rows, 1), chunks)


def _add_experts(regions: _Regions, s: WorkspaceSizes, shape: ExpertsShape, at: int) -> None:
    pairs = s.max_tokens * shape.slots
    regions.add("router_logits", s.max_tokens * shape.scored * 4, at)  # their choice is made before all below
    at = regions.add("expert_activated", pairs * shape.width * s.item, at)
    most = max(RESULT_BYTES, pairs * 256 * s.item)  # see `result_columns`
    regions.add("expert_results", min(pairs * s.hidden * s.item, most), at)


class Workspace:
    @staticmethod
    def bytes(sizes: WorkspaceSizes) -> int:
        return max(offset + size for offset, size in _layout(sizes).values())

    def __init__(self, sizes: WorkspaceSizes, device: str, dtype: torch.dtype) -> None:
        self.sizes = sizes
        self._dtype = dtype
        self._regions = _layout(sizes)
        self._memory = torch.empty(self.bytes(sizes), dtype=torch.uint8, device=device)
        self.counters = self.region("counters", torch.int32)[:COUNTERS].zero_()
        self.row_counters = self.region("counters", torch.int32)[COUNTERS:].zero_()
        work_item_counters = self.region("work_item_counters", torch.int32).zero_()
        self.matmul = self.region("matmul")
        if "prefill_partials" in self._regions:
            self.prefill_scratch = split_kv.SplitScratch(self.region("prefill_partials"), work_item_counters)
            self.decode_partial, self.decode_stats = self.region("decode_partial"), self.region("decode_stats")
            self.prefix_partial, self.prefix_stats = self.region("prefix_partial"), self.region("prefix_stats")
            self.verify_partials = self.region("verify_partials")
        if sizes.experts is not None:
            self.expert_counts = self.region("expert_counts", torch.int32).zero_()

    def beside(self) -> "Workspace":
        """The same memory for a second stream: its products of up to BESIDE_TOKENS tokens write to other regions."""
        other = copy(self)
        other._regions = self._regions | {name: self._regions[f"beside_{name}"] for name in ("gate_up", "activated")}
        other.matmul, other.counters = self.region("beside_matmul"), self.region("beside_counters", torch.int32).zero_()
        return other

    def mlp_tokens(self, gate_up: Matrix, tokens: int) -> int:
        """Number of a step's tokens that an MLP processes at a time: cuBLAS is a tenth slower at 1,024 than at
        2 x 512."""
        if format_of(gate_up).sliced:
            return tokens
        room = self._regions["gate_up"][1] // (gate_up.shape[0] * self.sizes.item)
        return min(room, 512 if tokens == 1024 else MLP_TOKENS)

    def region(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A whole region as a flat tensor."""
        offset, size = self._regions[name]
        return self._memory[offset : offset + size].view(dtype)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The start of a region as a tensor; the activations' dtype by default."""
        return self.region(name, dtype or self._dtype)[: prod(shape)].view(shape)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one sequence: more than one, or the last of a prompt."""

    row: int
    start: int  # index of its first token in the step
    n: int
    context: int  # length, the new tokens included


@dataclass(slots=True)
class StepShape:
    """Shape of a step, as far as the host knows it. Decode rows come first, row r having token r; chunks follow.

    A captured CUDA graph is replayed with other contexts: only `decode_rows` and `max_query` are fixed in it. The last
    decode rows may be padding: their context is 0, and in a step with chunks they have no token.
    """

    decode_rows: int
    max_query: int = 0  # tokens of the longest chunk; 0: no chunks
    shared_prefix: Tensor | None = None  # int32 [2]: a row whose block table begins with the prefix, and its length
    prefix_lens: Tensor | None = None  # int32 [rows]: the prefix's length for rows that have it, else 0
    chunks: list[PrefillChunk] | None = None  # None: known only on the device, as in a captured graph
    drafts: bool = False  # decode rows may have several tokens: drafts are verified, and there are no chunks
