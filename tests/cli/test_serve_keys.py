"""API keys in a whole server with two HTTP workers, through the stand-in engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.pull import pull
from emberline.cli import http_client
from emberline.cli.http_client import ServerAddress
from emberline.cli.serve import bind, serve
from emberline.config import resolve
from tests.standin import standin_worker

N_CONNECTIONS = 8  # enough that each of two HTTP workers has some
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
RUN = f"/client/v4/accounts/acme/ai/run/{DEFAULT_MODEL}?queueRequest=true"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_keys_in_every_http_worker(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    flags = {"server.port": 0, "server.http_workers": 2, "server.drain_timeout_s": 2, "server.auth": "keys"}
    config = resolve(flags, {}, tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    with bind(config.server) as listener:
        entry = pull(DEFAULT_MODEL, ModelStore(tmp_path))
        serving = asyncio.create_task(serve(config, [entry], listener, announce, stop, make_spec=standin_worker()))
        await asyncio.wait([serving, ready], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        started = ready.result()
        operator = ServerAddress.of(config)  # made after the start: the server has created the root secret
        operator = ServerAddress(started.host, started.port, None, operator.secret)
        await use_keys(operator)
        stop.set()
        await asyncio.wait_for(serving, 60)


async def use_keys(operator: ServerAddress) -> None:
    async def admin(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return await asyncio.to_thread(http_client.request_json, operator, method, path, body)

    created = await admin("POST", "/api/keys", {"account": "acme"})
    other = await admin("POST", "/api/keys", {"account": "acme", "models": ["gpt-*"]})
    alias = await admin("POST", "/api/keys", {"account": "acme", "models": ["SmolLM2"]})
    clients = [httpx.AsyncClient(base_url=operator.url, timeout=60) for _ in range(N_CONNECTIONS)]
    key = {"authorization": f"Bearer {created['key']}"}

    async def statuses(**headers: str) -> set[int]:
        answers = await asyncio.gather(*(client.get("/v1/models", headers=headers) for client in clients))
        return {answer.status_code for answer in answers}

    async def chat(key: str) -> httpx.Response:
        return await clients[0].post("/v1/chat/completions", json=CHAT, headers={"x-api-key": key})

    async def queued_job() -> dict[str, Any]:
        submitted = await admin("POST", RUN, {"requests": [{"prompt": "hi"}]})
        result: dict[str, Any] = {}

        async def done() -> bool:
            answer = await admin("POST", RUN, {"request_id": submitted["result"]["request_id"]})
            result.update(answer["result"])
            return answer["result"].get("status") not in ("queued", "running")

        await until(done)
        return result

    assert await statuses() == {401}
    assert await statuses(**key) == {200}, "a new key works in every process at once"
    assert (await chat(created["key"])).status_code == 200
    refused = await chat(other["key"])
    assert (refused.status_code, "it may use gpt-*" in refused.text) == (403, True)
    listed = await clients[0].get("/v1/models", headers={"x-api-key": other["key"]})
    assert listed.json()["data"] == []
    assert (await chat(alias["key"])).status_code == 200

    submitted = await clients[0].post(RUN, json={"requests": [{"prompt": "hi"}]}, headers=key)
    request_id = submitted.json()["result"]["request_id"]
    await admin("POST", f"/api/keys/{created['id']}/revoke")

    async def is_revoked() -> bool:
        return await statuses(**key) == {401}

    await until(is_revoked)

    async def has_run() -> bool:
        return "usage" in (await admin("POST", RUN, {"request_id": request_id}))["result"]

    await until(has_run)

    await admin("PATCH", "/api/accounts/acme", {"disabled": True})

    async def is_refused() -> bool:
        return "account acme is disabled" in str(await queued_job())

    await until(is_refused)
    await asyncio.gather(*(client.aclose() for client in clients))
