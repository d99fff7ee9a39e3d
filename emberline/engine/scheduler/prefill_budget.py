"""How many prompt tokens a step may take so that running streams keep their pace, learned from the steps that ran."""

import time
from dataclasses import dataclass
from math import inf

from emberline.engine.gpu.shapes import MAX_CAPTURED_TOKENS, ROUND, TILE, tokens
from emberline.engine.scheduler.plan import StepPlan
from emberline.engine.scheduler.sequence import Sequence
from emberline.protocol.request import Priority

TARGET_S = 0.019  # of a step that streams wait for: their p99 stays below 20 ms, and a chunk is still efficient
SHARE = 2.0  # or so many times what the streams' own step takes, where a card cannot do that
OVERLOAD = 4.0
FIRST_CHUNK = 512  # tokens, before anything was measured
MANY = 2048  # tokens of a step that is as efficient as any
LARGE = 4096  # tokens that take longer to compute than to launch uncaptured
_GAIN = 0.5  # how fast what was learned gives way to what is measured
_LITTLE = 1.25
_ODD = 1.3
_KEPT = 0.9  # of what earlier steps of a size count for, with every new one
_STALE = 2000  # steps after which a size that was too long may be tried again


@dataclass(slots=True)
class Work:
    """What a step computes, as far as its time depends on it."""

    n_decodes: int = 0
    n_tokens: int = 0  # of prompts
    reach: int = 0  # the sum of what these look back at
    begins: int = 0  # context at which the first chunk begins

    def add(self, n_tokens: int, context: int) -> None:
        """A chunk of n_tokens that ends at `context`."""
        if not self.n_tokens:
            self.begins = context - n_tokens
        self.n_tokens += n_tokens
        self.reach += n_tokens * (context - n_tokens // 2)

    @property
    def tiles(self) -> int:
        """Whole ones that a step with chunks is rounded up to."""
        return tokens(self.n_decodes + self.n_tokens) // TILE

    @property
    def context(self) -> int:
        return self.reach // max(1, self.n_tokens)


class Line:
    """Seconds of steps of one size by the context that their chunks begin at: a straight line through what was seen."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "seen")

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.seen = 0  # the last time

    def add(self, context: float, seconds: float) -> None:
        if self._n:  # a kernel may have been compiled in the middle of a step
            seconds = min(seconds, 1.5 * self.at(context))
        self._n = self._n * _KEPT + 1
        self._x = self._x * _KEPT + context
        self._xx = self._xx * _KEPT + context * context
        self._y = self._y * _KEPT + seconds
        self._xy = self._xy * _KEPT + context * seconds

    def at(self, context: float) -> float:
        mean, height = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        rise = self._xy / self._n - mean * height
        slope = max(0.0, rise / spread) if spread > TILE * TILE else 0.0
        return max(height / 2, height + slope * (context - mean))


class PrefillBudget:
    """For so many streams (powers of two), what a step of each number of tiles takes; the largest that fits.

    No formula over sizes: kernels are as slow for a short chunk as for one that fills the device, so what was measured
    at one size says little of another. A size nobody has measured is thought to cost in proportion, and is tried where
    that fits. Where not even the smallest fits, one that takes little longer is as good.
    """

    def __init__(self, target_s: float = TARGET_S) -> None:  # inf: streams wait as long as it takes
        self._target_s = target_s
        self._steps: dict[int, dict[int, Line]] = {}  # by power of two of the streams, by tiles
        self._decode_s: dict[int, float] = {}  # of steps without chunks, by power of two of the streams
        self._decode_n: dict[int, int] = {}  # how many of them that was the last time
        self._token_s: dict[int, float] = {}  # of a prompt's token in large steps, by that of the context
        self._alone_s: dict[int, float] = {}  # the same where nothing decodes beside it; one number
        self._beside_s: dict[int, float] = {}  # like _decode_s, from steps with chunks
        self._n_seen = 0

    def observe(self, work: Work, seconds: float) -> None:
        if not work.n_tokens:
            _learn(self._decode_s, work.n_decodes.bit_length(), seconds, 2.0)
            self._decode_n[work.n_decodes.bit_length()] = work.n_decodes
            return
        if work.n_tokens >= TILE // 2:
            _learn(self._token_s, _octave(work.context), seconds / work.n_tokens, 2.0)
        if not work.n_decodes and work.n_tokens >= MANY:
            _learn(self._alone_s, 0, seconds / work.n_tokens, 2.0)
        if not work.n_decodes or self._target_s == inf:
            return  # nobody waits, or nobody minds
        streams = work.n_decodes.bit_length()
        few = work.tiles * TILE <= MAX_CAPTURED_TOKENS  # of many tokens, a small error of each is a large one
        if self._alone_s and few and streams not in self._decode_s:  # they never decoded alone: what was theirs of it
            self._beside_s[streams] = seconds - work.n_tokens * self._alone_s[0]
        self._n_seen += 1
        lines = self._steps.setdefault(streams, {})
        line = lines.setdefault(work.tiles, Line())
        line.add(work.begins, seconds)
        line.seen = self._n_seen
        for tiles in [tiles for tiles, line in lines.items() if self._n_seen - line.seen > _STALE]:
            del lines[tiles]

    def chunk(self, work: Work, context: int, most: int, slack: float = 1.0) -> int:
        """Tokens of a prompt that may join the work, up to `most`; they begin at `context`.

        slack: how many times the target a step may take; beyond OVERLOAD, as long as it takes.
        """
        if not work.n_decodes or self._target_s == inf or slack >= OVERLOAD:
            return most
        beside = work.n_decodes + work.n_tokens
        tiles = self._tiles(work.n_decodes, context, self._target(work.n_decodes, slack))
        tiles = min(tiles, MAX_CAPTURED_TOKENS // TILE)
        least = beside // TILE + 1 if not work.n_tokens else 0  # prompts come forward whatever the streams cost
        return min(most, max(0, max(tiles, least) * TILE - beside))

    def room(self, wanted: int, most: int) -> int:
        """Tokens of a step whose prompts keep no pace: all that are wanted, or no more than can be captured."""
        return most if wanted >= min(most, LARGE) or self._target_s == inf else min(most, MAX_CAPTURED_TOKENS)

    def cut(self, work: Work, start: int, n: int) -> int:
        """How many of the next n tokens to take of a prompt that has more."""
        end = (start + n) // ROUND * ROUND
        return n if work.n_decodes or self._target_s == inf or end <= start else end - start

    def within(self, limit_s: float, work: Work, context: int, most: int) -> int:
        """Tokens of a prompt, up to `most`, with which the step lasts about so long; a first chunk has a tile."""
        near = min(self._token_s, key=lambda octave: abs(octave - _octave(context)), default=None)
        n = TILE if near is None else max(TILE, int(limit_s / self._token_s[near]))
        return min(most, n - work.n_tokens)

    def _tiles(self, n_decodes: int, context: int, target_s: float) -> int:
        near = min(self._steps, key=lambda streams: abs(streams - n_decodes.bit_length()), default=None)
        if near is None:
            return FIRST_CHUNK // TILE
        known: dict[int, float] = {}
        for tiles, line in sorted(self._steps[near].items()):  # much more than in proportion: that step was an odd one
            known[tiles] = min([line.at(context), *(_ODD * s * tiles / less for less, s in known.items())])
        limit_s = max(target_s, _LITTLE * min(known.values()))
        fitting = [tiles for tiles, seconds in known.items() if seconds <= limit_s]
        best = fitting[-1]
        if known[best] > target_s:
            less = max(1, min(best - 1, int(best * target_s / known[best])))
            return less if less not in known else best
        more = min(int(best * target_s / known[best]), 2 * best)
        beyond = min((tiles for tiles in known if tiles > best), default=more + 1)  # those took too long
        return max(best, min(more, beyond - 1))

    def _target(self, n_decodes: int, slack: float) -> float:
        streams = n_decodes.bit_length()
        known = [seconds for n, seconds in (self._beside_s | self._decode_s).items() if n <= streams]
        if streams in self._decode_s:  # twice as many may take twice as long
            known.append(self._decode_s[streams] * n_decodes / self._decode_n[streams])
        return max(slack * self._target_s, SHARE * max(known, default=0.0))


def _learn(known: dict[int, float], key: int, measured: float, most: float) -> None:
    """`most`: times what is known; a kernel may have been compiled in the middle of a step."""
    before = known.get(key, measured)
    known[key] = before + _GAIN * (min(measured, most * before) - before)


def _octave(context: int) -> int:
    return (context >> 10).bit_length()


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


LEAST_TOKENS = 64  # of prompts in a step: fewer say nothing of the rate
_RATE_GAIN = 0.2


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0: not known yet
        self._began_s: dict[int, float] = {}  # of the plans in flight
        self._done_s = 0.0

    def launched(self, plan: StepPlan) -> None:
        self._began_s[id(plan)] = time.perf_counter()

    def done(self, plan: StepPlan) -> None:
        """The device computes one plan after the other: a plan begins when the one before is done."""
        now_s = time.perf_counter()
        began_s = max(self._began_s.pop(id(plan), now_s), self._done_s)
        self._done_s = now_s
        if plan.n_tokens == len(plan.rows) or now_s <= began_s:
            return  # it only decodes
        n_tokens = sum(row.end - row.start for row in plan.rows if row.end - row.start > 1)
        if n_tokens < LEAST_TOKENS:
            return
        measured = n_tokens / (now_s - began_s)
        known = self.tokens_per_s or measured
        self.tokens_per_s = known + _RATE_GAIN * (measured - known)
