from collections import Counter

import pytest

from emberline.balancer.admission_queue import MAX_RETRY_S, REROUTE_S, WORKER_WAIT_S
from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.ledger import InFlightRequest
from emberline.protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import endpoint, fleet, keys, nothing_left, open_ids, request, send


def full(max_waiting: int = 100, **more: int) -> tuple[Balancer, str]:
    """One worker with room for one sequence, and the id of the request that runs there."""
    balancer = fleet("both", max_running=1, max_waiting=max_waiting, **more)
    running = request(tokens=10)
    send(balancer, running)
    balancer.first_token(running.id, 0.0)
    return balancer, running.id


def drain(balancer: Balancer, running: str, now_s: float = 1.0, output_tokens: int = 10) -> list[str]:
    """End one request after the other; the order in which the others were dispatched."""
    order: list[str] = []
    while running:
        balancer.ended(running, now_s, "finished", output_tokens)
        out = [record for record in balancer.dispatch(now_s) if record.route is not None]
        assert len(out) <= 1
        running = out[0].request.id if out else ""
        order += [running] if running else []
        if running:
            balancer.first_token(running, now_s)
    return order


def enqueue(balancer: Balancer, now_s: float = 0.0, **more: object) -> InFlightRequest:
    return balancer.enqueue(request(**{"tokens": 10, **more}), now_s)  # type: ignore[arg-type]


def test_higher_classes_are_dispatched_first() -> None:
    balancer, running = full()
    for name in ("flex", "default", "priority"):
        for i in range(2):
            enqueue(balancer, id=f"{name}{i}", priority=name)
    assert drain(balancer, running) == ["priority0", "priority1", "default0", "default1", "flex0", "flex1"]
    assert nothing_left(balancer, 1.0)


def test_a_short_prompt_may_pass_a_long_one_for_a_bounded_time() -> None:
    balancer, running = full()
    long = request(tokens=100_000, id="long")
    balancer.enqueue(long, 0.0)
    enqueue(balancer, 1.0, id="short")
    seconds = (
        balancer.fleet.workers["e0"].cost.prefill_s(100_000, 100_000) * balancer.fleet.workers["e0"].prefill_speed.scale
    )
    enqueue(balancer, 1.0 + seconds, id="late")
    assert drain(balancer, running, 2.0 + seconds) == ["short", "long", "late"]


def test_the_tenant_with_the_least_service_goes_first() -> None:
    balancer, running = full()
    for i in range(4):
        enqueue(balancer, account="greedy", id=f"g{i}", tokens=1000)
    enqueue(balancer, account="modest", id="m0", tokens=1000)
    enqueue(balancer, account="modest", id="m1", tokens=1000)
    assert drain(balancer, running) == ["g0", "m0", "g1", "m1", "g2", "g3"]


def test_output_tokens_cost_twice_as_much() -> None:
    balancer, running = full()
    for i in range(8):
        enqueue(balancer, account="talker", id=f"t{i}", tokens=100)
        enqueue(balancer, account="reader", id=f"r{i}", tokens=300)
    order: list[str] = []
    while running:
        balancer.ended(running, 1.0, "finished", 100 if running.startswith("t") else 0)
        running = next((record.request.id for record in balancer.dispatch(1.0)), "")
        order.append(running[:1])
        if running:
            balancer.first_token(running, 1.0)
    assert abs(Counter(order[:8])["t"] - Counter(order[:8])["r"]) <= 1


def test_an_idle_tenant_accumulates_no_credit() -> None:
    balancer, running = full()
    for i in range(20):
        enqueue(balancer, account="steady", id=f"s{i}", tokens=1000)
    for _ in range(10):
        balancer.ended(running, 1.0, "finished", 500)
        [record] = balancer.dispatch(1.0)
        running = record.request.id
        balancer.first_token(running, 1.0)
    for i in range(10):
        enqueue(balancer, account="new", id=f"n{i}", tokens=1000)
    after = drain(balancer, running, output_tokens=500)
    assert 4 <= sum(name.startswith("n") for name in after[:10]) <= 6


