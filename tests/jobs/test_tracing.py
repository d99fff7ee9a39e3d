"""Queued work belongs to the trace of the request that submitted it: jobs by a link, webhooks by their header."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.jobs.webhooks.deliveries import DeliveryRecord
from emberline.protocol.trace_context import TraceContext, current
from emberline.service.work import TaskEvents, Work
from emberline.store import Database
from tests.collector import Collector, Start, collector, traced
from tests.databases import mostly_sqlite, on_both_databases
from tests.jobs.queue.fakes import FakeService
from tests.jobs.queue.helpers import new_batch, new_jobs
from tests.jobs.queue.test_puller import Bench
from tests.jobs.webhooks.helpers import ShiftedClock, create_endpoint, wait_for_records, webhook_service
from tests.jobs.webhooks.receiver import receiving

__all__ = ["collector", "traced"]

database = mostly_sqlite
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


class ObservedService(FakeService):
    """Remembers the trace context in which its jobs run."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[TraceContext | None] = []

    async def run(self, work: Work) -> TaskEvents:
        self.contexts.append(current.get())
        async for event in super().run(work):
            yield event


@pytest.fixture
async def bench(store: Database, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(store, tmp_path)
    bench.service = ObservedService()
    yield bench
    await bench.close()


@on_both_databases
async def test_jobs_of_a_batch_link_to_the_submitting_trace(bench: Bench, collector: Collector, traced: Start) -> None:
    traced()
    bench.pull()
    batch = await bench.ended(await bench.queue.submit(new_batch(traceparent=PARENT), new_jobs(3)))
    assert batch.traceparent == PARENT
    await asyncio.to_thread(collector.wait_for, "job")
    async with asyncio.timeout(60):
        while len(collector.spans) < 3:
            await asyncio.sleep(0.005)
    assert {span.attributes["emberline.job.number"] for span in collector.spans} == {0, 1, 2}
    assert len({span.trace_id for span in collector.spans} - {TRACE}) == 3
    for span in collector.spans:
        assert (span.kind, span.parent_id, span.links) == ("consumer", "", [(TRACE, SPAN)])
        assert span.attributes["emberline.batch.id"] == batch.id
    assert isinstance(bench.service, ObservedService)
    inside = {context.span_id for context in bench.service.contexts if context is not None}
    assert inside == {span.span_id for span in collector.spans}


async def test_a_background_response_continues_the_trace(bench: Bench, collector: Collector, traced: Start) -> None:
    traced(sample_ratio=0.0)
    bench.pull()
    await bench.ended(await bench.queue.submit(new_batch(kind="response", traceparent=PARENT), new_jobs(1)))
    span = (await asyncio.to_thread(collector.wait_for, "job"))["job"]
    assert (span.trace_id, span.parent_id, span.links) == (TRACE, SPAN, [])


async def test_jobs_without_a_trace(bench: Bench) -> None:
    bench.pull()
    batch = await bench.ended(await bench.queue.submit(new_batch(), new_jobs(1)))
    assert (batch.counts.completed, batch.traceparent) == (1, "")
    assert isinstance(bench.service, ObservedService)
    assert bench.service.contexts == [None]


@pytest.mark.parametrize("traces", [True, False])
async def test_a_delivery_carries_the_traceparent(
    db: ShiftedClock, bench: Bench, collector: Collector, traced: Start, traces: bool
) -> None:
    if traces:
        traced()

    def settled(log: list[DeliveryRecord]) -> bool:
        return bool(log) and all(item.delivery.state != "pending" for item in log)

    db.ahead_s = 600.0  # the queue's events have the time of the store, which does not stand still
    async with receiving() as receiver, webhook_service(db) as webhooks:
        endpoint = await create_endpoint(webhooks, receiver.url)
        bench.pull()
        await bench.ended(await bench.queue.submit(new_batch("acme", traceparent=PARENT), new_jobs(1)))
        await wait_for_records(webhooks, endpoint, settled)
        (got,) = receiver.got
    if not traces:
        assert got.headers["traceparent"] == PARENT
        return
    span = (await asyncio.to_thread(collector.wait_for, "webhook"))["webhook"]
    assert got.headers["traceparent"] == f"00-{TRACE}-{span.span_id}-01"
    assert (span.parent_id, span.kind) == (SPAN, "client")
    assert span.attributes["http.response.status_code"] == 200
