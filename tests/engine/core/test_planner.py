"""Plans with plain rows as columns are those of the planner that makes an object for every row."""

import random

import msgspec
import pytest

from emberline.engine.core.limits import Limits, WorkLimits
from emberline.engine.core.planner import StepPlanner
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.kv.cache import KVCache
from emberline.protocol.request import ThinkingLimit
from emberline.protocol.token_ids import pack
from tests.engine.core.reference_planner import ReferencePlanner
from tests.engine.fakes import EOS, FULL, VOCAB, LateRunner, chunk_group, expected, mix, request, window_group
from tests.engine.speculation.standin import DeviceSpeculation, DraftingRunner, StandinSpeculation, output_of

LAYOUTS = [
    (FULL,),
    (FULL,),
    (window_group(24),),
    (FULL, window_group(20), window_group(37)),
    (chunk_group(32),),
    (FULL, chunk_group(24)),
]
DEPTH = 4
MAX_STEPS = 1500


class SparseSpeculation(StandinSpeculation):
    """Proposes something for about one row in `share`: those without drafts are planned beside it."""

    def __init__(self, share, oracle):
        super().__init__(oracle, wrong=3)
        self.share = share

    def draft(self, seqs):
        drafts = super().draft(seqs)
        return {number: draft for number, draft in drafts.items() if not mix(number, len(draft.seq.ids)) % self.share}


class RestingDevice(DeviceSpeculation):
    """Drafts nothing in every third step."""

    n_steps = 0

    def begin_step(self, n_running):
        self.n_steps += 1
        self.drafts = self.n_steps % 3 > 0
        return super().begin_step(n_running)


def loop_with(planner, schedule, wanted):
    """A step loop over the fake model, with this planner; `wanted`: requests by id, for drafts."""
    setup = schedule["setup"]
    cache = KVCache(setup["layouts"], [setup["n_blocks"]] * len(setup["layouts"]), chunk=setup["token_budget"])
    work = WorkLimits(starved_steps=30)
    context_len = min(setup["context_len"], cache.capacity)
    limits = Limits(context_len, VOCAB, (EOS,), setup["max_running"], setup["token_budget"], work)

    def answer(seq):
        layouts = [group.layout for group in cache.groups]
        ids, _ = expected(wanted[seq.id][0], wanted[seq.id][1].sampling, layouts, context_len)
        return ids[len(output_of(seq)) :]

    kinds = {
        "every row": lambda: StandinSpeculation(answer, wrong=3),
        "some rows": lambda: SparseSpeculation(3, answer),
        "few rows": lambda: SparseSpeculation(12, answer),
        "device": lambda: RestingDevice(DEPTH),
    }
    features = [kinds[setup["drafts"]]()] if setup["drafts"] else []
    runner = DraftingRunner(cache, 3, context_len) if setup["drafts"] == "device" else LateRunner(cache)
    pipelined = setup["micro_batches"]
    scheduler = Scheduler(cache, limits, "fake", features, micro_batches=pipelined, planner=planner)
    if not setup["compiled"]:
        scheduler.queues.rows.library = None  # as on a host without a C compiler
    return StepLoop(scheduler, runner, max(pipelined, setup["steps_in_flight"]))


