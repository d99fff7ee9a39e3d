"""Scaled models at one core: bounds, held requests, and reports."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.endpoint import Capacity
from emberline.balancer.grants import Grants
from emberline.cluster.planner_table import PlannerTable
from emberline.cluster.scaled_models import ScaledModels
from emberline.cluster.timings import Timings
from emberline.config import ScalingConfig
from emberline.protocol.errors import BadInput, NotFound, Unavailable
from emberline.protocol.scaling import DecisionRow, PlanRow
from emberline.service.core import LocalCore
from emberline.service.responses import DatabaseResponses
from emberline.service.sessions import Sessions
from emberline.store import Database, open_store
from tests.balancer.balancing import MODEL, endpoint, request

NAMES = {"m": MODEL, "alias": MODEL, "other": "other"}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    store = await open_store(tmp_path / "s.db")
    yield store
    await store.close()


@pytest.fixture
def admission() -> AdmissionController:
    return AdmissionController()


def make(
    store: Database, admission: AdmissionController, grants: Grants | None = None, **bounds: object
) -> ScaledModels:
    configured = {"alias": ScalingConfig(**bounds)} if bounds else {}  # type: ignore[arg-type]
    grants = grants or Grants(admission.balancer.fleet, 0.5)
    timings = Timings(report_s=1000.0)  # tests ask for reports
    return ScaledModels("core", PlannerTable(store), admission, grants, NAMES.get, configured, timings)


async def test_requests_are_held_for_a_first_replica_up_to_a_number(
    store: Database, admission: AdmissionController
) -> None:
    scaled = make(store, admission, min_replicas=0, max_held=2, hold_s=7.0)
    await scaled.refresh()
    assert (scaled.admitting(MODEL), scaled.admitting("other"), scaled.can_wake) == (7.0, 0.0, True)
    for _ in range(2):
        admission.balancer.enqueue(request(tokens=10, wait_s=scaled.admitting(MODEL)), admission.now_s())
    with pytest.raises(Unavailable, match="2 requests wait for one") as refused:
        scaled.admitting(MODEL)
    assert refused.value.retry_after_s
    admission.balancer.fleet.join(endpoint("e0"), Capacity(), admission.now_s())
    assert scaled.admitting(MODEL) == 7.0, "a replica is there: the queue has its own limit"


async def test_the_number_that_is_held_holds_for_those_that_come_at_once(
    store: Database, admission: AdmissionController
) -> None:
    core = LocalCore(admission, (), UsageLedger(store), Sessions(), DatabaseResponses(store, 30))
    core.scaling = make(store, admission, min_replicas=0, max_held=2)
    await core.scaling.refresh()

    async def know(model: str) -> None:
        await asyncio.sleep(0)

    core.know_model = know
    asked = [asyncio.create_task(core.admit(request(tokens=10))) for _ in range(5)]
    while sum(each.done() for each in asked) < 3:
        await asyncio.sleep(0)
    assert [type(each.exception()) for each in asked if each.done()] == [Unavailable] * 3
    assert len(admission.balancer.waiting_of(MODEL)) == 2
    moved = asyncio.create_task(core.admit(request(tokens=10, avoid=("e0",))))
    while len(admission.balancer.waiting_of(MODEL)) < 3:
        assert not moved.done(), "one that has begun is not refused"
        await asyncio.sleep(0)
    for each in (*asked, moved):
        each.cancel()
    await asyncio.gather(*asked, moved, return_exceptions=True)


async def test_a_report_counts_what_is_held_and_wakes_the_planner_once(
    store: Database, admission: AdmissionController
) -> None:
    scaled = make(store, admission, min_replicas=0)
    await scaled.refresh()
    news = scaled.table.listen(60.0)
    await scaled.report()
    assert [row.load.held_requests for row in await scaled.table.loads()] == [0]
    admission.balancer.enqueue(request(tokens=10, wait_s=60.0), admission.now_s())
    for _ in range(2):
        await scaled.report()
    (row,) = await scaled.table.loads()
    assert (row.core, row.load.model, row.load.held_requests, row.load.queued_tokens) == ("core", MODEL, 1, 10)
    assert await anext(news) == ""
    await PlannerTable(store).set_bounds(MODEL, ScalingConfig(max_replicas=7))
    assert await anext(news) == MODEL, "it was told once: this is the next that it hears"


async def test_queued_jobs_wake_a_model(store: Database, admission: AdmissionController) -> None:
    grants = Grants(admission.balancer.fleet, 0.5)
    scaled = make(store, admission, grants, min_replicas=0)
    await scaled.refresh()
    grants.queued({MODEL: 5.0})
    await scaled.report()
    (row,) = await scaled.table.loads()
    assert (row.load.held_requests, row.load.idle_s) == (1, 0.0)


async def test_a_dedicated_worker_is_no_replica_for_others(store: Database, admission: AdmissionController) -> None:
    grants = Grants(admission.balancer.fleet, 0.5)
    scaled = make(store, admission, grants, min_replicas=0, max_held=1)
    await scaled.refresh()
    own = msgspec.structs.replace(endpoint("e0"), account="acme")
    admission.balancer.fleet.join(own, Capacity(), admission.now_s())
    grants.queued({MODEL: 5.0})
    await scaled.report()
    (row,) = await scaled.table.loads()
    assert row.load.held_requests == 1, "jobs do not run on it"
    admission.balancer.enqueue(request(tokens=10, account="b", wait_s=60.0), admission.now_s())
    assert scaled.admitting(MODEL, "acme")
    with pytest.raises(Unavailable, match="1 requests wait for one"):
        scaled.admitting(MODEL, "b")


async def test_bounds_of_operators_come_before_configured_ones(store: Database, admission: AdmissionController) -> None:
    scaled = make(store, admission, max_replicas=2)
    await scaled.refresh()
    assert scaled.bounds == {MODEL: ScalingConfig(max_replicas=2)}
    found = await scaled.set_bounds("m", {"max_replicas": 5})
    assert found == scaled.bounds[MODEL] == ScalingConfig(max_replicas=5)
    assert (await scaled.set_bounds("m", {"min_replicas": 0})) == ScalingConfig(min_replicas=0, max_replicas=5)
    for wrong in ({"max_replicas": 0}, {"replicas": 1}, {"min_replicas": 9}, {"idle_s": -1}, {"hold_s": "long"}):
        with pytest.raises(BadInput):
            await scaled.set_bounds("m", wrong)
    with pytest.raises(NotFound, match="nothing is not served here"):
        await scaled.set_bounds("nothing", {"max_replicas": 2})
    assert await scaled.set_bounds("m", None) == ScalingConfig(max_replicas=2)


async def test_the_plan_names_what_was_seen_and_done(store: Database, admission: AdmissionController) -> None:
    scaled = make(store, admission, max_replicas=2)
    await scaled.refresh()
    ((before,),) = [(await scaled.plan())["models"]]
    assert (before["model"], before["plan"], before["decisions"]) == (MODEL, None, [])
    row = PlanRow(model=MODEL, at_us=store.now_us(), core="c", mode="on", plan={"held": ["why"]}, observation={})
    made = DecisionRow(
        model=MODEL,
        at_us=store.now_us(),
        number=0,
        core="c",
        action="start",
        role="both",
        replica="m-1",
        gpu="",
        cause="load",
        why="too few",
        outcome="begun",
        took_s=0.0,
    )
    await scaled.table.record(row, [made])
    (shown,) = (await scaled.plan("alias"))["models"]
    assert (shown["plan"], shown["planner"]) == ({"held": ["why"]}, {"core": "c", "mode": "on"})
    assert [(each["action"], each["why"]) for each in shown["decisions"]] == [("start", "too few")]
    with pytest.raises(NotFound, match="other is not scaled"):
        await scaled.plan("other")


async def test_bounds_that_are_set_at_another_core_hold_here_at_once(
    store: Database, admission: AdmissionController
) -> None:
    scaled = make(store, admission)
    await scaled.start()
    try:
        await PlannerTable(store).set_bounds(MODEL, ScalingConfig(max_replicas=7))
        async with asyncio.timeout(60):
            while MODEL not in scaled.bounds:
                await asyncio.sleep(0.01)
        assert scaled.bounds[MODEL].max_replicas == 7
    finally:
        await scaled.close()
