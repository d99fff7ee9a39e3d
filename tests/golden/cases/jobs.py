"""Files, batches, events and webhooks."""

import json
from collections.abc import Iterator

from tests.golden.cases.common import LOCAL, chat
from tests.golden.exchange import Case, Client, one

CHAT = "/v1/chat/completions"


def cases() -> Iterator[Case]:
    yield Case("jobs/files", _files)
    yield Case("jobs/batch", _batch)
    yield Case("jobs/batch-refused", _refused)
    yield Case("jobs/webhook", _webhook)
    yield one("jobs/webhook-refused", "/v1/webhook_endpoints", {"url": "http://10.0.0.1/"})
    yield one("jobs/queue", "/api/queue", method="GET")


def line(name: str, **more: object) -> bytes:
    """One line of a batch's input file."""
    body = {**chat(LOCAL), "max_tokens": 3, **more}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


async def upload(client: Client, content: bytes) -> str:
    made = await client.send("POST", "/v1/files", files={"file": ("in.jsonl", content), "purpose": (None, "batch")})
    return str(made["id"])


async def _files(client: Client) -> None:
    name = await upload(client, line("a"))
    await client.get(f"/v1/files/{name}")
    await client.get(f"/v1/files/{name}/content")
    await client.get("/v1/files")
    await client.send("DELETE", f"/v1/files/{name}")
    await client.get(f"/v1/files/{name}")
    await client.post("/v1/files", {})


async def _batch(client: Client) -> None:
    content = line("good") + line("bad", model="nothing") + b"not JSON\n" + line("relayed", model="vllm-model")
    new = {"input_file_id": await upload(client, content), "endpoint": CHAT, "completion_window": "24h"}
    made = await client.post("/v1/batches", {**new, "metadata": {"a": "b"}})
    done = await client.until(f"/v1/batches/{made['id']}", lambda found: found["status"] == "completed")
    await client.get(f"/v1/files/{done['output_file_id']}/content")
    await client.get(f"/v1/files/{done['error_file_id']}/content")
    await client.post(f"/v1/batches/{made['id']}/cancel")
    await client.get("/v1/batches")
    await client.send("DELETE", f"/v1/batches/{made['id']}")


async def _refused(client: Client) -> None:
    new = {"input_file_id": "file-nothing", "endpoint": CHAT, "completion_window": "24h"}
    await client.post("/v1/batches", new)
    await client.post("/v1/batches", {**new, "endpoint": "/v1/nothing"})
    await client.post("/v1/batches", {**new, "completion_window": "1h"})
    await client.get("/v1/batches/batch_nothing")


async def _webhook(client: Client) -> None:
    hook = client.stage.standins["hook"]
    made = await client.post("/v1/webhook_endpoints", {"url": hook.url, "events": ["batch.completed"], "name": "mine"})
    path = f"/v1/webhook_endpoints/{made['id']}"
    new = {"input_file_id": await upload(client, line("a")), "endpoint": CHAT, "completion_window": "24h"}
    await client.post("/v1/batches", new)
    await client.until(f"{path}/deliveries", lambda found: any(row["state"] == "delivered" for row in found["data"]))
    await client.get("/v1/events")
    await client.post(path, {"enabled": False})
    await client.post(f"{path}/rotate", {})
    await client.get("/v1/webhook_endpoints")
    await client.send("DELETE", path)
