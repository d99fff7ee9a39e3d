"""Texts encoded by queued jobs: submitted and read by Workers AI's queue and by an OpenAI batch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.batch_loader import BatchService
from emberline.jobs.queue.puller import LeaseOwner, Puller
from emberline.jobs.queue.queue import open_queue
from emberline.service import open_service
from emberline.service.core import LocalCore
from emberline.store import open_store
from tests.encoders import EncoderThread, tiny_bert
from tests.service.test_encode import ids_of, served

PATIENCE_S = 60


async def test_jobs_encode_texts(tmp_path: Path) -> None:
    folder = tmp_path / "embedder"
    folder.mkdir()
    item = served(tiny_bert(folder), EncoderThread(folder, tmp_path / "e.sock"))
    store = await open_store(tmp_path / "q.db")
    service = await open_service([item], data_dir=tmp_path, store=store)
    assert await service.ready(60)
    assert isinstance(service.core, LocalCore)
    queue = await open_queue(store, tmp_path)
    batches = BatchService(queue, service)
    batches.start_loading()
    auth = Authenticator(Secret("0" * 64), None)
    model = item.card.id
    puller = Puller(queue, service, service.core.grants, lambda: [model], auth.principal, LeaseOwner(tmp_path))
    puller.start(asyncio.Event())
    app: Any = App(service, ApiSettings(auth=auth), None, batches)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            await workers_ai_queue(client, model)
            await openai_batch(client, model)
    finally:
        await puller.close()
        await batches.close()
        await queue.close()
        await service.close()
        await store.close()


async def workers_ai_queue(client: httpx.AsyncClient, model: str) -> None:
    run = f"/client/v4/accounts/a/ai/run/{model}"
    inputs = [{"text": "abc", "external_reference": "r1"}, {"prompt": "no"}, {"text": ["x", "y"]}]
    queued = (await client.post(f"{run}?queueRequest=true", json={"requests": inputs})).json()["result"]
    async with asyncio.timeout(PATIENCE_S):
        while "responses" not in (found := (await client.post(run, json=queued)).json()["result"]):
            await asyncio.sleep(0.02)
    first, refused, two = found["responses"]
    now = (await client.post(run, json={"text": "abc"})).json()["result"]
    assert first["external_reference"] == "r1"
    np.testing.assert_allclose(first["result"]["data"], now["data"], atol=1e-6)
    assert refused["success"] is False
    assert two["result"]["shape"] == [2, 32]
    assert found["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in ("abc", "x", "y"))


async def openai_batch(client: httpx.AsyncClient, model: str) -> None:
    body = {"model": model, "input": "abc"}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": body}
    files = {"file": ("b.jsonl", json.dumps(line).encode())}
    uploaded = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=asked)).json()
    async with asyncio.timeout(PATIENCE_S):
        while (found := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.02)
    result = json.loads((await client.get(f"/v1/files/{found['output_file_id']}/content")).text)
    now = (await client.post("/v1/embeddings", json=body)).json()
    assert result["response"]["body"]["usage"] == now["usage"]
    queued, direct = (whole["data"][0]["embedding"] for whole in (result["response"]["body"], now))
    np.testing.assert_allclose(queued, direct, atol=1e-6)