def test_two_saturating_tenants_get_equal_service() -> None:
    """One sends many small requests, the other few large ones: their service stays close at every moment."""
    balancer, running = full(max_waiting=1000)
    for i in range(60):
        enqueue(balancer, account="large", id=f"L{i}", tokens=4000)
    for i in range(600):
        enqueue(balancer, account="small", id=f"s{i}", tokens=400)
    balancer.ended(running, 1.0, "finished", 0)
    served = {"large": 0, "small": 0}
    for _ in range(400):
        [record] = balancer.dispatch(1.0)
        served[record.request.account] += record.request.input_tokens + 2 * 50
        balancer.first_token(record.request.id, 1.0)
        balancer.ended(record.request.id, 1.0, "finished", 50)
        assert abs(served["large"] - served["small"]) <= 2 * (4000 + 2 * 50)


def test_a_full_queue_rejects_with_retry_after_from_the_measured_rate() -> None:
    balancer, running = full(max_waiting=10)
    for i in range(10):
        enqueue(balancer, id=f"w{i}")
    with pytest.raises(Overloaded) as refused:
        enqueue(balancer, id="too many")
    assert refused.value.retry_after_s == MAX_RETRY_S or refused.value.retry_after_s <= MAX_RETRY_S
    assert "too many" not in open_ids(balancer)
    for second in range(1, 21):  # two end each second
        for _ in range(2):
            fill_queue(balancer, second)
            balancer.ended(running, float(second), "finished")
            [record] = balancer.dispatch(float(second))
            running = record.request.id
            balancer.first_token(running, float(second))
    fill_queue(balancer, 20)
    with pytest.raises(Overloaded) as refused:
        enqueue(balancer, 20.0)
    assert refused.value.retry_after_s == pytest.approx(10 / 2, rel=0.3)


def fill_queue(balancer: Balancer, second: int) -> None:
    while len(balancer.queue) < 10:
        enqueue(balancer, float(second))


def test_a_full_queue_sheds_a_lower_class_for_a_higher_one() -> None:
    balancer, running = full(max_waiting=2)
    flex = [enqueue(balancer, id=f"flex{i}", priority="flex") for i in range(2)]
    enqueue(balancer, id="sync")
    out = balancer.dispatch(0.0)
    assert len(out) == 1
    assert out[0] in flex
    assert isinstance(out[0].error, Overloaded)
    with pytest.raises(Overloaded):
        enqueue(balancer, priority="flex")
    assert drain(balancer, running)[0] == "sync"
    assert nothing_left(balancer, 1.0)


def test_reject_if_busy_is_refused_instead_of_queued() -> None:
    balancer, running = full()
    with pytest.raises(Overloaded, match="must not wait"):
        enqueue(balancer, reject_if_busy=True)
    balancer.ended(running, 1.0, "finished")
    assert send(balancer, request(tokens=10, reject_if_busy=True), 1.0).decode == "e0"
    balancer = fleet("both")
    send(balancer, request(tokens=10))
    balancer.fleet.report("e0", EngineLoad(running=1, waiting=1), 1.0)  # an engine may queue below its max_running
    with pytest.raises(Overloaded, match="must not wait"):
        enqueue(balancer, 1.0, reject_if_busy=True)


