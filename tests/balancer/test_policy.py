from collections import Counter

import msgspec
import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import DEFAULTS, SpeedEstimate
from emberline.balancer.endpoint import Capacity
from emberline.balancer.ledger import InFlightLoad
from emberline.balancer.routing_policy import CACHE_LOSS, MAX_CACHE_LOSS_S, LowestCost, RoutingInput
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import Unavailable
from tests.balancer.balancing import ask, endpoint, fleet, keys, nothing_left, send, serve

SYSTEM = ("system", 900)  # 14,400 tokens that all sessions share


def test_a_conversation_stays_where_its_cache_is() -> None:
    balancer = fleet(*["both"] * 8)
    for session in range(20):
        chain = keys(SYSTEM, (f"s{session}", 1000))
        homes = {serve(balancer, ask(chain + keys((f"t{session}/{t}", 40 * t))), 10.0 * t).decode for t in range(5)}
        assert len(homes) == 1
    assert nothing_left(balancer, 100.0)


def test_sessions_that_share_a_system_prompt_spread() -> None:
    balancer = fleet(*["both"] * 8, max_running=64, ahead_s=1e9)
    for name in ("e0", "e3"):
        balancer.stored(name, keys(SYSTEM), 0.0)
    homes = Counter(send(balancer, ask(keys(SYSTEM, (f"s{session}", 500)))).decode for session in range(80))
    assert len(homes) == 8
    assert max(homes.values()) <= 2 * 80 / 8


@pytest.mark.parametrize(("crowd", "times"), [(0.0, 1.0), (1.0, 1.0 + DEFAULTS.others)])
def test_it_moves_when_waiting_costs_more_than_computing_again(crowd: float, times: float) -> None:
    """`times` its seconds: others live there who would wait too."""
    chain = keys(SYSTEM, ("mine", 3000))

    def moves(backlog: float) -> bool:
        balancer = fleet("both", "both", ahead_s=1e9, kv_tokens=1_000_000)
        home = serve(balancer, ask(chain)).decode
        for worker in balancer._workers.values():
            worker.prefill_speed = SpeedEstimate()
            worker._recent_tokens, worker._recent_at_s = 1e6 * crowd, 20.0
        again_s = worker.cost.prefill_s(3900 * 16 + 1, 3900 * 16 + 1)
        balancer._workers[home].in_flight.work_us = int(backlog * again_s * 1e6)
        return send(balancer, ask(chain), 20.0).decode != home

    assert not moves(0.0)
    assert not moves(0.8 * times)
    assert moves(1.2 * times)


@pytest.mark.parametrize(("n_blocks", "more_s"), [(100, None), (2000, MAX_CACHE_LOSS_S)])
def test_what_another_holds_is_computed_again_only_for_several_times_its_seconds(
    n_blocks: int, more_s: float | None
) -> None:
    """Of a short conversation; of a long one a second more is all."""
    chain = keys(("mine", n_blocks))

    def moves(backlog_s: float) -> bool:
        balancer = fleet("both", "both", ahead_s=1e9)
        home = serve(balancer, ask(chain)).decode
        for worker in balancer._workers.values():
            worker.prefill_speed = SpeedEstimate()
        balancer._workers[home].in_flight.work_us = int(backlog_s * 1e6)
        return send(balancer, ask(chain), 20.0).decode != home

    n, cost = n_blocks * BLOCK_TOKENS + 1, DEFAULTS.cost
    lost_s = cost.prefill_s(n, n) - cost.prefill_s(1, n)
    limit_s = lost_s + (CACHE_LOSS * lost_s if more_s is None else more_s)
    assert not moves(0.8 * limit_s)
    assert moves(1.2 * limit_s)


def test_own_decisions_count_at_once() -> None:
    """Siblings of a cold prompt, in the same instant, follow the first, unless it is quicker without it."""
    balancer = fleet(*["both"] * 8, ahead_s=1e9, kv_tokens=1_000_000)
    for worker in balancer._workers.values():
        worker._recent_tokens = 1e6
    chain = keys(("tree", 2000))
    routes = [send(balancer, ask(chain + keys((f"leaf{i}", 3)))) for i in range(6)]
    assert len({route.decode for route in routes}) == 1
    assert [route.cached_tokens for route in routes] == [0, *[2000 * 16] * 5]


def test_own_decisions_are_forgotten_unless_confirmed() -> None:
    balancer = fleet("both")
    chain = keys(("c", 100))
    first = ask(chain)
    send(balancer, first)
    balancer.ended(first.id, 0.1, "cancelled")
    assert send(balancer, ask(chain), 1.0).cached_tokens == 1600
    assert send(balancer, ask(chain), 100.0).cached_tokens == 0


def test_an_endpoint_without_events_is_believed_for_minutes_and_then_not() -> None:
    balancer = fleet("both", events=False)
    chain = keys(("c", 100))
    assert serve_blind(balancer, chain, 0.0) == 0
    for minute in range(1, 12):  # a conversation that goes on is kept
        assert serve_blind(balancer, chain, 60.0 * minute) == 1600
    assert serve_blind(balancer, chain, 2000.0) == 1600  # rotated once since
    balancer.dispatch(2400.0)
    balancer.dispatch(2800.0)
    assert serve_blind(balancer, chain, 2801.0) == 0


