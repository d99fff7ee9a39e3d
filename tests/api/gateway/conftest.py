"""Gateways in front of stand-in providers: the real service and store, real HTTP to the providers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.config import ProviderConfig
from emberline.gateway.gateways import GatewayService
from emberline.protocol.gateway import GatewaySettings
from emberline.protocol.price import Price
from emberline.service.service import Service
from emberline.service.service_factory import DATABASE, open_service
from emberline.store import open_store
from emberline.upstream.providers.directory import ProviderDirectory
from standins.openai_script import ServerScript
from standins.standin_openai import StandinServer

PATIENCE_S = 60.0
MODEL = "gpt-test"
SAYS = [{"role": "user", "content": "hello there, how are you?"}]
PRICE = Price(input=1_000_000, output=2_000_000)


class Bench:
    """Providers `a`, `b` and `c`, each a stand-in server with one model, and a client of the gateway's API."""

    def __init__(
        self,
        servers: dict[str, StandinServer],
        service: Service,
        store: Any,
        gateways: GatewayService,
        accounts: AccountService,
        client: httpx.AsyncClient,
    ) -> None:
        self.servers = servers
        self.service = service
        self.store = store
        self.gateways = gateways
        self.accounts = accounts
        self.client = client

    async def ask(self, model: str = f"a/{MODEL}", path: str = "", **fields: Any) -> httpx.Response:
        """A chat through the gateway `default`; fields that begin with cf are headers."""
        headers = {name.replace("_", "-"): value for name, value in fields.items() if name.startswith("cf_")}
        body = {name: value for name, value in fields.items() if not name.startswith("cf_")}
        url = path or "/v1/local/default/compat/chat/completions"
        return await self.client.post(url, json={"model": model, "messages": SAYS, **body}, headers=headers)

    async def logs(self, **query: Any) -> list[Any]:
        answer = await self.client.get("/api/gateways/default/logs", params=query)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    async def usage(self) -> list[Any]:
        """(id, model, status, output tokens, cost) of every usage row, once nothing is in flight."""
        end_s = time.monotonic() + PATIENCE_S
        core: Any = self.service.core
        while (list(core.admission.balancer.ledger) or self.service.n_running) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)  # a row is durable once its request is finalized
        return list(
            await self.store.read("SELECT id, model, status, output_tokens, cost_pico FROM usage ORDER BY created_us")
        )


Opener = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Opener]:
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(
        settings: dict[str, Any] | None = None,
        required: bool = False,
        more: tuple[ProviderConfig, ...] = (),
        **scripts: ServerScript,
    ) -> Bench:
        scripts = {"a": ServerScript(tokens=5), **scripts}
        servers = {name: await StandinServer("openai", MODEL, script).start() for name, script in scripts.items()}
        store = await open_store(tmp_path / DATABASE)
        secret = Secret.open(tmp_path)
        accounts = AccountService(store, secret)
        await accounts.open()
        configs = [
            ProviderConfig(name=name, url=f"{server.url}/v1", key=f"sk-secret-{name}-0123456789")
            for name, server in servers.items()
        ]
        prices = {f"{name}/{MODEL}": PRICE for name in servers}
        directory = ProviderDirectory([*configs, *more], keys=accounts.provider_keys)
        service = await open_service(
            [], data_dir=tmp_path, store=store, providers=directory, directory=accounts.directory, prices=prices
        )
        configured = [] if settings is None else [GatewaySettings(**{"name": "default", **settings})]
        gateways = GatewayService(store, configured)
        await gateways.open()
        auth = Authenticator(secret, directory=accounts.directory, required=required)
        app = App(service, ApiSettings(auth), accounts=accounts, gateways=gateways)
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686", timeout=PATIENCE_S)
        closing.extend([store.close, *(server.close for server in servers.values()), accounts.close, service.close])
        closing.extend([gateways.close, client.aclose])
        return Bench(servers, service, store, gateways, accounts, client)

    yield make
    for close in reversed(closing):
        await close()
