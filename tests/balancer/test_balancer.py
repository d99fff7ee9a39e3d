from typing import Any

import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.circuit_breaker import FAILURES, OPEN_S, SUCCESSES
from emberline.balancer.endpoint import Capacity
from emberline.balancer.ledger import InFlightLoad
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import endpoint, fleet, keys, nothing_left, request, send, serve


def state(balancer: Balancer, name: str, now_s: float = 0.0) -> str:
    return next(worker.state for worker in balancer.snapshot(now_s).workers if worker.name == name)


def end(balancer: Balancer, name: str, outcome: Any, times: int, now_s: float = 1.0) -> None:
    """Requests on one worker end with this outcome."""
    others = [worker for worker in balancer.fleet.workers.values() if worker.name != name and worker.connected]
    for other in others:
        other.drained = True
    balancer.fleet.pool_of("m").refresh()
    for _ in range(times):
        wanted = request(tokens=10)
        assert send(balancer, wanted, now_s).decode == name
        balancer.ended(wanted.id, now_s, outcome, 5)
    for other in others:
        other.drained = False
    balancer.fleet.pool_of("m").refresh()


# --- pools of one worker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [True, False])
def test_a_conversation_stays_with_the_worker_that_was_alone_when_it_began(events: bool) -> None:
    """Nothing is compared while there is one worker, and all that a later comparison needs is known."""
    balancer = fleet("both", events=events)
    conversations = [keys((f"c{n}", 40)) for n in range(8)]
    for n, chain in enumerate(conversations):
        wanted = request(chain, affinity=f"a/s{n}")
        if events:
            serve(balancer, wanted, 1.0 + n)
        else:  # the worker tells nothing: only what it was given is known
            send(balancer, wanted, 1.0 + n)
            balancer.first_token(wanted.id, 1.01 + n)
            balancer.ended(wanted.id, 1.01 + n, "finished", 10)
    balancer.fleet.join(endpoint("e1"), Capacity(events=events), 10.0)
    turns = [request(chain, affinity=f"a/s{n}") for n, chain in enumerate(conversations)]
    assert [serve(balancer, turn, 11.0 + n).decode for n, turn in enumerate(turns)] == ["e0"] * 8
    fresh = [serve(balancer, request(keys((f"n{n}", 40))), 20.0 + n).decode for n in range(8)]
    assert "e1" in fresh


def test_the_time_of_a_worker_is_divided_among_its_requests() -> None:
    balancer = fleet("both")
    alone, beside = request(id="alone"), request(id="beside")
    send(balancer, alone, 10.0)
    send(balancer, beside, 13.0)
    assert balancer.ended("alone", 15.0, "finished") == 2 * (3 + 1)  # alone, then with the other one; two devices
    assert balancer.ended("beside", 16.0, "finished") == 2 * (1 + 1)
    send(balancer, again := request(), 100.0)  # nobody had the time between
    assert balancer.ended(again.id, 101.0, "finished") == 2


def test_the_time_of_a_prefill_worker_counts_until_the_first_token() -> None:
    balancer = fleet("prefill", "decode")
    wanted = request(tokens=5000)
    assert send(balancer, wanted, 10.0).prefill == "e0"
    balancer.first_token(wanted.id, 12.0)
    assert balancer.ended(wanted.id, 13.0, "finished") == 2 * (2 + 3)


def test_a_lone_worker_is_charged_only_with_what_it_has_not_cached() -> None:
    """Else a few long conversations would seem to keep it busy, and requests would wait for nothing."""
    balancer = fleet("both")
    for n in range(8):
        serve(balancer, request(keys((f"c{n}", 400))), 1.0 + n)
    for n in range(8):
        turn = request(keys((f"c{n}", 400), ("next", 1)))
        assert send(balancer, turn, 20.0).cached_tokens == 400 * balancer.settings.block_tokens


# --- whose fault it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["client_error", "cancelled"])
def test_client_errors_are_not_the_workers_failures(outcome: str) -> None:
    balancer = fleet("both", "both")
    end(balancer, "e0", outcome, 5 * FAILURES)
    assert state(balancer, "e0") == "ready"