def test_deadlines_expire_in_the_queue() -> None:
    balancer, running = full()
    late = enqueue(balancer, deadline_s=2.0)
    assert balancer.dispatch(1.9) == []
    assert balancer.wake_s(1.9) is not None
    assert balancer.wake_s(1.9) <= 2.0  # type: ignore[operator]
    assert balancer.dispatch(2.0) == [late]
    assert isinstance(late.error, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        enqueue(balancer, 3.0, deadline_s=0.0)
    balancer.ended(running, 3.0, "finished")
    assert nothing_left(balancer, 3.0)


def test_a_waiting_request_is_routed_again() -> None:
    """The worker with its cache stays busy; a worker that joins takes it after a moment."""
    balancer, _ = full()
    waiting = enqueue(balancer)
    balancer.fleet.join(endpoint("e1"), balancer.fleet.workers["e0"].capacity, 1.0)
    assert balancer.dispatch(1.0 + REROUTE_S) == [waiting]
    assert waiting.route is not None
    assert waiting.route.decode == "e1"


def test_without_workers_a_request_waits_for_as_long_as_it_may() -> None:
    balancer = fleet("both")
    balancer.fleet.disconnected("e0", 1.0, "it crashed")
    with pytest.raises(Unavailable):
        enqueue(balancer, 1.0)
    patient, hasty = enqueue(balancer, 1.0, wait_s=10.0), enqueue(balancer, 1.0, wait_s=0.5)
    assert balancer.dispatch(1.6) == [hasty]
    assert isinstance(hasty.error, Unavailable)
    balancer.fleet.join(endpoint("e0"), balancer.fleet.workers["e0"].capacity, 5.0)
    assert balancer.dispatch(5.0) == [patient]
    assert patient.route is not None


def wait_until_expired(balancer: Balancer, now_s: float) -> tuple[float, list[InFlightRequest]]:
    """Call `dispatch` whenever the balancer asks for it, until it hands requests out."""
    for _ in range(10_000):
        if decided := balancer.dispatch(now_s):
            return now_s, decided
        wake_s = balancer.wake_s(now_s)
        assert wake_s is not None
        now_s = max(wake_s, now_s + 0.001)
    raise AssertionError("nothing was decided")


@pytest.mark.parametrize("leave", ["disconnected", "drain", "remove"])
def test_requests_queued_when_the_last_worker_leaves_expire(leave: str) -> None:
    balancer, running = full()
    queued = [enqueue(balancer, 1.0, id=f"w{i}") for i in range(3)]
    getattr(balancer.fleet, leave)("e0", 5.0)
    balancer.ended(running, 5.0, "cancelled")
    expired_s, expired = wait_until_expired(balancer, 5.0)
    assert expired_s == pytest.approx(5.0 + WORKER_WAIT_S, abs=0.01)
    assert expired == queued
    for record in queued:
        assert isinstance(record.error, Unavailable)
        assert record.error.retry_after_s
    assert nothing_left(balancer, expired_s)


def test_a_worker_that_comes_back_in_time_takes_the_requests_it_left() -> None:
    balancer, running = full()
    queued = enqueue(balancer, 1.0)
    capacity = balancer.fleet.workers["e0"].capacity
    for left_s in (5.0, 5.0 + WORKER_WAIT_S):  # the second absence is waited for as long as the first
        balancer.fleet.disconnected("e0", left_s)
        balancer.ended(running, left_s, "engine_failed")
        assert balancer.dispatch(left_s + WORKER_WAIT_S - 1) == []
        balancer.fleet.join(endpoint("e0"), capacity, left_s + WORKER_WAIT_S - 1)
        if left_s == 5.0:
            (first,) = balancer.dispatch(left_s + WORKER_WAIT_S - 1)
            assert first is queued
            running = queued.request.id
            balancer.first_token(running, left_s + WORKER_WAIT_S - 1)
            queued = enqueue(balancer, left_s + WORKER_WAIT_S - 1)
    assert balancer.dispatch(5.0 + 2 * WORKER_WAIT_S) == [queued]
    assert queued.error is None


def test_a_request_whose_model_has_no_worker_does_not_hold_up_other_models() -> None:
    balancer = fleet("both")
    balancer.fleet.disconnected("e0", 1.0)
    other = enqueue(balancer, 1.0, model="other", wait_s=10.0)
    mine = enqueue(balancer, 2.0, wait_s=10.0)
    balancer.fleet.join(endpoint("e0"), Capacity(max_running=16), 2.1)
    assert balancer.dispatch(2.1) == [mine]
    assert list(balancer.queue) == [other]


def test_a_deadline_outlasts_the_wait_for_a_worker() -> None:
    balancer = fleet("both")
    balancer.fleet.disconnected("e0", 1.0)
    first, second = (enqueue(balancer, 1.0, wait_s=5.0, deadline_s=30.0) for _ in range(2))
    balancer.fleet.join(endpoint("e0"), Capacity(max_running=1), 2.0)
    assert balancer.dispatch(2.0) == [first]
    expired_s, expired = wait_until_expired(balancer, 2.0)
    assert expired_s == pytest.approx(31.0, abs=0.01)
    assert expired == [second]
    assert isinstance(second.error, DeadlineExceeded)


def test_one_models_queue_does_not_refuse_another_models_requests() -> None:
    balancer, _ = full(max_waiting=10)
    other = Endpoint(name="o0", address="unix:/o0", models=("other",))
    balancer.fleet.join(other, Capacity(max_running=1), 0.0)
    send(balancer, request(tokens=10, model="other"))
    for i in range(10):
        enqueue(balancer, id=f"w{i}", priority="flex")
    first = enqueue(balancer, model="other")  # it waits: it is neither refused,
    assert first in list(balancer.queue)
    for _ in range(9):
        enqueue(balancer, model="other")
    with pytest.raises(Overloaded, match="10 requests already wait for other"):
        enqueue(balancer, model="other")  # nor does a full queue shed another model's requests
    assert len(balancer.queue) == 20


def test_after_a_second_failover_a_request_waits_as_long_as_after_the_first() -> None:
    balancer = fleet("both")
    wanted = request(tokens=10, wait_s=10.0)
    balancer.fleet.disconnected("e0", 1.0)
    record = balancer.enqueue(wanted, 1.0)
    capacity = balancer.fleet.workers["e0"].capacity
    other = balancer.enqueue(request(tokens=10, model="other", wait_s=9.0), 1.0)  # keeps the queue from being cleaned
    balancer.fleet.join(endpoint("e0"), capacity, 2.0)
    assert balancer.dispatch(2.0) == [record]
    balancer.fleet.disconnected("e0", 9.0)
    assert balancer.enqueue(wanted, 9.0) is record
    assert balancer.dispatch(12.0) == [other]  # it may wait until 19.0
    balancer.fleet.join(endpoint("e0"), capacity, 13.0)
    assert balancer.dispatch(13.0) == [record]
    assert record.error is None


def test_backpressure_holds_requests_and_releases_them_in_order() -> None:
    balancer = fleet("both", ahead_s=0.5)
    first = request(tokens=50_000)
    send(balancer, first)
    second, third = enqueue(balancer, tokens=40_000), enqueue(balancer, tokens=2_000)
    assert balancer.dispatch(0.0) == []
    balancer.first_token(first.id, 5.0)
    assert balancer.dispatch(5.0) == [third, second]  # after the short one there is less than `ahead_s` of work


def test_jobs_are_charged_as_preemptible() -> None:
    balancer = fleet("both", max_running=2)
    for i in range(2):
        route = balancer.dispatch_job(request(id=f"b{i}", engine="e0", priority="batch", tokens=50_000), 0.0)
        assert route.decode == "e0"
    assert balancer.snapshot(0.0).workers[0].batch_active == 2
    assert send(balancer, request(tokens=10)).decode == "e0"
    balancer.fleet.disconnected("e0", 1.0)
    with pytest.raises(Unavailable):
        balancer.dispatch_job(request(engine="e0"), 1.0)
    for request_id in list(open_ids(balancer)):
        balancer.ended(request_id, 2.0, "engine_failed")
    assert nothing_left(balancer, 2.0)


def test_a_job_that_was_granted_room_comes_also_when_the_worker_was_drained_since() -> None:
    """Its model makes way for another: jobs that were claimed for it must not count a failed attempt."""
    balancer = fleet("both")
    balancer.fleet.drain("e0", 0.0)
    assert balancer.dispatch_job(request(id="b", engine="e0", priority="batch"), 0.0).decode == "e0"
    assert balancer.fleet.workers["e0"].in_flight.total == 1
    balancer.fleet.report("e0", EngineLoad(draining=True), 0.0)  # it would refuse
    with pytest.raises(Unavailable):
        balancer.dispatch_job(request(engine="e0", priority="batch"), 0.0)
    balancer.ended("b", 1.0, "finished")


def test_requests_of_a_model_that_cannot_be_loaded_are_refused_with_the_reason() -> None:
    balancer = fleet()
    first, second = (balancer.enqueue(request(wait_s=600.0), at_s) for at_s in (1.0, 2.0))
    assert balancer.waiting_of(first.request.model) == [first, second]
    assert balancer.waiting_of("another") == []
    balancer.refuse_waiting("another", Unavailable("not this one"))
    assert balancer.dispatch(2.0) == []
    balancer.refuse_waiting(first.request.model, Unavailable("the weights are damaged"))
    assert balancer.dispatch(3.0) == [first, second]
    assert str(first.error) == "the weights are damaged"
    assert nothing_left(balancer, 3.0)


def test_a_cancelled_request_leaves_the_queue() -> None:
    balancer, running = full()
    gone = enqueue(balancer)
    balancer.ended(gone.request.id, 0.5, "cancelled")
    balancer.ended(running, 1.0, "finished")
    assert balancer.dispatch(1.0) == []
    assert nothing_left(balancer, 1.0)


def test_a_tenants_queue_at_one_worker_does_not_block_others() -> None:
    balancer = fleet("both", "both", max_running=1, max_waiting=50)
    chain = keys(("hot", 4000))
    balancer.fleet.stored("e0", chain, 0.0)
    for i in range(40):
        balancer.enqueue(request(chain, account="hot", id=f"h{i}"), 0.0)
    balancer.dispatch(0.0)
    others = [request(keys((f"o{i}", 5)), account="other") for i in range(2)]
    records = [balancer.enqueue(other, 0.1) for other in others]
    routes = [record.route.decode for record in balancer.dispatch(0.1) if record in records and record.route]
    assert routes == ["e1"] or routes == []


def test_sequences_that_share_their_prompt_share_its_kv() -> None:
    """By the sum of contexts there is room for two; the engine reports that they use little."""
    balancer = fleet("both", kv_tokens=50_000, max_running=64)
    chain = keys(("tree", 1000))
    for i in range(2):
        first = request(chain, id=f"leaf{i}")
        send(balancer, first)
        balancer.first_token(first.id, 0.0)
    third = balancer.enqueue(request(chain), 1.0)
    assert balancer.dispatch(1.0) == []
    balancer.fleet.report("e0", EngineLoad(running=2, kv_used_blocks=1010, kv_total_blocks=3125), 1.1)
    assert balancer.dispatch(1.1) == [third]


def kv_worker(kv_tokens: int = 100_000, prompt: int = 1000, reply: int = 0) -> tuple[Balancer, str]:
    """A worker with one decoding request; past replies had `reply` tokens."""
    balancer = fleet("both", kv_tokens=kv_tokens, max_running=256, ahead_s=1e9)
    for _ in range(20 if reply else 0):
        past = request(tokens=10)
        send(balancer, past)
        balancer.ended(past.id, 0.0, "finished", reply)
    running = request(tokens=prompt)
    send(balancer, running)
    balancer.first_token(running.id, 0.0)
    return balancer, running.id


def test_a_worker_that_reports_full_kv_gets_no_requests() -> None:
    balancer, running = kv_worker()
    balancer.fleet.report("e0", EngineLoad(running=1, kv_used_blocks=6250, kv_total_blocks=6250), 1.0)
    held = [enqueue(balancer, 1.0) for _ in range(60)]
    assert balancer.dispatch(1.0) == []
    balancer.ended(running, 1.5, "finished")
    balancer.fleet.report("e0", EngineLoad(kv_used_blocks=0, kv_total_blocks=6250), 1.5)
    assert set(balancer.dispatch(1.5)) == set(held)


def test_jobs_in_the_kv_do_not_keep_requests_out() -> None:
    """The engine preempts them."""
    balancer, _ = kv_worker()
    full_of_jobs = EngineLoad(running=50, running_batch=49, kv_used_blocks=6250, kv_total_blocks=6250)
    balancer.fleet.report("e0", full_of_jobs, 1.0)
    assert send(balancer, request(tokens=1000), 1.0).decode == "e0"


def dispatched_at_once(balancer: Balancer, n: int, now_s: float = 1.0, **more: object) -> int:
    for _ in range(n):
        enqueue(balancer, now_s, **more)
    return len(balancer.dispatch(now_s))


@pytest.mark.parametrize("reports", [True, False])
def test_memory_is_kept_free_for_replies_as_long_as_replies_have_been(reports: bool) -> None:
    n_sent = []
    for reply in (100, 9000):
        balancer, _ = kv_worker(reply=reply)
        if reports:
            balancer.fleet.report("e0", EngineLoad(running=1, kv_used_blocks=63, kv_total_blocks=6250), 1.0)
        n_sent.append(dispatched_at_once(balancer, 60, tokens=1000))
    assert n_sent[0] == 60
    assert n_sent[1] == 8  # 9 × 10,000 tokens


def test_max_tokens_bounds_the_predicted_reply() -> None:
    balancer, _ = kv_worker(reply=9000)
    balancer.fleet.report("e0", EngineLoad(running=1, kv_used_blocks=63, kv_total_blocks=6250), 1.0)
    assert dispatched_at_once(balancer, 60, tokens=1000, max_tokens=100) == 60


def test_tokens_that_were_generated_count_once() -> None:
    """Half of the predicted reply is generated, and so in the report: the request that fitted before still does."""
    balancer, _ = kv_worker(kv_tokens=25_000, reply=9000)
    total = 25_000 // 16
    balancer.fleet.report("e0", EngineLoad(running=1, kv_used_blocks=63, kv_total_blocks=total), 1.0)
    for second in range(1, 11):
        load = EngineLoad(running=1, kv_used_blocks=63 + 28 * second, kv_total_blocks=total, output_tokens=450 * second)
        balancer.fleet.report("e0", load, 1.0 + second)
    assert (
        dispatched_at_once(balancer, 1, now_s=11.0, tokens=5000, id="too long") == 0
    )  # with a reply of 9,000 it does not fit
    balancer.ended("too long", 11.0, "cancelled")
    assert dispatched_at_once(balancer, 1, now_s=11.0, tokens=4500, account="b") == 1


def test_the_queue_keeps_nothing_of_a_provider_that_was_removed() -> None:
    balancer = Balancer()
    provider = Endpoint(name="p", address="https://p", models=("p/*",))
    balancer.fleet.join(provider, Capacity(max_running=1), 0.0)
    running, waiting = (request(tokens=10, model="p/m") for _ in range(2))
    send(balancer, running)
    balancer.enqueue(waiting, 0.0)
    assert balancer.queue.n_of("p/*") == 1
    for each in (running, waiting):
        balancer.ended(each.id, 1.0, "finished", 5)
        balancer.dispatch(1.0)
    assert balancer.queue.retry_after_s("p/*", 1.0) < MAX_RETRY_S  # by the rate of departures
    balancer.fleet.remove("p", 1.0)
    assert balancer.queue.retry_after_s("p/*", 1.0) == MAX_RETRY_S
