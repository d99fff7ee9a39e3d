"""Tensors that an architecture builds a layer from, loaded from the checkpoint into a backend by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from emberline.kernels.backend import Backend, WeightSource
from emberline.weights.model_config import BadCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointSource(Protocol):
    """The part of a checkpoint's interface that a model needs. See `emberline.weights.checkpoint.Checkpoint`."""

    @property
    def config(self) -> Any: ...
    def has(self, name: str) -> bool: ...
    def weight(self, name: str) -> WeightSource: ...


class LayerWeights:
    """The weights of layer `number`. Names are relative to `blk.N.` and without their suffix."""

    def __init__(self, source: CheckpointSource, backend: Backend, number: int) -> None:
        self.config = source.config
        self.number = number
        self._source = source
        self._backend = backend

    def _sources(self, names: tuple[str, ...], suffix: str = "weight") -> list[WeightSource]:
        return [self._source.weight(f"blk.{self.number}.{name}.{suffix}") for name in names]

    def matrix(self, *names: str, bias: bool = False, gated: bool = False) -> Any:
        """Tensors stacked by rows, in the backend's layout. `gated`: exactly [gate, up] of an MLP."""
        biases = self._sources(names, "bias") if bias else None
        return self._backend.load_matrix(self._sources(names), biases, gated=gated)

    def experts(
        self, *names: str, n: int, bias: bool = False, gated: bool = False, shared: tuple[str, ...] = ()
    ) -> Any:
        """The same for each of n experts, whose tensors are called `name.E`, and for a shared one behind them."""
        parts = [tuple(f"{name}.{expert}" for name in names) for expert in range(n)]
        if shared:
            parts.append(shared)
        biases = [self._sources(each, "bias") for each in parts] if bias else None
        try:
            return self._backend.load_experts([self._sources(each) for each in parts], biases, gated=gated)
        except ValueError as error:
            raise BadCheckpoint(f"layer {self.number}: {error}") from None

    def same_format(self, *names: str) -> bool:
        """True if the tensors have the same shape and format."""
        formats = {(w.shape, getattr(w, "kind", None), getattr(w, "group", 0)) for w in self._sources(names)}
        return len(formats) == 1

    def norm(self, name: str) -> Tensor:
        return self.vector(name)

    def vector(self, name: str, suffix: str = "weight") -> Tensor:
        """In float32."""
        return self._backend.load_vector(*self._sources((name,), suffix))

    def tensor(self, name: str) -> Tensor:
        """Dense, in the activations' dtype."""
        return self._backend.load_tensor(*self._sources((name,)))
