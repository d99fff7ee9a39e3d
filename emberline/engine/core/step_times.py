"""Measured durations of steps: the prefill rate, the share of time in which the device computes, and a cost model.

A load report tells all three. They are what admission control, the cluster's planner and `emberline tune` rest on.
"""

import time
from collections import deque
from collections.abc import Callable
from math import isfinite

import numpy as np

from emberline.engine.core.plan import START, StepPlan
from emberline.protocol.frames import StepCost

MIN_RATED_TOKENS = 64  # of prompts in a step: fewer say nothing about the prefill rate
MAX_HOST_S = 0.01  # between two steps; more means that there was nothing to do
WINDOW_S = 5.0  # over which utilisation is measured
_MARK_S = 0.1  # between two marks of that window
_RATE_GAIN = 0.2
_FIT_EVERY = 8  # steps that only decode differ little: the fit takes one in so many
_SOLVE_EVERY = 64  # measurements between two solutions of the fit
_DECAY = 0.9995  # weight of earlier measurements, with every new one
_OUTLIER = 3.0  # times the expected duration: a kernel was compiled, or the machine was busy with something else
_UNITS = np.array([1.0, 1.0, 1e3, 1.0, 1e6])  # of the terms of a step, so that sums of squares are of similar size


class DeviceTime:
    """Seconds in which the device has computed, in all and in steps of jobs alone, and their share of the last ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0  # since the engine's start
        self._jobs_s = 0.0  # of them, in steps that computed jobs alone
        self._clock = clock
        self._marks = deque([(clock(), 0.0, 0.0)])
        self._shares = 0.0, 0.0

    def add(self, seconds: float, jobs_alone: bool = False) -> None:
        """Count a step that has ended now."""
        self.busy_s += seconds
        if jobs_alone:
            self._jobs_s += seconds

    def shares(self) -> tuple[float, float]:
        """Shares of the last seconds in which the device computed, and computed jobs alone; 0 to 1, in hundredths."""
        marks, now_s = self._marks, self._clock()
        last_s, busy_s, _ = marks[-1]
        if now_s - last_s < _MARK_S:
            return self._shares
        if len(marks) > 1 or busy_s != self.busy_s:  # else it was idle all the time
            marks.append((now_s, self.busy_s, self._jobs_s))
        while len(marks) > 1 and marks[1][0] <= now_s - WINDOW_S:
            marks.popleft()
        from_s, busy_s, jobs_s = marks[0]
        span_s = max(now_s - from_s, _MARK_S)
        busy, jobs = (self.busy_s - busy_s) / span_s, (self._jobs_s - jobs_s) / span_s
        self._shares = round(min(1.0, busy), 2), round(min(1.0, jobs), 2)
        return self._shares


class StepFit:
    """Cost of a step by what it computes: least squares of relative errors over the steps that were measured."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None  # None: too few steps yet
        self._n = 0
        self._products = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self._error = 0.0  # mean relative error of the last predictions

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        """Take in one step: 1, sequences that decode, their context, prompt tokens, and tokens × tokens before."""
        if self.cost is not None:
            expected_s = self.cost.seconds(*terms[1:])
            if seconds > _OUTLIER * expected_s:
                return
            self._error += 0.02 * (abs(expected_s / seconds - 1) - self._error)
        scaled = np.array(terms) / _UNITS / seconds
        self._products *= _DECAY
        self._products += np.outer(scaled, scaled)
        self._sums *= _DECAY
        self._sums += scaled
        self._n += 1
        if self._n % _SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Solve for coefficients of which none is negative; terms that no step had stay 0."""
        scale = np.sqrt(np.diag(self._products))
        kept = [term for term in range(5) if scale[term] > 0]
        found = np.zeros(5)
        while kept:
            part = self._products[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
            solved, *_ = np.linalg.lstsq(part, self._sums[kept] / scale[kept], rcond=1e-9)
            if (solved >= 0).all():
                found[kept] = solved / scale[kept]
                break
            kept.pop(int(np.argmin(solved)))
        values = [float(f"{value:.4g}") for value in found / _UNITS]
        if all(map(isfinite, values)) and sum(values) > 0:
            step_s, row_s, context_s, token_s, pair_s = values
            self.cost = StepCost(step_s, row_s, context_s, token_s, pair_s, self._n, round(self._error, 3))


class StepTimes:
    """Durations of the steps of one engine."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of prompts; 0: not known yet
        self.device = DeviceTime()
        self.fit = StepFit()
        self._small_s = 0.0  # duration of a step that computes few prompt tokens, or none; 0: not known yet
        self._launched: dict[int, tuple[float, bool]] = {}  # by the number of a plan in flight: when; jobs alone
        self._done_s = 0.0

    def launched(self, plan: StepPlan, jobs_alone: bool = False) -> None:
        """Note that a plan is launched now. jobs_alone: all its rows are of jobs."""
        self._launched[plan.number] = time.perf_counter(), jobs_alone

    def forget(self, plan: StepPlan) -> None:
        """Leave out a plan that has failed."""
        self._launched.pop(plan.number, None)

    def done(self, plan: StepPlan) -> float:
        """Measure a plan whose result has come. The device begins a plan when the previous one is done.

        Returns the seconds since then, including those that the device waited for the host, if they are few.
        """
        now_s = time.perf_counter()
        (launched_s, jobs_alone), done_s = self._launched.pop(plan.number, (now_s, False)), self._done_s
        began_s = max(launched_s, done_s)
        self._done_s = now_s
        took_s = now_s - began_s
        if took_s <= 0:
            return 0.0
        self.device.add(took_s, jobs_alone)
        n_tokens = 0
        if plan.n_tokens - plan.n_drafts > plan.n_rows:  # it does not only decode
            n_tokens = sum(row.end - row.start for row in plan.others if row.end - row.start > 1)
        if n_tokens >= MIN_RATED_TOKENS:
            self.tokens_per_s = smoothed(self.tokens_per_s, n_tokens / took_s)
        else:
            self._small_s = smoothed(self._small_s, took_s)
        if n_tokens or plan.number % _FIT_EVERY == 0:
            self.fit.add(_terms(plan), took_s)
        return now_s - max(done_s, launched_s - MAX_HOST_S)

    def predicted_s(self, plan: StepPlan) -> float:
        """Expected duration of a step that is about to be launched; 0 if nothing was measured yet.

        Until a prompt was measured, each of its tokens counts as much as a small step, which is too much.
        """
        n_prompt = plan.n_tokens - plan.n_drafts - plan.n_rows
        if not self.tokens_per_s:
            return self._small_s * (plan.n_tokens if n_prompt else 1)
        if not n_prompt and self._small_s:
            return self._small_s
        return self._small_s + plan.n_tokens / self.tokens_per_s


def _terms(plan: StepPlan) -> tuple[float, ...]:
    """Return the terms of a step's duration: 1, sequences that decode, their context, tokens of chunks, tokens × tokens
    before them."""
    n_rows, context, n_tokens, pairs = len(plan.columns), int(plan.columns.cells[START].sum()), 0, 0.0
    for row in plan.others:
        n = row.stop - row.start
        if n == 1:
            n_rows += 1
            context += row.start
        else:
            n_tokens += n
            pairs += n * (row.start + n / 2)
    return 1.0, float(n_rows), float(context), float(n_tokens), pairs


def smoothed(known: float, measured: float) -> float:
    """Moving average after one more measurement; `known` is 0 before the first."""
    return known + _RATE_GAIN * (measured - known) if known else measured
