"""What a simulation showed, and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp
from typing import Any

from emberline.simulator.job import Job
from emberline.simulator.plan import Plan

BINS = 50  # of the logarithm of an interval: 2 % each
SLO_TTFT_S, SLO_TOKEN_S = 2.0, 0.025


@dataclass(slots=True, kw_only=True)
class Outcome:
    plan: Plan
    trace: str
    jobs: list[Job]  # asked while it was measured
    busy_s: list[float]  # by worker, while it was measured; so the next two
    prompt_tokens: list[int]
    output_tokens: list[int]
    preemptions: int
    refused: int
    transferred_bytes: int
    intervals: dict[int, int]
    now_s: float

    def first_token_s(self) -> list[float]:
        """Of every job, in order; one that still waits has waited so long already."""
        return [(job.first_s if job.first_s >= 0 else self.now_s) - job.asked_s for job in self.jobs]

    def least_first_token_s(self) -> list[float]:
        """What no router could better: nobody waits, and only what nobody has asked before is computed."""
        model = self.plan.model
        return [model.prefill_s(job.n_prompt - job.known_tokens, job.known_tokens) for job in self.jobs]

    def time_per_token_s(self) -> list[float]:
        return [job.time_per_token_s for job in self.jobs if job.ended_s >= 0 and job.n_output > 1]

    @property
    def busy(self) -> float:
        """Mean share of the time in which a worker computed."""
        return sum(self.busy_s) / len(self.busy_s) / self.plan.measured_s

    @property
    def hit_ratio(self) -> float:
        return _share(sum(job.cached_tokens for job in self.jobs), sum(job.n_prompt for job in self._begun()))

    @property
    def ideal_hit_ratio(self) -> float:
        jobs = self._begun()
        return _share(sum(job.known_tokens for job in jobs), sum(job.n_prompt for job in jobs))

    def _begun(self) -> list[Job]:
        return [job for job in self.jobs if job.first_s >= 0]

    def fairness(self) -> float:
        """Jain's index over tenants of their mean time to a first token: 1 when all wait alike."""
        waits: dict[int, list[float]] = {}
        for job, wait_s in zip(self.jobs, self.first_token_s()):
            waits.setdefault(job.tenant, []).append(wait_s)
        means = [sum(values) / len(values) for values in waits.values()]
        return _share(sum(means) ** 2, len(means) * sum(mean * mean for mean in means))

    def within_slo(self) -> float:
        """The share of jobs with a first token and a pace as promised."""
        good = sum(
            job.first_s >= 0
            and job.first_s - job.asked_s <= SLO_TTFT_S
            and job.ended_s >= 0
            and job.time_per_token_s <= SLO_TOKEN_S
            for job in self.jobs
        )
        return _share(good, len(self.jobs))

    def figures(self) -> dict[str, Any]:
        ttft, pace = sorted(self.first_token_s()), sorted(self.time_per_token_s())
        mean_busy = sum(self.busy_s) / len(self.busy_s)
        return {
            "trace": self.trace,
            "policy": self.plan.policy,
            "workers": len(self.busy_s),
            "load": round(self.plan.load, 6),
            "requests": len(self.jobs),
            "unfinished": sum(job.ended_s < 0 for job in self.jobs),
            "requests_per_s": round(len(self.jobs) / self.plan.measured_s, 4),
            **{f"ttft_p{q}_s": round(percentile(ttft, q), 4) for q in (50, 90, 99)},
            "ttft_least_p90_s": round(percentile(sorted(self.least_first_token_s()), 90), 4),
            **{f"token_p{q}_ms": round(1e3 * percentile(pace, q), 3) for q in (50, 90, 99)},
            **{f"interval_p{q}_ms": round(1e3 * self._interval(q), 3) for q in (50, 90, 99)},
            "hit_ratio": round(self.hit_ratio, 4),
            "ideal_hit_ratio": round(self.ideal_hit_ratio, 4),
            "busy": round(self.busy, 4),
            "busiest_over_mean": round(max(self.busy_s) / mean_busy, 4) if mean_busy else 0.0,
            "fairness": round(self.fairness(), 4),
            "within_slo": round(self.within_slo(), 4),
            "prompt_tokens_per_s": round(sum(self.prompt_tokens) / self.plan.measured_s, 1),
            "output_tokens_per_s": round(sum(self.output_tokens) / self.plan.measured_s, 1),
            "preemptions": self.preemptions,
            "refused": self.refused,
            "transferred_gb": round(self.transferred_bytes / 1e9, 2),
        }

    def _interval(self, q: float) -> float:
        total = sum(self.intervals.values())
        seen = 0
        for place in sorted(self.intervals):
            seen += self.intervals[place]
            if seen * 100 >= q * total:
                return exp((place + 0.5) / BINS)
        return 0.0


def percentile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank, of values in order; 0 when there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(len(ordered) * q / 100) - 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
