"""Who streams while a step is planned: those that a prompt in it would hold up."""

from dataclasses import dataclass
from math import inf

from emberline.engine.sequence import Sequence
from emberline.protocol.request import Priority


@dataclass(slots=True)
class Streams:
    """Sequences that draw a token a step. They are promised their pace against what comes after them."""

    n: int = 0  # those that sit this step out included: they wait for it all the same
    since: float = inf  # the step at which the first of them began; nobody watches queued work
    best: Priority = Priority.DEFAULT  # of their classes

    def add(self, seq: Sequence) -> None:
        """By rank: the best class first."""
        self.n += 1
        if seq.began_step < self.since and seq.urgency != Priority.BATCH:
            if self.since == inf:
                self.best = seq.urgency
            self.since = seq.began_step

    def came_after(self, seq: Sequence) -> bool:
        """Whether it was here before any of them began, and not because its class had to wait."""
        return seq.came_step < self.since and seq.urgency <= self.best
