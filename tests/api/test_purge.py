"""What a purge forgets, over an HTTP worker, with workers of every role: all but what is stored under an id."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from emberline.accounts.account import LOCAL_ACCOUNT
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.gateway.gateways import GatewayService
from emberline.gateway.response_cache import CachedReply
from emberline.protocol.block_hash import session_digest
from emberline.protocol.complete_response import Answer
from emberline.protocol.events import Usage
from emberline.protocol.frames import CacheCommand
from emberline.protocol.request import Principal
from emberline.service import open_core_server, open_http_worker
from emberline.service.core import LocalCore
from emberline.store import open_store
from emberline.text.text_model import TextModel
from tests.service.conftest import MODEL, PATIENCE_S, Opener, offer
from tests.service.conftest import open_one as open_one
from tests.service.conftest import say as say
from tests.service.conftest import text_model as text_model
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_service import ask, events_of

SECRET = Secret("s" * 32)
ACME = Principal(LOCAL_ACCOUNT, "", SECRET.derive("kv", LOCAL_ACCOUNT))  # the account of a server without keys
OTHER = Principal("other", "", SECRET.derive("kv", "other"))


class Bench(NamedTuple):
    client: httpx.AsyncClient  # of the HTTP worker
    core: LocalCore
    core_gateways: GatewayService
    worker_gateways: GatewayService
    engines: list[FakeEngine]


@pytest.fixture
async def bench(
    tmp_path: Path, open_one: Opener, say: Callable[..., Script], text_model: TextModel
) -> AsyncIterator[Bench]:
    engines = [
        await FakeEngine(tmp_path / f"{role}.sock", say("Hello!"), name=role, role=role).start()
        for role in ("both", "prefill", "decode")
    ]
    service = await open_one(*engines)
    async with AsyncExitStack() as stack:
        store = await open_store(tmp_path / "gateways.db")
        stack.push_async_callback(store.close)
        core_server = await open_core_server(service, tmp_path / "core.sock")
        stack.push_async_callback(core_server.close)
        worker = await open_http_worker([offer(text_model, *engines)], core_socket=tmp_path / "core.sock")
        stack.push_async_callback(worker.close)
        assert await worker.ready(PATIENCE_S)
        gateways = [GatewayService(store), GatewayService(store)]
        for each in gateways:
            await each.open()
            stack.push_async_callback(each.close)
        for principal, session in ((ACME, "s"), (ACME, "t"), (OTHER, "s")):
            await events_of(worker, ask(f"hello {session}", session=session), principal)
        app: Any = App(worker, ApiSettings(Authenticator(SECRET, None)), gateways=gateways[1])
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        await stack.enter_async_context(client)
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "again"}]}
        stream = await client.post("/v1/chat/completions", json=body, headers={"x-emberline-resume": "60"})
        client.headers["stream"] = stream.headers["x-emberline-stream-id"]
        for account in (LOCAL_ACCOUNT, "other"):
            reply = CachedReply(answer=Answer([], Usage()), model=MODEL, provider="p", expires_us=1 << 60)
            gateways[1].cache.put(account, "digest", reply)
        await gateways[1].cache.close()  # writes them
        assert await gateways[0].cache.get(LOCAL_ACCOUNT, "digest")
        assert isinstance(service.core, LocalCore)
        yield Bench(client, service.core, *gateways, engines)
    for engine in engines:
        await engine.die()


async def n_replies(bench: Bench, account: str) -> int:
    """Processes that still find the cached reply of an account."""
    await bench.core_gateways.cache.check_purged()
    caches = (bench.core_gateways.cache, bench.worker_gateways.cache)
    return sum([await cache.get(account, "digest") is not None for cache in caches])


async def status_of_stream(bench: Bench) -> int:
    return (await bench.client.get(f"/v1/streams/{bench.client.headers['stream']}")).status_code


def conversations(bench: Bench) -> set[tuple[bytes, str | None]]:
    """Salt and session of those that the core knows."""
    fingerprint = bench.engines[0].info.fingerprint
    return {(found.salt, found.session) for found in bench.core.sessions.recent(fingerprint, 10)()}


async def test_an_account(bench: Bench) -> None:
    assert await status_of_stream(bench) == 200
    assert await n_replies(bench, LOCAL_ACCOUNT) == 2
    assert {session for salt, session in conversations(bench) if salt == ACME.salt} >= {"s", "t"}
    answer = (await bench.client.post("/api/cache/purge", json={"account": LOCAL_ACCOUNT})).json()
    workers = {name: {"device": 1} for name in ("both", "prefill", "decode")}
    assert answer.pop("conversations") >= 3
    assert answer == {"blocks": 3, "workers": workers, "streams": 1, "replies": 1}
    assert [engine.cache_commands for engine in bench.engines] == [[CacheCommand(0, "purge", ACME.salt, b"")]] * 3
    assert conversations(bench) == {(OTHER.salt, "s")}
    assert await status_of_stream(bench) == 404
    assert await n_replies(bench, LOCAL_ACCOUNT) == 0
    assert await n_replies(bench, "other") == 2


async def test_a_session(bench: Bench) -> None:
    answer = (await bench.client.post("/api/cache/purge", json={"session": "s"})).json()
    assert (answer["streams"], answer["replies"]) == (0, 0), "they belong to no session"
    (command,) = bench.engines[1].cache_commands
    assert command.session == session_digest("s")
    assert (ACME.salt, "s") not in conversations(bench)
    assert {(ACME.salt, "t"), (OTHER.salt, "s")} <= conversations(bench)


async def test_everything(bench: Bench) -> None:
    answer = (await bench.client.post("/api/cache/purge", json={"everything": True})).json()
    assert answer["streams"] == 1
    assert answer["replies"] == 2
    assert conversations(bench) == set()
    assert await n_replies(bench, "other") == 0
    assert all(command.salt is None for engine in bench.engines for command in engine.cache_commands)


async def test_a_worker_that_does_not_answer_keeps_nothing_else(bench: Bench) -> None:
    await bench.engines[1].die()
    answer = await bench.client.post("/api/cache/purge", json={"everything": True})
    assert answer.status_code == 503
    assert "not everything is purged: prefill" in answer.text
    assert conversations(bench) == set()
    assert await n_replies(bench, LOCAL_ACCOUNT) == 0
