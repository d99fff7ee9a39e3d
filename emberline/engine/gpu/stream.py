"""The device's queue as the runner sees it: copies that do not wait, marks to wait for. On a CPU nothing is late."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.scheduler.plan import DeviceLost


class Mark(Protocol):
    """A point in the queue."""

    def record(self) -> None: ...
    def wait(self) -> None:
        """Sleep until the device has come this far."""

    def seconds_since(self, earlier: "Any") -> float | None:
        """Of the device's time; both marks must have been waited for. None where it keeps no time."""


class CudaMark:
    def __init__(self) -> None:
        # "blocking" sleeps instead of spinning: the next step is queued already, so waking up late costs nothing
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def seconds_since(self, earlier: "CudaMark") -> float | None:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostMark:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: "HostMark") -> float | None:
        return None


def mark(device: torch.device) -> Mark:
    return CudaMark() if device.type == "cuda" else HostMark()


def pinned(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that the device copies from and to by itself."""
    return torch.zeros(n, dtype=dtype, pin_memory=device.type == "cuda")


class Upload:
    """Host buffers in a ring: one is written again only when the device has read it, some steps later."""

    def __init__(self, n_words: int, device: torch.device, depth: int = 4) -> None:
        self._device = device
        self._buffers = [pinned(n_words, torch.int32, device) for _ in range(depth)]
        self._arrays: list[NDArray[np.int32]] = [buffer.numpy() for buffer in self._buffers]
        self._read = [mark(device) for _ in range(depth)]
        self._used = [False] * depth
        self._next = 0

    def array(self) -> NDArray[np.int32]:
        """To be filled, then sent."""
        if self._used[self._next]:
            self._read[self._next].wait()
        return self._arrays[self._next]

    def send(self, n_words: int, to: Tensor) -> Tensor:
        """Queue the copy of what was filled in; the device's view of it."""
        target = to[:n_words]
        target.copy_(self._buffers[self._next][:n_words], non_blocking=True)
        self._read[self._next].record()
        self._used[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)
        return target
