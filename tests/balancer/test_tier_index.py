"""What tiers and the pool hold counts in routing: by the seconds of fetching it."""

from collections import Counter

import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import DEFAULTS
from emberline.balancer.endpoint import Capacity
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import EngineInfo, EngineLoad, TierStats
from tests.balancer.balancing import endpoint, fleet, keys, request, send, serve

TOKEN_BYTES = 131_072  # of an 8B model
CHAIN = keys(("mine", 2000))  # 32,000 tokens: 6.4 s of prefill in the cost model
TOKENS = 32_001


def tiered(n_workers: int = 4, *tiers: TierStats, **settings: object) -> Balancer:
    """Workers that report these tiers."""
    balancer = fleet(*["both"] * n_workers, ahead_s=1e9, **settings)  # type: ignore[arg-type]
    for name in balancer.fleet.workers:
        balancer.fleet.resize(name, Capacity(max_running=16, kv_token_bytes=TOKEN_BYTES))
        balancer.fleet.report(name, EngineLoad(tiers=tiers), 0.0)
    return balancer


def host(rate: float = 50e9, state: str = "ok") -> TierStats:
    return TierStats("host", read_rate=rate, state=state)


def pool(rate: float = 10e9, state: str = "ok") -> TierStats:
    return TierStats("pool", read_rate=rate, state=state)


def test_kv_bytes_of_a_token_come_from_the_layout() -> None:
    groups = (KVGroup("full", tuple(range(4)), 8, 128, "float16"), KVGroup("window64", (4, 5), 8, 128, "float16", 64))
    info = EngineInfo(model="m", fingerprint="f", context_len=1, vocab_size=1, eos_ids=(), kv_groups=groups)
    assert Capacity.of(info).kv_token_bytes == 4 * 2 * 8 * 128 * 2


def test_a_tier_hit_is_preferred_to_computing_and_a_device_hit_to_both() -> None:
    balancer = tiered(4, host())
    balancer.fleet.stored("e2", CHAIN, 0.0, "host")
    route = send(balancer, request(CHAIN))
    assert (route.decode, route.cached_tokens) == ("e2", 32_000)
    balancer = tiered(4, host())
    balancer.fleet.stored("e2", CHAIN, 0.0, "host")
    balancer.fleet.stored("e1", CHAIN, 0.0)
    assert send(balancer, request(CHAIN)).decode == "e1"


def test_a_slow_tier_counts_for_nothing() -> None:
    """32,000 tokens are 4.2 GB: 42 s at 100 MB/s."""
    balancer = tiered(1, TierStats("disk", read_rate=100e6))
    balancer.fleet.stored("e0", CHAIN, 0.0, "disk")
    assert send(balancer, request(CHAIN)).cached_tokens == 0
    fast = tiered(1, TierStats("disk", read_rate=3e9))
    fast.fleet.stored("e0", CHAIN, 0.0, "disk")
    assert send(fast, request(CHAIN)).cached_tokens == 32_000


@pytest.mark.parametrize("why", ["state", "removed", "replaced", "left", "no bytes known"])
def test_a_tier_that_is_degraded_emptied_or_gone_counts_for_nothing(why: str) -> None:
    balancer = tiered(2, host())
    balancer.fleet.stored("e1", CHAIN, 0.0, "host")
    if why == "state":
        balancer.fleet.report("e1", EngineLoad(tiers=(host(state="degraded: it stalls"),)), 1.0)
    elif why == "removed":
        balancer.fleet.removed("e1", CHAIN, 1.0, "host")
    elif why == "replaced":
        balancer.fleet.replaced("e1", b"", 1.0, "host")
    elif why == "left":
        balancer.fleet.disconnected("e1", 1.0)
        balancer.fleet.join(endpoint("e1"), Capacity(max_running=16, kv_token_bytes=TOKEN_BYTES), 2.0)
        balancer.fleet.report("e1", EngineLoad(tiers=(host(),)), 3.0)
    else:
        balancer.fleet.resize("e1", Capacity(max_running=16))
        balancer.fleet.report("e1", EngineLoad(tiers=(host(),)), 1.0)
    assert send(balancer, request(CHAIN), 4.0).cached_tokens == 0


def test_what_the_pool_holds_every_worker_can_fetch() -> None:
    balancer = tiered(4, pool())
    for conversation in range(40):
        balancer.fleet.stored("e0", keys((f"c{conversation}", 2000)), 0.0, "pool")
    routes = [send(balancer, request(keys((f"c{conversation}", 2000)))) for conversation in range(40)]
    assert {route.cached_tokens for route in routes} == {32_000}
    assert max(Counter(route.decode for route in routes).values()) <= 20, "the one that told of them is no home"
    balancer.fleet.replaced("e1", b"", 1.0, "pool")
    assert send(balancer, request(keys(("c0", 2000))), 20.0).cached_tokens == 32_000, "one worker knows a part only"
    balancer.fleet.removed("e1", keys(("c0", 2000)), 21.0, "pool")
    balancer.fleet.disconnected("e0", 22.0)
    assert send(balancer, request(keys(("c1", 2000))), 30.0).cached_tokens == 32_000, "the pool outlives its workers"


def test_a_worker_without_a_pool_does_not_fetch_from_it() -> None:
    balancer = tiered(2, pool())
    balancer.fleet.stored("e0", CHAIN, 0.0, "pool")
    balancer.fleet.report("e1", EngineLoad(), 1.0)
    assert {send(balancer, request(CHAIN), 2.0).decode for _ in range(3)} == {"e0"}


def test_a_conversation_leaves_a_busy_worker_when_the_pool_has_it() -> None:
    """With the pool that costs 0.4 s; without it, computing 32,000 tokens."""
    for tiers, moves in (((pool(),), True), ((), False)):
        balancer = tiered(2, *tiers)
        home = serve(balancer, request(CHAIN)).decode
        balancer.fleet.stored(home, CHAIN, 0.0, "pool")
        balancer.fleet.workers[home].in_flight.work_us = 2_500_000
        for worker in balancer.fleet.workers.values():
            worker.prefill_speed.scale = 1.0
        assert (send(balancer, request(CHAIN), 1.0).decode != home) == moves


def test_fetched_prompts_do_not_measure_the_workers_speed() -> None:
    balancer = tiered(1, pool())
    balancer.fleet.stored("e0", CHAIN, 0.0, "pool")
    wanted = request(CHAIN)
    send(balancer, wanted)
    work_us = balancer.fleet.workers["e0"].in_flight.work_us
    assert work_us < 1e6 * DEFAULTS.cost.work_s(TOKENS, TOKENS) / 100, "what is fetched is no work"
    balancer.first_token(wanted.id, 3.0, 32_000)
    assert balancer.fleet.workers["e0"].prefill_speed.n == 0