def serve_blind(balancer, chain: bytes, now_s: float) -> int:  # type: ignore[no-untyped-def]
    wanted = ask(chain)
    route = send(balancer, wanted, now_s)
    balancer.ended(wanted.id, now_s, "finished")
    return int(route.cached_tokens)


def test_a_slower_endpoint_gets_less() -> None:
    balancer = fleet("both", "both", ahead_s=1e9, max_running=64)
    for _ in range(10):  # e0 is learnt to be four times as slow
        for name, scale in (("e0", 4.0), ("e1", 1.0)):
            balancer._workers[name].prefill_speed.add(scale, 1.0)
    homes = Counter(send(balancer, ask(keys((f"k{i}", 500))), 0.0).decode for i in range(50))
    assert homes["e1"] > 2.5 * homes["e0"] > 0


@pytest.mark.parametrize("n", [1, 3, 64])
def test_passing_over_the_cold_changes_nothing(n: int) -> None:
    """The bound that spares looking at endpoints that hold nothing gives what looking at all gives."""
    balancer = fleet(*["both"] * n, ahead_s=1e9)
    chain = keys(SYSTEM, ("s", 300))
    workers = list(balancer._workers.values())
    for i, worker in enumerate(workers):
        balancer.stored(worker.name, chain[: 16 * (900 + (300 * (i % 5 == 2)))], 0.0)
        worker.in_flight.work_us = 97_000 * (i * 7 % 11)
    policy = LowestCost(2.0)
    for tokens in (1, 14_401, 15_000, 19_201):
        for backlog_us in (0, 10_000, 1_000_000, 10_000_000):
            workers[2 % n].in_flight.work_us = backlog_us
            need = balancer._routing_input(ask(chain, tokens=tokens), balancer._pool("m"), workers)
            quick = policy.choose(workers, need, 1.0)
            cold = RoutingInput(need.tokens, need.n, need.match, 1 << 30, need.session64, need.output_tokens)
            assert policy.choose(workers, cold, 1.0) is quick


def test_affinity_keeps_a_named_session_at_home_and_spills_over() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity", max_running=1)
    home = send(balancer, ask(affinity="s"), 0.0).decode
    second = send(balancer, ask(affinity="s"), 0.0).decode
    assert second != home
    other = fleet(*["both"] * 4, policy="affinity", max_running=1)  # another core
    assert [send(other, ask(affinity="s"), 0.0).decode for _ in range(2)] == [home, second]


def test_a_session_name_may_be_a_megabyte_and_anything() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity")
    for name in ("x" * (1 << 20), "\ud800", "", "é"):
        assert len({serve(balancer, ask(affinity=name), 1.0).decode for _ in range(3)}) == 1


def test_affinity_without_a_name_comes_from_what_sessions_do_not_share() -> None:
    balancer = fleet(*["both"] * 8, policy="affinity")
    for name in balancer._workers:
        balancer.stored(name, keys(SYSTEM), 0.0)
    homes = [
        {serve_unseen(balancer, keys(SYSTEM, (f"s{s}", 30 + 10 * turn)), 100.0 * turn) for turn in range(3)}
        for s in range(30)
    ]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) > 4


def serve_unseen(balancer, chain: bytes, now_s: float) -> str:  # type: ignore[no-untyped-def]
    """The engine never says that it holds the prompt."""
    wanted = ask(chain)
    route = send(balancer, wanted, now_s)
    balancer.first_token(wanted.id, now_s)
    balancer.ended(wanted.id, now_s, "finished")
    return str(route.decode)


def test_few_sessions_move_when_an_endpoint_leaves() -> None:
    balancer = fleet(*["both"] * 4, policy="affinity", max_running=1 << 20, ahead_s=1e9)
    before = {s: send(balancer, ask(affinity=f"s{s}")).decode for s in range(200)}
    assert min(Counter(before.values()).values()) > 30
    balancer.remove("e1", 1.0)
    after = {s: send(balancer, ask(affinity=f"s{s}"), 1.0).decode for s in range(200)}
    assert all(after[s] == home for s, home in before.items() if home != "e1")
    assert "e1" not in after.values()


def test_round_robin_and_least_loaded_for_comparison() -> None:
    balancer = fleet(*["both"] * 3, policy="round_robin")
    assert [send(balancer, ask()).decode for _ in range(6)] == ["e0", "e1", "e2"] * 2
    balancer = fleet(*["both"] * 3, policy="least_loaded")
    assert Counter(send(balancer, ask()).decode for _ in range(9)) == {"e0": 3, "e1": 3, "e2": 3}


# --- prefill and decode apart ----------------------------------------------------------------------------------------


