"""Traces: sessions of turns whose prompts are paths in a tree of segments; and when each session starts.

A segment is a run of KV blocks that no prompt of the trace divides, so that a prompt of thousands of blocks is a path
of a few dozen segments.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

Runs = Sequence[tuple[int, int]]  # (first id, count) of a prompt's blocks; each id names the whole prefix up to it

FIRST_BASE = 1 << 24  # lower segment numbers are common prefixes
MAX_COPY_SHIFT_S = 60.0  # random offset of each copy of a trace, so that their bursts do not coincide


@dataclass(slots=True, frozen=True)
class TraceTurn:
    """One request."""

    path: tuple[int, ...]  # segments from the root; numbers are local to the session
    lengths: tuple[int, ...]  # blocks of each
    n_prompt: int  # tokens
    n_output: int
    wait_s: float = 0.0  # think time since the end of the previous turn (or the session's start)
    reply: tuple[int, int] = (0, 0)  # (segment, blocks) that its reply fills, where the trace says
    is_sub_agent: bool = False  # the session's next turn does not wait for it


@dataclass(slots=True, frozen=True)
class TraceSession:
    """Turns in sequence: each is sent after the answer to the previous one and its think time."""

    turns: tuple[TraceTurn, ...]
    start_s: float = 0.0  # in traces with recorded arrivals
    common: tuple[int, int] = (0, 0)  # (kind, n): all sessions of this kind share their first n segments
    times_s: tuple[float, ...] = ()  # when each turn was recorded: to enter a session in the middle
    group: int = 0  # conversation, sampled as a whole; 0: none


@dataclass(slots=True)
class TrafficTrace:
    name: str
    block_tokens: int
    sessions: list[TraceSession]
    n_segments: int  # numbers that one copy of a session (or of the trace, if shared) uses
    shared: bool  # the sessions of one copy share segments and have recorded arrival times
    left_out: int = 0  # requests that exceed the context

    @property
    def n_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


class SegmentIndex:
    """Divides block ids into segments: between two cuts no prompt begins, ends or diverges from another."""

    def __init__(self, prompts: Iterable[Runs], cuts: Iterable[int] = ()) -> None:
        found = set(cuts)
        for runs in prompts:
            for first, n in runs:
                found.add(first)
                found.add(first + n)
        self._cuts = sorted(found)

    def __len__(self) -> int:
        return len(self._cuts)

    def path(self, runs: Runs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(segments, lengths) of a prompt."""
        cuts = self._cuts
        segments: list[int] = []
        lengths: list[int] = []
        for first, n in runs:
            low, high = bisect_left(cuts, first), bisect_left(cuts, first + n)
            segments.extend(range(low, high))
            lengths.extend(cuts[place + 1] - cuts[place] for place in range(low, high))
        return tuple(segments), tuple(lengths)

    def number(self, block: int) -> int:
        """The segment that contains a block."""
        return bisect_right(self._cuts, block) - 1


def run_lengths(ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


@dataclass(slots=True, frozen=True)
class SessionStart:
    at_s: float
    session: TraceSession
    base: int  # offset of the session's segment numbers
    turn: int  # the first one sent: a session may have begun before time 0


def session_starts(trace: TrafficTrace, load: float, until_s: float, rng: Random) -> list[SessionStart]:
    """In order of time. `load`: copies of a trace with recorded arrivals, else session starts per second."""
    found = _copies(trace, load, rng) if trace.shared else _poisson(trace, load, until_s, rng)
    return sorted((start for start in found if start.at_s <= until_s), key=lambda start: start.at_s)


def _copies(trace: TrafficTrace, load: float, rng: Random) -> Iterator[SessionStart]:
    """Whole copies with fresh ids; of the last one a fraction of the conversations."""
    n_whole, fraction = int(load), load - int(load)
    for copy in range(n_whole + (fraction > 0)):
        shift_s = rng.uniform(0.0, MAX_COPY_SHIFT_S)
        kept: dict[int, bool] = {}
        for session in trace.sessions:
            if copy == n_whole and not kept.setdefault(session.group, rng.random() < fraction):
                continue
            yield SessionStart(session.start_s + shift_s, session, FIRST_BASE + copy * trace.n_segments, 0)


def _poisson(trace: TrafficTrace, load: float, until_s: float, rng: Random) -> Iterator[SessionStart]:
    """Poisson arrivals that begin before time 0, so that the number of live sessions is stationary from the start."""
    at_s = -max(session.times_s[-1] for session in trace.sessions)
    order: list[TraceSession] = []
    base = FIRST_BASE
    while True:
        at_s += rng.expovariate(load)
        if at_s > until_s:
            return
        if not order:  # every session of the trace once before any repeats
            order = list(trace.sessions)
            rng.shuffle(order)
        session = order.pop()
        base += trace.n_segments
        live = (
            n for n, time_s in enumerate(session.times_s) if at_s + time_s >= 0 and not session.turns[n].is_sub_agent
        )
        turn = next(live, None)
        if turn is not None:
            yield SessionStart(at_s + session.times_s[turn], session, base, turn)
