"""Circuit breaker of one worker: outlier ejection by failed requests, and recovery by single probes."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

FAILURES = 10  # that open it,
OF_LAST = 20  # among so many outcomes: a worker that fails every other request is ejected too
SUCCESSES = 3  # of probes, that close it
OPEN_S = 60.0

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True, eq=False)
class CircuitBreaker:
    """Closed: all requests pass. Open: none. Half open: one probe at a time, until enough succeeded or one failed."""

    state: State = "closed"
    opened_s: float = 0.0
    probing: bool = False  # half open, and a probe is in flight
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=OF_LAST))
    _successes: int = 0

    @property
    def allows(self) -> bool:
        return self.state == "closed" or (self.state == "half_open" and not self.probing)

    @property
    def n_failures(self) -> int:
        """Failed requests among the last OF_LAST, since the breaker last changed its state."""
        return self._outcomes.count(False)

    def check(self, now_s: float) -> None:
        """Half-open the breaker once it has been open for long enough."""
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
        if self.state == "half_open" or (self.state == "closed" and self.n_failures >= FAILURES):
            self.open(now_s)

    def open(self, now_s: float) -> None:
        """Let no request pass for OPEN_S, whatever the last outcomes were."""
        self.state, self.opened_s, self.probing = "open", now_s, False
        self._outcomes.clear()

    def inconclusive(self) -> None:
        """The request ended for a reason that says nothing about the worker: another probe may go."""
        self.probing = False
