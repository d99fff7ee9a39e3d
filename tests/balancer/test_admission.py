from collections import Counter

import pytest

from emberline.balancer.admission_queue import MAX_RETRY_S, REROUTE_S
from emberline.balancer.balancer import Balancer
from emberline.balancer.ledger import InFlightRequest
from emberline.protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import ask, endpoint, fleet, keys, nothing_left, open_ids, send


def full(max_waiting: int = 100, **more: int) -> tuple[Balancer, str]:
    """One endpoint with room for one, and who is there."""
    balancer = fleet("both", max_running=1, max_waiting=max_waiting, **more)
    running = ask(tokens=10)
    send(balancer, running)
    balancer.first_token(running.id, 0.0)
    return balancer, running.id


def drain(balancer: Balancer, running: str, now_s: float = 1.0, output_tokens: int = 10) -> list[str]:
    """End one after the other; who came next."""
    order: list[str] = []
    while running:
        balancer.ended(running, now_s, "finished", output_tokens)
        out = [ticket for ticket in balancer.dispatch(now_s) if ticket.route is not None]
        assert len(out) <= 1
        running = out[0].request.id if out else ""
        order += [running] if running else []
        if running:
            balancer.first_token(running, now_s)
    return order


def offer(balancer: Balancer, now_s: float = 0.0, **more: object) -> InFlightRequest:
    return balancer.enqueue(ask(**{"tokens": 10, **more}), now_s)  # type: ignore[arg-type]


def test_classes_go_before_each_other() -> None:
    balancer, running = full()
    for name in ("flex", "default", "priority"):
        for i in range(2):
            offer(balancer, id=f"{name}{i}", priority=name)
    assert drain(balancer, running) == ["priority0", "priority1", "default0", "default1", "flex0", "flex1"]
    assert nothing_left(balancer, 1.0)


def test_a_short_prompt_passes_a_long_one_but_not_for_ever() -> None:
    balancer, running = full()
    long = ask(tokens=100_000, id="long")
    balancer.enqueue(long, 0.0)
    offer(balancer, 1.0, id="short")
    seconds = balancer._workers["e0"].cost.prefill_s(100_000, 100_000) * balancer._workers["e0"].prefill_speed.scale
    offer(balancer, 1.0 + seconds, id="late")
    assert drain(balancer, running, 2.0 + seconds) == ["short", "long", "late"]


def test_the_tenant_that_has_had_least_goes_first() -> None:
    balancer, running = full()
    for i in range(4):
        offer(balancer, account="greedy", id=f"g{i}", tokens=1000)
    offer(balancer, account="modest", id="m0", tokens=1000)
    offer(balancer, account="modest", id="m1", tokens=1000)
    assert drain(balancer, running) == ["g0", "m0", "g1", "m1", "g2", "g3"]


def test_output_counts_double() -> None:
    balancer, running = full()
    for i in range(8):
        offer(balancer, account="talker", id=f"t{i}", tokens=100)
        offer(balancer, account="reader", id=f"r{i}", tokens=300)
    order: list[str] = []
    while running:
        balancer.ended(running, 1.0, "finished", 100 if running.startswith("t") else 0)
        running = next((ticket.request.id for ticket in balancer.dispatch(1.0)), "")
        order.append(running[:1])
        if running:
            balancer.first_token(running, 1.0)
    assert abs(Counter(order[:8])["t"] - Counter(order[:8])["r"]) <= 1


def test_who_was_away_has_no_claim_on_that_time() -> None:
    balancer, running = full()
    for i in range(20):
        offer(balancer, account="steady", id=f"s{i}", tokens=1000)
    for _ in range(10):
        balancer.ended(running, 1.0, "finished", 500)
        [ticket] = balancer.dispatch(1.0)
        running = ticket.request.id
        balancer.first_token(running, 1.0)
    for i in range(10):
        offer(balancer, account="new", id=f"n{i}", tokens=1000)
    after = drain(balancer, running, output_tokens=500)
    assert 4 <= sum(name.startswith("n") for name in after[:10]) <= 6


