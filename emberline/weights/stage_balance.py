"""Dividing a model's layers into pipeline stages: the slowest stage sets the pace, the fullest one the room for KV.

Layers differ: one with experts may hold ten times as much as a dense one, the embedding takes memory and no time, and
the head, which a step of few rows reads as a whole, may take the time of several layers. A division is balanced if its
slowest stage takes at most 6 % more than the mean, or no longer than that of any other; of the balanced ones the one is
chosen that leaves the most memory. (Kimi K2.5 in four stages: 5.5 % instead of 3.4 is a layer less in the fullest
stage, and twice the KV cache on H100s.)

Times are measured ones, or predicted: a decode step is limited by the bytes that it reads.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import StageSplit
from emberline.weights.model_config import ModelConfig
from emberline.weights.outline import TensorSource, layer_kinds
from emberline.weights.rank_checkpoint import split_name

BALANCED = 1.06  # time of the slowest stage over the mean
MICRO_BATCH_ROWS = 8  # sequences of a decode step in one stage, for which times are predicted


class Cost(NamedTuple):
    time: float  # in any unit: seconds where they were measured, bytes that a step reads where they are predicted
    n_bytes: int


class ModelCost(NamedTuple):
    layers: Sequence[Cost]
    embedding: Cost
    head: Cost  # and the last norm
    caches: Sequence[Hashable] = ()  # what each layer's KV is like: a stage has layers of every kind

    def stages(self, split: StageSplit) -> list[Cost]:
        """Cost of each stage: the first has the embedding, the last the head."""
        sums = [[sum(part) for part in zip(*(self.layers[n] for n in split.layers(s)))] for s in range(split.n_stages)]
        for stage, extra in (0, self.embedding), (-1, self.head):
            sums[stage] = [one + more for one, more in zip(sums[stage], extra)]
        return [Cost(time, int(n_bytes)) for time, n_bytes in sums]

    def imbalance(self, split: StageSplit) -> float:
        """Time of the slowest stage over the mean: what share of the devices' time is spent waiting."""
        times = [stage.time for stage in self.stages(split)]
        return max(times) / (sum(times) / len(times)) if any(times) else 1.0


def split_stages(source: TensorSource, n_stages: int) -> StageSplit:
    """The stages of a checkpoint's model, by predicted times. Every rank of a group computes the same."""
    return balance_stages(predict_cost(source), n_stages)


def balance_stages(cost: ModelCost, n_stages: int) -> StageSplit:
    """The division with the least in its fullest stage among those that are balanced; BadInput: there is none.

    Of several the one with the fastest slowest stage, then the one with the most even memory.
    """
    n = len(cost.layers)
    times, sizes = _Ranges(cost, 0, n_stages), _Ranges(cost, 1, n_stages)
    slowest = _smallest_worst(times, [np.inf] * n_stages, times)
    if not np.isfinite(slowest):
        kinds = len(set(cost.caches))
        needed = "a layer" if kinds < 2 else f"layers of all {kinds} kinds of KV cache"
        most = max(k for k in range(1, n_stages) if k == 1 or _can_divide(cost, k))
        raise BadInput(f"--pp {n_stages}: each stage needs {needed} of the model's {n}: use at most {most}", param="pp")
    slowest = max(slowest, BALANCED * times.total / n_stages)
    fullest = _smallest_worst(sizes, [slowest] * n_stages, times)
    slowest = _smallest_worst(times, [fullest] * n_stages, sizes)
    begins = _most_even(times, sizes, n_stages, slowest, fullest)
    bounds = [n]
    for stage in range(n_stages - 1, 0, -1):
        bounds.append(int(begins[stage][bounds[-1]]))
    return StageSplit((0, *reversed(bounds)))


class _Ranges:
    """Sums over all ranges of layers: [start, stop], infinite where they can be no stage."""

    def __init__(self, cost: ModelCost, part: int, n_stages: int) -> None:
        sums = np.concatenate([[0.0], np.cumsum([float(layer[part]) for layer in cost.layers])])
        self._sums = np.where(_has_every_cache(cost), sums[None, :] - sums[:, None], np.inf)
        self._extras = float(cost.embedding[part]), float(cost.head[part])
        self._last = n_stages - 1
        self.total = float(sums[-1]) + sum(self._extras)

    def stage(self, stage: int) -> NDArray[np.float64]:
        return self._sums + (stage == 0) * self._extras[0] + (stage == self._last) * self._extras[1]

    def within(self, stage: int, most: float) -> NDArray[np.bool_]:
        return self.stage(stage) <= most * (1 + 1e-9)