def test_a_failing_worker_is_ejected_and_probed_one_request_at_a_time() -> None:
    balancer = fleet("both", "both")
    end(balancer, "e0", "engine_failed", FAILURES)
    assert state(balancer, "e0") == "open"
    assert {serve(balancer, request(tokens=10), 2.0).decode for _ in range(20)} == {"e1"}
    balancer.dispatch(1.0 + OPEN_S)
    assert state(balancer, "e0") == "half_open"
    for _ in range(SUCCESSES):
        end(balancer, "e0", "finished", 1, 2.0 + OPEN_S)
    assert state(balancer, "e0") == "ready"


def test_half_open_admits_one_probe_at_a_time() -> None:
    balancer = fleet("both", "both")
    end(balancer, "e0", "engine_failed", FAILURES)
    balancer.dispatch(1.0 + OPEN_S)
    probes = [send(balancer, request(tokens=10), 2.0 + OPEN_S).decode for _ in range(10)]
    assert probes.count("e0") == 1


def test_the_last_worker_is_used_even_when_ejected() -> None:
    balancer = fleet("both")
    end(balancer, "e0", "engine_failed", 3 * FAILURES)
    assert state(balancer, "e0") == "open"
    assert send(balancer, request(tokens=10), 2.0).decode == "e0"


def test_a_lost_connection_counts_as_one_failure() -> None:
    balancer = fleet("both", "both", max_running=64)
    there = [request(tokens=10) for _ in range(4 * FAILURES)]
    routes = {wanted.id: send(balancer, wanted).decode for wanted in there}
    balancer.fleet.disconnected("e0", 1.0, "it crashed")
    for request_id, name in routes.items():
        if name == "e0":
            balancer.ended(request_id, 1.0, "engine_failed")
    assert state(balancer, "e0") == "down"
    assert balancer.snapshot(1.0).workers[0].problem == "it crashed"
    balancer.fleet.join(endpoint("e0"), balancer.fleet.workers["e0"].capacity, 2.0)
    assert state(balancer, "e0") == "ready"


def test_a_lost_prefill_worker_is_blamed_and_the_decode_worker_is_not() -> None:
    balancer = fleet("prefill", "prefill", "decode")
    for i in range(4):
        wanted = request(keys((f"k{i}", 200)), id=f"w{i}")
        lost = send(balancer, wanted, float(i)).prefill
        moved = request(keys((f"k{i}", 200)), id=f"w{i}", lost=(lost,))
        route = send(balancer, moved, float(i))
        assert route.prefill not in ("", lost)
        balancer.ended(f"w{i}", float(i), "finished", 5)
    blamed = {w.name: w.breaker.n_failures for w in balancer.fleet.workers.values()}
    assert blamed["e2"] == 0
    assert blamed["e0"] + blamed["e1"] == 4
    assert nothing_left(balancer, 20.0)


# --- coming and going ------------------------------------------------------------------------------------------------


def test_failover_releases_the_old_worker_and_avoids_it() -> None:
    balancer = fleet("both", "both")
    wanted = request(tokens=1000, id="q")
    first = send(balancer, wanted).decode
    second = send(balancer, request(tokens=1000, id="q", lost=(first,)), 1.0).decode
    assert second != first
    assert balancer.fleet.workers[first].in_flight == InFlightLoad()
    balancer.ended("q", 2.0, "finished", 3)
    assert nothing_left(balancer, 2.0)


def test_a_removed_worker_has_no_load_and_gets_no_requests() -> None:
    balancer = fleet("both", "both")
    there = [request(keys((f"k{i}", 10))) for i in range(8)]
    for wanted in there:
        send(balancer, wanted)
    gone = balancer.fleet.workers["e0"]
    balancer.fleet.remove("e0", 1.0)
    assert gone.in_flight == InFlightLoad()
    for wanted in there:
        balancer.first_token(wanted.id, 2.0)
        balancer.ended(wanted.id, 3.0, "finished", 9)
    assert gone.in_flight == InFlightLoad()
    assert {serve(balancer, request(tokens=5), 4.0).decode for _ in range(9)} == {"e1"}
    assert nothing_left(balancer, 4.0)