def test_two_greedy_tenants_share_within_a_request() -> None:
    """One sends many small requests, the other few large ones: what they got stays close at every moment."""
    balancer, running = full(max_waiting=1000)
    for i in range(60):
        offer(balancer, account="large", id=f"L{i}", tokens=4000)
    for i in range(600):
        offer(balancer, account="small", id=f"s{i}", tokens=400)
    balancer.ended(running, 1.0, "finished", 0)
    served = {"large": 0, "small": 0}
    for _ in range(400):
        [ticket] = balancer.dispatch(1.0)
        served[ticket.request.account] += ticket.request.input_tokens + 2 * 50
        balancer.first_token(ticket.request.id, 1.0)
        balancer.ended(ticket.request.id, 1.0, "finished", 50)
        assert abs(served["large"] - served["small"]) <= 2 * (4000 + 2 * 50)


def test_too_many_are_refused_with_a_time_from_the_measured_rate() -> None:
    balancer, running = full(max_waiting=10)
    for i in range(10):
        offer(balancer, id=f"w{i}")
    with pytest.raises(Overloaded) as refused:
        offer(balancer, id="too many")
    assert refused.value.retry_after_s == MAX_RETRY_S or refused.value.retry_after_s <= MAX_RETRY_S
    assert "too many" not in open_ids(balancer)
    for second in range(1, 21):  # two leave each second
        for _ in range(2):
            offer_until_full(balancer, second)
            balancer.ended(running, float(second), "finished")
            [ticket] = balancer.dispatch(float(second))
            running = ticket.request.id
            balancer.first_token(running, float(second))
    offer_until_full(balancer, 20)
    with pytest.raises(Overloaded) as refused:
        offer(balancer, 20.0)
    assert refused.value.retry_after_s == pytest.approx(10 / 2, rel=0.3)


def offer_until_full(balancer: Balancer, second: int) -> None:
    while len(balancer._queue) < 10:
        offer(balancer, float(second))


def test_a_full_queue_lets_a_better_class_in_at_the_cost_of_a_worse() -> None:
    balancer, running = full(max_waiting=2)
    flex = [offer(balancer, id=f"flex{i}", priority="flex") for i in range(2)]
    offer(balancer, id="sync")
    out = balancer.dispatch(0.0)
    assert len(out) == 1
    assert out[0] in flex
    assert isinstance(out[0].error, Overloaded)
    with pytest.raises(Overloaded):
        offer(balancer, priority="flex")
    assert drain(balancer, running)[0] == "sync"
    assert nothing_left(balancer, 1.0)


def test_who_is_not_to_wait_is_refused_where_it_would() -> None:
    balancer, running = full()
    with pytest.raises(Overloaded, match="must not wait"):
        offer(balancer, reject_if_busy=True)
    balancer.ended(running, 1.0, "finished")
    assert send(balancer, ask(tokens=10, reject_if_busy=True), 1.0).decode == "e0"
    balancer = fleet("both")
    send(balancer, ask(tokens=10))
    balancer.report("e0", EngineLoad(running=1, waiting=1), 1.0)  # an engine may have a queue while places are free
    with pytest.raises(Overloaded, match="must not wait"):
        offer(balancer, 1.0, reject_if_busy=True)


