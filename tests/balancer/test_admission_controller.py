import asyncio
from random import Random

import pytest

from emberline.balancer.admission_controller import KV_KEYS_AT_ONCE, AdmissionController
from emberline.balancer.admission_queue import WORKER_WAIT_S
from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Capacity, Endpoint, WorkerListener
from emberline.balancer.worker import Worker
from emberline.protocol.errors import Unavailable
from emberline.protocol.frames import EngineLoad, KVEvents
from tests.balancer.balancing import endpoint, nothing_left, open_ids, request

BLOCK = 16


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Connection:
    listener: WorkerListener | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> AdmissionController:
    admission = AdmissionController(Balancer(), clock)
    admission.watch(Connection(endpoint("e0")))
    admission.joined(endpoint("e0"), Capacity(max_running=1), EngineLoad())
    return admission


async def test_requests_that_run_and_that_wait_are_a_workers(admission: AdmissionController, clock: Clock) -> None:
    assert not admission.has_requests("e0")
    running, waiting = request(tokens=10), request(tokens=10, wait_s=60.0)
    await admission.admit(running)
    assert admission.has_requests("e0")
    admission.left("e0", "it was killed")
    admission.ended(running.id, "engine_failed")
    assert not admission.has_requests("e0")
    asked = asyncio.create_task(admission.admit(waiting))
    while waiting.id not in open_ids(admission.balancer):
        await asyncio.sleep(0)
    assert admission.has_requests("e0")
    assert not admission.has_requests("e1")
    asked.cancel()
    await asyncio.wait([asked])
    assert not admission.has_requests("e0")


async def test_a_request_is_handed_out_once_whether_it_waits_or_not(
    admission: AdmissionController, clock: Clock
) -> None:
    running, waiting = request(tokens=10), request(tokens=10)
    assert (await admission.admit(running)).decode == "e0"
    assert admission.balancer.dispatch(clock.now_s) == []
    asked = asyncio.create_task(admission.admit(waiting))
    while waiting.id not in open_ids(admission.balancer):
        await asyncio.sleep(0)
    assert not asked.done()
    admission.ended(running.id, "finished")
    for _ in range(3):  # iterations of the event loop, long before a timer
        await asyncio.sleep(0)
    assert asked.done()
    assert asked.result().decode == "e0"
    assert admission.balancer.dispatch(clock.now_s) == []
    admission.ended(waiting.id, "finished")
    assert nothing_left(admission.balancer, clock.now_s)


async def test_a_request_that_waits_when_the_last_worker_dies_is_refused_in_time(
    admission: AdmissionController, clock: Clock
) -> None:
    running, waiting = request(tokens=10), request(tokens=10)
    await admission.admit(running)
    asked = asyncio.create_task(admission.admit(waiting))
    while waiting.id not in open_ids(admission.balancer):
        await asyncio.sleep(0)
    admission.left("e0", "it was killed")
    admission.ended(running.id, "engine_failed")
    clock.now_s += WORKER_WAIT_S + 1
    with pytest.raises(Unavailable, match="no engine of m takes requests") as refused:
        await asyncio.wait_for(asked, 30)
    assert refused.value.retry_after_s
    assert nothing_left(admission.balancer, clock.now_s)


class CountingBalancer(Balancer):
    n_reports = 0  # the fleet says once per applied load report that its worker may have room

    def has_room(self, worker: Worker) -> None:
        self.n_reports += 1
        super().has_room(worker)


async def test_only_the_last_load_report_before_a_decision_is_applied(clock: Clock) -> None:
    balancer = CountingBalancer()
    admission = AdmissionController(balancer, clock)
    admission.watch(Connection(endpoint("e0")))
    admission.joined(endpoint("e0"), Capacity(max_running=8), None)
    balancer.n_reports = 0
    for n in range(100):
        clock.now_s += 0.01
        admission.reported("e0", EngineLoad(running=1, steps=n))
    assert balancer.n_reports == 0
    assert admission.snapshot().workers[0].load.steps == 99
    assert balancer.n_reports == 1
    admission.reported("e0", EngineLoad(running=2, steps=100))
    await admission.admit(wanted := request(tokens=10))
    assert balancer.fleet.workers["e0"].reports.load.steps == 100, "a decision sees all that came before it"
    admission.reported("e0", EngineLoad(running=3, steps=101))
    async with asyncio.timeout(30):  # at the latest after REPORT_S
        while balancer.n_reports < 3:
            await asyncio.sleep(0.001)
    admission.ended(wanted.id, "finished")
    admission.close()


async def test_a_report_that_frees_a_worker_wakes_the_request_that_waits(admission: AdmissionController) -> None:
    admission.reported("e0", EngineLoad(running=1))  # another core's
    asked = asyncio.create_task(admission.admit(waiting := request(tokens=10)))
    while waiting.id not in open_ids(admission.balancer):
        await asyncio.sleep(0)
    assert not asked.done()
    admission.reported("e0", EngineLoad())
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked.done()
    admission.ended(waiting.id, "finished")
    admission.close()


def n_matched(admission: AdmissionController, keys: bytes) -> int:
    match = admission.balancer.fleet.index.match(keys)
    return match[0][0] if match else 0


async def test_a_large_snapshot_is_applied_over_several_iterations_of_the_event_loop(
    admission: AdmissionController,
) -> None:
    keys, late = Random(1).randbytes(BLOCK * 10 * KV_KEYS_AT_ONCE), Random(2).randbytes(BLOCK * 3)
    admission.kv_events("e0", KVEvents(stored=keys, whole=True))
    assert len(admission.balancer.fleet.index) == KV_KEYS_AT_ONCE
    admission.kv_events("e0", KVEvents(stored=late, removed=keys[-BLOCK:]))  # in order: after the snapshot
    n_iterations = 0
    while n_matched(admission, late) < 3:
        await asyncio.sleep(0)
        n_iterations += 1
        assert n_iterations < 100
    assert n_iterations >= 9
    assert n_matched(admission, keys) == 10 * KV_KEYS_AT_ONCE - 1


@pytest.mark.parametrize("what", ["leaves", "starts anew"])
async def test_what_is_left_of_a_snapshot_is_dropped_with_its_worker(admission: AdmissionController, what: str) -> None:
    keys = Random(1).randbytes(BLOCK * 3 * KV_KEYS_AT_ONCE)
    admission.kv_events("e0", KVEvents(stored=keys, whole=True))
    if what == "leaves":
        admission.left("e0", "it was killed")
    else:
        admission.kv_events("e0", KVEvents(whole=True))
    for _ in range(10):
        await asyncio.sleep(0)
    assert n_matched(admission, keys) == 0
    assert len(admission.balancer.fleet.index) <= KV_KEYS_AT_ONCE  # what was applied before
