"""The interface between models and kernels: the blocks that layers are made of, and what a backend does with them.

A block is data: weights in the backend's layout, and parameters. `reference.TorchBackend` computes every block in plain
PyTorch on any device, `gpu.backend.triton_backend` in Triton; `cpu.native_backend` runs whole models of the common
ones in C, in numpy arrays: nothing here imports torch.

Under tensor parallelism a block's weights are the rank's slices (`weights.rank_checkpoint`), so its output is a part of
a sum: the backend adds up the parts of all ranks before anything else is done to it (post-norm, residual). Embedding
and LM head are divided by vocabulary whatever their size: they are 2.2 GiB each of Kimi K2.5, and one rule costs small
models no more than an all-reduce and a gather of the sampled tokens' logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from emberline.kernels.collectives import ParallelGroups
from emberline.kernels.routing import Routing
from emberline.protocol.block_hash import KVGroup

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """A tensor of a checkpoint, read on request. See `emberline.weights.tensors.Weight`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...  # of its numbers on disk; "int4", "mxfp4", "fp8": weights.quantized_weight
    def dense(self) -> Any: ...  # float32 numpy array
    def affine(self, unpack: Any = None) -> Any: ...  # weights.tensors.Affine, or None
    def tensor(self, dtype: Any, device: Any) -> Tensor: ...
    def into(self, target: Tensor) -> None: ...  # may be deferred until the loader finishes


