"""A provider whose last key is removed leaves nothing: no worker, no series of metrics, no card."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import ModelCard
from emberline.cluster.timings import Timings
from emberline.config import ProviderConfig
from emberline.net.egress_policy import EgressPolicy
from emberline.protocol.errors import ModelNotFound
from emberline.protocol.request import Principal
from emberline.service import open_core_server, open_http_worker
from emberline.upstream.models import UpstreamModels
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.directory import ProviderDirectory
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig
from standins.standin_openai import StandinServer
from tests.upstream.providers.conftest import PATIENCE_S, SAYS, Gateway, Opener, StartProvider
from tests.upstream.providers.test_provider_keys import key_of

MODEL = "gemini-3-pro"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def workers(made: Gateway, admin: dict[str, str]) -> set[str]:
    status = (await made.client.get("/api/status", headers=admin)).json()
    return {worker["name"] for worker in status["workers"]}


async def test_removed_providers_leave_nothing(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini")
    made = await gateway(keys=True, timings=Timings(provider_sweep_s=0.02))
    admin = await key_of(made, "root", admin=True)
    for number in range(5):
        name = f"mine-{number}"
        new = {"name": name, "key": server.key, "url": server.url, "kind": "gemini"}
        assert (await made.post("/api/providers", new, **admin)).status_code == 200
        body = {"model": f"{name}/{MODEL}", "messages": SAYS}
        assert (await made.post("/v1/chat/completions", body, **admin)).status_code == 200
        assert f"{name}/*" in await workers(made, admin)
        if number == 0:
            assert b'model="mine-0/' in await made.service.operations.metrics()
        if number < 4:
            assert (await made.client.delete(f"/api/providers/{name}", headers=admin)).status_code == 200
    kept = {"mine-4/*"}
    await until(lambda: _are(made, admin, kept))
    text = (await made.service.operations.metrics()).decode()
    assert "mine-4/" in text
    assert not any(f"mine-{number}" in text for number in range(4))
    assert set(made.service.upstream.clients) == kept
    gone = await made.post("/v1/chat/completions", {"model": f"mine-0/{MODEL}", "messages": SAYS}, **admin)
    assert gone.status_code == 404
    again = {"name": "mine-0", "key": server.key, "url": server.url, "kind": "gemini"}
    assert (await made.post("/api/providers", again, **admin)).status_code == 200
    back = await made.post("/v1/chat/completions", {"model": f"mine-0/{MODEL}", "messages": SAYS}, **admin)
    assert back.status_code == 200


@pytest.mark.parametrize("name", ["mine", "smollm2-0"])
async def test_an_account_cannot_remove_a_worker_by_its_name(
    gateway: Opener, provider_server: StartProvider, openai_server: Callable[..., Awaitable[StandinServer]], name: str
) -> None:
    """The worker of an account's provider and an operator's worker may have the same name: neither harms the other."""
    upstream, server = await openai_server(model="gpt-test"), await provider_server("openai")
    endpoint = Endpoint(name="smollm2-0", address=upstream.url, kind="openai", models=("gpt-test",))
    made = await gateway(
        keys=True,
        timings=Timings(provider_sweep_s=0.01),
        upstreams=[UpstreamClient(UpstreamConfig(endpoint=endpoint))],
        egress=EgressPolicy(["127.0.0.0/8"]),
    )
    admin, key = await key_of(made, "root", admin=True), await key_of(made, "agent")
    new = {"name": name, "key": server.key, "url": server.url, "kind": "openai"}
    assert (await made.post("/api/providers", new, **key)).status_code == 200
    for model in (f"{name}/gpt-5", "gpt-test", f"{name}/gpt-5"):
        reply = await made.post("/v1/chat/completions", {"model": model, "messages": SAYS}, **key)
        assert reply.status_code == 200, reply.text
    assert await workers(made, admin) == {"smollm2-0", f"{name}/*"}
    assert (await made.client.delete(f"/api/providers/{name}", headers=key)).status_code == 200
    await until(lambda: _are(made, admin, {"smollm2-0"}))
    assert (await made.post("/v1/chat/completions", {"model": "gpt-test", "messages": SAYS}, **key)).status_code == 200


async def test_a_listed_model_is_known_without_its_card(gateway: Opener) -> None:
    """Every request for an unknown name asks: to make the cards of all models each time would stop the event loop."""
    described: list[str] = []

    def describe(card: ModelCard) -> ModelCard:
        described.append(card.id)
        return card

    endpoint = Endpoint(name="e", address="http://127.0.0.1:9", kind="openai", models=("org/gpt-test",))
    config = ProviderConfig(name="openai", key="sk", models=("gpt-5",))
    directory = ProviderDirectory([config], describe)
    upstream = UpstreamModels([UpstreamClient(UpstreamConfig(endpoint=endpoint))], describe, directory)
    assert [card.id for card in upstream.cards()] == ["org/gpt-test", "openai/gpt-5"]
    described.clear()
    names = ("org/gpt-test", "openai/gpt-5", "openai/made-up", "gpt-5", "made-up")
    assert [upstream.lists(name) for name in names] == [True, True, False, False, False]
    made = await gateway(config)
    assert [made.core.lists_model(name) for name in names] == [False, True, False, False, False]
    assert described == []
    await upstream.close()


async def test_a_failed_sweep_is_not_the_last() -> None:
    failures, swept = [RuntimeError("once")], asyncio.Event()

    class Failing(ProviderDirectory):
        def sweep(self, is_used: Callable[[ProviderClient], bool]) -> list[ProviderClient]:
            if failures:
                raise failures.pop()
            swept.set()
            return super().sweep(is_used)

    sweeping = asyncio.create_task(UpstreamModels([], providers=Failing()).sweep_providers(0.001, lambda client: False))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([sweeping, asyncio.create_task(swept.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert swept.is_set()
    sweeping.cancel()


async def _are(made: Gateway, admin: dict[str, str], names: set[str]) -> bool:
    return await workers(made, admin) == names


async def test_a_request_in_flight_keeps_its_provider(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini", hang=True)
    made = await gateway(keys=True, timings=Timings(provider_sweep_s=0.01))
    admin = await key_of(made, "root", admin=True)
    new = {"name": "mine", "key": server.key, "url": server.url, "kind": "gemini"}
    assert (await made.post("/api/providers", new, **admin)).status_code == 200
    body = {"model": f"mine/{MODEL}", "messages": SAYS}
    running = asyncio.create_task(made.post("/v1/chat/completions", body, **admin))
    await until(lambda: _runs(made))
    assert (await made.client.delete("/api/providers/mine", headers=admin)).status_code == 200
    await asyncio.sleep(0.1)  # ten sweeps
    assert await workers(made, admin) == {"mine/*"}
    assert made.core.admission.in_flight_on("mine/*") == 1
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: _are(made, admin, set()))


async def _runs(made: Gateway) -> bool:
    return made.core.admission.in_flight_on("mine/*") == 1


async def test_a_request_of_an_http_worker_keeps_its_provider(
    gateway: Opener, provider_server: StartProvider, tmp_path: Path
) -> None:
    server, quick = await provider_server("gemini", hang_after=10), Timings(provider_sweep_s=0.01)
    made = await gateway(keys=True, timings=quick)
    admin = await key_of(made, "root", admin=True)
    core_server = await open_core_server(made.service, tmp_path / "core.sock")
    directory = ProviderDirectory(keys=made.accounts.provider_keys)
    worker = await open_http_worker([], core_socket=tmp_path / "core.sock", providers=directory, timings=quick)
    auth = Authenticator(Secret.open(tmp_path), directory=made.accounts.directory, required=True)
    transport = httpx.ASGITransport(app=App(worker, ApiSettings(auth), accounts=made.accounts))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686", timeout=PATIENCE_S) as client:
        new = {"name": "mine", "key": server.key, "url": server.url, "kind": "gemini"}
        assert (await client.post("/api/providers", json=new, headers=admin)).status_code == 200
        body = {"model": f"mine/{MODEL}", "messages": SAYS, "stream": True}
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=admin))
        await until(lambda: _runs(made))
        assert (await client.delete("/api/providers/mine", headers=admin)).status_code == 200
        await asyncio.sleep(0.1)  # ten sweeps
        assert set(worker.upstream.clients) == {"mine/*"}
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: _forgotten(worker.upstream))
    await worker.close()
    await core_server.close()


async def _forgotten(upstream: UpstreamModels) -> bool:
    return not upstream.clients


async def test_a_request_that_has_not_begun_is_told_of_the_removal(gateway: Opener) -> None:
    made = await gateway(keys=True, timings=Timings(provider_sweep_s=0.01))
    admin = await key_of(made, "root", admin=True)
    new = {"name": "mine", "key": "sk", "url": "https://example.com", "kind": "openai"}
    assert (await made.post("/api/providers", new, **admin)).status_code == 200
    upstream = made.service.upstream
    card = upstream.find("mine/gpt", None)
    assert card is not None
    assert upstream.provider_of(card) == "mine"
    assert (await made.client.delete("/api/providers/mine", headers=admin)).status_code == 200
    await until(lambda: _forgotten(upstream))
    caller = Principal("root")
    for look_up in (upstream.provider_of, lambda card: upstream.target(card, caller), upstream.n_servers):
        with pytest.raises(ModelNotFound, match="provider mine was removed: add its key again"):
            look_up(card)
