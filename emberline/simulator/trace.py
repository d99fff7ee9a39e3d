"""Recorded or generated traffic: sessions of turns, whose prompts are paths in a tree of segments."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Runs = Sequence[tuple[int, int]]  # (first id, how many): a prompt's blocks, each id naming the whole prefix up to it


@dataclass(slots=True, frozen=True)
class Turn:
    """One request."""

    path: tuple[int, ...]  # segments, the root's first; numbers are the session's own
    lengths: tuple[int, ...]  # blocks of each
    n_prompt: int  # tokens
    n_output: int
    wait_s: float = 0.0  # from the end of the turn before (of the session's start) until it is asked
    reply: tuple[int, int] = (0, 0)  # (segment, blocks) that its reply fills, where a trace tells
    beside: bool = False  # a sub-agent's: the session's next turn does not wait for it


@dataclass(slots=True, frozen=True)
class Session:
    """Turns, one after the other: each is asked when the one before has been answered and thought about."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0  # of traces with arrivals of their own
    common: tuple[int, int] = (0, 0)  # (kind, n): the first n segments are those of all sessions of this kind
    ages: tuple[float, ...] = ()  # when each turn was asked, as recorded: to enter a session half-way
    group: int = 0  # of a conversation, for sampling; 0: by itself


@dataclass(slots=True)
class Trace:
    name: str
    block_tokens: int
    sessions: list[Session]
    n_segments: int  # numbers that one copy of a session (or of all, where they share) may use
    shared: bool  # all sessions of one copy share segments, and arrive at times of their own
    left_out: int = 0  # requests that no modelled worker could take
    notes: list[str] = field(default_factory=list)

    @property
    def n_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


class Segments:
    """Cuts ids into segments: between two cuts no prompt begins, ends or parts from another."""

    def __init__(self, prompts: Iterable[Runs], more: Iterable[int] = ()) -> None:
        cuts = set(more)
        for runs in prompts:
            for first, n in runs:
                cuts.add(first)
                cuts.add(first + n)
        self._cuts = sorted(cuts)

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
        """The segment that a block is in."""
        return bisect_right(self._cuts, block) - 1


def runs_of(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Run-length coded: neighbours that count up."""
    runs: list[tuple[int, int]] = []
    first = last = -2
    for number in ids:
        if number != last + 1:
            if first >= 0:
                runs.append((first, last - first + 1))
            first = number
        last = number
    if first >= 0:
        runs.append((first, last - first + 1))
    return runs
