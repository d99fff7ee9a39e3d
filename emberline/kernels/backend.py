"""The interface between models and kernels: a few fused operations that every backend implements.

A model is written once over this protocol. `reference.TorchBackend` defines each operation in plain PyTorch on any
device; `cpu.native_backend` implements them in C, `gpu.triton_backend` in Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from emberline.protocol.block_hash import KVGroup


class WeightSource(Protocol):
    """A tensor of a checkpoint, read on request. See `emberline.weights.tensors.Weight`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def dense(self) -> Any: ...  # float32 numpy array
    def affine(self) -> Any: ...  # weights.tensors.Affine, or None
    def tensor(self, dtype: Any, device: Any) -> Tensor: ...
    def into(self, target: Tensor) -> None: ...  # may be deferred until the loader finishes


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    kv_group: int  # index of the KV group that holds the layer's cache
    layer_index: int  # of the layer within that group
    window: int | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP with its norms."""

    gate_up: Any  # the backend's matrix type
    down: Any
    norm: Tensor
    post_norm: Tensor | None
    eps: float
    activation: str  # "silu" or "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: attention, then the MLP, each added to the residual."""

    norm: Tensor
    qkv: Any  # the backend's matrix type
    attention: Attention
    output: Any
    post_norm: Tensor | None
    mlp: MLP
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies of one KV group."""

    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    scale: float = 1.0  # multiplies cos and sin


class Backend(Protocol):
    name: str
    device: str
    kv_dtype: str  # torch dtype name of the KV cache
    kv_keys: str  # KVGroup.keys

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> Any:
        """Weights stacked by rows, in the backend's own layout. `gated`: exactly [gate, up] of an MLP."""
        ...

    def load_vector(self, weight: WeightSource) -> Tensor:
        """A norm's weight."""
        ...

    def begin_step(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> Any:
        """Compute what all layers of a step share; the result is passed to `run_layers`."""
        ...

    def embed(self, matrix: Any, ids: Tensor, factor: float) -> Tensor:
        """Embedding lookup: rows of the matrix times `factor`."""
        ...

    def run_layers(self, layers: Sequence[Layer], x: Tensor, context: Any) -> None:
        """Apply all layers to the residual `x` [tokens, hidden] in place, writing K and V to the cache."""
        ...

    def norm_linear(self, x: Tensor, matrix: Any, norm: Tensor, eps: float) -> Tensor:
        """rms_norm(x) times the matrix, plus its bias: the LM head."""
        ...
