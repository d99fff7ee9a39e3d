"""Dedicated workers, and workers in several regions."""

import time
from typing import Any

import msgspec
import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import Settings
from emberline.balancer.endpoint import Capacity
from emberline.balancer.grants import Grants
from emberline.protocol.errors import Unavailable
from tests.balancer.balancing import endpoint, keys, nothing_left, request, send, serve


def fleet_of(*workers: dict[str, Any], max_running: int = 4) -> Balancer:
    """Workers e0, e1, … of a core in region eu."""
    balancer = Balancer(Settings(region="eu"))
    for i, more in enumerate(workers):
        made = endpoint(f"e{i}", more.pop("role", "both"))
        capacity = Capacity(max_running=max_running, round_trip_s=more.pop("round_trip_s", 0.0))
        balancer.fleet.join(msgspec.structs.replace(made, **more), capacity, 0.0)
    return balancer


def test_a_dedicated_worker_serves_its_account_alone() -> None:
    balancer = fleet_of({"account": "acme"}, {})
    assert {serve(balancer, request(tokens=10, account="acme")).decode for _ in range(10)} == {"e0"}
    assert {serve(balancer, request(tokens=10, account="other")).decode for _ in range(10)} == {"e1"}
    balancer.fleet.remove("e0", 1.0)
    assert serve(balancer, request(tokens=10, account="acme"), 1.0).decode == "e1", "better than none"
    balancer.fleet.remove("e1", 1.0)
    balancer.fleet.join(msgspec.structs.replace(endpoint("e0"), account="acme"), Capacity(), 1.0)
    with pytest.raises(Unavailable):
        balancer.enqueue(request(tokens=10, account="other"), 2.0)
    assert nothing_left(balancer, 2.0)


def test_a_dedicated_worker_that_is_to_be_avoided_is_no_reason_to_use_anothers() -> None:
    balancer = fleet_of({"account": "acme"}, {"account": "other"}, {})
    assert send(balancer, request(tokens=10, account="acme", avoid=("e0",))).decode == "e0"
    assert send(balancer, request(tokens=10, account="third", avoid=("e2",))).decode == "e2"


def test_jobs_are_granted_no_room_on_dedicated_workers() -> None:
    balancer = fleet_of({"account": "acme"}, {})
    grants = Grants(balancer.fleet)
    taken = grants.issue("m", 100)
    assert taken
    assert {grant.engine for grant in taken} == {"e1"}


def test_another_region_takes_what_the_own_one_has_no_room_for() -> None:
    balancer = fleet_of({"region": "us", "round_trip_s": 0.1}, {"region": "eu"}, {}, max_running=2)
    routes = [send(balancer, request(tokens=10)).decode for _ in range(6)]
    assert set(routes[:4]) == {"e1", "e2"}
    assert set(routes[4:]) == {"e0"}
    waits = balancer.enqueue(request(tokens=10), 0.0)
    assert waits.waits_for in ("e1", "e2"), "it waits for its own region"


def test_a_nearer_region_is_preferred() -> None:
    balancer = fleet_of({"region": "us", "round_trip_s": 0.3}, {"region": "uk", "round_trip_s": 0.05})
    assert {serve(balancer, request(tokens=10)).decode for _ in range(10)} == {"e1"}


def test_a_conversation_stays_where_its_cache_is() -> None:
    balancer = fleet_of({"region": "us", "round_trip_s": 0.05}, {"region": "eu"}, max_running=2)
    blocking = [request(tokens=10) for _ in range(2)]
    assert {send(balancer, each).decode for each in blocking} == {"e1"}
    chain = keys(("conversation", 1000))
    assert serve(balancer, request(chain)).decode == "e0"
    for each in blocking:
        balancer.ended(each.id, 1.0, "finished", 1)
    assert serve(balancer, request(chain + keys(("more", 2))), 2.0).decode == "e0", "16,000 tokens are cached there"
    assert serve(balancer, request(keys(("other", 1000))), 2.0).decode == "e1"
    short = keys(("short", 1))
    balancer.fleet.stored("e0", short, 2.0)
    assert serve(balancer, request(short), 3.0).decode == "e1", "a round trip costs more than 16 tokens"


def test_kv_is_not_sent_from_region_to_region() -> None:
    balancer = fleet_of(
        {"role": "prefill", "region": "us"},
        {"role": "decode", "region": "us"},
        {"role": "prefill", "region": "eu"},
        {"role": "decode", "region": "eu"},
        max_running=1,
    )
    routes = [send(balancer, request(keys((f"{i}", 500)))) for i in range(2)]
    assert [(route.prefill, route.decode) for route in routes] in (
        [("e2", "e3"), ("e0", "e1")],
        [("e2", "e3"), ("", "e1")],
        [("", "e3"), ("e0", "e1")],
        [("", "e3"), ("", "e1")],
    )


def test_a_core_without_a_region_uses_all() -> None:
    balancer = Balancer(Settings())
    for i, region in enumerate(("eu", "us")):
        balancer.fleet.join(msgspec.structs.replace(endpoint(f"e{i}"), region=region), Capacity(max_running=2), 0.0)
    assert {send(balancer, request(tokens=10)).decode for _ in range(4)} == {"e0", "e1"}


def test_a_decision_among_regions_takes_microseconds() -> None:
    balancer = fleet_of(*({"region": "us" if i % 2 else "eu", "round_trip_s": 0.1} for i in range(32)), max_running=64)
    chain, best_s = keys(("prompt", 64)), 1.0
    for i in range(50):
        wanted = request(chain + keys((f"{i}", 8)))
        start_s = time.thread_time()
        send(balancer, wanted, float(i))
        best_s = min(best_s, time.thread_time() - start_s)
        balancer.ended(wanted.id, float(i), "finished", 1)
    assert best_s < 0.005
