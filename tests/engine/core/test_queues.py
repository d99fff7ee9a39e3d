"""The batch class: it pauses for prompts of better classes, its prefill is limited in time, and it never starves."""

import pytest

from emberline.engine.core.limits import WorkLimits
from emberline.engine.core.prefill_policy import BatchTimeLimit, StepWork
from emberline.engine.core.queues import BATCH_DECODE_S, BATCH_PREFILL_S, QUIET_S
from emberline.protocol.request import Priority
from tests.engine.core.test_scheduler import A, B, Bench, sizes
from tests.engine.fakes import loop_of, request


def ids(bench, plan):
    by_number = {seq.number: seq.id for seq in bench.scheduler.snapshot()}
    return [by_number.get(row.number, "?") for row in plan.rows]


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
    for _ in range(3 * (WorkLimits().paused_steps + 2)):
        if sum(seq.effective_class != Priority.BATCH for seq in bench.scheduler.snapshot()) < 2:
            bench.submit(f"interactive {n}", [(n * 7 + i) % 7 for i in range(150)], max_tokens=1, ignore_eos=True)
            n += 1
        bench.step()
    assert bench.deltas["batch"][-1].finish == "length"


def test_a_starved_batch_class_sequence_is_promoted():
    bench = Bench(max_running=1, n_blocks=64, starved_steps=20)
    for name in ("batch 1", "batch 2"):
        bench.submit(name, A[:8], max_tokens=4, priority=Priority.BATCH, ignore_eos=True)
    n = 0
    order = []
    for _ in range(200):
        waiting = sum(seq.requested_class != Priority.BATCH for seq in bench.scheduler.snapshot())
        for _ in range(3 - waiting):
            bench.submit(f"interactive {n}", B[:8], max_tokens=5, ignore_eos=True)
            n += 1
        bench.step()
        assert sum(seq.effective_class != seq.requested_class for seq in bench.scheduler.snapshot()) <= 1
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


def limited(seconds_per_token: float, max_running: int = 4):
    prefill = BatchTimeLimit()
    for _ in range(20):
        prefill.observe(StepWork(0, 200, 0), 200 * seconds_per_token)
    setup = {"token_budget": 512, "n_blocks": 256, "context_len": 1024, "max_running": max_running}
    loop = loop_of(prefill=prefill, **setup)
    scheduler = loop.scheduler
    scheduler.submit(request("earlier", [1, 2, 3], max_tokens=1), 0.0)
    while loop.busy:
        loop.step(0.0)  # an interactive request has just ended
    return scheduler, loop, prefill


def computed(scheduler):
    return {seq.id: seq.n_computed for seq in scheduler.snapshot()}


def test_batch_class_prefill_is_limited_in_time():
    scheduler, loop, _ = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler.submit(request("batch", [n % 7 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    assert 190 <= computed(scheduler)["batch"] <= 210


def test_batch_class_prefill_is_unlimited_without_recent_interactive_requests():
    scheduler, loop, _ = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler.submit(request("batch", [n % 7 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(QUIET_S)
    assert computed(scheduler) == {"batch": 500}


def test_batch_class_prefill_is_limited_as_long_as_an_interactive_request_runs():
    scheduler, loop, _ = limited(seconds_per_token=BATCH_PREFILL_S / 50)
    scheduler.submit(request("long", [1, 2, 3], max_tokens=400, ignore_eos=True), 0.0)
    for step in range(20):
        loop.step(float(step))
    scheduler.submit(request("batch", [n % 7 for n in range(500)], priority=Priority.BATCH), 20.0)
    loop.step(20.0)
    assert 40 <= computed(scheduler)["batch"] <= 60


def test_batch_class_replies_take_turns_beside_an_interactive_request():
    scheduler, loop, prefill = limited(seconds_per_token=1e-6, max_running=12)
    for n_decodes in (1, 2, 4, 8):
        for _ in range(50):  # every sequence takes as long as a quarter of what they may take together
            prefill.observe(StepWork(n_decodes), 0.004 + n_decodes * BATCH_DECODE_S / 4)
    for n in range(8):
        scheduler.submit(
            request(f"b{n}", [n % 6, 5, n // 6], priority=Priority.BATCH, max_tokens=200, ignore_eos=True), 0.0
        )
    loop.step(QUIET_S)
    assert rows_of(scheduler, loop, QUIET_S) == 8  # no interactive request
    scheduler.submit(request("live", [1, 2, 3], max_tokens=100, ignore_eos=True), 10.0)
    loop.step(10.0)  # its prompt
    before = computed(scheduler)
    n_steps = 24
    assert {rows_of(scheduler, loop, 10.0) for _ in range(n_steps)} == {4}  # three of them, and the live one
    gained = {id: n - before[id] for id, n in computed(scheduler).items()}
    assert gained.pop("live") == n_steps
    assert min(gained.values()) == n_steps // 3  # each at least in every third step


def rows_of(scheduler, loop, now_s: float) -> int:
    before = sum(computed(scheduler).values())
    loop.step(now_s)
    return sum(computed(scheduler).values()) - before


def test_interactive_prefill_is_not_limited_in_time():
    scheduler, loop, _ = limited(seconds_per_token=BATCH_PREFILL_S / 200)
    scheduler.submit(request("interactive", [n % 7 for n in range(500)]), 0.0)
    scheduler.submit(request("batch", [n % 5 for n in range(500)], priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    assert computed(scheduler) == {"interactive": 500, "batch": 0}


def test_batch_class_prefill_progresses_on_a_slow_machine():
    scheduler, loop, _ = limited(seconds_per_token=1.0)
    scheduler.submit(request("batch", [n % 7 for n in range(200)], priority=Priority.BATCH, max_tokens=1), 0.0)
    for _ in range(13):
        assert loop.busy
        loop.step(0.0)
    assert not loop.busy  # 16 tokens a step: no interactive request waits for more than these


def test_stop_tokens_are_those_of_the_running_sequences():
    """A union that kept those of ended requests would cost every later step more."""
    bench, seen = Bench(max_running=4), set()
    bench.submit("long", A[:8], max_tokens=60, ignore_eos=True)
    for token_id in range(2, 7):
        bench.submit(f"stops at {token_id}", A[:8], max_tokens=4, ignore_eos=True, stop_ids=(token_id,))
        for _ in range(3):
            bench.step()
            queues = bench.scheduler.queues
            assert set(queues.stop_ids) == {stop_id for seq in queues.running for stop_id in seq.stop_ids}
            seen |= set(queues.stop_ids)
    assert seen


def test_the_number_of_steps_may_outgrow_32_bits():
    bench = Bench()
    bench.cache.fence.planned = bench.cache.fence.completed = (1 << 31) - 3
    bench.submit("a", A[:8], max_tokens=8, ignore_eos=True)
    assert len(bench.finish().tokens("a")) == 8
