"""The library that computes attention of long prefill chunks: FlashAttention-3 where it is installed, else cuDNN."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.gpu import cudnn_attention, fa3_attention
from emberline.kernels.gpu.gathered_kv import SEGMENT_TOKENS

MIN_TOKENS = 2048  # of a chunk; shorter ones use Triton


class LongAttention(Protocol):
    """A module that implements it."""

    @property
    def name(self) -> str: ...
    @property
    def has_plans(self) -> bool:
        """True if planning a shape takes time, so that the library is used only once `warm_up` has ended."""
        ...

    def supports(self, attn: GroupedQueryAttention) -> bool: ...
    def supports_expanded(self, q_dim: int, v_dim: int) -> bool:
        """True if `forward` takes MLA's heads, whose values are narrower than their keys."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [n, heads, dim] over k [m, kv_heads, dim] and v [m, kv_heads, v_dim], with any strides.

        Returns [n, heads, v_dim], `out` if it is given, and the natural log-sum-exp [n, heads]. causal: m is n.
        """
        ...

    def new_kv(self, memory: Tensor, attn: GroupedQueryAttention, tokens: int, alone: bool) -> Any:
        """Return where k and v of a step's new tokens are to be copied, each [tokens, kv_heads, dim]. Returns None for
        nowhere."""
        ...

    def attend(
        self, q: Tensor, new_kv: Any, attn: GroupedQueryAttention, pool: Tensor, table: Tensor, context: int,
        memory: Tensor, out: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attention of one chunk: `out`, or another tensor where that saves a copy. q, out: [n, heads * dim].

        new_kv: of the chunk. context: length with the chunk included; table: int32 [blocks] of its row; memory: of
        `gathered_elements`, as in `new_kv`. The chunk's k and v are in the cache already.
        """
        ...

    def warm_up(
        self, q: Tensor, attn: GroupedQueryAttention, pool: Tensor, memory: Tensor, out: Tensor
    ) -> Iterator[bool]:
        """Prepare the shapes of most prompts, one per iteration."""
        ...


def long_attention() -> LongAttention:
    return fa3_attention if fa3_attention.is_available() else cudnn_attention


def is_long(library: LongAttention, attn: GroupedQueryAttention, n_tokens: int) -> bool:
    """True if the library computes a chunk. No library knows windows that are worth it."""
    return n_tokens >= MIN_TOKENS and attn.window is None and attn.chunk is None and library.supports(attn)


def gathered_elements(max_tokens: int, kv_width: int) -> int:
    """Elements of k and v for a library: of a step's new tokens and of a segment of context."""
    return 2 * (max_tokens + SEGMENT_TOKENS) * kv_width
