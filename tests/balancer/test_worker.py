from emberline.balancer.balancer import Balancer
from emberline.balancer.worker import WorkerSnapshot
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import fleet, request, send


def snapshot(balancer: Balancer, now_s: float) -> WorkerSnapshot:
    [worker] = balancer.snapshot(now_s).workers
    return worker


def test_a_worker_with_requests_but_without_steps_is_stalled() -> None:
    balancer, now_s = fleet("both"), 1000.0
    balancer.fleet.report("e0", EngineLoad(), now_s)
    now_s += 3600
    assert snapshot(balancer, now_s).healthy  # idle for an hour
    send(balancer, request(tokens=10), now_s)
    now_s += 20
    assert snapshot(balancer, now_s).healthy
    now_s += 20
    assert not snapshot(balancer, now_s).healthy
    balancer.fleet.observed("e0", EngineLoad(running=1, steps=5), now_s - 1.0, now_s)  # an HTTP worker has seen a step
    assert snapshot(balancer, now_s).healthy
    assert snapshot(balancer, now_s).load.running == 1
    now_s += 60
    assert not snapshot(balancer, now_s).healthy
    balancer.fleet.report("e0", EngineLoad(running=2), now_s)  # our own connection has seen one
    balancer.fleet.observed("e0", EngineLoad(running=7), now_s - 1.0, now_s)  # older
    assert snapshot(balancer, now_s).healthy
    assert snapshot(balancer, now_s).load.running == 2
    balancer.fleet.disconnected("e0", now_s)
    assert not snapshot(balancer, now_s).healthy
