"""The engine worker, which also writes to its log how many steps are in flight whenever one is launched: as rank 0 of a
pipeline, each with other sequences that sample."""

import sys
from collections import deque

from emberline.engine.core.plan import Sampled, StepPlan
from emberline.engine.ranks.rank_runner import LeaderRunner, RankStep
from emberline.engine.worker.main import main

IN_FLIGHT = "steps in flight: "

_in_flight: deque[set[int]] = deque()  # sequences that sample
_launch, _result = LeaderRunner.launch, RankStep.result


def launch(self: LeaderRunner, plan: StepPlan) -> RankStep:
    sampling = {row.number for row in plan.rows if row.samples}
    assert not any(sampling & other for other in _in_flight), "a sequence is in two micro-batches"
    step = _launch(self, plan)
    _in_flight.append(sampling)
    print(f"{IN_FLIGHT}{len(_in_flight)}", file=sys.stderr, flush=True)
    return step


def result(self: RankStep) -> "list[Sampled]":
    found = list(_result(self))
    _in_flight.popleft()
    return found


if __name__ == "__main__":
    LeaderRunner.launch, RankStep.result = launch, result  # type: ignore[method-assign]
    raise SystemExit(main())
