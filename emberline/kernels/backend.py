"""What a model needs of the machine: a handful of fused operations, the same for every backend.

A model is written once over this protocol. `reference.TorchBackend` says what each operation means, in plain PyTorch,
on any device; `cpu.native.NativeBackend` computes the same in C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from emberline.protocol.block_hash import KVGroup


class WeightSource(Protocol):
    """A tensor of a checkpoint, read when asked for. See `emberline.weights.tensors.Weight`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def dense(self) -> Any: ...  # float32 numpy array
    def affine(self) -> Any: ...  # group-32 affine codes, or None
    def tensor(self, dtype: Any, device: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    group: int  # which KV group the layer's cache belongs to
    index: int  # the layer's place inside that group
    window: int | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP with its norms."""

    gate_up: Any  # Matrix
    down: Any  # Matrix
    norm: Tensor
    post_norm: Tensor | None
    eps: float
    activation: str  # "silu" or "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: attention, then the MLP, each added to the residual."""

    norm: Tensor
    qkv: Any  # Matrix
    attention: Attention
    output: Any  # Matrix
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
    kv_dtype: str  # torch dtype name of the cache
    kv_keys: str  # KVGroup.keys

    def matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> Any:
        """Weights stacked by rows, in the backend's own form. `gated`: exactly [gate, up] of an MLP."""
        ...

    def vector(self, weight: WeightSource) -> Tensor:
        """A norm's weight."""
        ...

    def begin(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> Any:
        """Whatever all layers of a step share."""
        ...

    def rows(self, matrix: Any, ids: Tensor, factor: float) -> Tensor:
        """Rows of a matrix times a factor: the embedding."""
        ...

    def layers(self, layers: Sequence[Layer], x: Tensor, context: Any) -> None:
        """All layers, over the residual `x`: [tokens, hidden], in place. Writes k and v to the cache, then attends."""
        ...

    def linear(self, x: Tensor, matrix: Any, norm: Tensor, eps: float) -> Tensor:
        """rms_norm(x) times the matrix, plus its bias: the head."""
        ...