def _has_every_cache(cost: ModelCost) -> NDArray[np.bool_]:
    """True if a range of layers [start, stop] has at least one of every kind of cache."""
    n = len(cost.layers)
    has = ~np.tri(n + 1, dtype=bool)
    for kind in set(cost.caches):
        counts = np.concatenate([[0], np.cumsum([cache == kind for cache in cost.caches])])
        has &= counts[None, :] > counts[:, None]
    return has


def _can_divide(cost: ModelCost, n_stages: int) -> bool:
    ranges = _Ranges(cost, 0, n_stages)
    return bool(np.isfinite(_smallest_worst(ranges, [np.inf] * n_stages, ranges)))


def _smallest_worst(of: _Ranges, limits: Sequence[float], limited: _Ranges) -> float:
    """The smallest maximum over the stages of one sum, where each stage's other sum is within its limit."""

    def allowed(stage: int) -> NDArray[np.float64]:
        return np.where(limited.within(stage, limits[stage]), of.stage(stage), np.inf)

    worst = allowed(0)[0]  # [stop]: of the stages up to there
    for stage in range(1, len(limits)):
        worst = np.maximum(worst[:, None], allowed(stage)).min(0)
    return float(worst[-1])


def _most_even(
    times: _Ranges, sizes: _Ranges, n_stages: int, slowest: float, fullest: float
) -> list[NDArray[np.int64]]:
    """Where each stage begins, by where it ends, with the smallest sum of squared bytes within both limits."""

    def squares(stage: int) -> NDArray[np.float64]:
        allowed = times.within(stage, slowest) & sizes.within(stage, fullest)
        return np.where(allowed, sizes.stage(stage) / max(1.0, sizes.total), np.inf) ** 2

    total, begins = squares(0)[0], [np.zeros(0, np.int64)]
    for stage in range(1, n_stages):
        sums = total[:, None] + squares(stage)
        begins.append(sums.argmin(0))
        total = sums.min(0)
    return begins


# --- predicted cost ---------------------------------------------------------------------------------------------------


def predict_cost(source: TensorSource, rows: int = MICRO_BATCH_ROWS) -> ModelCost:
    """Bytes that are held, and those that a decode step of so many rows reads: of experts the ones that it chooses."""
    kinds = layer_kinds(source)
    found = dict.fromkeys(kinds, (0, 0))  # bytes without experts, and of one expert
    outside = {"token_embd": 0, "output": 0, "output_norm": 0}
    for name in source.names:
        part, expert, _ = split_name(name)
        number = int(name.split(".")[1]) if name.startswith("blk.") else None
        if (number is not None and number not in found) or (expert or 0) > 0:
            continue
        n_bytes = sum(tensor.raw.nbytes for tensor in source.weight(name).stored)
        if number is None:
            outside[part] = outside.get(part, 0) + n_bytes
        else:
            dense, of_expert = found[number]
            found[number] = (dense + n_bytes, of_expert) if expert is None else (dense, of_expert + n_bytes)
    layers = [_layer_cost(source.config, *found[kind], rows) for kind in kinds]
    head = outside["output"] or outside["token_embd"]  # a tied head is held by the last stage as well
    config: ModelConfig = source.config
    windows = [sizes or (None,) * config.n_layers for sizes in (config.windows, config.chunks)]
    embedding, last = Cost(0.0, outside["token_embd"]), Cost(head, head + outside["output_norm"])
    return ModelCost(layers, embedding, last, list(zip(*windows, strict=True)))


def _layer_cost(config: ModelConfig, dense: int, of_expert: int, rows: int) -> Cost:
    if config.moe is None or not of_expert:
        return Cost(dense, dense)
    n = config.moe.experts
    chosen = n * (1 - (1 - config.moe.top_k / n) ** rows)
    return Cost(dense + chosen * of_expert, dense + n * of_expert)
