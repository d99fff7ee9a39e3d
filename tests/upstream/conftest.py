"""A service over stand-in upstream servers, with the real core."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.accounts.usage_row import UsageRow
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.served_models import ServedModels
from emberline.protocol.request import GenerateRequest, Message, Principal, SamplingParams
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service.core import LocalCore
from emberline.service.responses import DatabaseResponses
from emberline.service.service import Service
from emberline.service.sessions import Sessions
from emberline.store import open_store
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.upstream.models import UpstreamModels
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig
from emberline.upstream.servers.server_load import ProbeTimings
from standins.openai_script import ServerScript
from standins.standin_openai import ServerKind, StandinServer

MODEL = "standin"
PRINCIPAL = Principal("tenant", salt=b"s" * 16)
PATIENCE_S = 60.0
LONG = "tell me everything about prefill and decode, please. " * 40


def request(text: str = LONG, request_id: str = "r1", **more: Any) -> GenerateRequest:
    more.setdefault("sampling", SamplingParams(temperature=0))
    return GenerateRequest(id=request_id, model=MODEL, messages=(Message("user", text),), **more)


class Bench:
    """Stand-in servers, the service in front of them, and its usage ledger."""

    def __init__(
        self, standins: dict[str, StandinServer], service: Service, core: LocalCore, store: Any, gate: "Gate"
    ) -> None:
        self.standins = standins
        self.service = service
        self.core = core
        self.asks = gate.asks
        self._store = store

    @property
    def clients(self) -> dict[str, UpstreamClient]:
        return self.service.upstream.clients

    async def costs(self) -> list[Any]:
        return [cost for (cost,) in await self._store.read("SELECT cost_pico FROM usage")]

    async def rows(self) -> list[UsageRow]:
        """Rows of every request, once all have ended: a row is durable once its request is finalized."""
        async with asyncio.timeout(PATIENCE_S):
            while self.service.n_running:
                await asyncio.sleep(0.01)
        rows = await self._store.read(
            "SELECT id, status, input_tokens, output_tokens, cached_by_tier FROM usage ORDER BY id"
        )
        return list(rows)

    async def times(self) -> list[tuple[int, int, int]]:
        return list(await self._store.read("SELECT first_token_us, created_us, finished_us FROM usage"))

    async def idle(self) -> bool:
        """Nothing is charged, queued or running anywhere, once what ends has ended."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if not list(self.core.admission.balancer.ledger):
                return True
            await asyncio.sleep(0.01)
        return False


class Gate(AdmissionController):
    """Notes what it is asked."""

    def __init__(self, roles: dict[str, str]) -> None:
        super().__init__(Balancer())
        self.asks: list[RouteRequest] = []
        self.roles = roles  # by worker

    async def admit(self, ask: RouteRequest) -> Route:
        self.asks.append(ask)
        return await super().admit(ask)


class PairGate(Gate):
    """Disaggregates every request that it can; when that pays is tested with the balancer."""

    async def admit(self, ask: RouteRequest) -> Route:
        route = await super().admit(ask)
        pool = [name for name, role in self.roles.items() if role == "prefill"]
        pool = [name for name in pool if name not in ask.avoid] or pool
        return route if route.prefill or not pool else msgspec.structs.replace(route, prefill=pool[0])


async def _nothing() -> None:
    return None


Opener = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Opener]:
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(
        *servers: tuple[str, ServerKind, str],
        transfer: str = "",
        paired: bool = True,
        timings: ProbeTimings | None = None,
        **scripts: ServerScript,
    ) -> Bench:
        standins = {}
        for name, kind, role in servers:
            disaggregated = kind == "sglang" and role != "both" and transfer in ("", "bootstrap")
            standins[name] = await StandinServer(kind, MODEL, scripts.get(name), disaggregated).start()
        upstreams = [
            UpstreamClient(
                UpstreamConfig(
                    endpoint=Endpoint(
                        name=name,
                        address=standins[name].url,
                        role=role,  # type: ignore[arg-type]
                        kind=kind,
                        models=(MODEL,),
                        alone=not (standins[name].disaggregated and role == "decode"),
                    ),
                    transfer=transfer,
                    bootstrap=f"127.0.0.1:{standins[name].port}",
                ),
                timings or ProbeTimings(),
            )
            for name, kind, role in servers
        ]
        store = await open_store(tmp_path / "db")
        responses = DatabaseResponses(store, 30)
        gate = (PairGate if paired else Gate)({name: role for name, _, role in servers})
        core = LocalCore(gate, upstreams, UsageLedger(store), Sessions(), responses)
        models = UpstreamModels(upstreams)
        models.start(watch=True)
        service = Service(core, ServedModels(), {}, _nothing, GrammarCompiler(), models)
        for upstream in upstreams:
            assert await upstream.wait_connected(PATIENCE_S)
        closing.extend([store.close, *(standin.close for standin in standins.values()), service.close])
        return Bench(standins, service, core, store, gate)

    yield make
    for close in reversed(closing):
        await close()
