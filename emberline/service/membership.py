"""Workers join, leave and drain while the server runs.

The core decides. It tells the HTTP workers, each of which has connections of its own, and they follow. Membership is
not kept over a restart of the server: what is to stay belongs into its configuration.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.endpoint import Endpoint, engine_endpoint
from emberline.catalog.model_files import ModelFiles
from emberline.config import EndpointConfig
from emberline.protocol.errors import BadInput, Conflict, NotFound, Unavailable
from emberline.service.engine_client import EngineClient
from emberline.service.served_models import ServedModels
from emberline.upstream.client import UpstreamClient, UpstreamConfig, upstream_configs
from emberline.upstream.models import UpstreamModels, discover

JOIN_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.1
STOP_LIMIT_S = 30.0  # for a worker that is to end to do so

log = logging.getLogger("emberline.balancer")


class WorkerChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an operator asks for. A name stands for all the models of an upstream server."""

    action: Literal["join", "leave", "drain", "undrain"]
    name: str = ""
    config: EndpointConfig | None = None  # of a worker that joins
    stop: bool = False  # leave: end the worker's process, too, where another machine started it


class Members(msgspec.Struct, tag="members", omit_defaults=True):
    """From the core to HTTP workers: how membership differs from the configuration."""

    engines: list[Endpoint] = []  # that have joined,
    upstreams: list[UpstreamConfig] = []
    gone: list[str] = []  # names of workers that have left
    models: list[ModelFiles] = []  # that are loaded on demand
    states: dict[str, str] = {}  # of the models that this machine loads and unloads: on_disk, loading, loaded, …