def test_deadlines_are_kept_in_the_queue() -> None:
    balancer, running = full()
    late = offer(balancer, deadline_s=2.0)
    assert balancer.dispatch(1.9) == []
    assert balancer.wake_s(1.9) is not None
    assert balancer.wake_s(1.9) <= 2.0  # type: ignore[operator]
    assert balancer.dispatch(2.0) == [late]
    assert isinstance(late.error, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        offer(balancer, 3.0, deadline_s=0.0)
    balancer.ended(running, 3.0, "finished")
    assert nothing_left(balancer, 3.0)


def test_one_that_waits_looks_around() -> None:
    """Its home stays busy; another endpoint that joins takes it after a moment."""
    balancer, _ = full()
    waiting = offer(balancer)
    balancer.join(endpoint("e1"), balancer._workers["e0"].capacity, 1.0)
    assert balancer.dispatch(1.0 + REROUTE_S) == [waiting]
    assert waiting.route is not None
    assert waiting.route.decode == "e1"


def test_while_nothing_is_there_who_may_wait_waits() -> None:
    balancer = fleet("both")
    balancer.disconnected("e0", 1.0, "it crashed")
    with pytest.raises(Unavailable):
        offer(balancer, 1.0)
    patient, hasty = offer(balancer, 1.0, wait_s=10.0), offer(balancer, 1.0, wait_s=0.5)
    assert balancer.dispatch(1.6) == [hasty]
    assert isinstance(hasty.error, Unavailable)
    balancer.join(endpoint("e0"), balancer._workers["e0"].capacity, 5.0)
    assert balancer.dispatch(5.0) == [patient]
    assert patient.route is not None


def test_work_beyond_a_moment_is_held_back_and_then_goes_in_order() -> None:
    balancer = fleet("both", ahead_s=0.5)
    first = ask(tokens=50_000)
    send(balancer, first)
    second, third = offer(balancer, tokens=40_000), offer(balancer, tokens=2_000)
    assert balancer.dispatch(0.0) == []
    balancer.first_token(first.id, 5.0)
    assert balancer.dispatch(5.0) == [third, second]  # the short one leaves less than that moment of work


def test_queued_work_is_charged_but_makes_room() -> None:
    balancer = fleet("both", max_running=2)
    for i in range(2):
        route = balancer.dispatch_job(ask(id=f"b{i}", engine="e0", priority="batch", tokens=50_000), 0.0)
        assert route.decode == "e0"
    assert balancer.snapshot(0.0).workers[0].batch_active == 2
    assert send(balancer, ask(tokens=10)).decode == "e0"
    balancer.disconnected("e0", 1.0)
    with pytest.raises(Unavailable):
        balancer.dispatch_job(ask(engine="e0"), 1.0)
    for request_id in list(open_ids(balancer)):
        balancer.ended(request_id, 2.0, "engine_failed")
    assert nothing_left(balancer, 2.0)


def test_a_client_that_leaves_the_queue_is_gone() -> None:
    balancer, running = full()
    gone = offer(balancer)
    balancer.ended(gone.request.id, 0.5, "cancelled")
    balancer.ended(running, 1.0, "finished")
    assert balancer.dispatch(1.0) == []
    assert nothing_left(balancer, 1.0)


def test_one_tenants_long_queue_at_one_home_leaves_others_alone() -> None:
    balancer = fleet("both", "both", max_running=1, max_waiting=50)
    chain = keys(("hot", 4000))
    balancer.stored("e0", chain, 0.0)
    for i in range(40):
        balancer.enqueue(ask(chain, account="hot", id=f"h{i}"), 0.0)
    balancer.dispatch(0.0)
    others = [ask(keys((f"o{i}", 5)), account="other") for i in range(2)]
    tickets = [balancer.enqueue(other, 0.1) for other in others]
    routes = [ticket.route.decode for ticket in balancer.dispatch(0.1) if ticket in tickets and ticket.route]
    assert routes == ["e1"] or routes == []


def test_streams_that_share_their_prompt_share_its_memory() -> None:
    """By our own count there is room for two; the engine says that they take little."""
    balancer = fleet("both", kv_tokens=50_000, max_running=64)
    chain = keys(("tree", 1000))
    for i in range(2):
        first = ask(chain, id=f"leaf{i}")
        send(balancer, first)
        balancer.first_token(first.id, 0.0)
    third = balancer.enqueue(ask(chain), 1.0)
    assert balancer.dispatch(1.0) == []
    balancer.report("e0", EngineLoad(running=2, kv_used_blocks=1010, kv_total_blocks=3125), 1.1)
    assert balancer.dispatch(1.1) == [third]
