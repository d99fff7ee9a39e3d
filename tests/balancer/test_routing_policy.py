from collections import Counter

import msgspec
import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import DEFAULTS, SpeedEstimate
from emberline.balancer.endpoint import Capacity
from emberline.balancer.ledger import InFlightLoad
from emberline.balancer.routing_policy import CACHE_LOSS, MAX_CACHE_LOSS_S, LowestCost, RoutingInput
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import endpoint, fleet, keys, nothing_left, request, send, serve

SYSTEM = ("system", 900)  # 14,400 tokens that all sessions share


def test_a_conversation_stays_with_its_cache() -> None:
    balancer = fleet(*["both"] * 8)
    for session in range(20):
        chain = keys(SYSTEM, (f"s{session}", 1000))
        homes = {serve(balancer, request(chain + keys((f"t{session}/{t}", 40 * t))), 10.0 * t).decode for t in range(5)}
        assert len(homes) == 1
    assert nothing_left(balancer, 100.0)


def test_sessions_that_share_a_system_prompt_spread() -> None:
    balancer = fleet(*["both"] * 8, max_running=64, ahead_s=1e9)
    for name in ("e0", "e3"):
        balancer.fleet.stored(name, keys(SYSTEM), 0.0)
    homes = Counter(send(balancer, request(keys(SYSTEM, (f"s{session}", 500)))).decode for session in range(80))
    assert len(homes) == 8
    assert max(homes.values()) <= 2 * 80 / 8


@pytest.mark.parametrize(("crowd", "times"), [(0.0, 1.0), (1.0, 1.0 + DEFAULTS.others)])
def test_a_conversation_moves_when_waiting_costs_more_than_recomputing(crowd: float, times: float) -> None:
    """`times`: its prefill seconds, more where other conversations share the cache."""
    chain = keys(SYSTEM, ("mine", 3000))

    def moves(backlog: float) -> bool:
        balancer = fleet("both", "both", ahead_s=1e9, kv_tokens=1_000_000)
        home = serve(balancer, request(chain)).decode
        for worker in balancer.fleet.workers.values():
            worker.prefill_speed = SpeedEstimate()
            worker.dispatched(round(1e6 * (crowd - worker.cache_pressure(20.0))), 20.0)
        again_s = worker.cost.prefill_s(3900 * 16 + 1, 3900 * 16 + 1)
        balancer.fleet.workers[home].in_flight.work_us = int(backlog * again_s * 1e6)
        return send(balancer, request(chain), 20.0).decode != home

    assert not moves(0.0)
    assert not moves(0.8 * times)
    assert moves(1.2 * times)


@pytest.mark.parametrize(("n_blocks", "more_s"), [(100, None), (2000, MAX_CACHE_LOSS_S)])
def test_leaving_a_cache_costs_a_multiple_of_its_prefill(n_blocks: int, more_s: float | None) -> None:
    """Of a short conversation; for a long one the surcharge is limited to a second."""
    chain = keys(("mine", n_blocks))

    def moves(backlog_s: float) -> bool:
        balancer = fleet("both", "both", ahead_s=1e9)
        home = serve(balancer, request(chain)).decode
        for worker in balancer.fleet.workers.values():
            worker.prefill_speed = SpeedEstimate()
        balancer.fleet.workers[home].in_flight.work_us = int(backlog_s * 1e6)
        return send(balancer, request(chain), 20.0).decode != home

    n, cost = n_blocks * BLOCK_TOKENS + 1, DEFAULTS.cost
    lost_s = cost.prefill_s(n, n) - cost.prefill_s(1, n)
    limit_s = lost_s + (CACHE_LOSS * lost_s if more_s is None else more_s)
    assert not moves(0.8 * limit_s)
    assert moves(1.2 * limit_s)


def test_dispatched_prompts_count_as_cached_at_once() -> None:
    """Prompts with the same prefix follow the first one, unless another worker is faster without the prefix."""
    balancer = fleet(*["both"] * 8, ahead_s=1e9, kv_tokens=1_000_000)
    for worker in balancer.fleet.workers.values():
        worker.dispatched(1_000_000, 0.0)
    chain = keys(("tree", 2000))
    routes = [send(balancer, request(chain + keys((f"leaf{i}", 3)))) for i in range(6)]
    assert len({route.decode for route in routes}) == 1
    assert [route.cached_tokens for route in routes] == [0, *[2000 * 16] * 5]