class WorkerConnections:
    """The connections of one process to all workers."""

    def __init__(
        self,
        models: ServedModels,
        upstream: UpstreamModels,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        """`on_stall` is called with the name of an engine that hangs."""
        self.engines: dict[str, EngineClient] = {}  # by name
        self.upstream = upstream
        self.models = models
        self._on_stall = on_stall

    def engines_of(self, model: str) -> list[EngineClient]:
        return [engine for engine in self.engines.values() if engine.endpoint.models[0] == model]

    def add_engine(self, endpoint: Endpoint) -> EngineClient:
        """Not started yet. It names its model."""
        assert endpoint.name not in self.engines, "endpoint names are unique"
        client = self.engines[endpoint.name] = EngineClient(endpoint)
        client.vocabulary = lambda: self.models.text_of(endpoint.models[0]).vocabulary
        client.on_stall = self._on_stall
        return client

    async def remove(self, *names: str) -> None:
        removed = [self.engines.pop(name, None) or self.upstream.remove(name) for name in names]
        await asyncio.gather(*(client.close() for client in removed if client is not None))

    async def follow(self, members: Members) -> None:
        """What the core says, in a process that is not the core. Workers are added and removed before this waits for
        anything: the core's next message may be a route to one of them, or other members."""
        self.models.offer(members.models)
        self.models.states = members.states
        for endpoint in members.engines:
            if endpoint.name not in self.engines:
                self.add_engine(endpoint).start()
        joined = [UpstreamClient(config) for config in members.upstreams if config.name not in self.upstream.clients]
        for client in joined:
            self.upstream.add(client)
            client.start(watch=False)
        await self.remove(*members.gone)
        for client in joined:
            await self.upstream.load_tokenizer(client)


class CoreWorkers(Protocol):
    """The workers as the core knows them."""

    admission: AdmissionController

    def add(self, connection: EngineClient | UpstreamClient) -> None:
        """A worker whose connection is not started yet."""

    def discard(self, name: str) -> None: ...


class Membership:
    """Carries changes out, in the core process."""

    def __init__(
        self,
        core: CoreWorkers,
        connections: WorkerConnections,
        on_leave: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`on_leave` ends the process of a worker that this machine has started."""
        self.members = Members()
        self.on_change: Callable[[Members], None] | None = None
        self._core = core
        self._connections = connections
        self._on_leave = on_leave
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._joining = asyncio.Lock()  # one at a time: names are checked before workers are asked

    async def change(self, change: WorkerChange) -> list[str]:
        """The names of the workers that it concerns. NotFound, Conflict, BadInput, Unavailable say why it cannot be."""
        if change.action == "join":
            assert change.config is not None
            async with self._joining:
                return await self._join(change.config)
        names = self._named(change.name)
        for name in names:
            if change.action == "undrain":
                if name in self._leaving:
                    raise Conflict(f"{name} is leaving; it can join again once it has left", param="name")
                self._core.admission.undrain(name)
            else:
                self._core.admission.drain(name)
            if change.action == "leave" and name not in self._leaving:
                self._leaving[name] = asyncio.create_task(self._leave(name, change.stop), name=f"leave {name}")
        log.info("%s: %s", change.action, ", ".join(names))
        return names

    # --- models that are loaded on demand ----------------------------------------------------------------------------

    async def attach(self, endpoints: Sequence[Endpoint]) -> bool:
        """Workers of a model that this machine has loaded; whether they could be reached."""
        clients = [self._add_engine(endpoint) for endpoint in endpoints]
        names = {endpoint.name for endpoint in endpoints}
        self.members.gone = [name for name in self.members.gone if name not in names]
        self._tell()
        return all(await asyncio.gather(*(client.wait_connected(JOIN_TIMEOUT_S) for client in clients)))

    async def detach(self, names: Sequence[str]) -> None:
        """Workers without requests whose model is being unloaded."""
        for name in names:
            await self._remove(name)

    def offer(self, models: Sequence[ModelFiles]) -> None:
        """The models that can be loaded on demand, for this process and the HTTP workers."""
        self.members.models = list(models)
        self._connections.models.offer(models)
        self._tell()

    def show_states(self, states: Mapping[str, str]) -> None:
        if states != self.members.states:
            self.members.states = self._connections.models.states = dict(states)
            self._tell()

    async def close(self) -> None:
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def _named(self, name: str) -> list[str]:
        known = self._core.admission.worker_names()
        names = [worker for worker in known if worker == name or worker.startswith(f"{name}:")]
        if not names:
            raise NotFound(f"no worker is called {name[:100]}; there are {', '.join(known) or 'none'}", param="name")
        return names

    async def _join(self, config: EndpointConfig) -> list[str]:
        if any(name.partition(":")[0] == config.name for name in self._core.admission.worker_names()):
            raise Conflict(f"a worker is called {config.name} already; give it another name", param="name")
        names = await (self._join_engine(config) if config.kind == "emberline" else self._join_upstream(config))
        members = self.members
        members.gone = [name for name in members.gone if name not in names]
        self._tell()
        log.info("joined: %s", ", ".join(names))
        return names

    async def _join_engine(self, config: EndpointConfig) -> list[str]:
        endpoint = engine_endpoint(config)
        model = self._connections.models.model_id(endpoint.models[0])
        if model is None:
            raise BadInput(
                f"{endpoint.models[0]} is not served here, so its tokenizer is not loaded; add the worker to "
                "[[endpoints]] of the configuration and restart",
                param="models",
            )
        endpoint = msgspec.structs.replace(endpoint, models=(model,))
        await self._check_weights(endpoint)
        self._add_engine(endpoint)
        return [endpoint.name]

    def _add_engine(self, endpoint: Endpoint) -> EngineClient:
        client = self._connections.add_engine(endpoint)
        self._core.add(client)
        client.start()
        self.members.engines.append(endpoint)
        return client

    async def _check_weights(self, endpoint: Endpoint) -> None:
        """Whether it can be reached, and has the same weights as the other workers of its model."""
        probe = EngineClient(endpoint)
        probe.start()
        try:
            if not await probe.wait_connected(JOIN_TIMEOUT_S):
                raise Unavailable(f"{endpoint.name} cannot be reached at {endpoint.address}: {probe.problem}")
            for other in self._connections.engines_of(endpoint.models[0]):
                if (
                    other.info is not None
                    and probe.info is not None
                    and other.info.fingerprint != probe.info.fingerprint
                ):
                    raise BadInput(
                        f"{endpoint.name} serves {probe.info.model} with other weights than {other.name}",
                        param="models",
                    )
        finally:
            await probe.close()

    async def _join_upstream(self, config: EndpointConfig) -> list[str]:
        clients = await discover(upstream_configs([config]))
        for client in clients:
            await self._connections.upstream.load_tokenizer(client)
        for client in clients:
            self._connections.upstream.add(client)
            self._core.add(client)
            client.start(watch=True)
            self.members.upstreams.append(client.config)
        return [client.name for client in clients]

    async def _leave(self, name: str, stop: bool) -> None:
        """Remove the worker once its requests have ended."""
        while self._core.admission.in_flight_on(name):
            await asyncio.sleep(DRAIN_POLL_S)
        if stop and (engine := self._connections.engines.get(name)) is not None:
            engine.end_worker(STOP_LIMIT_S)
            await asyncio.sleep(DRAIN_POLL_S)  # closing the connection would discard what is not sent yet
        await self._remove(name)
        del self._leaving[name]
        log.info("left: %s", name)
        if self._on_leave is not None:
            await self._on_leave(name)

    async def _remove(self, name: str) -> None:
        self._core.discard(name)
        await self._connections.remove(name)
        members = self.members
        members.engines = [endpoint for endpoint in members.engines if endpoint.name != name]
        members.upstreams = [config for config in members.upstreams if config.name != name]
        members.gone.append(name)
        self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change(self.members)
