"""Asynchronous copies between host and device, and the events to wait for. On a CPU everything is synchronous."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.core.plan import DeviceLost, Draws, SampledToken
from emberline.kernels.decode_inputs import MAX_DRAFTS

_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_EXECUTION_FAILED")


class DeviceEvent(Protocol):
    """A point in the device's stream."""

    def record(self) -> None: ...
    def wait(self) -> None:
        """Sleep until the device has reached it."""

    def seconds_since(self, earlier: "Any") -> float | None:
        """Device time; both events must have been waited for. None on a CPU."""


class CudaEvent:
    """An event on the stream that is current where the event is made."""

    def __init__(self, device: torch.device, spins: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)  # to look it up takes longer than to record the event
        # "blocking" sleeps instead of spinning: the next step is queued already, so waking up late costs nothing
        self._event = torch.cuda.Event(enable_timing=not spins, blocking=not spins)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        try:
            if not self._event.query():  # type: ignore[no-untyped-call]  # a buffer was mostly read long ago
                with torch.cuda.device(self._device):  # the thread may have launched nothing there
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


def device_event(device: torch.device, spins: bool = False) -> DeviceEvent:
    """`spins`: to wait for it takes a processor and no time to wake up; it has no time of its own."""
    return CudaEvent(device, spins) if device.type == "cuda" else HostEvent()


def pinned(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned host memory, for asynchronous copies."""
    return torch.zeros(n, dtype=dtype, pin_memory=device.type == "cuda")


class Upload:
    """A ring of host buffers: one is written again only after the device has read it, some steps later."""

    def __init__(self, n_words: int, device: torch.device, depth: int = 4) -> None:
        self._device = device
        self._buffers = [pinned(n_words, torch.int32, device) for _ in range(depth)]
        self._arrays: list[NDArray[np.int32]] = [buffer.numpy() for buffer in self._buffers]
        self._words = [array.data for array in self._arrays]
        self._read = [device_event(device) for _ in range(depth)]
        self._used = [False] * depth
        self._next = 0

    def array(self) -> NDArray[np.int32]:
        """The next buffer, to be filled and then sent."""
        if self._used[self._next]:
            self._read[self._next].wait()
        return self._arrays[self._next]

    def words(self) -> memoryview:
        """The same as plain memory."""
        self.array()
        return self._words[self._next]

    def send(self, n_words: int, to: Tensor) -> Tensor:
        """Queue the copy of the filled buffer; returns the device tensor."""
        source = self._buffers[self._next]
        target = to if n_words == to.numel() else to[:n_words]  # a slice takes the host as long as a short copy
        target.copy_(source if n_words == source.numel() else source[:n_words], non_blocking=True)
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


def sampled_tensors(n_rows: int, device: torch.device) -> SampledTensors:
    return SampledTensors(
        torch.zeros(n_rows, dtype=torch.int32, device=device),
        torch.zeros(n_rows, dtype=torch.float32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.int32, device=device),
        torch.zeros(n_rows, MAX_TOP, dtype=torch.float32, device=device),
    )


class UrgentWait:
    """Waits for steps whose result the device itself waits for: sleeps for most of the time that the last ones took,
    then spins. To be woken up takes as long as to plan the next step."""

    SLEPT = 0.8  # of the expected time
    SHORTEST_S = 0.0005  # that is slept

    def __init__(self) -> None:
        self._expected_s = 0.0  # the shortest of late: what other work delayed is no measure

    def wait(self, event: DeviceEvent) -> None:
        began_s = time.perf_counter()
        if (sleep_s := self.SLEPT * self._expected_s) >= self.SHORTEST_S:
            time.sleep(sleep_s)
        event.wait()
        took_s = time.perf_counter() - began_s
        self._expected_s = min(took_s, 1.02 * self._expected_s) if self._expected_s else took_s


class StepOutputs:
    """The sampled tokens of one step and the drafts behind them, copied to pinned host memory."""

    def __init__(self, n_rows: int, n_drafting: int, device: torch.device) -> None:
        n_top = n_rows * MAX_TOP
        self._host = SampledTensors(
            pinned(n_rows, torch.int32, device),
            pinned(n_rows, torch.float32, device),
            pinned(n_top, torch.int32, device).view(n_rows, MAX_TOP),
            pinned(n_top, torch.float32, device).view(n_rows, MAX_TOP),
        )
        self._token_ids: NDArray[np.int32] = self._host.token_ids.numpy()
        self._n = 0  # rows fetched
        self._drafts = pinned(n_drafting * MAX_DRAFTS, torch.int32, device).view(n_drafting, MAX_DRAFTS)
        self.began: DeviceEvent = device_event(device)
        self.done: DeviceEvent = device_event(device)
        self._ready: DeviceEvent = device_event(device, spins=True)

    def fetch(
        self, sampled: SampledTensors, n: int, logprobs: bool, drafts: Tensor | None = None, urgent: bool = False
    ) -> None:
        """Queue the copy of the first n rows, and of drafts [rows, MAX_DRAFTS]. urgent: `read` gets an UrgentWait."""
        self._n = n
        if drafts is not None:
            self._drafts[: len(drafts)].copy_(drafts, non_blocking=True)
        names = ("token_ids", "logprob", "top_ids", "top_logprobs") if logprobs else ("token_ids",)
        for name in names:
            getattr(self._host, name)[:n].copy_(getattr(sampled, name)[:n], non_blocking=True)
        self.end(urgent)

    def end(self, urgent: bool = False) -> None:
        """Nothing is queued for the step any more."""
        self.done.record()
        if urgent:
            self._ready.record()  # behind it, so that a wait for both wakes up once

    def drafts(self, n: int, depth: int) -> list[list[int]]:
        """Drafts of the first n rows. Call it after they were read."""
        found: list[list[int]] = self._drafts[:n, :depth].tolist()
        return found

    def read(
        self, order: Sequence[int], logprobs: list[int | None] | None, urgent: UrgentWait | None = None
    ) -> Sequence[SampledToken]:
        """Wait, then the tokens in this order of rows; `logprobs`: how many alternatives each wants."""
        if urgent is not None:
            urgent.wait(self._ready)
        else:
            self.done.wait()
        token_ids = self._token_ids[: self._n].tolist()
        if logprobs is None:
            return Draws(token_ids if order == range(self._n) else [token_ids[i] for i in order])
        return [self._with_logprobs(token_ids[i], i, k) for i, k in zip(order, logprobs)]

    def _with_logprobs(self, token_id: int, row: int, k: int | None) -> SampledToken:
        if k is None or token_id < 0:
            return SampledToken(token_id)
        top = zip(self._host.top_ids[row, :k].tolist(), self._host.top_logprobs[row, :k].tolist())
        return SampledToken(token_id, float(self._host.logprob[row]), list(top))


def fatal(error: Exception) -> Exception:
    """DeviceLost for an error of the device itself; running out of memory concerns the step alone."""
    text = str(error)
    of_device = isinstance(error, RuntimeError) and any(each in text for each in _DEVICE_ERRORS)
    if not of_device or "out of memory" in text:
        return error
    lost = DeviceLost(text)
    lost.__cause__ = error
    return lost