def test_expected_blocks_expire_unless_confirmed() -> None:
    balancer = fleet("both")
    chain = keys(("c", 100))
    first = request(chain)
    send(balancer, first)
    balancer.ended(first.id, 0.1, "cancelled")
    assert send(balancer, request(chain), 1.0).cached_tokens == 1600
    assert send(balancer, request(chain), 100.0).cached_tokens == 0


def test_a_worker_without_kv_events_is_believed_to_cache_for_minutes() -> None:
    balancer = fleet("both", events=False)
    chain = keys(("c", 100))
    assert cached_without_events(balancer, chain, 0.0) == 0
    for minute in range(1, 12):  # an active conversation is kept
        assert cached_without_events(balancer, chain, 60.0 * minute) == 1600
    assert cached_without_events(balancer, chain, 2000.0) == 1600  # one rotation since
    balancer.dispatch(2400.0)
    balancer.dispatch(2800.0)
    assert cached_without_events(balancer, chain, 2801.0) == 0


def cached_without_events(balancer, chain: bytes, now_s: float) -> int:  # type: ignore[no-untyped-def]
    wanted = request(chain)
    route = send(balancer, wanted, now_s)
    balancer.ended(wanted.id, now_s, "finished")
    return int(route.cached_tokens)


def test_a_slower_worker_gets_fewer_requests() -> None:
    balancer = fleet("both", "both", ahead_s=1e9, max_running=64)
    for _ in range(10):  # e0 is measured to be four times as slow
        for name, scale in (("e0", 4.0), ("e1", 1.0)):
            balancer.fleet.workers[name].prefill_speed.add(scale, 1.0)
    homes = Counter(send(balancer, request(keys((f"k{i}", 500))), 0.0).decode for i in range(50))
    assert homes["e1"] > 2.5 * homes["e0"] > 0


@pytest.mark.parametrize("n", [1, 3, 64])
def test_the_lower_bound_of_cold_workers_changes_no_choice(n: int) -> None:
    """The choice is the same as with the costs of all workers."""
    balancer = fleet(*["both"] * n, ahead_s=1e9)
    chain = keys(SYSTEM, ("s", 300))
    workers = list(balancer.fleet.workers.values())
    for i, worker in enumerate(workers):
        balancer.fleet.stored(worker.name, chain[: 16 * (900 + (300 * (i % 5 == 2)))], 0.0)
        worker.in_flight.work_us = 97_000 * (i * 7 % 11)
    policy = LowestCost(2.0)
    for tokens in (1, 14_401, 15_000, 19_201):
        for backlog_us in (0, 10_000, 1_000_000, 10_000_000):
            workers[2 % n].in_flight.work_us = backlog_us
            need = balancer.routing_input(request(chain, tokens=tokens), balancer.fleet.pool_of("m"), workers)
            quick = policy.choose(workers, need, 1.0)
            cold = RoutingInput(need.tokens, need.n, need.match, 1 << 30, need.session64, need.output_tokens)
            assert policy.choose(workers, cold, 1.0) is quick


def test_session_affinity_keeps_its_home_and_spills_over() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity", max_running=1)
    home = send(balancer, request(affinity="s"), 0.0).decode
    second = send(balancer, request(affinity="s"), 0.0).decode
    assert second != home
    other = fleet(*["both"] * 4, policy="affinity", max_running=1)  # another core
    assert [send(other, request(affinity="s"), 0.0).decode for _ in range(2)] == [home, second]


def test_a_session_name_may_be_large_and_arbitrary() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity")
    for name in ("x" * (1 << 20), "\ud800", "", "é"):
        assert len({serve(balancer, request(affinity=name), 1.0).decode for _ in range(3)}) == 1


def test_affinity_without_a_session_hashes_the_first_unshared_block() -> None:
    balancer = fleet(*["both"] * 8, policy="affinity")
    for name in balancer.fleet.workers:
        balancer.fleet.stored(name, keys(SYSTEM), 0.0)
    homes = [
        {serve_without_events(balancer, keys(SYSTEM, (f"s{s}", 30 + 10 * turn)), 100.0 * turn) for turn in range(3)}
        for s in range(30)
    ]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) > 4


