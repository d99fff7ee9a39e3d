"""Providers behind the real service and the HTTP APIs, in one process: stand-ins speak the providers' own formats."""

import asyncio
import json
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
from emberline.net.egress_policy import EgressPolicy
from emberline.service.core import LocalCore
from emberline.service.service import Service
from emberline.service.service_factory import DATABASE, open_service
from emberline.store import open_store
from emberline.upstream.providers.directory import ProviderDirectory
from standins.openai_script import ServerScript
from standins.standin_openai import StandinServer
from standins.standin_providers import (
    ProviderScript,
    StandinAnthropic,
    StandinGemini,
    StandinOpenAI,
    StandinProvider,
)

PATIENCE_S = 60.0
KEY = "sk-configured-0123456789"
SAYS = [{"role": "user", "content": "hello there, how are you?"}]


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


class Gateway:
    """A service with providers, its store, and a client of its HTTP APIs."""

    def __init__(self, service: Service, store: Any, client: httpx.AsyncClient, accounts: AccountService) -> None:
        self.service = service
        self.client = client
        self.accounts = accounts
        self.store = store

    @property
    def core(self) -> LocalCore:
        assert isinstance(self.service.core, LocalCore)
        return self.service.core

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def rows(self) -> list[Any]:
        """(model, status, input tokens, cached tokens, output tokens, cost) of every request, once all have ended."""
        end_s = time.monotonic() + PATIENCE_S
        while self.service.n_running and time.monotonic() < end_s:  # a row is durable once its request is finalized
            await asyncio.sleep(0.002)
        columns = "model, status, input_tokens, cached_tokens, output_tokens, cost_pico"
        while not (rows := list(await self.store.read(f"SELECT {columns} FROM usage ORDER BY created_us"))):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.002)
        return rows


Opener = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Opener]:
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(
        *providers: ProviderConfig,
        egress: EgressPolicy | None = None,
        keys: bool = False,
        with_gateways: bool = False,
        **options: Any,
    ) -> Gateway:
        store = await open_store(tmp_path / DATABASE)
        accounts = AccountService(store, Secret.open(tmp_path))
        await accounts.open()
        directory = ProviderDirectory(providers, keys=accounts.provider_keys, egress=egress)
        service = await open_service(
            [], data_dir=tmp_path, store=store, providers=directory, directory=accounts.directory, **options
        )
        auth = Authenticator(Secret.open(tmp_path), directory=accounts.directory, required=keys)
        gateways = GatewayService(store, []) if with_gateways else None
        if gateways is not None:
            await gateways.open()
            closing.append(gateways.close)
        app = App(service, ApiSettings(auth), accounts=accounts, gateways=gateways)
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686", timeout=PATIENCE_S)
        closing.extend([store.close, accounts.close, service.close, client.aclose])
        return Gateway(service, store, client, accounts)

    yield make
    for close in reversed(closing):
        await close()


@pytest.fixture
async def openai_server() -> AsyncIterator[Callable[..., Awaitable[StandinServer]]]:
    started: list[StandinServer] = []

    async def start(script: ServerScript | None = None, model: str = "gpt-test") -> StandinServer:
        server = await StandinServer("openai", model, script).start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.close()


StartProvider = Callable[..., Awaitable[StandinProvider]]


@pytest.fixture
async def provider_server() -> AsyncIterator[StartProvider]:
    started: list[StandinProvider] = []

    async def start(kind: str, **script: Any) -> StandinProvider:
        server = {"anthropic": StandinAnthropic, "gemini": StandinGemini, "openai": StandinOpenAI}[kind]()
        server.script = ProviderScript(**script)
        started.append(await server.start())
        return server

    yield start
    for server in started:
        await server.close()


def configured(kind: str, server: StandinProvider, **more: Any) -> ProviderConfig:
    return ProviderConfig(name=kind, url=server.url, key=server.key, **more)