class CacheLayout(NamedTuple):
    """Cache layout of an attention block's tokens. Layers with the same layout share a KV group. Fields as in
    KVGroup."""

    planes: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Llama 4's scaling of queries by position p: 1 + scale * log(1 + floor((p + 1) / interval))."""

    scale: float
    interval: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Norm, q, k and v, attention over the KV cache, and the output projection, added to the residual.

    The order of what may be done to q and k: weighted norms, RoPE, L2 norm, temperature.
    """

    norm: Tensor
    qkv: Any  # the backend's matrix type
    output: Any
    post_norm: Tensor | None = None  # of the output, before it is added
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    kv_group: int = -1  # index of the KV group that holds the layer's cache; assigned when all layers are known
    layer_index: int = -1  # of the layer within that group
    window: int | None = None  # tokens, the query included
    chunk: int | None = None  # a token sees those of its own chunk of so many tokens
    rope: bool = True
    q_norm: Tensor | None = None  # of each head
    k_norm: Tensor | None = None
    l2_norm: bool = False  # of q and k, without weights
    temperature: QueryTemperature | None = None
    sinks: Tensor | None = None  # float32 [heads]: one more logit each in the softmax's denominator

    @property
    def matrices(self) -> tuple[Any, ...]:
        return self.qkv, self.output

    @property
    def cache(self) -> CacheLayout:
        chunked = self.chunk is not None
        return CacheLayout(2, self.kv_heads, self.head_dim, self.chunk if chunked else self.window, chunked)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def output_dim(self) -> int:
        """Numbers of a token that the output projection reads."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA), added to the residual.

    A token's cache is one row: its normed latent [kv_lora], then its rotated key [rope_dim], which all heads share.
    """

    norm: Tensor
    qkv_a: Any  # rows: q_lora (or heads * (nope_dim + rope_dim), where q is not low-rank), kv_lora, rope_dim
    q_norm: Tensor | None  # [q_lora]
    q_b: Any | None  # [heads * (nope_dim + rope_dim), q_lora]; of a head: first the dimensions without RoPE
    kv_norm: Tensor  # [kv_lora]
    k_up: Tensor  # [heads, nope_dim, kv_lora]; k_up and v_up are views of one tensor
    v_up: Tensor  # [heads, v_dim, kv_lora]
    output: Any  # [hidden, heads * v_dim]
    post_norm: Tensor | None = None
    heads: int
    q_lora: int | None
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    eps: float
    kv_group: int = -1
    layer_index: int = -1

    @property
    def matrices(self) -> tuple[Any, ...]:
        return (self.qkv_a, self.output) if self.q_b is None else (self.qkv_a, self.q_b, self.output)

    @property
    def cache(self) -> CacheLayout:
        return CacheLayout(planes=1, kv_heads=1, head_dim=self.kv_lora + self.rope_dim)

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def output_dim(self) -> int:
        return self.heads * self.v_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Norm, then a gated MLP, added to the residual."""

    norm: Tensor
    gate_up: Any
    down: Any
    post_norm: Tensor | None = None
    eps: float
    activation: str  # "silu" or "gelu_tanh"

    @property
    def matrices(self) -> tuple[Any, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Norm, router and experts: each token is computed by the experts chosen for it, and their weighted sum is added to
    the residual. See `kernels.moe`.
    """

    norm: Tensor
    router: Tensor  # [experts, hidden], multiplied in float32
    router_bias: Tensor | None = None  # float32 [experts]
    routing: Routing
    correction_bias: Tensor | None = None  # float32 [experts], added to the scores for the choice of experts only
    gate_up: Any  # the backend's expert matrices: [experts, 2 * width, hidden], with biases where the model has them
    down: Any  # [experts, hidden, width]
    shared: MLP | None = None  # experts that compute every token, as one MLP; their norm is the block's
    post_norm: Tensor | None = None
    eps: float
    first_expert: int = 0  # of `gate_up` and `down` among the router's; tokens of the others are other ranks'
    weight_on_input: bool = False  # the weight multiplies an expert's input, not its output
    activation: str  # as of `moe.gated_activation`

    @property
    def matrices(self) -> tuple[Any, ...]:
        return self.gate_up, self.down, *(() if self.shared is None else self.shared.matrices)


Attention = GroupedQueryAttention | LatentAttention
FeedForward = MLP | MoE


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: two blocks, each of which adds its output to the residual."""

    attention: Attention
    feed_forward: FeedForward

    @property
    def matrices(self) -> tuple[Any, ...]:
        """Weight matrices of the layer, in the backend's layout."""
        return *self.attention.matrices, *self.feed_forward.matrices


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies of one KV group."""

    inverse_frequencies: Tensor  # float32 [rotated dimensions / 2]
    scale: float = 1.0  # multiplies cos and sin
    axes: Tensor | None = None  # int64, of each frequency: 0 time, 1 height, 2 width (M-RoPE); None: one position

    def by_frequency(self, positions: Any) -> Any:
        """Position of each token in each frequency, [tokens, 1] or [tokens, frequencies]. positions: [tokens], or
        [3, tokens] under M-RoPE."""
        return positions[:, None] if positions.ndim == 1 else positions[self.axes].T


class Backend(Protocol):
    """Computes a model's blocks. Where this says Tensor, the C backend's weights are numpy arrays, and its activations
    are of the kind that its caller passes."""

    name: str
    device: str
    kv_dtype: str  # torch dtype name of the KV cache
    kv_keys: str  # KVGroup.keys
    groups: ParallelGroups  # of this rank

    def inference(self) -> AbstractContextManager[Any]:
        """A context for a forward pass, in which nothing is recorded for gradients."""
        ...

    def constant(self, values: NDArray[Any]) -> Tensor:
        """Numbers that are no weights, such as rotary frequencies, where the backend computes."""
        ...

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> Any:
        """Weights stacked by rows, in the backend's own layout. `gated`: exactly [gate, up] of an MLP."""
        ...

    def load_vector(self, weight: WeightSource) -> Tensor:
        """A norm's weight."""
        ...

    def load_tensor(self, weight: WeightSource) -> Tensor:
        """A dense tensor of any rank, in the activations' dtype."""
        ...

    def load_experts(
        self, experts: list[list[WeightSource]], bias: list[list[WeightSource]] | None = None, *, gated: bool = False
    ) -> Any:
        """One matrix per expert, each stacked by rows from its list, in the backend's own layout."""
        ...

    def begin_step(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> Any:
        """Compute what all layers of a step share; the result is passed to `run_layers`."""
        ...

    def embed(self, matrix: Any, ids: Tensor, factor: float, first: int = 0) -> Tensor:
        """Embedding lookup: rows of the matrix times `factor`. Of several ranks, each has the rows from `first` on."""
        ...

    def residual(self, n_tokens: int, hidden: int) -> Tensor:
        """Memory for the hidden states that the stage before has computed."""
        ...

    def run_layers(self, layers: Sequence[Layer], x: Tensor, context: Any) -> None:
        """Apply all layers to the residual `x` [tokens, hidden] in place, writing new tokens to the cache."""
        ...

    def norm_linear(self, x: Tensor, matrix: Any, norm: Tensor, eps: float) -> Tensor:
        """rms_norm(x) times the matrix, plus its bias: the LM head. `x` may have no tokens."""
        ...

    def gather_logits(self, logits: Tensor, sizes: Sequence[int]) -> Tensor:
        """The logits of all ranks' parts of the vocabulary, which have these sizes, beside each other: float32."""
        ...