def serve_without_events(balancer, chain: bytes, now_s: float) -> str:  # type: ignore[no-untyped-def]
    """Without KV events of the prompt."""
    wanted = request(chain)
    route = send(balancer, wanted, now_s)
    balancer.first_token(wanted.id, now_s)
    balancer.ended(wanted.id, now_s, "finished")
    return str(route.decode)


def test_few_sessions_move_when_a_worker_is_removed() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity", max_running=1 << 20, ahead_s=1e9)
    before = {s: send(balancer, request(affinity=f"s{s}")).decode for s in range(200)}
    assert min(Counter(before.values()).values()) > 30
    balancer.fleet.remove("e1", 1.0)
    after = {s: send(balancer, request(affinity=f"s{s}"), 1.0).decode for s in range(200)}
    assert all(after[s] == home for s, home in before.items() if home != "e1")
    assert "e1" not in after.values()


def test_round_robin_and_least_loaded() -> None:
    balancer = fleet(*["both"] * 3, policy="round_robin")
    assert [send(balancer, request()).decode for _ in range(6)] == ["e0", "e1", "e2"] * 2
    balancer = fleet(*["both"] * 3, policy="least_loaded")
    assert Counter(send(balancer, request()).decode for _ in range(9)) == {"e0": 3, "e1": 3, "e2": 3}


def test_least_loaded_prefers_the_idle_worker_that_was_busy_least() -> None:
    balancer = fleet(*["both"] * 3, policy="least_loaded")
    for name, busy_s in (("e0", 60.0), ("e1", 20.0), ("e2", 40.0)):
        balancer.fleet.report(name, EngineLoad(running=1, steps=1), 100.0)
        balancer.fleet.report(name, EngineLoad(steps=2), 100.0 + busy_s)
    for worker in balancer.fleet.workers.values():
        assert 0 < worker.busy_share(10_000.0) < worker.busy_share(200.0) < 0.2
    assert [send(balancer, request(), 200.0).decode for _ in range(3)] == ["e1", "e2", "e0"]


# --- prefill and decode apart ----------------------------------------------------------------------------------------


def test_a_long_prompt_uses_a_prefill_worker_and_charges_both() -> None:
    balancer = fleet("prefill", "decode")
    wanted = request(keys(("c", 500)))
    route = send(balancer, wanted)
    assert (route.prefill, route.decode) == ("e0", "e1")
    prefill, decode = (balancer.fleet.workers[name].in_flight for name in ("e0", "e1"))
    assert prefill.prefill_tokens == 8001
    assert prefill.active == 0
    assert decode.prefill_tokens == 0
    assert (decode.active, decode.decode_tokens) == (1, 8001)
    balancer.first_token(wanted.id, 0.6)
    assert prefill == InFlightLoad()
    balancer.ended(wanted.id, 2.0, "finished", 60)
    assert nothing_left(balancer, 2.0)


def test_few_uncached_tokens_are_computed_by_the_decode_worker() -> None:
    balancer = fleet("prefill", "decode")
    chain = keys(("c", 500))
    serve(balancer, request(chain))
    assert send(balancer, request(chain, tokens=8200), 10.0).prefill == ""
    assert send(balancer, request(chain, tokens=8300), 10.0).prefill == "e0"


def test_a_decode_worker_is_not_believed_faster_than_a_prefill_worker() -> None:
    """Where the fixed cost of a prompt is small, workers that compute only short prompts seem fast."""
    balancer, now_s = fleet("prefill", "decode"), 0.0
    for n in range(20):
        for name, blocks, took_s in ((f"short{n}", 2, 0.07), (f"long{n}", 20, 0.7)):
            wanted = request(keys((name, blocks)))
            route = send(balancer, wanted, now_s)
            assert (route.decode, route.prefill) == ("e1", "e0" if blocks > 2 else "")
            balancer.first_token(wanted.id, now_s + took_s)
            balancer.ended(wanted.id, now_s + took_s, "finished", 1)
            now_s += 2.0
    scales = [worker.prefill_speed.scale for worker in balancer.fleet.workers_of("m")]
    assert scales[0] > 4 * scales[1], "else this says nothing"


def test_a_saturated_prefill_pool_is_bypassed() -> None:
    balancer = fleet("prefill", "decode", ahead_s=1e9)
    send(balancer, request(tokens=100_000))
    assert send(balancer, request(keys(("short", 40)))).prefill == ""  # no sequences there yet that it would delay


