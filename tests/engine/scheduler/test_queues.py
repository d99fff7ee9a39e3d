"""The batch class: it pauses for prompts of better classes, its prefill is limited in time, and it never starves."""

import pytest

from emberline.engine.scheduler import queues
from emberline.engine.scheduler.prefill_policy import BatchTimeLimit, StepWork
from emberline.engine.scheduler.queues import BATCH_PREFILL_S, MAX_PAUSED_STEPS
from emberline.engine.step_loop import StepLoop
from emberline.protocol.request import Priority
from tests.engine.fakes import FakeRunner, request, scheduler_of
from tests.engine.scheduler.test_scheduler import A, B, Bench, sizes


def ids(bench, plan):
    return [
        bench.scheduler._by_number[row.number].id if row.number in bench.scheduler._by_number else "?"
        for row in plan.rows
    ]


def test_batch_class_decodes_pause_for_prompts_of_a_better_class():
    bench = Bench(max_running=4, token_budget=32, n_blocks=64)
    bench.submit("batch", A[:8], max_tokens=40, priority=Priority.BATCH, ignore_eos=True)
    bench.step()
    bench.step()
    bench.submit("interactive", B[:80], max_tokens=4, ignore_eos=True)
    plans = [bench.step() for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[32], [32], [16], [1, 1]]
    assert set(ids(bench, plans[3])) == {"interactive", "batch"}
    bench.finish()
    assert len(bench.tokens("batch")) == 40


def test_pausing_does_not_change_tokens():
    alone = Bench()
    alone.submit("batch", A[:8], max_tokens=20, priority=Priority.BATCH, ignore_eos=True)
    mixed = Bench()
    mixed.submit("batch", A[:8], max_tokens=20, priority=Priority.BATCH, ignore_eos=True)
    for n in range(5):
        mixed.step()
        mixed.submit(f"interactive {n}", B[: 30 + n], max_tokens=3, ignore_eos=True)
    assert mixed.finish().tokens("batch") == alone.finish().tokens("batch")


def test_pausing_is_bounded():
    bench = Bench(max_running=4, token_budget=32, n_blocks=400)
    bench.submit("batch", A[:8], max_tokens=3, priority=Priority.BATCH, ignore_eos=True)
    bench.step()
    n = 0
    for _ in range(3 * (MAX_PAUSED_STEPS + 2)):
        if sum(seq.effective_class != Priority.BATCH for seq in bench.scheduler._by_number.values()) < 2:
            bench.submit(f"interactive {n}", [(n * 7 + i) % 7 for i in range(150)], max_tokens=1, ignore_eos=True)
            n += 1
        bench.step()
    assert bench.deltas["batch"][-1].finish == "length"


def test_a_starved_batch_class_sequence_is_promoted(monkeypatch):
    monkeypatch.setattr(queues, "STARVED_STEPS", 20)
    bench = Bench(max_running=1, n_blocks=64)
    for name in ("batch 1", "batch 2"):
        bench.submit(name, A[:8], max_tokens=4, priority=Priority.BATCH, ignore_eos=True)
    n = 0
    order = []
    for _ in range(200):
        waiting = sum(seq.request.priority != Priority.BATCH for seq in bench.scheduler._by_number.values())
        for _ in range(3 - waiting):
            bench.submit(f"interactive {n}", B[:8], max_tokens=5, ignore_eos=True)
            n += 1
        bench.step()
        assert sum(seq.effective_class != seq.request.priority for seq in bench.scheduler._by_number.values()) <= 1
        order += [name for name, deltas in bench.deltas.items() if deltas[-1].finish and name not in order]
    assert {"batch 1", "batch 2"} <= set(order)
    assert order.index("batch 1") < order.index("batch 2")
    assert order.index("interactive 1") < order.index("batch 1")


@pytest.mark.parametrize(
    ("places", "classes", "told"),
    [
        (1, (Priority.DEFAULT, Priority.FLEX, Priority.BATCH, Priority.BATCH), (1, 3, 2, 0)),
        (3, (Priority.BATCH, Priority.FLEX, Priority.BATCH, Priority.BATCH), (3, 1, 1, 2)),
    ],
)
def test_the_load_counts_the_batch_class_separately(places, classes, told):
    bench = Bench(max_running=places)
    for n, priority in enumerate(classes):
        bench.submit(f"r{n}", A[:8], max_tokens=9, priority=priority, ignore_eos=True)
    bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.waiting_batch, load.running_batch) == told


def limited(seconds_per_token: float):
    prefill = BatchTimeLimit()
    for _ in range(20):
        prefill.observe(StepWork(0, 200, 0), 200 * seconds_per_token)
    scheduler, cache = scheduler_of(token_budget=512, n_blocks=128, context_len=1024)
    scheduler._planner._prefill = prefill
    scheduler._batch_class._interactive_step = 0  # an interactive request has just ended
    return scheduler, StepLoop(scheduler, FakeRunner(cache))


def test_batch_class_prefill_is_limited_in_time():
    scheduler, loop = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler.submit(request("batch", [n % 7 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    plan_len = next(iter(scheduler._by_number.values())).n_computed
    assert 190 <= plan_len <= 210


def test_batch_class_prefill_is_unlimited_without_recent_interactive_requests():
    scheduler, loop = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler._batch_class._interactive_step = -queues.QUIET_STEPS
    scheduler.submit(request("batch", [n % 7 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    assert next(iter(scheduler._by_number.values())).n_computed == 500


def test_interactive_prefill_is_not_limited_in_time():
    scheduler, loop = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler.submit(request("interactive", [n % 7 for n in range(500)]), 0.0)
    scheduler.submit(request("batch", [n % 5 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    computed = {seq.id: seq.n_computed for seq in scheduler._by_number.values()}
    assert computed == {"interactive": 500, "batch": 0}


def test_batch_class_prefill_progresses_on_a_slow_machine():
    scheduler, loop = limited(seconds_per_token=1.0)
    scheduler.submit(request("batch", [n % 7 for n in range(200)], priority=Priority.BATCH, max_tokens=1), 0.0)
    for _ in range(2):
        loop.step(0.0)
    assert not loop.busy
