"""Workers join, leave and drain while the server runs.

The core decides. It tells the HTTP workers, each of which has connections of its own, and they follow. Membership is
not kept over a restart of the server: what is to stay belongs into its configuration.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.endpoint import Endpoint, engine_endpoint
from emberline.catalog.model_files import ModelFiles
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.prefix_push import PrefixPusher
from emberline.cluster.served_models import ServedModels
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.cluster.worker_checks import Exclusions
from emberline.config import EndpointConfig
from emberline.net.periodic import stop
from emberline.protocol.errors import BadInput, Conflict, NotFound, Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.member import Member
from emberline.upstream.models import UpstreamModels, discover
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig, upstream_configs

JOIN_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.1
STOP_LIMIT_S = 30.0  # for a worker that is to end to do so
RESTART_LIMIT_S = 600.0  # for one that is to end and to be started again, to finish what it has
_ROLE_POLL_S = 0.01

log = logging.getLogger("emberline.balancer")


class WorkerChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change that an operator asks for. A name stands for all the models of an upstream server."""

    action: Literal["join", "leave", "drain", "undrain", "role", "restart"]
    name: str = ""
    config: EndpointConfig | None = None  # of a worker that joins
    role: WorkerRole | None = None  # that a worker is to have
    wait_s: float = 0.0  # role: at most, for what the worker ran in its former one
    stop: bool = False  # leave: end the worker's process, too, where another machine started it


class Members(msgspec.Struct, omit_defaults=True):
    """Message of the core to HTTP workers: how membership differs from the configuration."""

    engines: list[Endpoint] = []  # that have joined,
    upstreams: list[UpstreamConfig] = []
    gone: list[str] = []  # names of configured workers that have left
    models: list[ModelFiles] = []  # that are loaded on demand
    states: dict[str, str] = {}  # of the models that this machine loads and unloads: on_disk, loading, loaded, …
    problems: dict[str, str] = {}  # why a model could not be loaded, or its worker ended


