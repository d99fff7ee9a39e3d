import httpx

from emberline.api.batch_loader import BatchService
from tests.api.fake_service import KEY, FakeService, client_of
from tests.jobs.queue.helpers import MODEL, new_batch, new_jobs


async def test_status_with_the_queue(service: FakeService, batches: BatchService) -> None:
    batch = await batches.queue.submit(new_batch("alice"), new_jobs(5))
    await batches.queue.submit(new_batch("bob"), new_jobs(2))
    await batches.queue.claim("w", MODEL, 3)
    async with client_of(service, batches=batches) as client:
        found = (await client.get("/api/status?requests=7&since=99")).json()
    assert found["waiting"] == {"default": 7}
    assert found["series"] == {"time_s": [99]}
    (depth,) = found["queue"]["models"]
    assert (depth["model"], depth["queued"], depth["running"]) == (MODEL, 4, 3)
    assert depth["age_s"] >= 0
    assert found["queue"]["dead"] == 0
    listed = {item["id"]: item for item in found["queue"]["batches"]}
    assert listed[batch.id]["total"] == 5
    assert listed[batch.id]["status"] == "in_progress"
    assert {item["account"] for item in listed.values()} == {"alice", "bob"}


async def test_status_without_a_queue_and_its_limits(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await client.get("/api/status")).json()["queue"] is None
    for query in ("requests=1001", "requests=x", "recent=201", "since=-1"):
        assert (await client.get(f"/api/status?{query}")).status_code == 400
    async with client_of(service, key=KEY) as guarded:
        assert (await guarded.get("/api/status")).status_code == 401
