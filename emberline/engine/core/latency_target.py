"""Chunked prefill under an inter-token latency target, learned from the duration of steps."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from emberline.engine.core.prefill_policy import NO_TARGET, BatchTimeLimit, StepLimit, StepWork, smooth

TARGET_S = 0.019  # of a step with decoding sequences: their p99 ITL stays below 20 ms, and a chunk is still efficient
BURST_S = 0.055  # of a step with decoding sequences that computes prompts of a burst: ITL stays below 65 ms
DECODE_SHARE = 2.0  # where a device cannot do that: this many times the duration of a step that only decodes
FIRST_CHUNK = 512  # tokens, before anything was measured
EFFICIENT_TOKENS = 2048  # from which on a step is as efficient as any
EAGER_TOKENS = 4096  # from which on a step takes longer to compute than to launch without a CUDA graph
_TOLERANCE = 1.25  # where nothing meets the target: this much above the shortest step is as good
_OUTLIER = 1.3  # times the proportional duration
_DECAY = 0.9  # weight of earlier measurements, with every new one
_STALE_STEPS = 2000  # after which a size that was too slow may be tried again


@dataclass(frozen=True, slots=True)
class ShapePolicy:
    """The sizes to which the runner rounds steps up."""

    tile: int  # tokens: matrix products compute whole tiles
    max_graph_tokens: int  # largest step that is captured as a CUDA graph
    max_graph_prompts: int  # of which such a step computes a chunk
    prompt_multiple: int  # positions at which long prompts are cut, so that few attention shapes occur
    burst_tokens: int  # of a larger captured step: prompts of a burst beside sequences that decode

    def tiles(self, n_tokens: int) -> int:
        return -(-n_tokens // self.tile)


class DurationFit:
    """Duration of steps of one size as a line over the context at which their chunks begin: decaying least squares."""

    __slots__ = ("_min_spread", "_n", "_x", "_xx", "_xy", "_y", "last_seen")

    def __init__(self, min_spread: float) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self._min_spread = min_spread  # variance of the context below which the slope means nothing
        self.last_seen = 0

    def add(self, context: float, seconds: float) -> None:
        if self._n:  # a kernel may have been compiled during the step
            seconds = min(seconds, 1.5 * self.at(context))
        self._n = self._n * _DECAY + 1
        self._x = self._x * _DECAY + context
        self._xx = self._xx * _DECAY + context * context
        self._y = self._y * _DECAY + seconds
        self._xy = self._xy * _DECAY + context * seconds

    def at(self, context: float) -> float:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        covariance = self._xy / self._n - mean_x * mean_y
        slope = max(0.0, covariance / variance) if variance > self._min_spread else 0.0
        return max(mean_y / 2, mean_y + slope * (context - mean_x))


class LatencyTarget(BatchTimeLimit):
    """Knows, by number of decoding sequences (powers of two), how long a step of each number of tiles takes.

    A chunk is as large as meets the target. There is no formula over sizes: kernels are as slow for a short chunk as
    for one that fills the device, so one size says little about another. A size that was never measured is assumed to
    cost in proportion, and is tried where that meets the target. Where not even the smallest size does, one that takes
    little longer is as good.
    """

    def __init__(
        self,
        shape: ShapePolicy,
        target_s: float = TARGET_S,
        most_drafts: Callable[[int], int] | None = None,
        n_stages: int = 1,
    ) -> None:
        """n_stages: of a pipeline. The first one's steps are observed, and a token comes when all have computed."""
        super().__init__(shape.tile)
        self._n_stages = n_stages
        self._shape = shape
        self._most_drafts = most_drafts or super().most_drafts
        self._target_s = target_s
        self._fits: dict[int, dict[int, DurationFit]] = {}  # by power of two of the decodes, then by tiles
        self._decode_s: dict[int, float] = {}  # of steps without chunks, by power of two of the decodes
        self._decode_n: dict[int, int] = {}  # how many decodes the last of those steps had
        self._prefill_s: dict[int, float] = {}  # of a prompt token in large steps that decode nothing; one entry
        self._mixed_decode_s: dict[int, float] = {}  # like _decode_s, estimated from steps with chunks
        self._n_observed = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        bucket, seconds = work.n_decoded.bit_length(), self._n_stages * seconds
        super().observe(work, seconds)
        if not work.n_tokens:
            smooth(self._decode_s, bucket, seconds)
            self._decode_n[bucket] = work.n_decoded
            return
        if not work.n_decodes:
            if work.n_tokens >= EFFICIENT_TOKENS:
                smooth(self._prefill_s, 0, seconds / work.n_tokens)
            return
        tiles = self._shape.tiles(work.n_decoded + work.n_tokens)
        small = tiles * self._shape.tile <= self._shape.max_graph_tokens  # else errors per token add up
        if self._prefill_s and small and bucket not in self._decode_s:
            self._mixed_decode_s[bucket] = seconds - work.n_tokens * self._prefill_s[0]
        self._n_observed += 1
        fits = self._fits.setdefault(bucket, {})
        fit = fits.setdefault(tiles, DurationFit(self._shape.tile**2))
        fit.add(work.start, seconds)
        fit.last_seen = self._n_observed
        for stale in [n for n, each in fits.items() if self._n_observed - each.last_seen > _STALE_STEPS]:
            del fits[stale]

    def step_limit(self, n_decodes: int, budget: int, untargeted: Callable[[float], int]) -> StepLimit:
        """Either a step fits a CUDA graph, or it has so many tokens that launching it eagerly does not matter.

        Sequences that decode also bound prompts that no latency target applies to, those of one burst: they wait for
        each step.
        """
        graph_tokens = max(self._shape.max_graph_tokens, n_decodes + self._shape.tile)
        largest = min(budget, self._burst_tokens) if n_decodes else budget
        if largest > graph_tokens:
            eager = largest >= EAGER_TOKENS or not n_decodes
            limit = StepLimit(largest, inf if eager else self._shape.max_graph_prompts)
            if n_decodes + untargeted(limit.n_prompts) >= min(largest, EAGER_TOKENS):
                return limit
        return StepLimit(min(budget, graph_tokens), self._shape.max_graph_prompts)

    @property
    def _burst_tokens(self) -> int:
        """Tokens of the largest step that takes about BURST_S and is not slowed down by its launch."""
        shape, token_s = self._shape, self._prefill_s.get(0, 0.0)
        most = int(BURST_S / token_s) // shape.tile * shape.tile if token_s else shape.burst_tokens
        if most >= EAGER_TOKENS:
            return most
        return shape.burst_tokens if most >= shape.burst_tokens else shape.max_graph_tokens

    def chunk(self, work: StepWork, context: int, most: int, slack: float = 1.0, limit_s: float = inf) -> int:
        most = super().chunk(work, context, most, slack, limit_s)
        if not work.n_decodes or slack >= NO_TARGET:
            return most
        tile, scheduled = self._shape.tile, work.n_decoded + work.n_tokens
        tiles = self._tiles(work.n_decoded, context, self._step_target_s(work.n_decoded, slack))
        tiles = min(tiles, self._shape.max_graph_tokens // tile)
        least = scheduled // tile + 1 if not work.n_tokens else 0  # the first prompt always makes progress
        return min(most, max(0, max(tiles, least) * tile - scheduled))

    def n_decodes(self, limit_s: float) -> float:
        return inf  # one more makes hardly a difference on a GPU

    def most_drafts(self, n_rows: int) -> int:
        return self._most_drafts(n_rows)

    @property
    def drafts_beside_prompts(self) -> bool:
        return False  # prompts fill the device: every draft would cost as much as one of their tokens

    def align(self, work: StepWork, start: int, n: int) -> int:
        end = (start + n) // self._shape.prompt_multiple * self._shape.prompt_multiple
        return n if work.n_decodes or end <= start else end - start

    def _tiles(self, n_decodes: int, context: int, target_s: float) -> int:
        bucket = min(self._fits, key=lambda each: abs(each - n_decodes.bit_length()), default=None)
        if bucket is None:
            return self._shape.tiles(FIRST_CHUNK)
        known: dict[int, float] = {}  # seconds by tiles
        for tiles, fit in sorted(self._fits[bucket].items()):  # far above proportion: an outlier
            known[tiles] = min([fit.at(context), *(_OUTLIER * s * tiles / fewer for fewer, s in known.items())])
        limit_s = max(target_s, _TOLERANCE * min(known.values()))
        best = [tiles for tiles, seconds in known.items() if seconds <= limit_s][-1]
        in_proportion = int(best * target_s / known[best])
        if known[best] > target_s:
            fewer = max(1, min(best - 1, in_proportion))
            return fewer if fewer not in known else best
        more = min(in_proportion, 2 * best)
        too_slow = min((tiles for tiles in known if tiles > best), default=more + 1)
        return max(best, min(more, too_slow - 1))

    def _step_target_s(self, n_decodes: int, slack: float) -> float:
        bucket = n_decodes.bit_length()
        known = [seconds for n, seconds in (self._mixed_decode_s | self._decode_s).items() if n <= bucket]
        if bucket in self._decode_s:  # twice as many may take twice as long
            known.append(self._decode_s[bucket] * n_decodes / self._decode_n[bucket])
        return max(slack * self._target_s, DECODE_SHARE * max(known, default=0.0))
