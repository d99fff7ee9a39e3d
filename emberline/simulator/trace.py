"""Traces: sessions of turns whose prompts are paths in a tree of segments; and when each session starts.

A segment is a run of KV blocks that no prompt of the trace divides, so that a prompt of thousands of blocks is a path
of a few dozen segments.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from emberline.protocol.errors import BadInput

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
    called_tools: bool = False  # the reply ends with tool calls
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
        """(segments, lengths) of a prompt, which names no block twice."""
        cuts = self._cuts
        segments: list[int] = []
        lengths: list[int] = []
        for first, n in runs:
            low, high = bisect_left(cuts, first), bisect_left(cuts, first + n)
            segments.extend(range(low, high))
            lengths.extend(cuts[place + 1] - cuts[place] for place in range(low, high))
        assert len(set(segments)) == len(segments), "a prompt names a block twice"
        return tuple(segments), tuple(lengths)

    def number(self, block: int) -> int:
        """The segment that contains a block."""
        return bisect_right(self._cuts, block) - 1


class DistinctBlocks:
    """Gives ids of their own to blocks that a prompt names again. An id names the whole prefix up to its block, so the
    second block is another one; recordings that name blocks by their content repeat ids."""

    def __init__(self, first_free: int) -> None:
        """No prompt has an id from `first_free` on."""
        self._first_free = first_free
        self._ids: dict[tuple[int, int], int] = {}  # by the block before it, and the id that is repeated

    def of(self, runs: Runs) -> Runs:
        """The same prompt, without repeated ids. Prompts that begin alike still do."""
        in_order = sorted(runs)
        if all(first + n <= after for (first, n), (after, _) in pairwise(in_order)):
            return runs
        ids: list[int] = []
        seen: set[int] = set()
        for first, n in runs:
            for block in range(first, first + n):
                if block in seen:
                    before = ids[-1], block
                    block = self._ids.setdefault(before, self._first_free + len(self._ids))
                seen.add(block)
                ids.append(block)
        return run_lengths(ids)


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
    past_s: float = 0.0  # when the turn before that one was sent; 0: there is none

    @property
    def has_ended(self) -> bool:
        """Before time 0."""
        return self.turn == len(self.session.turns)


@dataclass(slots=True, frozen=True)
class LoadProfile:
    """The part of the load that arrives, over time: straight lines between points, from 0 to 1."""

    points: tuple[tuple[float, float], ...]  # (seconds, part), in order of time

    def __post_init__(self) -> None:
        times_s = [at_s for at_s, _ in self.points]
        if not self.points or times_s != sorted(times_s) or not all(0 <= part <= 1 for _, part in self.points):
            raise BadInput("a load profile has points in order of time, with parts from 0 to 1", param="swing")

    @classmethod
    def swing(cls, factor: float, seconds: float) -> "LoadProfile":
        """Rises by the factor in the first half and falls again."""
        if factor < 1 or seconds <= 0:
            raise BadInput(f"the load swings by a factor of 1 or more, not {factor:g}", param="swing")
        return cls(((0.0, 1 / factor), (seconds / 2, 1.0), (seconds, 1 / factor)))

    def part(self, at_s: float) -> float:
        place = bisect_right(self.points, (at_s, float("inf")))
        if place in (0, len(self.points)):
            return self.points[max(0, place - 1)][1]
        (start_s, before), (end_s, after) = self.points[place - 1 : place + 1]
        return before + (after - before) * (at_s - start_s) / (end_s - start_s)


def session_starts(
    trace: TrafficTrace, load: float, until_s: float, rng: Random, profile: LoadProfile | None = None
) -> list[SessionStart]:
    """Return the session starts in order of time, with those that have ended before time 0 first. `load` is the number
    of copies of a trace with recorded arrivals, otherwise session starts per second. `profile` scales it over time;
    conversations keep their place in it."""
    found = _copies(trace, load, rng, profile) if trace.shared else _poisson(trace, load, until_s, rng, profile)
    return sorted((start for start in found if start.at_s <= until_s), key=lambda start: start.at_s)


def _copies(trace: TrafficTrace, load: float, rng: Random, profile: LoadProfile | None) -> Iterator[SessionStart]:
    """Whole copies with fresh ids; of the last one a fraction of the conversations."""
    n_whole, fraction = int(load), load - int(load)
    for copy in range(n_whole + (fraction > 0)):
        shift_s = rng.uniform(0.0, MAX_COPY_SHIFT_S)
        kept: dict[int, bool] = {}
        above: dict[int, float] = {}  # the part of the load from which a conversation is among it
        for session in trace.sessions:
            if copy == n_whole and not kept.setdefault(session.group, rng.random() < fraction):
                continue
            if profile is not None:
                drawn = rng.random()
                threshold = above.setdefault(session.group, drawn) if session.group else drawn
                if threshold >= profile.part(session.start_s + shift_s):
                    continue
            yield SessionStart(session.start_s + shift_s, session, FIRST_BASE + copy * trace.n_segments, 0)


def _poisson(
    trace: TrafficTrace, load: float, until_s: float, rng: Random, profile: LoadProfile | None
) -> Iterator[SessionStart]:
    """Poisson arrivals that begin before time 0, so that the number of live sessions is stationary from the start."""
    at_s = -max(session.times_s[-1] for session in trace.sessions)
    order: list[TraceSession] = []
    base = FIRST_BASE
    while True:
        at_s += rng.expovariate(load)
        if at_s > until_s:
            return
        if profile is not None and rng.random() >= profile.part(at_s):
            continue
        if not order:  # every session of the trace once before any repeats
            order = list(trace.sessions)
            rng.shuffle(order)
        session = order.pop()
        base += trace.n_segments
        live = (
            n for n, time_s in enumerate(session.times_s) if at_s + time_s >= 0 and not session.turns[n].is_sub_agent
        )
        turn = next(live, len(session.turns))
        past_s = max((at_s + time_s for time_s in session.times_s if at_s + time_s < 0), default=0.0)
        yield SessionStart(
            past_s if turn == len(session.turns) else at_s + session.times_s[turn], session, base, turn, past_s
        )
