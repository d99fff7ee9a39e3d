"""Load reports of upstream servers, and what follows from them: how much a server is given, whether it is stuck."""

import math
import re
from typing import Any

import msgspec

from emberline.balancer.stall_detector import DEFAULTS, STALL_STEPS
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad

# --- reports ----------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{([^}\n]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOST = 1 << 40


class NoLoadReport(Exception):
    """The server's answer has no load report in it; the message says what is missing."""


def vllm_load(metrics: str) -> EngineLoad:
    """The load report from vLLM's /metrics; several engines behind one port are added up."""
    sums: dict[str, float] = {}
    fullness: list[float] = []
    blocks = 0
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "cache_config_info":
            blocks += _blocks(dict(_LABEL.findall(labels)))
        elif name == "kv_cache_usage_perc":
            fullness.append(_number(value))
        else:
            sums[name] = sums.get(name, 0.0) + _number(value)
    if "num_requests_running" not in sums:
        raise NoLoadReport("/metrics has no vllm:num_requests_running")
    used = max((share for share in fullness if 0 <= share <= 1), default=0.0)
    return EngineLoad(
        running=_count(sums["num_requests_running"]),
        waiting=_count(sums.get("num_requests_waiting", 0)),
        kv_used_blocks=int(used * blocks),
        kv_total_blocks=blocks,
        prompt_tokens=_count(sums.get("prompt_tokens_total", 0)),
        cached_tokens=_count(sums.get("prefix_cache_hits_total", 0)),
        output_tokens=_count(sums.get("generation_tokens_total", 0)),
        preemptions=_count(sums.get("num_preemptions_total", 0)),
        steps=_count(sums.get("iteration_tokens_total_count", 0)),
    )


def sglang_load(answer: Any) -> EngineLoad:
    """The load report from SGLang's /v1/loads: one entry per data-parallel rank, added up."""
    loads = answer.get("loads", [answer]) if isinstance(answer, dict) else answer
    ranks = loads if isinstance(loads, list) else ()
    ranks = [rank for rank in ranks if isinstance(rank, dict) and "num_running_reqs" in rank]
    if not ranks:
        raise NoLoadReport("/v1/loads has no num_running_reqs")

    def total(name: str) -> int:
        return sum(_count(rank.get(name)) for rank in ranks)

    return EngineLoad(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        waiting_tokens=total("num_waiting_uncached_tokens"),
        kv_used_blocks=total("num_used_tokens") // BLOCK_TOKENS,
        kv_total_blocks=total("max_total_num_tokens") // BLOCK_TOKENS,
    )


def _blocks(labels: dict[str, str]) -> int:
    n_blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return _count(_number(n_blocks)) * _count(_number(size)) // BLOCK_TOKENS


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _count(value: Any) -> int:
    """NaN, negative and absurd numbers count as 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return int(value) if 0 <= value < _MOST else 0  # no NaN is


# --- capacity ---------------------------------------------------------------------------------------------------------

FIRST_LIMIT = 256  # sequences: vLLM's own default
MAX_LIMIT = 4096
_GROWTH = 1.25


class ConcurrencyLimit:
    """Sequences that a server gets at once where no limit is configured, adapted to its load reports.

    A server whose own queue does not empty runs all that it can: it gets no more than that, so that further requests
    wait in the admission queue, where they can still go elsewhere. One that runs all it is given without a queue gets
    more. A server without load reports stays at the first limit.
    """

    def __init__(self) -> None:
        self.sequences = FIRST_LIMIT
        self._had_queue = False  # at the last report: prompts that just arrived are waiting too

    def observe(self, load: EngineLoad) -> bool:
        """Follow the latest load report. Returns True if the limit has changed."""
        before = self.sequences
        if load.waiting and self._had_queue:
            self.sequences = min(before, max(1, load.running))
        elif not load.waiting and load.running > 0.9 * before:
            self.sequences = min(MAX_LIMIT, math.ceil(before * _GROWTH))
        self._had_queue = load.waiting > 0
        return self.sequences != before


# --- progress ---------------------------------------------------------------------------------------------------------


class ProbeTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of health checks of an upstream server, in seconds. Those of progress are as for our own engines, except
    for the time in which a canary is answered."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    canary_s: float = 5.0  # for one token
    min_patience_s: float = 2 * DEFAULTS.min_stall_s
    first_patience_s: float = DEFAULTS.first_step_s
    max_patience_s: float = 300.0
    suspect_share: float = 0.5  # of its patience, after which a generation is tried


class ProgressCheck:
    """Tells whether a server that has work computes anything. Tokens are progress, not answered probes: the API of a
    server answers while its engine hangs. Where a report has no totals (SGLang's), any change of it is progress."""

    def __init__(self, timings: ProbeTimings = ProbeTimings()) -> None:  # noqa: B008  # immutable
        self._timings = timings
        self._load = EngineLoad()
        self._changed_s = -math.inf
        self._step_s: float | None = None

    def observe(self, load: EngineLoad, now_s: float) -> None:
        before, self._load = self._load, load
        if (load.running or load.waiting) and _computed(load) == _computed(before):
            return
        if load.steps > before.steps and before.running and load.running:
            self._step_s = (now_s - self._changed_s) / (load.steps - before.steps)
        self._changed_s = now_s

    def progressed(self, now_s: float) -> None:
        """Record that the server has computed a token, whatever its report says."""
        self._changed_s = now_s

    @property
    def patience_s(self) -> float:
        if self._step_s is None:
            return self._timings.first_patience_s
        patience_s = max(self._timings.min_patience_s, STALL_STEPS * self._step_s)
        return min(self._timings.max_patience_s, patience_s)

    def is_suspect(self, now_s: float) -> bool:
        """Time to try a generation."""
        return now_s - self._changed_s > self.patience_s * self._timings.suspect_share

    def is_stuck(self, now_s: float) -> bool:
        return now_s - self._changed_s > self.patience_s


def _computed(load: EngineLoad) -> object:
    """Differs between two reports when something was computed between them."""
    totals = (load.steps, load.prompt_tokens, load.output_tokens)
    return totals if any(totals) else load
