"""The cost of batches in the HTTP API: `python -m benchmarks.batch_api`. Prints JSON.

10,000 requests of 2 KB through the HTTP app, SQLite with full durability: until the submission is acknowledged, until
every line is in the queue, how long the event loop was held meanwhile, and how fast results are written.
"""

import asyncio
import json
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.batch_loader import BatchService
from emberline.jobs.queue.queue import Queue, open_queue
from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
from emberline.protocol.events import Usage
from emberline.store import open_store
from tests.api.fake_service import MODEL, FakeService

N_LINES = 10_000
TEXT = "word " * 380
ANSWER = Answer([AnswerChoice([TextPart("word " * 160)])], Usage(prompt_tokens=400, completion_tokens=160))
WORKERS_AI = f"/client/v4/accounts/local/ai/run/{MODEL}"


class Watch:
    """The longest delay of the event loop."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.perf_counter() - began_s - 0.001)

    async def stop(self) -> float:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        return round(1e3 * self.worst_s, 1)


def body(i: int) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 160, "messages": [{"role": "user", "content": f"{i} {TEXT}"}]}


class Submitted(NamedTuple):
    batch_id: str
    took_s: float
    watch: Watch  # since the request was sent


async def openai_batch(client: httpx.AsyncClient) -> Submitted:
    lines = [{"custom_id": str(i), "url": "/v1/chat/completions", "body": body(i)} for i in range(N_LINES)]
    content = "\n".join(map(json.dumps, lines)).encode()
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
    watch, began_s = Watch(), time.perf_counter()
    file = (await client.post("/v1/files", **form)).json()
    new = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
    answer = (await client.post("/v1/batches", json=new)).json()
    return Submitted(answer["id"], time.perf_counter() - began_s, watch)


async def anthropic_batch(client: httpx.AsyncClient) -> Submitted:
    requests = [{"custom_id": str(i), "params": body(i)} for i in range(N_LINES)]
    return await posted(client, "/v1/messages/batches", requests)


async def workers_ai_batch(client: httpx.AsyncClient) -> Submitted:
    requests = [{"messages": body(i)["messages"], "external_reference": str(i)} for i in range(N_LINES)]
    return await posted(client, f"{WORKERS_AI}?queueRequest=true", requests)


async def posted(client: httpx.AsyncClient, url: str, requests: list[dict[str, Any]]) -> Submitted:
    raw = json.dumps({"requests": requests}).encode()
    watch, began_s = Watch(), time.perf_counter()
    answer = (await client.post(url, content=raw)).json()
    batch_id = answer["id"] if "id" in answer else answer["result"]["request_id"]
    return Submitted(batch_id, time.perf_counter() - began_s, watch)


async def figures_of(client: httpx.AsyncClient, queue: Queue, submit: Any, results: Any) -> dict[str, float]:
    batch_id, acknowledged_s, watch = await submit(client)
    began_s = time.perf_counter()
    while (await queue.batch("local", batch_id)).status == "validating":
        await asyncio.sleep(0.01)
    queued_s = acknowledged_s + time.perf_counter() - began_s
    held_ms = await watch.stop()
    while leases := await queue.claim("bench", MODEL, 500):
        await asyncio.gather(*(queue.complete(lease, ANSWER) for lease in leases))
    began_s = time.perf_counter()
    n_bytes = len((await results(client, batch_id)).content)
    results_s = time.perf_counter() - began_s
    return {
        "acknowledged_s": round(acknowledged_s, 2),
        "all_lines_queued_s": round(queued_s, 2),
        "loop_held_at_most_ms": held_ms,
        "results_s": round(results_s, 2),
        "results_mb": round(n_bytes / 1e6, 1),
    }


async def main() -> None:
    service = FakeService()
    with tempfile.TemporaryDirectory() as folder:
        store = await open_store(Path(folder) / "bench.db")
        queue = await open_queue(store, Path(folder))
        batches = BatchService(queue, service)
        batches.start_loading()
        app = App(service, ApiSettings(auth=Authenticator(Secret("0" * 64))), batches=batches)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686", timeout=60) as client:
            ways = {
                "openai": (openai_batch, lambda c, id: c.get(f"/v1/files/file-{id}-output/content")),
                "anthropic": (anthropic_batch, lambda c, id: c.get(f"/v1/messages/batches/{id}/results")),
                "workers_ai": (workers_ai_batch, lambda c, id: c.post(WORKERS_AI, json={"request_id": id})),
            }
            figures = {name: await figures_of(client, queue, *way) for name, way in ways.items()}
        await batches.close()
        await queue.close()
        await store.close()
    print(json.dumps({"machine": platform.machine(), "n_lines": N_LINES, **figures}, indent=2))


if __name__ == "__main__":
    uvloop.run(main())