def test_a_long_prompt_goes_through_prefill_and_charges_both() -> None:
    balancer = fleet("prefill", "decode")
    wanted = ask(keys(("c", 500)))
    route = send(balancer, wanted)
    assert (route.prefill, route.decode) == ("e0", "e1")
    prefill, decode = (balancer._workers[name].in_flight for name in ("e0", "e1"))
    assert prefill.prefill_tokens == 8001
    assert prefill.active == 0
    assert decode.prefill_tokens == 0
    assert (decode.active, decode.decode_tokens) == (1, 8001)
    balancer.prefilled(wanted.id, 0.5)
    assert prefill == InFlightLoad()
    balancer.first_token(wanted.id, 0.6)
    balancer.progress(wanted.id, 50, 1.0)
    assert decode.decode_tokens == 8051
    balancer.ended(wanted.id, 2.0, "finished", 60)
    assert nothing_left(balancer, 2.0)


def test_few_uncached_tokens_are_computed_by_decode() -> None:
    balancer = fleet("prefill", "decode")
    chain = keys(("c", 500))
    serve(balancer, ask(chain))
    assert send(balancer, ask(chain, tokens=8200), 10.0).prefill == ""
    assert send(balancer, ask(chain, tokens=8300), 10.0).prefill == "e0"


def test_decode_is_not_taken_to_be_faster_than_prefill_for_its_short_prompts() -> None:
    """On machines whose prompts cost more than requests, endpoints that see only short ones seem to be fast."""
    balancer, now_s = fleet("prefill", "decode"), 0.0
    for n in range(20):
        for name, blocks, took_s in ((f"short{n}", 2, 0.07), (f"long{n}", 20, 0.7)):
            wanted = ask(keys((name, blocks)))
            route = send(balancer, wanted, now_s)
            assert (route.decode, route.prefill) == ("e1", "e0" if blocks > 2 else "")
            balancer.first_token(wanted.id, now_s + took_s)
            balancer.ended(wanted.id, now_s + took_s, "finished", 1)
            now_s += 2.0
    scales = [worker.prefill_scale for worker in balancer.snapshot(now_s).workers]
    assert scales[0] > 4 * scales[1], "else this says nothing"


def test_a_busy_prefill_pool_is_passed_by() -> None:
    balancer = fleet("prefill", "decode", ahead_s=1e9)
    send(balancer, ask(tokens=100_000))
    assert send(balancer, ask(keys(("short", 40)))).prefill == ""  # no streams there yet that it would hold up


def test_decode_alone_serves_when_no_prefill_is_there_and_prefill_alone_does_not() -> None:
    balancer = fleet("prefill", "decode")
    balancer.disconnected("e0", 1.0)
    assert send(balancer, ask(tokens=50_000), 1.0).prefill == ""
    balancer = fleet("prefill")
    with pytest.raises(Exception, match="no engine of m"):
        balancer.enqueue(ask(), 0.0)


def test_who_cannot_compute_prompts_is_never_asked_to() -> None:
    """However few tokens they are; not by a request, nor by queued work."""
    balancer = Balancer()
    for name, role in (("p", "prefill"), ("d", "decode")):
        made = msgspec.structs.replace(endpoint(name, role), alone=role != "decode")
        balancer.join(made, Capacity(max_running=4), 0.0)
    short, line = ask(keys(("c", 2))), ask(keys(("c", 2)), engine="d")
    assert send(balancer, short).prefill == "p"
    assert balancer.dispatch_job(line, 0.0).prefill == "p"
    balancer.remove("p", 1.0)
    with pytest.raises(Unavailable):
        balancer.enqueue(ask(keys(("c", 2))), 1.0)
    with pytest.raises(Unavailable):
        balancer.dispatch_job(ask(engine="d"), 1.0)


def test_each_pool_is_balanced_by_its_own_load() -> None:
    balancer = fleet(*["prefill"] * 2, *["decode"] * 3, ahead_s=1e9, max_running=64)
    routes = [send(balancer, ask(keys((f"k{i}", 300)))) for i in range(60)]
    prefills, decodes = Counter(r.prefill for r in routes), Counter(r.decode for r in routes)
    assert max(prefills[name] for name in ("e0", "e1")) <= 36
    assert all(15 <= decodes[name] <= 25 for name in ("e2", "e3", "e4"))


def test_both_keep_their_caches() -> None:
    balancer = fleet(*["prefill"] * 3, *["decode"] * 3)
    for s in range(12):
        chain = keys(SYSTEM, (f"s{s}", 800))
        turns = [serve(balancer, ask(chain + keys((f"{s}t{t}", 60 * t))), 20.0 * t) for t in range(4)]
        assert len({route.prefill for route in turns}) == 1
        assert len({route.decode for route in turns}) == 1


def test_two_endpoints_with_one_name_are_told_apart_by_the_error() -> None:
    balancer = fleet("both")
    with pytest.raises(Exception, match="two endpoints are called e0: unix:/e0 and tcp:other:1"):
        balancer.join(endpoint("e0", address="tcp:other:1"), balancer._workers["e0"].capacity, 1.0)
    assert balancer._workers["e0"].endpoint.address == "unix:/e0"
