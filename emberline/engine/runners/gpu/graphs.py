"""CUDA graphs: a step shape that was captured ahead of requests is replayed as one launch."""

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from emberline.engine.runners.gpu.batch import MixedShape, VerifyShape

Key = TypeVar("Key", bound=Hashable)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor  # the output tensor of every replay


MAX_GRAPHS = 160  # further shapes run eagerly: a graph takes some device memory


class StepKind(NamedTuple):
    """The key of a step's CUDA graph."""

    shape: int | VerifyShape | MixedShape  # int: rows of a step that only decodes
    cascade: bool = False  # cascade attention over a shared prefix

    def holds(self, other: "StepKind") -> bool:
        """True if a step of the other kind can be padded to this one. Cascade attention is never required."""
        mine, theirs = self.shape, other.shape
        if isinstance(mine, int) or isinstance(theirs, int):
            fits = isinstance(mine, int) and isinstance(theirs, int) and mine >= theirs
        else:
            fits = type(mine) is type(theirs) and all(size >= needed for size, needed in zip(mine, theirs))
        return fits and self.cascade <= other.cascade

    @property
    def cost(self) -> tuple[int, int, bool]:
        """The sort key by which the cheapest kind that holds a step is chosen."""
        if isinstance(self.shape, int):
            return self.shape, 0, not self.cascade
        if isinstance(self.shape, VerifyShape):
            return self.shape.n_tokens, self.shape.n_rows, False
        return self.shape.n_tokens, self.shape.n_decodes, not self.cascade


class CudaGraphs(Generic[Key]):
    """Graphs by key. All share one memory pool: they run one after the other, and results are copied out at once."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._captured: dict[Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def __iter__(self) -> Iterator[Key]:
        return iter(self._captured)

    @property
    def has_room(self) -> bool:
        return self.enabled and len(self._captured) < MAX_GRAPHS

    def replay(self, key: Key) -> Tensor:
        captured = self._captured[key]
        captured.graph.replay()
        return captured.result

    def capture(self, key: Key, body: Callable[[], Tensor]) -> None:
        """Run body, which loads its kernels, and capture it. A step that cannot be captured runs eagerly."""
        body()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            _log.warning("a step of shape %s could not be captured: %s", key, error)
            return
        self._captured[key] = _Captured(graph, result)
