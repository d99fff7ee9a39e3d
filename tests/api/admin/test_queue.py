from emberline.api.batch_loader import BatchService
from emberline.protocol.errors import ErrorInfo
from tests.api.fake_service import FakeService, client_of
from tests.jobs.queue.helpers import MODEL, new_batch, new_jobs


async def test_queue_depths(service: FakeService, batches: BatchService) -> None:
    await batches.queue.submit(new_batch("alice"), new_jobs(5))
    await batches.queue.submit(new_batch("bob"), new_jobs(2))
    await batches.queue.claim("w", MODEL, 3)
    async with client_of(service, batches=batches) as client:
        found = (await client.get("/api/queue")).json()
    assert (found["n_dead"], found["dead"]) == (0, [])
    assert sum(item["queued"] for item in found["waiting"]) == 4
    assert sum(item["running"] for item in found["waiting"]) == 3
    assert {item["account"] for item in found["waiting"]} == {"alice", "bob"}
    assert any(item["queued"] for item in found["waiting"])
    assert all(0 <= item["age_s"] < 60 for item in found["waiting"] if item["queued"])


async def test_dead_letters_are_shown_and_run_again(service: FakeService, batches: BatchService) -> None:
    queue = batches.queue
    batch = await queue.submit(new_batch(), new_jobs(1))
    for alone in (False, False, True):
        await queue._store.write("UPDATE lines SET ready_us = 0")
        (lease,) = await queue.claim("w", MODEL, 1, quarantined=alone)
        await queue.fail(lease, ErrorInfo("unavailable", "gone"), retry=True, killed=True)
    async with client_of(service, batches=batches) as client:
        found = (await client.get("/api/queue")).json()
        assert found["n_dead"] == 1
        (letter,) = found["dead"]
        assert (letter["batch"], letter["line"], letter["custom_id"], letter["kills"]) == (batch.id, 0, "c0", 3)
        assert "died" in letter["error"]
        assert (await client.get("/api/queue?dead=0")).json()["dead"] == []
        again = await client.post("/api/queue/replay", json={"batch": batch.id})
        assert again.json() == {"replayed": 1}
        assert (await client.get("/api/queue")).json()["n_dead"] == 0
        refused = await client.post("/api/queue/replay", json={"batch": batch.id, "line": 0})
        assert refused.status_code == 404
        assert "dead letters" in refused.json()["error"]["message"]
        assert (await client.post("/api/queue/replay", json={})).status_code == 400


async def test_the_queue_needs_a_key(service: FakeService, batches: BatchService) -> None:
    async with client_of(service, key="k" * 20, batches=batches) as client:
        assert (await client.get("/api/queue")).status_code == 401