def random_schedule(seed):
    """Settings of an engine, and what happens before each step: requests, aborts, a step that fails."""
    rng = random.Random(seed)
    setup = {
        "layouts": rng.choice(LAYOUTS),
        "n_blocks": rng.choice([14, 24, 80]),
        "context_len": rng.choice([60, 150]),
        "max_running": rng.choice([3, 6, 12]),
        "token_budget": rng.choice([16, 64]),
        "drafts": rng.choice(["", "", "", "every row", "some rows", "few rows", "device"]),
        "steps_in_flight": rng.choice([1, 2, 3]),
        "micro_batches": rng.choice([1, 1, 1, 1, 2]),
        "compiled": rng.random() < 0.9,
    }
    if crowded := rng.random() < 0.3:  # sequences outgrow the pool together
        setup |= {"n_blocks": 12, "context_len": 150, "max_running": 6}
    events, n_requests, n_steps = [], rng.randrange(3, 16), 4 if crowded else 30
    for n in range(n_requests):
        sampling = {"max_tokens": rng.choice([1, 4, 18, 40]), "ignore_eos": rng.random() < 0.6}
        if crowded:
            sampling = {"max_tokens": 60, "ignore_eos": True}
        if rng.random() < 0.15:
            sampling["min_tokens"] = rng.randrange(1, 6)
        if rng.random() < 0.2:
            sampling["stop_ids"] = (rng.randrange(1, VOCAB),)
        if rng.random() < 0.15:
            sampling["logprobs"] = 2
        prompt = [rng.randrange(VOCAB) for _ in range(7 if crowded else rng.choice([1, 5, 16, 33, 50]))]
        made = request(str(n), prompt, rng.choice([0, 1, 1, 1, 3]), **sampling)
        if not setup["drafts"] and rng.random() < 0.15:
            made = msgspec.structs.replace(made, thinking_limit=ThinkingLimit(rng.randrange(1, 9), (6,), pack([5, 6])))
        arrives = rng.randrange(n_steps)
        events.append((arrives, "submit", (prompt, made)))
        if rng.random() < 0.15:
            events.append((arrives + rng.randrange(1, 30), "abort", str(n)))
    if rng.random() < 0.2:
        events.append((rng.randrange(2, 30), "fail", None))
    return {"setup": setup, "events": sorted(events, key=lambda event: event[0])}


def traced(planner, schedule):
    """Everything that an engine with this planner plans and says, step by step."""
    wanted = {what[1].id: what for _, kind, what in schedule["events"] if kind == "submit"}
    loop, events, said, n_columns = loop_with(planner, schedule, wanted), list(schedule["events"]), [], 0
    for step in range(MAX_STEPS):
        while events and events[0][0] <= step:
            _, kind, what = events.pop(0)
            if kind == "submit" and len(what[0]) < loop.scheduler.limits.context_len:
                loop.submit(what[1], step)
            elif kind == "abort":
                said.append(loop.abort(what))
            elif kind == "fail":
                loop.runner.fail_next = MemoryError("out of memory")
        deltas = loop.step(float(step))
        said.append(sorted(deltas, key=lambda delta: delta.id))
        if not events and not loop.busy:
            break
    else:
        raise AssertionError("the schedule never ends")
    plans = []
    for plan in loop.runner.plans:
        n_columns += len(plan.columns)
        admitted = [(each.slot, each.request.id, each.output_ids, each.blocks) for each in plan.admissions]
        counts = plan.n_tokens, plan.n_drafts, plan.n_drafting, plan.n_awaited, plan.n_preempted, plan.n_rows
        plans.append((plan.number, admitted, counts, plan.rows))
    return plans, said, loop.scheduler.load(), n_columns


def check_schedules(seeds):
    n_columns = 0
    for seed in seeds:
        schedule = random_schedule(seed)
        plans, said, load, n_found = traced(StepPlanner, schedule)
        wanted_plans, wanted_said, wanted_load, _ = traced(ReferencePlanner, schedule)
        for found, wanted in zip(plans, wanted_plans):
            assert found == wanted, f"schedule {seed}"
        assert len(plans) == len(wanted_plans), f"schedule {seed}"
        assert said == wanted_said, f"schedule {seed}"
        assert load == wanted_load, f"schedule {seed}"
        n_columns += n_found
    assert n_columns > 20 * len(seeds), "many rows are plain"


def test_plans_are_those_of_the_reference_planner():
    check_schedules([*range(13, 19), 23, 33, 48, 260])  # the last four found faults that were made on purpose


@pytest.mark.slow
def test_plans_of_a_thousand_schedules_are_those_of_the_reference_planner():
    check_schedules(range(1000, 2000))
