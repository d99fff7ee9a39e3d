"""Which workers of a model are candidates: outlier ejection is bounded."""

import pytest

from emberline.balancer.balancer import Balancer
from emberline.balancer.circuit_breaker import FAILURES
from tests.balancer.balancing import MODEL, fleet


def fail(balancer: Balancer, name: str, now_s: float) -> None:
    for _ in range(FAILURES):
        balancer.fleet.protocol_error(name, now_s)


def candidates(balancer: Balancer) -> list[str]:
    return [worker.name for worker in balancer.fleet.pool_of(MODEL).candidates(())[0]]


@pytest.mark.parametrize(("n_workers", "n_ejected"), [(1, 0), (2, 1), (3, 1), (5, 2)])
def test_at_most_half_of_the_workers_are_ejected(n_workers: int, n_ejected: int) -> None:
    balancer = fleet(*["both"] * n_workers)
    for i in range(n_workers):
        fail(balancer, f"e{i}", float(i))
    assert candidates(balancer) == [f"e{i}" for i in range(n_ejected, n_workers)], "the first to fail are ejected"


def test_workers_that_take_nothing_do_not_count() -> None:
    balancer = fleet("both", "both", "both", "both")
    fail(balancer, "e0", 1.0)
    fail(balancer, "e1", 2.0)
    assert candidates(balancer) == ["e2", "e3"]
    balancer.fleet.disconnected("e3", 3.0)
    assert candidates(balancer) == ["e1", "e2"], "of three, one may be ejected"


def test_workers_to_avoid_are_candidates_only_when_there_is_no_other() -> None:
    pool = fleet("both", "both").fleet.pool_of(MODEL)
    assert [worker.name for worker in pool.candidates(("e0",))[0]] == ["e1"]
    assert [worker.name for worker in pool.candidates(("e0", "e1"))[0]] == ["e0", "e1"]


def test_a_prefill_worker_to_avoid_leaves_its_decode_worker() -> None:
    pool = fleet("prefill", "decode", "both").fleet.pool_of(MODEL)
    decoders, prefillers = pool.candidates(("e0",))
    assert ([worker.name for worker in decoders], prefillers) == (["e1", "e2"], [])
