"""How fast prompts are computed here, measured; the balancer weighs waiting against moving with it."""

import time

from emberline.engine.plan import StepPlan

LEAST_TOKENS = 64  # of prompts in a step: fewer say nothing of the rate
_GAIN = 0.2


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
        self.tokens_per_s = known + _GAIN * (measured - known)