class WorkerConnections:
    """The connections of one process to all workers."""

    def __init__(
        self,
        models: ServedModels,
        upstream: UpstreamModels,
        on_stall: Callable[[str], None] | None = None,
        tls: ssl.SSLContext | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        """`on_stall` is called with the name of an engine that hangs. `tls` has this process's certificate, for
        engines of other machines."""
        self.tls = tls
        self.timings = timings
        self.engines: dict[str, EngineClient] = {}  # by name
        self.upstream = upstream
        self.models = models
        self._on_stall = on_stall
        self._exclusions = Exclusions()
        self._followed: set[str] = set()  # workers that had joined by the core's latest message

    def engines_of(self, model: str) -> list[EngineClient]:
        return [engine for engine in self.engines.values() if engine.endpoint.models[0] == model]

    def add_engine(self, endpoint: Endpoint) -> EngineClient:
        """Not started yet. It names its model."""
        assert endpoint.name not in self.engines, "endpoint names are unique"
        client = self.engines[endpoint.name] = EngineClient(
            endpoint, self.tls, self.timings, self._exclusions.of(endpoint.name)
        )
        client.vocabulary = lambda: self.models.text_of(endpoint.models[0]).vocabulary
        client.on_stall = self._on_stall
        return client

    async def remove(self, *names: str) -> None:
        removed = [self.engines.pop(name, None) or self.upstream.remove(name) for name in names]
        await asyncio.gather(*(client.close() for client in removed if client is not None))

    async def follow(self, members: Members) -> None:
        """Do as the core says, in a process that is not the core: workers that it no longer names have left, too.

        Workers are added and removed before this waits for anything: the core's next message may be a route to one of
        them, or other members.
        """
        self.models.offer(members.models)
        self.models.states, self.models.problems = members.states, members.problems
        replaced = [self.engines.pop(each.name) for each in members.engines if self._is_replaced(each)]
        for endpoint in members.engines:
            if endpoint.name not in self.engines:
                self.add_engine(endpoint).start()
        joined = [UpstreamClient(config) for config in members.upstreams if config.name not in self.upstream.clients]
        for client in joined:
            self.upstream.add(client)
            client.start(watch=False)
        followed = {engine.name for engine in members.engines} | {config.name for config in members.upstreams}
        left, self._followed = self._followed - followed, followed
        await self.remove(*left, *members.gone)
        await asyncio.gather(*(engine.close() for engine in replaced))
        for client in joined:
            await self.upstream.load_tokenizer(client)

    def _is_replaced(self, endpoint: Endpoint) -> bool:
        """Another run of a worker has its name."""
        known = self.engines.get(endpoint.name)
        return known is not None and known.endpoint != endpoint


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
        self._configured = (*connections.engines, *connections.upstream.clients)  # HTTP workers start with these
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self.pusher: PrefixPusher | None = None  # set where workers that drain send their caches to others
        self._pushing: dict[str, asyncio.Task[None]] = {}  # by worker that drains
        self._former: dict[str, set[str]] = {}  # by worker: requests that ran there when its role changed
        self._joining = asyncio.Lock()  # one at a time: names are checked before workers are asked

    async def change(self, change: WorkerChange) -> list[str]:
        """The names of the workers that it concerns. NotFound, Conflict, BadInput, Unavailable say why it cannot be."""
        if change.action == "join":
            assert change.config is not None
            async with self._joining:
                return await self._join(change.config)
        names = self._named(change.name)
        if change.action == "role":
            assert change.role is not None
            for name in names:
                self.role_check(name, change.role)(())
                self.want_role(name, change.role)
                await self.wait_role(name, change.role)
                await self.wait_former(name, change.wait_s)
            return names
        if change.action == "restart":
            for name in names:
                self.restart_worker(name)
            return names
        for name in names:
            if change.action == "undrain" and name in self._leaving:
                raise Conflict(f"{name} is leaving; it can join again once it has left", param="name")
            self.set_drained(name, change.action != "undrain")
            if change.action == "leave" and name not in self._leaving:
                self._leaving[name] = asyncio.create_task(self._leave(name, change.stop), name=f"leave {name}")
        log.info("%s: %s", change.action, ", ".join(names))
        return names

    # --- members of a cluster ----------------------------------------------------------------------------------------

    async def check_engine(self, endpoint: Endpoint) -> None:
        """Raise BadInput, Conflict or Unavailable if this core could not use the worker."""
        name = endpoint.name
        if name in self._connections.engines and name not in {engine.name for engine in self.members.engines}:
            raise Conflict(f"a worker is called {name} in the configuration of this core: choose another name")
        await self._check_weights(self._of_known_model(endpoint))

    def follow_engine(self, endpoint: Endpoint) -> None:
        """Dial a member. BadInput: its model is not known here."""
        endpoint = self._of_known_model(endpoint)
        if endpoint.name in self._connections.engines:
            raise Conflict(f"another worker is called {endpoint.name} in the configuration of this core")
        self._add_engine(endpoint)
        self._tell()

    async def drop_engine(self, name: str) -> None:
        if name in self._connections.engines:
            await self._remove(name)

    def set_drained(self, name: str, drained: bool) -> None:
        """A worker that drains sends what it has cached to others, so that conversations go on there."""
        (self._core.admission.drain if drained else self._core.admission.undrain)(name)
        if not drained and (task := self._pushing.pop(name, None)) is not None:
            task.cancel()
        if drained and name not in self._pushing and self.pusher is not None:
            self._pushing[name] = asyncio.create_task(self._push(name, self.pusher), name=f"push {name}")

    async def _push(self, name: str, pusher: PrefixPusher) -> None:
        """Send conversations at once, for the next turns of those that are idle; and when the last request has ended
        and its conversation is remembered, which happens after its client got the reply."""
        await pusher.push(name)
        await self.wait_idle(name)
        await asyncio.sleep(self._connections.timings.remember_s)
        await pusher.push(name)

    def is_pushing(self, name: str) -> bool:
        task = self._pushing.get(name)
        return task is not None and not task.done()

    async def wait_pushed(self, name: str) -> None:
        if (task := self._pushing.get(name)) is not None:
            await asyncio.wait([task])

    # --- roles -------------------------------------------------------------------------------------------------------

    def role_check(self, name: str, role: WorkerRole) -> Callable[[Sequence[Member]], None]:
        """Conflict: the worker cannot have this role. What is returned raises Conflict where its model could not be
        served any more, by the members' rows, which this core may not have followed yet. A store calls it in the middle
        of a transaction, and in a thread of its own: it has what this core knows now."""
        engine = self._connections.engines.get(name)
        if engine is None:
            if name in self._connections.upstream.clients:
                raise Conflict(f"{name} is a server of another kind: its role is the one of its configuration")
            return lambda members: None  # a member that this core does not dial yet
        engine.check_role(role)
        if role != "prefill" or engine.role == role:
            return lambda members: None
        model, others = engine.endpoint.models[0], self._others_that_decode(engine)

        def check(members: Sequence[Member]) -> None:
            if not others - {each.name for each in members if each.state != "joined" or each.role == "prefill"}:
                raise Conflict(
                    f"{name} is the last worker of {model} that decodes: give another one the role decode or both first"
                )

        return check

    def _others_that_decode(self, engine: EngineClient) -> frozenset[str]:
        """Workers that decode what this one does: not those that drain, or belong to another account."""
        own = engine.endpoint
        workers = self._core.admission.balancer.fleet.workers_of(own.models[0])
        draining = {worker.name for worker in workers if worker.draining}
        return frozenset(
            each.name
            for each in self._connections.engines_of(own.models[0])
            if each is not engine
            and each.connected
            and each.decodes
            and each.name not in draining
            and each.endpoint.account in ("", own.account)
        )

    def want_role(self, name: str, role: WorkerRole) -> None:
        """Give a worker a role, now or when it connects. Its running requests go on."""
        engine = self._connections.engines.get(name)
        if engine is None:
            return
        if engine.role != role:
            self._former[name] = self._core.admission.requests_on(name)
            log.info("role of %s: %s", name, role, extra={"before": engine.role})
        engine.set_role(role)

    async def wait_role(self, name: str, role: WorkerRole) -> None:
        """Wait until a connected worker has confirmed its role. Raises Unavailable if it does not in time."""
        engine = self._connections.engines.get(name)
        try:
            async with asyncio.timeout(limit_s := self._connections.timings.role_s):
                while engine is not None and engine.connected and engine.role != role:
                    await asyncio.sleep(_ROLE_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"{name} did not say within {limit_s:.0f} s that its role is {role}; it gets it once it answers"
            ) from None

    def n_former(self, name: str) -> int:
        """Requests of this core that ran on the worker when its role changed, and still do."""
        former = self._former.get(name)
        if not former:
            return 0
        former &= self._core.admission.requests_on(name)
        return len(former)

    async def wait_former(self, name: str, limit_s: float) -> None:
        """Wait up to `limit_s` for the requests that `n_former` counts to end or move."""
        end_s = asyncio.get_running_loop().time() + limit_s
        while self.n_former(name) and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(DRAIN_POLL_S)

    def restart_worker(self, name: str) -> None:
        """Ask a worker to finish what it has, and to end so that it is started again. Raises Unavailable."""
        engine = self._connections.engines.get(name)
        if engine is None or not engine.connected:
            why = "it is not dialed" if engine is None else engine.problem
            raise Unavailable(f"{name} cannot be asked to end by this core: {why}")
        log.info("restart: %s", name)
        engine.end_worker(RESTART_LIMIT_S, restart=True)

    def end_worker(self, name: str, limit_s: float) -> None:
        if (engine := self._connections.engines.get(name)) is not None:
            engine.end_worker(limit_s)

    def reaches(self, name: str) -> bool:
        engine = self._connections.engines.get(name)
        return engine is not None and engine.connected

    def standing(self, name: str) -> tuple[bool, str, int, int]:
        """True if the worker is connected, the reason if not, and its sequences: those of this core, and all."""
        engine = self._connections.engines.get(name)
        if engine is None:
            return False, "not dialed yet", 0, 0
        running = engine.load.running + engine.load.waiting if engine.connected else 0
        return engine.connected, engine.problem, self._core.admission.in_flight_on(name), running

    async def wait_idle(self, name: str) -> None:
        """Wait until no request of this core runs on the worker."""
        while self._core.admission.in_flight_on(name):
            await asyncio.sleep(DRAIN_POLL_S)

    async def wait_gone(self, name: str, limit_s: float) -> bool:
        """Wait until the worker closes the connection, as it does when it ends. Returns False after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self.reaches(name):
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        return True

    def _of_known_model(self, endpoint: Endpoint) -> Endpoint:
        model = self._connections.models.model_id(endpoint.models[0])
        if model is None:
            raise BadInput(
                f"{endpoint.models[0]} is not on this core's machine, which needs its tokenizer: run `emberline pull "
                f"{endpoint.models[0]}` there",
                param="models",
            )
        return msgspec.structs.replace(endpoint, models=(model,))

    # --- models that are loaded on demand ----------------------------------------------------------------------------

    async def attach(self, endpoints: Sequence[Endpoint]) -> bool:
        """Workers of a model that this machine has loaded; whether they could be reached."""
        clients = [self._add_engine(endpoint) for endpoint in endpoints]
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

    def reported_problem(self, model: str) -> str:
        """The latest failure that a worker of the model reports; empty if none does."""
        engines = self._connections.engines_of(model)
        return next((engine.load.problem for engine in engines if engine.load.problem), "")

    def show_states(self, states: Mapping[str, str], problems: Mapping[str, str]) -> None:
        if states != self.members.states or problems != self.members.problems:
            self.members.states = self._connections.models.states = dict(states)
            self.members.problems = self._connections.models.problems = dict(problems)
            self._tell()

    async def close(self) -> None:
        await stop(*self._leaving.values(), *self._pushing.values())

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
        """Raise an error unless the worker can be reached and has the weights of the other workers of its model."""
        probe = EngineClient(endpoint, self._connections.tls, self._connections.timings)
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
        await self.wait_idle(name)
        await self.wait_pushed(name)
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
        self._former.pop(name, None)
        if (task := self._pushing.pop(name, None)) is not None:
            task.cancel()
        await self._connections.remove(name)
        members = self.members
        members.engines = [endpoint for endpoint in members.engines if endpoint.name != name]
        members.upstreams = [config for config in members.upstreams if config.name != name]
        self._tell()

    def _tell(self) -> None:
        """Tell the HTTP workers how membership differs from the configuration."""
        present = self._connections.engines.keys() | self._connections.upstream.clients.keys()
        self.members.gone = [name for name in self._configured if name not in present]
        if self.on_change is not None:
            self.on_change(self.members)
