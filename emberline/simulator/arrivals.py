"""Which session begins when: a trace's own arrivals, copied to reach a load; or a Poisson process of session starts."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from emberline.simulator.trace import Session, Trace

FIRST_BASE = 1 << 24  # segment numbers below are for what sessions have in common
COPY_APART_S = 60.0  # copies of one trace begin at random within this, or each burst would meet its twins


@dataclass(slots=True, frozen=True)
class Start:
    at_s: float
    session: Session
    base: int  # added to the session's segment numbers
    turn: int  # the first that is asked: sessions may have begun before time did


def starts(trace: Trace, load: float, until_s: float, rng: Random) -> list[Start]:
    """In order of time. `load`: copies of a trace with arrivals of its own, else session starts a second."""
    found = list(_copies(trace, load, rng) if trace.shared else _poisson(trace, load, until_s, rng))
    return sorted((start for start in found if start.at_s <= until_s), key=lambda start: start.at_s)


def _copies(trace: Trace, load: float, rng: Random) -> Iterator[Start]:
    """Whole copies with fresh ids, and of the last one a share of the conversations."""
    n_whole, share = int(load), load - int(load)
    for copy in range(n_whole + (share > 0)):
        shift_s = rng.uniform(0.0, COPY_APART_S)
        kept: dict[int, bool] = {}
        for session in trace.sessions:
            if copy == n_whole and not kept.setdefault(session.group, rng.random() < share):
                continue
            yield Start(session.start_s + shift_s, session, FIRST_BASE + copy * trace.n_segments, 0)


def _poisson(trace: Trace, load: float, until_s: float, rng: Random) -> Iterator[Start]:
    """Sessions that begin from long ago on, so that at time 0 as many live as ever will; the dead are passed over."""
    longest_s = max(session.ages[-1] for session in trace.sessions)
    at_s = -longest_s
    order: list[Session] = []
    base = FIRST_BASE
    while True:
        at_s += rng.expovariate(load)
        if at_s > until_s:
            return
        if not order:  # every session of the trace once, before any comes again
            order = list(trace.sessions)
            rng.shuffle(order)
        session = order.pop()
        base += trace.n_segments
        turn = next((n for n, age in enumerate(session.ages) if at_s + age >= 0 and not session.turns[n].beside), None)
        if turn is not None:
            yield Start(at_s + session.ages[turn], session, base, turn)
