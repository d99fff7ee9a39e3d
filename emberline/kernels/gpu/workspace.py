"""The workspace: one allocation that all layers of all steps share, sized before anything is allocated.

residual | normed, attention out | qkv | KV of new tokens, partials | gate, up | activated | split-K | rotary, splits
                                 '------------ logits, after the last layer -------------'
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emberline.kernels.backend import MLP, GroupedQueryAttention
from emberline.kernels.gpu import cudnn_attention, prefill_attention, split_kv
from emberline.kernels.gpu.decode_attention import n_prefix_splits
from emberline.kernels.gpu.launch import cdiv

MLP_TOKENS = 2048  # for which an MLP's intermediates are computed at a time
PARTIAL_FLOATS = 4 << 20  # for split-K matmuls
COUNTERS = 1 << 16
DEQUANTIZED_BYTES = 32 << 20  # of a quantized matrix, dequantized at a time for cuBLAS
_ALIGN = 256


def mlp_tokens(tokens: int) -> int:
    """How many of a step's tokens an MLP processes at a time: cuBLAS is a tenth slower at 1,024 than at twice 512."""
    return 512 if tokens == 1024 else MLP_TOKENS


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class WorkspaceSizes:
    """What the sizes of the regions follow from: a model's blocks, and the largest step."""

    hidden: int
    vocab: int
    attentions: tuple[AttentionShape, ...]  # of each KV group
    mlp: int  # the widest
    max_tokens: int
    max_rows: int
    max_samples: int
    item: int = 2  # bytes of an activation
    quantized: bool = False

    @classmethod
    def of(
        cls, model: Any, max_tokens: int, max_rows: int, max_samples: int, item: int = 2, quantized: bool = False
    ) -> "WorkspaceSizes":
        """Of a `models.decoder.Decoder`."""
        shapes = {
            attn.kv_group: AttentionShape(attn.heads, attn.kv_heads, attn.head_dim)
            for attn in model.attentions
            if isinstance(attn, GroupedQueryAttention)
        }
        attentions = tuple(shapes[group] for group in range(len(model.kv_groups)))
        mlp = max(block.down.shape[1] for block in model.feed_forwards if isinstance(block, MLP))
        sizes = (model.config.hidden_size, model.config.vocab_size, attentions, mlp)
        return cls(*sizes, max_tokens, max_rows, max_samples, item, quantized)


def _layout(s: WorkspaceSizes) -> dict[str, tuple[int, int]]:
    """Name of each region to its (offset, bytes)."""
    regions: dict[str, tuple[int, int]] = {}
    end = 0

    def add(name: str, size: int, at: int | None = None) -> None:
        nonlocal end
        start = end if at is None else at
        regions[name] = (start, size)
        end = max(end, cdiv(start + size, _ALIGN) * _ALIGN)

    shapes = set(s.attentions)
    q = max(shape.heads * shape.head_dim for shape in shapes)
    kv = max(shape.kv_heads * shape.head_dim for shape in shapes)
    heads, kv_heads = (max(shape[n] for shape in shapes) for n in range(2))
    add("residual", s.max_tokens * s.hidden * s.item)
    add("normed", s.max_tokens * max(s.hidden, q) * s.item)
    layer = end
    add("qkv", s.max_tokens * (q + 2 * kv) * s.item)
    add("queries", s.max_tokens * q * s.item)
    attention = end
    add("new_kv", 2 * s.max_tokens * kv * s.item)
    long = any(shape.head_dim in cudnn_attention.HEAD_DIMS for shape in shapes)
    gathered = cudnn_attention.SEGMENT_TOKENS if long else 0
    add("gathered_kv", 2 * gathered * kv * s.item)
    # A step uses either cuDNN attention or split-KV prefill: they share memory.
    partials = max(prefill_attention.prefill_scratch_floats(*shape) for shape in shapes)
    add("prefill_partials", partials * 4, attention)
    # The MLP runs after attention and reuses its memory.
    both = max(
        min(s.max_tokens, MLP_TOKENS) * 2 * s.mlp, s.max_tokens * s.hidden
    )  # or an output awaiting its post-norm
    add("gate_up", both * s.item, layer)
    start, size = regions["gate_up"]
    add("activated", min(s.max_tokens, MLP_TOKENS) * s.mlp * s.item, cdiv(start + size, _ALIGN) * _ALIGN)
    add("logits", s.max_samples * s.vocab * 4, layer)
    add("matmul", PARTIAL_FLOATS * 4)
    add("dequantized", DEQUANTIZED_BYTES if s.quantized else 0)
    decode_splits = max(split_kv.max_decode_splits(s.max_rows, shape.kv_heads) for shape in shapes)
    add("decode_partial", decode_splits * q * 4)
    add("decode_stats", decode_splits * heads * 2 * 4)
    row_counts = {1, s.max_rows, *(1 << i for i in range(s.max_rows.bit_length()))}
    prefix_rows = max(n_prefix_splits(rows, *shape[:2]) * rows for rows in row_counts for shape in shapes)
    add("prefix_partial", prefix_rows * q * 4)
    add("prefix_stats", prefix_rows * heads * 2 * 4)
    for group, shape in enumerate(s.attentions):
        add(f"rotary{group}", s.max_tokens * shape.head_dim * 4)
        add(f"decode_splits{group}", decode_splits * split_kv.DECODE_SPLIT_FIELDS * 4)
        add(f"work_items{group}", split_kv.MAX_WORK_ITEMS * split_kv.WORK_ITEM_FIELDS * 4)
    add("counters", (COUNTERS + s.max_rows * kv_heads) * 4)
    add("work_item_counters", split_kv.MAX_WORK_ITEMS * 4)
    return regions


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
        self.prefill_scratch = split_kv.SplitScratch(self.region("prefill_partials"), work_item_counters)
        self.decode_partial, self.decode_stats = self.region("decode_partial"), self.region("decode_stats")
        self.prefix_partial, self.prefix_stats = self.region("prefix_partial"), self.region("prefix_stats")
        self.matmul = self.region("matmul")

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
    """What the host knows of a step's shape. Decode rows come first, row r having token r; chunks follow.

    A captured CUDA graph is replayed with other contexts: only `decode_rows` and `max_query` are fixed in it. The last
    decode rows may be padding: their context is 0, and in a step with chunks they have no token.
    """

    decode_rows: int
    max_query: int = 0  # tokens of the longest chunk; 0: no chunks
    shared_prefix: Tensor | None = None  # int32 [2]: a row whose block table begins with the prefix, and its length
    prefix_lens: Tensor | None = None  # int32 [rows]: the prefix's length for rows that have it, else 0
    chunks: list[PrefillChunk] | None = None  # None: known only on the device, as in a captured graph
