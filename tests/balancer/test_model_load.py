"""What a core tells the planner of a model."""

import pytest

from emberline.balancer.model_load import ModelLoadMeter, decode_rate
from emberline.protocol.frames import EngineLoad
from emberline.protocol.scaling import STEP_S
from tests.balancer.balancing import MODEL, fleet, keys, request, send


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


def test_queued_tokens_are_those_that_no_worker_has_cached() -> None:
    balancer = fleet("both", max_running=1)
    meter = ModelLoadMeter(MODEL, balancer, Clock())
    chain = keys(("system", 4))
    first = request(chain, tokens=100)
    send(balancer, first)
    load = meter.read(0.0)
    assert (load.queued_tokens, load.held_requests, load.idle_s) == (100, 0, 0.0)
    balancer.first_token(first.id, 0.0)
    balancer.fleet.stored("e0", chain, 0.0)
    balancer.enqueue(request(chain, tokens=100), 0.0)  # the worker has room for one
    assert not balancer.dispatch(0.0)
    load = meter.read(1.0)
    assert (load.queued_tokens, load.held_requests) == (100 - 64, 0)
    assert [worker.in_flight for worker in load.workers] == [1]


def test_requests_that_wait_for_any_worker_are_held() -> None:
    balancer = fleet()
    balancer.enqueue(request(tokens=10, wait_s=60.0), 0.0)
    load = ModelLoadMeter(MODEL, balancer, Clock()).read(5.0)
    assert (load.held_requests, load.queued_tokens, load.idle_s, load.workers) == (1, 10, 0.0, ())


def test_a_model_is_idle_since_its_last_request_has_ended() -> None:
    balancer = fleet("both")
    meter = ModelLoadMeter(MODEL, balancer, Clock())
    first = request(tokens=10)
    send(balancer, first)
    assert meter.read(900.0).idle_s == 0.0, "it runs"
    balancer.ended(first.id, 901.0, "finished", 7)
    assert meter.read(902.0).idle_s == 2.0
    assert meter.read(950.0).idle_s == 50.0


def test_arrivals_are_counted_once_in_the_interval_in_which_they_came() -> None:
    balancer, clock = fleet("both", max_running=1), Clock()
    meter = ModelLoadMeter(MODEL, balancer, clock)
    meter.read(0.0)
    first, second = request(tokens=10), request(tokens=20)
    send(balancer, first)
    balancer.enqueue(second, 0.0)
    assert not balancer.dispatch(0.0)
    meter.read(0.0)
    clock.now_us = STEP_S * 1_000_000
    balancer.ended(first.id, 1.0, "finished", 7)
    assert [record.request.id for record in balancer.dispatch(1.0)] == [second.id]
    points = meter.read(1.0).arrivals
    assert [(point.number, point.requests, point.uncached_tokens) for point in points] == [(0, 2, 30), (1, 0, 0)]


def test_output_is_counted_as_workers_report_it_and_a_restart_counts_nothing() -> None:
    balancer = fleet("both")
    meter = ModelLoadMeter(MODEL, balancer, Clock())
    send(balancer, request(tokens=10))
    for total in (100, 150, 20, 25):
        balancer.fleet.report(
            "e0", EngineLoad(running=1, output_tokens=total, kv_used_blocks=2, kv_total_blocks=9), 0.0
        )
        load = meter.read(0.0)
    (point,) = load.arrivals
    assert (point.output_tokens, point.kv_tokens) == (55, 32)


def test_output_of_other_cores_is_theirs() -> None:
    balancer = fleet("both")
    meter = ModelLoadMeter(MODEL, balancer, Clock())
    send(balancer, request(tokens=10))
    for total in (0, 100):
        balancer.fleet.report("e0", EngineLoad(running=4, output_tokens=total), 0.0)
        load = meter.read(0.0)
    assert load.arrivals[-1].output_tokens == 25


def test_rates_are_measured_and_zero_before() -> None:
    balancer = fleet("both", "prefill", kv_tokens=4096)
    both, prefill = ModelLoadMeter(MODEL, balancer, Clock()).read(0.0).workers
    assert (both.prefill_rate, both.decode_rate, both.kv_tokens) == (0.0, 0.0, 4096)
    worker = balancer.fleet.workers_of(MODEL)[0]
    worker.prefill_speed.add(2.0, 1.0)
    worker.decode_speed.add(1.0, 1.0)
    both, prefill = ModelLoadMeter(MODEL, balancer, Clock()).read(0.0).workers
    assert both.prefill_rate == pytest.approx(1 / (worker.prefill_speed.scale * worker.cost.token_s), rel=1e-3)
    assert both.decode_rate > 0
    assert prefill.decode_rate == 0.0
    balancer.fleet.report("e0", EngineLoad(prefill_rate=1234.0), 0.0)
    assert ModelLoadMeter(MODEL, balancer, Clock()).read(0.0).workers[0].prefill_rate == 1234.0


def test_a_slower_worker_has_a_lower_decode_rate_and_at_least_one_sequence() -> None:
    rates = []
    for took_s in (1.0, 10.0, 1000.0):
        balancer = fleet("both", max_running=64)
        worker = balancer.fleet.workers_of(MODEL)[0]
        for _ in range(100):
            worker.decode_speed.add(took_s, 1.0)
        rates.append(decode_rate(worker))
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


def test_rates_are_at_least_what_the_device_delivers_while_it_computes() -> None:
    clock, balancer = Clock(), fleet("both")
    meter = ModelLoadMeter(MODEL, balancer, clock)
    first = EngineLoad(prefill_rate=100.0, busy_s=50.0, prompt_tokens=1000, output_tokens=500, utilisation=0.4)
    balancer.fleet.report("e0", first, 0.0)
    assert meter.read(0.0).workers[0].prefill_rate == 100.0
    clock.now_us += STEP_S * 1_000_000
    then = EngineLoad(prefill_rate=100.0, busy_s=60.0, prompt_tokens=9000, output_tokens=2500, utilisation=0.4)
    balancer.fleet.report("e0", then, 10.0)
    (worker,) = meter.read(10.0).workers
    assert (worker.prefill_rate, worker.decode_rate, worker.utilisation) == (800.0, 200.0, 0.4)
    restarted = EngineLoad(prefill_rate=100.0, busy_s=1.0, prompt_tokens=10, output_tokens=5, utilisation=0.4)
    balancer.fleet.report("e0", restarted, 20.0)
    clock.now_us += STEP_S * 1_000_000
    assert meter.read(20.0).workers[0].prefill_rate == 100.0
