"""Faults of simulated workers: one dies and returns with an empty cache, or hangs and goes on where it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

FaultKind = Literal["die", "hang"]
MIN_DOWN_S, MAX_DOWN_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    worker: str
    kind: FaultKind
    down_s: float  # until it is back

    @property
    def back_s(self) -> float:
        return self.at_s + self.down_s


def random_faults(n: int, workers: Sequence[str], start_s: float, end_s: float, rng: Random) -> list[Fault]:
    """About `n` in order of time, of both kinds, over all workers; one at a time at each worker."""
    faults: list[Fault] = []
    back_s = dict.fromkeys(workers, start_s)
    for at_s in sorted(rng.uniform(start_s, end_s) for _ in range(n)):
        up = [name for name in workers if back_s[name] <= at_s]
        if up:
            kind: FaultKind = "hang" if len(faults) % 2 else "die"
            faults.append(Fault(at_s, rng.choice(up), kind, rng.uniform(MIN_DOWN_S, MAX_DOWN_S)))
            back_s[faults[-1].worker] = faults[-1].back_s
    return faults
