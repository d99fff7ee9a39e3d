"""How many prompt tokens a step may take so that running streams keep their pace, learned from the steps that ran."""

from dataclasses import dataclass
from itertools import takewhile
from math import inf

from emberline.engine.gpu_shapes import TILE, rows_beside_chunks, tokens

TARGET_S = 0.0145  # of a step that streams wait for: their p99 stays below 20 ms, and a chunk is still efficient
SHARE = 2.0  # or so many times what the streams' own step takes, where a card cannot do that
FIRST_CHUNK = 512  # tokens, before anything was measured
_GAIN = 0.5  # how fast what was learned gives way to what is measured
_LITTLE = 1.25
_SPARE = 0.93  # of the target: with no more than this a step may try one tile more
_DOUBT = 0.99  # what was too long is believed a little less with every step, and so tried again some day


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
        return tokens(rows_beside_chunks(self.n_decodes) + self.n_tokens) // TILE

    @property
    def context(self) -> int:
        return self.reach // max(1, self.n_tokens)


Key = tuple[int, int]  # powers of two: of the streams, of the context


class Pace:
    """For so many streams and so long a context, what a step of each number of tiles takes; the largest that fits.

    No formula: kernels are as slow for a short chunk as for one that fills the device, so what was measured at one size
    says little of another. A size nobody has measured is tried when the one below leaves time to spare, or the one
    above took too long. Where not even the smallest fits, one that takes little longer is as good.
    """

    def __init__(self, target_s: float = TARGET_S) -> None:  # inf: streams wait as long as it takes
        self._target_s = target_s
        self._steps: dict[Key, dict[int, float]] = {}  # seconds by tiles
        self._decode_s: dict[int, float] = {}  # of steps without chunks, by power of two of the streams
        self._token_s: dict[int, float] = {}  # of a prompt's token in large steps, by that of the context

    def observe(self, work: Work, seconds: float) -> None:
        if not work.n_tokens:
            _learn(self._decode_s, work.n_decodes.bit_length(), seconds, 2.0)
            return
        if work.n_tokens >= TILE // 2:
            _learn(self._token_s, _octave(work.context), seconds / work.n_tokens, 2.0)
        if not work.n_decodes or self._target_s == inf:
            return  # nobody waits, or nobody minds
        target_s = self._target(work.n_decodes)
        steps = self._steps.setdefault(_key(work.n_decodes, work.begins), {})
        _learn(steps, work.tiles, seconds)
        for tiles, known_s in steps.items():
            if known_s > target_s:  # never more than in proportion: that was a step in which a kernel was compiled
                steps[tiles] = min(known_s * _DOUBT, seconds * max(1.0, tiles / work.tiles))

    def chunk(self, work: Work, context: int, most: int) -> int:
        """Tokens of a prompt that may join the work, up to `most`; they begin at `context`."""
        if not work.n_decodes or self._target_s == inf:
            return most
        beside = rows_beside_chunks(work.n_decodes) + work.n_tokens
        tiles = self._tiles(work.n_decodes, context)
        least = beside // TILE + 1 if not work.n_tokens else 0  # prompts come forward whatever the streams cost
        return min(most, max(0, max(tiles, least) * TILE - beside))

    def within(self, limit_s: float, work: Work, context: int, most: int) -> int:
        """Tokens of a prompt, up to `most`, with which the step lasts about so long; a first chunk has a tile."""
        near = min(self._token_s, key=lambda octave: abs(octave - _octave(context)), default=None)
        n = TILE if near is None else max(TILE, int(limit_s / self._token_s[near]))
        return min(most, n - work.n_tokens)

    def _tiles(self, n_decodes: int, context: int) -> int:
        key = _key(n_decodes, context)
        near = min(self._steps, key=lambda k: abs(k[0] - key[0]) + abs(k[1] - key[1]), default=None)
        if near is None:
            return FIRST_CHUNK // TILE
        steps, target_s = self._steps[near], self._target(n_decodes)
        limit_s = max(target_s, _LITTLE * min(steps.values()))
        sizes = sorted(steps)
        best = [sizes[0], *takewhile(lambda tiles: steps[tiles] <= limit_s, sizes)][-1]
        if steps[best] > target_s:
            less = max(1, min(best - 1, int(best * target_s / steps[best])))
            return less if less not in steps else best
        more = best * 2 if steps[best] < target_s / 2 else best + 1
        return more if steps[best] < _SPARE * target_s and more not in steps else best

    def _target(self, n_decodes: int) -> float:
        streams = n_decodes.bit_length()
        known = [seconds for n, seconds in self._decode_s.items() if n <= streams]
        return max(self._target_s, SHARE * max(known, default=0.0))


def _learn(known: dict[int, float], key: int, measured: float, most: float = 1e9) -> None:
    """`most`: times what is known; a kernel may have been compiled in the middle of a step."""
    before = known.get(key, measured)
    known[key] = before + _GAIN * (min(measured, most * before) - before)


def _key(n_decodes: int, context: int) -> Key:
    return n_decodes.bit_length(), _octave(context)


def _octave(context: int) -> int:
    return (context >> 10).bit_length()
