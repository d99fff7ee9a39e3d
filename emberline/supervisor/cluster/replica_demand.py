"""Demand of a model's requests, in tokens per second and tokens of KV, and the capacity of its replicas.

Replicas of different GPUs are added up by their measured rates, so that a fleet of equal ones needs

    max(⌈uncached queued tokens ÷ prefill rate ÷ tolerated seconds⌉, ⌈KV tokens in use ÷ KV capacity ÷ 0.8⌉)

of them, and no fewer than the forecast of the last minutes, their bursts included. A replica that has to be started
helps only later: for it, the queue counts that the others will have left by then.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from emberline.protocol.frames import WorkerRole

ReplicaState = Literal["starting", "running", "draining"]
KV_TARGET = 0.8  # of the KV capacity: beyond it, sequences are preempted and prefixes evicted
RATE_TARGET = 0.75  # of the measured rates, for arrivals that the forecast expects: what is busier has a queue
MIN_TREND_INTERVALS = 4  # fewer say nothing about a trend
BURSTS = 2.0  # times the scatter of intervals about their trend: what comes at once must be computed at once
MAX_TREND = 2.0  # the forecast, at most, as a multiple of the highest interval


class ReplicaCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """0: not known."""

    prefill_rate: float = 0.0  # uncached prompt tokens per second, measured
    decode_rate: float = 0.0  # output tokens per second within the ITL target, measured
    kv_tokens: int = 0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: WorkerRole = "both"
    state: ReplicaState = "running"
    since_s: float = 0.0  # when it became that
    gpu: str = ""  # kind of its GPUs
    cost: float = 1.0  # per second: its number of GPUs, or their price
    capacity: ReplicaCapacity = ReplicaCapacity()
    in_flight: int = 0  # requests
    drain_s: float = 0.0  # that it would take to finish them, or to move them elsewhere

    @property
    def is_active(self) -> bool:
        return self.state != "draining"


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that can be started. The capacity is used until one of this kind has measured its own."""

    gpu: str = ""
    n_free: int
    cost: float = 1.0
    capacity: ReplicaCapacity = ReplicaCapacity()


class ArrivalInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals of one interval, of 10 s for instance."""

    seconds: float
    uncached_tokens: int = 0  # of prompts
    output_tokens: int = 0
    kv_tokens: int = 0  # in use, at the most


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    prefill_rate: float = 0.0  # uncached prompt tokens per second
    decode_rate: float = 0.0  # output tokens per second
    kv_tokens: float = 0.0  # in use

    def highest(self, other: "Demand") -> "Demand":
        return Demand(
            prefill_rate=max(self.prefill_rate, other.prefill_rate),
            decode_rate=max(self.decode_rate, other.decode_rate),
            kv_tokens=max(self.kv_tokens, other.kv_tokens),
        )

    def lowest(self, other: "Demand") -> "Demand":
        return Demand(
            prefill_rate=min(self.prefill_rate, other.prefill_rate),
            decode_rate=min(self.decode_rate, other.decode_rate),
            kv_tokens=min(self.kv_tokens, other.kv_tokens),
        )


def load_of(role: WorkerRole, capacities: Sequence[ReplicaCapacity], demand: Demand) -> float:
    """The part of what replicas of this role have that the demand takes; above 1: they are too few.

    A replica for both prefill and decode shares its time between them. What no replica knows of itself is not judged.
    """
    busy = 0.0
    if role != "decode":
        busy += _share(demand.prefill_rate, [each.prefill_rate for each in capacities])
    if role != "prefill":
        busy += _share(demand.decode_rate, [each.decode_rate for each in capacities])
        busy = max(busy, _share(demand.kv_tokens, [each.kv_tokens * KV_TARGET for each in capacities]))
    return busy


def _share(wanted: float, parts: Sequence[float]) -> float:
    if wanted <= 0:
        return 0.0
    if not parts:
        return math.inf
    total = math.fsum(parts)
    return wanted / total if total > 0 else 0.0


def forecast(history: Sequence[ArrivalInterval], ahead_s: float) -> Demand:
    """Expected `ahead_s` after the end of the history, oldest interval first, with its bursts."""
    seconds = [each.seconds for each in history]
    return Demand(
        prefill_rate=_extrapolate([each.uncached_tokens / each.seconds for each in history], seconds, ahead_s),
        decode_rate=_extrapolate([each.output_tokens / each.seconds for each in history], seconds, ahead_s),
        kv_tokens=_extrapolate([float(each.kv_tokens) for each in history], seconds, ahead_s),
    )


def _extrapolate(values: Sequence[float], seconds: Sequence[float], ahead_s: float) -> float:
    """A line through the values by least squares, and `BURSTS` times how far they scatter about it. Its slope counts
    beyond its standard error: noise is no trend. A rising load is followed ahead, a falling one to where it is."""
    n = len(values)
    if not n:
        return 0.0
    total_s = math.fsum(seconds)
    mean = math.fsum(value * each for value, each in zip(values, seconds)) / total_s
    if n < MIN_TREND_INTERVALS:
        return mean
    ends = list(accumulate(seconds))
    centers = [end - each / 2 for end, each in zip(ends, seconds)]
    center, middle = math.fsum(centers) / n, math.fsum(values) / n
    spread = math.fsum((at - center) ** 2 for at in centers)
    slope = math.fsum((at - center) * (value - middle) for at, value in zip(centers, values)) / spread
    residual = math.fsum((value - middle - slope * (at - center)) ** 2 for at, value in zip(centers, values))
    scatter = math.sqrt(residual / (n - 2))
    error = scatter / math.sqrt(spread)
    change = max(0.0, slope - error) * (total_s + ahead_s - center) + min(0.0, slope + error) * (total_s - center)
    return max(0.0, min(middle + change + BURSTS * scatter, MAX_TREND * max(values)))


def expected(demand: Demand) -> Demand:
    """Return the demand of a forecast, with room for bursts; KV has its own room in `KV_TARGET`."""
    return msgspec.structs.replace(
        demand, prefill_rate=demand.prefill_rate / RATE_TARGET, decode_rate=demand.decode_rate / RATE_TARGET
    )


def backlog_at(queued_tokens: int, arrival_rate: float, ahead_s: float, rates: Iterable[tuple[float, float]]) -> float:
    """Uncached tokens that are queued in `ahead_s`. `rates`: (prefill rate, seconds until it is there) per replica."""
    done = math.fsum(rate * max(0.0, ahead_s - ready_s) for rate, ready_s in rates)
    return max(0.0, queued_tokens + arrival_rate * ahead_s - done)


class Capacities:
    """Capacities of replicas and offers: measured by the replica itself, or by others of its kind, or else as
    offered."""

    def __init__(self, replicas: Sequence[Replica], offers: Sequence[NodeOffer]) -> None:
        kinds = {each.gpu for each in replicas} | {each.gpu for each in offers}
        everything = [each.capacity for each in replicas]
        offered = [each.capacity for each in offers]
        self._of_kind = {
            gpu: _first_known(
                _mean([each.capacity for each in replicas if each.gpu == gpu]),
                _mean([each.capacity for each in offers if each.gpu == gpu]),
                _mean(everything),
                _mean(offered),
            )
            for gpu in kinds
        }

    def of(self, replica: Replica) -> ReplicaCapacity:
        return _first_known(replica.capacity, self._of_kind[replica.gpu])


def _mean(capacities: Sequence[ReplicaCapacity]) -> ReplicaCapacity:
    return ReplicaCapacity(
        prefill_rate=_mean_known([each.prefill_rate for each in capacities]),
        decode_rate=_mean_known([each.decode_rate for each in capacities]),
        kv_tokens=int(_mean_known([each.kv_tokens for each in capacities])),
    )


def _mean_known(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return math.fsum(known) / len(known) if known else 0.0


def _first_known(*candidates: ReplicaCapacity) -> ReplicaCapacity:
    return ReplicaCapacity(
        prefill_rate=next((each.prefill_rate for each in candidates if each.prefill_rate > 0), 0.0),
        decode_rate=next((each.decode_rate for each in candidates if each.decode_rate > 0), 0.0),
        kv_tokens=next((each.kv_tokens for each in candidates if each.kv_tokens > 0), 0),
    )
