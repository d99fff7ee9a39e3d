"""The simulation's clock: a queue of events in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    """Runs events in order of time; events of the same time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        assert time_s >= self.now_s, "an event cannot be scheduled in the past"
        self._n += 1
        heappush(self._events, (time_s, self._n, action, args))

    def run(self, until_s: float) -> None:
        """Run all events up to that time."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, action, args = heappop(events)
            action(*args)
        self.now_s = max(self.now_s, until_s)

    @property
    def empty(self) -> bool:
        return not self._events
