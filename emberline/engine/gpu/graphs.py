"""CUDA graphs: a step shape that has run once is captured, and from then on replayed as one launch."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor  # the output tensor of every replay


MAX_GRAPHS = 160  # further shapes run eagerly: a graph takes some device memory


class CudaGraphs:
    """Graphs by key. All share one memory pool: they run one after the other, and results are copied out at once."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._enabled = enabled and device.type == "cuda"
        self._captured: dict[Hashable, _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self.replayed = False  # whether the last run was a replay; the duration of another says little about the next

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    @property
    def has_room(self) -> bool:
        return self._enabled and len(self._captured) < MAX_GRAPHS

    def run(self, key: Hashable, body: Callable[[], Tensor]) -> Tensor:
        """Run body. The first time it runs eagerly, and is captured while the device is busy with it."""
        captured = self._captured.get(key)
        self.replayed = captured is not None
        if captured is not None:
            captured.graph.replay()
            return captured.result
        result = body()
        if self.has_room and key not in self._captured:
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
        except RuntimeError as error:  # it has run, and will run eagerly
            _log.warning("a step of shape %s could not be captured: %s", key, error)
            return None
        return _Captured(graph, result)
