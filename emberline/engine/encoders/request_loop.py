"""Common part of the step loops of encoders and speech models: requests, load, deadlines and ends.

Unlike `step_loop.py` they have no KV cache, no scheduler and nothing in flight between two steps.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import inf
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from emberline.engine.core.rank import Executor
from emberline.engine.core.step_times import DeviceTime
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, Unsupported
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.frames import EngineLoad, KVEvents, Vocabulary
from emberline.protocol.request import EngineRequest, Priority


class QueuedRequest(Protocol):
    request: EngineRequest
    deadline_s: float | None  # monotonic

    @property
    def running(self) -> bool:
        """True if a step has computed a part of it, or does so now."""

    def usage(self) -> Usage: ...

    def partial_usage(self) -> Usage:
        """Counts of what was computed by now, for a request that is aborted or fails."""


Item = TypeVar("Item", bound=QueuedRequest)


class NoKVEvents:
    """A feed of KV events of a loop that caches nothing."""

    def subscribe(self) -> list[KVEvents]:
        return []

    def unsubscribe(self) -> None:
        pass

    def take(self) -> list[KVEvents]:
        return []


class RequestLoop(Generic[Item]):
    """The owner calls `step` while the loop is busy. Subclasses accept requests; the base class accepts none."""

    executors: Mapping[str, Executor] = MappingProxyType({})  # no feature gives orders
    report_s = inf  # a load report is due after each step alone
    has_idle_task = False
    blocked = False
    wake_s = 0.0
    preparing = False
    n_prepared = 0

    def __init__(
        self,
        max_waiting: int,
        cpu_share: AbstractContextManager[None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_waiting = max_waiting  # requests
        self._cpu_share = cpu_share or nullcontext()
        self._clock = clock
        self._requests: dict[str, Item] = {}
        self._n_submitted = 0
        self._steps = 0
        self._device = DeviceTime(clock)
        # What heartbeats say, read by their thread while a step runs:
        self.computed_tokens = 0
        self.in_step = False
        self.step_s = 0.0  # predicted, of the last step; 0: unknown

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accept a request, or raise an EmberlineError that says why not."""
        raise Unsupported("this process accepts no requests")

    def step(self, now_s: float) -> list[TokenDelta]:
        """Compute a part of what was requested. Returns what clients are to be told."""
        return []

    def close(self) -> None:
        """Do nothing: the loop has no threads."""

    def kv_events(self) -> NoKVEvents:
        """A feed without events."""
        return NoKVEvents()

    def purge(self, owner: bytes | None, session: bytes) -> int:
        """Forget nothing, since nothing is cached. Returns the number of blocks, 0."""
        return 0

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> EngineLoad:
        items = self._requests.values()
        running = [item for item in items if item.running]
        batch = sum(item.request.priority == Priority.BATCH for item in items)
        running_batch = sum(item.request.priority == Priority.BATCH for item in running)
        utilisation, jobs_utilisation = self._device.shares()
        return EngineLoad(
            running=len(running),
            waiting=len(items) - len(running),
            waiting_batch=batch - running_batch,
            running_batch=running_batch,
            steps=self._steps,
            prompt_tokens=self.computed_tokens,
            computed_tokens=self.computed_tokens,
            utilisation=utilisation,
            jobs_utilisation=jobs_utilisation,
            busy_s=round(self._device.busy_s, 3),
        )

    def run_idle_task(self) -> None:
        """Do nothing: there is no idle task."""

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Ignore the vocabulary: nothing is generated."""

    def called_tools(self, request_id: str) -> None:
        """Ignore tool calls: nothing is cached."""

    def abort(self, request_id: str) -> TokenDelta | None:
        item = self._requests.pop(request_id, None)
        return None if item is None else TokenDelta(request_id, finish="cancelled", usage=item.partial_usage())

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return [self._failed(item, error) for item in list(self._requests.values())]

    def _check_room(self, request: EngineRequest) -> None:
        if request.id in self._requests:
            raise BadInput(f"request id {request.id} is in use")
        if len(self._requests) >= self._max_waiting:
            raise BadInput(f"{self._max_waiting} requests wait here already")

    def _add(self, item: Item) -> None:
        self._requests[item.request.id] = item
        self._n_submitted += 1

    def _fail_late(self, now_s: float) -> list[TokenDelta]:
        late = [item for item in self._requests.values() if item.deadline_s is not None and now_s > item.deadline_s]
        return [self._failed(item, DeadlineExceeded("not finished within its deadline")) for item in late]

    def _failed(self, item: Item, error: EmberlineError) -> TokenDelta:
        del self._requests[item.request.id]
        return TokenDelta(item.request.id, finish="error", usage=item.partial_usage(), error=error.info())


def deadline_s(request: EngineRequest, now_s: float) -> float | None:
    """Monotonic time until which the request must have ended. Returns None if it may take any time."""
    return None if request.deadline_s is None else now_s + request.deadline_s
