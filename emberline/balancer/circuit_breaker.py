"""Keeps requests away from an endpoint that fails them, and finds out when it no longer does."""

from collections import deque
from typing import Literal

FAILURES = 10  # that open it,
OF_LAST = 20  # among so many outcomes: one that fails every other request is no use either
SUCCESSES = 3  # that close it
OPEN_S = 60.0

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Closed: all may pass. Open: none. Half open: one at a time, until enough have succeeded or one has failed."""

    __slots__ = ("_outcomes", "_successes", "opened_s", "probing", "state")

    def __init__(self) -> None:
        self.state: State = "closed"
        self.opened_s = 0.0
        self.probing = False  # half open, and the one is on its way
        self._outcomes: deque[bool] = deque(maxlen=OF_LAST)
        self._successes = 0

    @property
    def allows(self) -> bool:
        return self.state == "closed" or (self.state == "half_open" and not self.probing)

    def look(self, now_s: float) -> None:
        """Time passes."""
        if self.state == "open" and now_s - self.opened_s >= OPEN_S:
            self.state, self.probing, self._successes = "half_open", False, 0

    def sent(self) -> None:
        self.probing = self.state == "half_open"

    def succeeded(self) -> None:
        self._outcomes.append(True)
        if self.state == "half_open":
            self.probing = False
            self._successes += 1
            if self._successes >= SUCCESSES:
                self.state = "closed"
                self._outcomes.clear()

    def failed(self, now_s: float) -> None:
        self._outcomes.append(False)
        if self.state == "half_open" or (self.state == "closed" and self._outcomes.count(False) >= FAILURES):
            self.state, self.opened_s, self.probing = "open", now_s, False
            self._outcomes.clear()

    def undecided(self) -> None:
        """Nobody's fault: the probe has told nothing, and another may go."""
        self.probing = False