def test_a_worker_that_says_that_it_drains_gets_nothing_new() -> None:
    balancer = fleet("both", "both", max_running=1)
    there = {(wanted := request(tokens=10)).id: send(balancer, wanted).decode for _ in range(2)}
    waiting = balancer.enqueue(request(tokens=10), 0.0)
    queued_for = waiting.waits_for
    balancer.fleet.report(queued_for, EngineLoad(running=1, draining=True), 1.0)
    assert state(balancer, queued_for) == "draining"
    for request_id in there:
        balancer.ended(request_id, 2.0, "finished", 5)
    assert waiting in balancer.dispatch(2.0)
    assert waiting.route is not None
    assert waiting.route.decode != queued_for
    balancer.fleet.disconnected(queued_for, 3.0)
    balancer.fleet.join(endpoint(queued_for), Capacity(max_running=1), 4.0)
    balancer.fleet.report(queued_for, EngineLoad(), 4.0)
    assert state(balancer, queued_for) == "ready"


def test_an_http_worker_may_be_the_first_to_hear_that_a_worker_drains() -> None:
    balancer = fleet("both", "both")
    balancer.fleet.observed("e0", EngineLoad(draining=True), 0.5, 1.0)
    balancer.fleet.report("e0", EngineLoad(draining=True), 1.5)
    assert {serve(balancer, request(tokens=5), 2.0).decode for _ in range(9)} == {"e1"}


def test_a_draining_worker_finishes_its_requests() -> None:
    balancer = fleet("both", "both")
    there = [request(tokens=10) for _ in range(6)]
    on = {wanted.id: send(balancer, wanted).decode for wanted in there}
    balancer.fleet.drain("e0", 1.0)
    assert state(balancer, "e0") == "draining"
    assert {serve(balancer, request(tokens=5), 2.0).decode for _ in range(9)} == {"e1"}
    assert balancer.fleet.workers["e0"].in_flight.active == list(on.values()).count("e0") > 0
    for request_id in on:
        balancer.ended(request_id, 3.0, "finished", 1)
    assert nothing_left(balancer, 3.0)


def test_requests_queued_for_a_lost_worker_are_rerouted() -> None:
    balancer = fleet("both", "both", max_running=1)
    chain = keys(("home", 3000))
    balancer.fleet.stored("e0", chain, 0.0)
    assert send(balancer, request(chain)).decode == "e0"
    waiting = balancer.enqueue(request(chain), 0.1)
    assert balancer.dispatch(0.1) == []
    balancer.fleet.disconnected("e0", 0.2)
    assert balancer.dispatch(0.2) == [waiting]
    assert waiting.route is not None
    assert waiting.route.decode == "e1"


def test_a_stalled_worker_is_avoided_until_it_progresses() -> None:
    balancer = fleet("both", "both")
    balancer.fleet.report("e0", EngineLoad(), 0.0)
    stuck = next(wanted for wanted in (request(tokens=10) for _ in range(9)) if send(balancer, wanted).decode == "e0")
    balancer.dispatch(40.0)
    assert state(balancer, "e0", 40.0) == "stalled"
    assert {serve(balancer, request(tokens=5), 41.0).decode for _ in range(9)} == {"e1"}
    balancer.fleet.report("e0", EngineLoad(running=1), 42.0)
    balancer.dispatch(43.0)
    assert state(balancer, "e0", 43.0) == "ready"
    balancer.ended(stuck.id, 44.0, "finished")


def test_measured_speed_is_the_prior_of_unmeasured_workers() -> None:
    balancer = fleet("both", "both")
    cost = balancer.fleet.workers["e0"].cost
    home = serve(balancer, request(keys(("c", 1000))), 0.0, took_s=3 * cost.prefill_s(16_001, 16_001)).decode
    first, other = balancer.fleet.workers[home], next(w for w in balancer.fleet.workers.values() if w.name != home)
    assert first.prefill_speed.scale == pytest.approx(3.0, rel=0.1)
    assert other.prefill_speed.scale == pytest.approx(3.0, rel=0.1)


def test_the_cached_tokens_of_the_engine_correct_the_measured_speed() -> None:
    """Routing expected nothing to be cached; nearly all was."""
    balancer = fleet("both")
    worker = balancer.fleet.workers["e0"]
    for i in range(30):
        wanted = request(keys((f"k{i}", 2000)))
        send(balancer, wanted, 10.0 * i)
        took_s = worker.cost.prefill_s(101, 32_001)
        balancer.first_token(wanted.id, 10.0 * i + took_s, cached_tokens=31_900)
        balancer.ended(wanted.id, 10.0 * i + 5, "finished", 1)
    assert worker.prefill_speed.scale == pytest.approx(1.0, rel=0.05)