def test_decode_workers_serve_without_prefill_workers_but_not_vice_versa() -> None:
    balancer = fleet("prefill", "decode")
    balancer.fleet.disconnected("e0", 1.0)
    assert send(balancer, request(tokens=50_000), 1.0).prefill == ""
    balancer = fleet("prefill")
    with pytest.raises(Unavailable, match="no engine of m"):
        balancer.enqueue(request(), 0.0)


def test_a_worker_that_cannot_prefill_is_never_asked_to() -> None:
    """However few the tokens; neither by requests nor by jobs."""
    balancer = Balancer()
    for name, role in (("p", "prefill"), ("d", "decode")):
        made = msgspec.structs.replace(endpoint(name, role), alone=role != "decode")
        balancer.fleet.join(made, Capacity(max_running=4), 0.0)
    short, line = request(keys(("c", 2))), request(keys(("c", 2)), engine="d")
    assert send(balancer, short).prefill == "p"
    assert balancer.dispatch_job(line, 0.0).prefill == "p"
    balancer.fleet.remove("p", 1.0)
    with pytest.raises(Unavailable):
        balancer.enqueue(request(keys(("c", 2))), 1.0)
    with pytest.raises(Unavailable):
        balancer.dispatch_job(request(engine="d"), 1.0)


def test_jobs_use_prefill_workers_as_requests_do() -> None:
    """A long prompt is computed by the prefill worker while that is sooner, the prompts of other jobs included."""
    balancer = fleet("prefill", "decode", max_running=64)
    routes = [balancer.dispatch_job(request(tokens=4000, engine="e1"), 0.0) for _ in range(30)]
    assert {route.decode for route in routes} == {"e1"}
    by_prefill = [route.prefill for route in routes]
    assert by_prefill[0] == "e0"
    assert 8 <= by_prefill.count("") <= 22  # both workers have prompts to compute
    assert balancer.dispatch_job(request(tokens=50, engine="e1"), 0.0).prefill == ""  # short
    assert send(balancer, request(tokens=4000)).prefill == "e0"  # passes the jobs
    balancer.fleet.disconnected("e0", 1.0)
    assert balancer.dispatch_job(request(tokens=4000, engine="e1"), 1.0).prefill == ""


def test_prefill_and_decode_pools_are_balanced_separately() -> None:
    balancer = fleet(*["prefill"] * 2, *["decode"] * 3, ahead_s=1e9, max_running=64)
    routes = [send(balancer, request(keys((f"k{i}", 300)))) for i in range(60)]
    prefills, decodes = Counter(r.prefill for r in routes), Counter(r.decode for r in routes)
    assert max(prefills[name] for name in ("e0", "e1")) <= 36
    assert all(15 <= decodes[name] <= 25 for name in ("e2", "e3", "e4"))


def test_prefill_and_decode_workers_both_keep_their_caches() -> None:
    balancer = fleet(*["prefill"] * 3, *["decode"] * 3)
    for s in range(12):
        chain = keys(SYSTEM, (f"s{s}", 800))
        turns = [serve(balancer, request(chain + keys((f"{s}t{t}", 60 * t))), 20.0 * t) for t in range(4)]
        assert len({route.prefill for route in turns}) == 1
        assert len({route.decode for route in turns}) == 1


def test_two_workers_with_one_name_are_refused() -> None:
    balancer = fleet("both")
    with pytest.raises(BadInput, match="two endpoints are called e0: unix:/e0 and tcp:other:1"):
        balancer.fleet.join(endpoint("e0", address="tcp:other:1"), balancer.fleet.workers["e0"].capacity, 1.0)
    assert balancer.fleet.workers["e0"].endpoint.address == "unix:/e0"


def test_a_worker_that_was_never_measured_gets_requests_of_a_fast_fleet() -> None:
    """All within one moment: no health check passes."""
    balancer = fleet("both", "both")
    routes = []
    for i in range(40):
        wanted = request(keys((f"k{i}", 2)))
        route = send(balancer, wanted, 0.1)
        routes.append(route.decode)
        if route.decode == "e0":
            balancer.first_token(wanted.id, 0.101)
        balancer.ended(wanted.id, 0.102, "finished" if route.decode == "e0" else "cancelled")
    assert min(routes.count("e0"), routes.count("e1")) >= 8
