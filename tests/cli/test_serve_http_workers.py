"""`emberline serve` with two HTTP workers and two stand-in engines: one server for all tests, on one event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from emberline.cli import http_client
from emberline.cli.http_client import ChatTiming
from tests.cli.test_serve_events import StandinServer, check_events, check_stop, standin_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
N_CONNECTIONS = 8  # enough that each of two HTTP workers has some
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
RUN = "/client/v4/accounts/acme/ai/run/@local/models/smollm2?queueRequest=true"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandinServer]:
    """A server that asks for API keys. It ends all streams of events when it stops after the last test."""
    flags = {"server.http_workers": 2, "engine.replicas": 2, "server.auth": "keys"}
    async with standin_server(tmp_path_factory.mktemp("home"), tiny_model, flags) as server:
        yield server
        await check_stop(server)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_keys_in_every_http_worker(server: StandinServer) -> None:
    operator = server.operator

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


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _children() -> list[str]:
    """Process ids of this process's children. Workers of servers in other test processes have the same names."""
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in _text(path).split()]


async def test_http_workers_share_one_port_and_a_worker_leaves(server: StandinServer) -> None:
    operator = server.operator
    timings = [ChatTiming() for _ in range(8)]
    chats = [http_client.chat(operator, CHAT, timing) for timing in timings]
    await asyncio.gather(*(asyncio.to_thread(list, chat) for chat in chats))
    assert [timing.output_tokens for timing in timings] == [3] * 8

    async def engines() -> list[str]:
        return [engine["name"] for engine in (await asyncio.to_thread(http_client.get, operator, "/api/ps"))["engines"]]

    stays, leaves = await engines()
    (pid,) = [pid for pid in _children() if leaves in _text(Path(f"/proc/{pid}/cmdline"))]
    await asyncio.to_thread(http_client.post, operator, "/api/workers/leave", {"name": leaves})

    async def has_left() -> bool:
        return leaves not in _text(Path(f"/proc/{pid}/cmdline"))

    await until(has_left)
    assert await engines() == [stays]


async def test_events_reach_the_webhook_and_the_streams_of_every_http_worker(server: StandinServer) -> None:
    await check_events(server)
