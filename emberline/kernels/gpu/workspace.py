"""The one piece of memory that all layers of all steps share, sized before anything is allocated.

residual | normed, then attended | qkv | kv gathered, parts | gate, up | activated | partial sums | rotary, pieces
                                 '--------- logits, once the layers are done ---------'
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.gpu import cudnn_attention as dense_attention
from emberline.kernels.gpu import decode_attention as cascade
from emberline.kernels.gpu import prefill_attention
from emberline.kernels.gpu import split_kv as plan
from emberline.kernels.gpu import split_kv as split_keys
from emberline.kernels.gpu.launch import cdiv

MLP_TOKENS = 2048  # an MLP's intermediate is computed for so many tokens at a time
PARTIAL_FLOATS = 4 << 20  # for matmuls with split columns
COUNTERS = 1 << 16
DEQUANTIZED_BYTES = 32 << 20  # bytes: rows of a quantised matrix at a time, for cuBLAS
_ALIGN = 256


def mlp_tokens(tokens: int) -> int:
    """Of a step's, that an MLP computes at a time. cuBLAS is a tenth slower at 1,024 than at twice 512."""
    return 512 if tokens == 1024 else MLP_TOKENS


@dataclass(frozen=True, slots=True)
class WorkspaceSizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    groups: int
    max_tokens: int
    max_rows: int
    max_samples: int
    item: int = 2  # bytes of an activation
    quantised: bool = False

    @classmethod
    def of(
        cls, config: Any, max_tokens: int, max_rows: int, max_samples: int, item: int = 2, quantised: bool = False
    ) -> "WorkspaceSizes":
        groups = len(set(config.windows or (None,)))
        shape = (config.hidden_size, config.n_heads, config.n_kv_heads, config.head_dim, config.mlp_size)
        return cls(*shape, config.vocab_size, groups, max_tokens, max_rows, max_samples, item, quantised)

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def holds(self, tokens: int, rows: int, samples: int) -> bool:
        return tokens <= self.max_tokens and rows <= self.max_rows and samples <= self.max_samples


def _layout(s: WorkspaceSizes) -> dict[str, tuple[int, int]]:
    """Name to (offset, bytes)."""
    places: dict[str, tuple[int, int]] = {}
    wide = max(s.hidden, s.heads * s.head_dim)
    pieces = plan.max_decode_splits(s.max_rows, s.kv_heads)
    parts = max(cascade.n_prefix_splits(rows, s.heads, s.kv_heads) * rows for rows in _row_counts(s.max_rows))
    end = 0

    def place(name: str, size: int, at: int | None = None) -> None:
        nonlocal end
        start = end if at is None else at
        places[name] = (start, size)
        end = max(end, cdiv(start + size, _ALIGN) * _ALIGN)

    place("residual", s.max_tokens * s.hidden * s.item)
    place("normed", s.max_tokens * wide * s.item)
    layers = end
    place("qkv", s.max_tokens * s.qkv * s.item)
    place("queries", s.max_tokens * s.heads * s.head_dim * s.item)
    dense = end
    place("own", 2 * s.max_tokens * s.kv_heads * s.head_dim * s.item)
    gathered = dense_attention.SEGMENT_TOKENS if s.head_dim in dense_attention.HEAD_DIMS else 0
    place("gathered", 2 * gathered * s.kv_heads * s.head_dim * s.item)
    # A step has dense chunks, or chunks whose keys are split.
    place("parts", prefill_attention.prefill_scratch_floats(s.heads, s.kv_heads, s.head_dim) * 4, dense)
    # The MLP runs after attention: its intermediates lie where attention's were.
    both = max(min(s.max_tokens, MLP_TOKENS) * 2 * s.mlp, s.max_tokens * s.hidden)  # or a projection yet to be normed
    place("gate_up", both * s.item, layers)
    start, size = places["gate_up"]
    place("activated", min(s.max_tokens, MLP_TOKENS) * s.mlp * s.item, cdiv(start + size, _ALIGN) * _ALIGN)
    place("logits", s.max_samples * s.vocab * 4, layers)
    place("matmul", PARTIAL_FLOATS * 4)
    place("dequantised", DEQUANTIZED_BYTES if s.quantised else 0)
    place("partial", pieces * s.heads * s.head_dim * 4)
    place("peaks", pieces * s.heads * 2 * 4)
    place("prefix", parts * s.heads * s.head_dim * 4)
    place("prefix_peaks", parts * s.heads * 2 * 4)
    for group in range(s.groups):
        place(f"angles{group}", s.max_tokens * s.head_dim * 4)
        place(f"pieces{group}", pieces * plan.DECODE_SPLIT_FIELDS * 4)
        place(f"items{group}", split_keys.MAX_WORK_ITEMS * split_keys.WORK_ITEM_FIELDS * 4)
    place("counters", (COUNTERS + s.max_rows * s.kv_heads) * 4)
    place("item_counters", split_keys.MAX_WORK_ITEMS * 4)
    return places


def _row_counts(most: int) -> list[int]:
    return sorted({1, most, *(1 << i for i in range(most.bit_length()))})


class Workspace:
    @staticmethod
    def bytes(sizes: WorkspaceSizes) -> int:
        return max(offset + size for offset, size in _layout(sizes).values())

    def __init__(self, sizes: WorkspaceSizes, device: str, dtype: torch.dtype) -> None:
        self.sizes = sizes
        self._dtype = dtype
        self._places = _layout(sizes)
        self._memory = torch.empty(self.bytes(sizes), dtype=torch.uint8, device=device)
        self.counters = self.flat("counters", torch.int32)[:COUNTERS].zero_()
        self.row_counters = self.flat("counters", torch.int32)[COUNTERS:].zero_()
        item_counters = self.flat("item_counters", torch.int32).zero_()
        self.chunk_scratch = split_keys.SplitScratch(self.flat("parts", torch.float32), item_counters)
        self.partial = self.flat("partial", torch.float32)
        self.peaks = self.flat("peaks", torch.float32)
        self.prefix = self.flat("prefix", torch.float32)
        self.prefix_peaks = self.flat("prefix_peaks", torch.float32)
        self.matmul = self.flat("matmul", torch.float32)

    def flat(self, name: str, dtype: torch.dtype) -> Tensor:
        offset, size = self._places[name]
        return self._memory[offset : offset + size].view(dtype)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The beginning of a place as a tensor."""
        return self.flat(name, dtype or self._dtype)[: prod(shape)].view(shape)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one sequence, more than one of them or a prompt's last."""

    row: int
    start: int  # index of its first token in the step
    n: int
    context: int  # its length, the new tokens included


@dataclass(slots=True)
class StepShape:
    """Rows that add one token come first: row r of them is token r. Chunks follow.

    A captured graph is replayed with other contexts: only `decode_rows` and `max_query` are baked into it. The last of
    the decode rows may be nobody's: their context is 0, and beside chunks they have no token.
    """

    decode_rows: int
    max_query: int = 0  # longest chunk; 0: there is none
    shared: Tensor | None = None  # int32 [2]: a row whose table starts with the shared prefix, and its tokens
    shares: Tensor | None = None  # int32 [rows]: tokens of that prefix each row has, all of it or 0
    chunks: list[PrefillChunk] | None = None  # None: chunks may be anything, as in a captured graph
