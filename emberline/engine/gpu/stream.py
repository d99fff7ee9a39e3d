"""Asynchronous copies between host and device, and the events to wait for. On a CPU everything is synchronous."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.scheduler.plan import DeviceLost


class DeviceEvent(Protocol):
    """A point in the device's stream."""

    def record(self) -> None: ...
    def wait(self) -> None:
        """Sleep until the device has reached it."""

    def seconds_since(self, earlier: "Any") -> float | None:
        """Device time; both events must have been waited for. None on a CPU."""


class CudaEvent:
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

    def seconds_since(self, earlier: "CudaEvent") -> float | None:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostEvent:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: "HostEvent") -> float | None:
        return None


def device_event(device: torch.device) -> DeviceEvent:
    return CudaEvent() if device.type == "cuda" else HostEvent()


def pinned(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned host memory, for asynchronous copies."""
    return torch.zeros(n, dtype=dtype, pin_memory=device.type == "cuda")


class Upload:
    """A ring of host buffers: one is written again only after the device has read it, some steps later."""

    def __init__(self, n_words: int, device: torch.device, depth: int = 4) -> None:
        self._device = device
        self._buffers = [pinned(n_words, torch.int32, device) for _ in range(depth)]
        self._arrays: list[NDArray[np.int32]] = [buffer.numpy() for buffer in self._buffers]
        self._read = [device_event(device) for _ in range(depth)]
        self._used = [False] * depth
        self._next = 0

    def array(self) -> NDArray[np.int32]:
        """The next buffer, to be filled and then sent."""
        if self._used[self._next]:
            self._read[self._next].wait()
        return self._arrays[self._next]

    def send(self, n_words: int, to: Tensor) -> Tensor:
        """Queue the copy of the filled buffer; returns the device tensor."""
        target = to[:n_words]
        target.copy_(self._buffers[self._next][:n_words], non_blocking=True)
        self._read[self._next].record()
        self._used[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)
        return target


MAX_TOP = 20


@dataclass(slots=True)
class SampledTensors:
    """One token per row; the other tensors are filled where a slot wants logprobs."""

    token_ids: Tensor  # int32 [rows]; negative: the model produced invalid numbers
    logprob: Tensor  # float32 [rows]
    top_ids: Tensor  # int32 [rows, MAX_TOP]
    top_logprobs: Tensor  # float32 [rows, MAX_TOP]

    def first(self, n: int) -> "SampledTensors":
        return SampledTensors(self.token_ids[:n], self.logprob[:n], self.top_ids[:n], self.top_logprobs[:n])


class SampledToken(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


def sampled_tensors(n_rows: int, device: torch.device) -> SampledTensors:
    return SampledTensors(
        torch.zeros(n_rows, dtype=torch.int32, device=device),
        torch.zeros(n_rows, dtype=torch.float32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.int32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.float32, device=device),
    )


class StepOutputs:
    """The sampled tokens of one step, copied to pinned host memory."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        n_top = n_rows * MAX_TOP
        self._host = SampledTensors(
            pinned(n_rows, torch.int32, device),
            pinned(n_rows, torch.float32, device),
            pinned(n_top, torch.int32, device).view(n_rows, MAX_TOP),
            pinned(n_top, torch.float32, device).view(n_rows, MAX_TOP),
        )
        self.began: DeviceEvent = device_event(device)
        self.done: DeviceEvent = device_event(device)

    def fetch(self, sampled: SampledTensors, n: int, logprobs: bool) -> None:
        """Queue the copy of the first n rows."""
        names = ("token_ids", "logprob", "top_ids", "top_logprobs") if logprobs else ("token_ids",)
        for name in names:
            getattr(self._host, name)[:n].copy_(getattr(sampled, name)[:n], non_blocking=True)
        self.done.record()

    def read(self, order: list[int], logprobs: list[int | None] | None) -> list[SampledToken]:
        """Wait, then the tokens in this order of rows; `logprobs`: how many alternatives each wants."""
        self.done.wait()
        token_ids = self._host.token_ids.tolist()
        if logprobs is None:
            return [SampledToken(token_ids[i]) for i in order]
        return [self._with_logprobs(token_ids[i], i, k) for i, k in zip(order, logprobs)]

    def _with_logprobs(self, token_id: int, row: int, k: int | None) -> SampledToken:
        if k is None or token_id < 0:
            return SampledToken(token_id)
        top = zip(self._host.top_ids[row, :k].tolist(), self._host.top_logprobs[row, :k].tolist())
        return SampledToken(token_id, float(self._host.logprob[row]), list(top))
