"""Captured steps: what has run once with a shape is replayed from then on as one launch."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor  # where every replay leaves it


MAX_GRAPHS = 160  # beyond these, shapes run uncaptured: a graph takes some memory of the device


class Graphs:
    """By key. All share one memory pool: they run one after the other, and what they compute is copied out at once."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._enabled = enabled and device.type == "cuda"
        self._captured: dict[Hashable, _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self.replayed = False  # whether the last run was one; else its time says little of the next

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    @property
    def wants_more(self) -> bool:
        return self._enabled and len(self._captured) < MAX_GRAPHS

    def run(self, key: Hashable, body: Callable[[], Tensor]) -> Tensor:
        """Do what body does. The first time it runs as it is, and is captured while the device is busy with it."""
        captured = self._captured.get(key)
        self.replayed = captured is not None
        if captured is not None:
            captured.graph.replay()
            return captured.result
        result = body()
        if self.wants_more and key not in self._captured:
            self._captured[key] = self._capture(key, body)
        return result

    def _capture(self, key: Hashable, body: Callable[[], Tensor]) -> _Captured | None:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        except RuntimeError as error:  # it has run, and goes on running uncaptured
            _log.warning("a step of shape %s could not be captured: %s", key, error)
            return None
        return _Captured(graph, result)
