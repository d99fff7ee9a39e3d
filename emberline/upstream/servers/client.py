"""An upstream server as an endpoint of the balancer: its configuration, health, load and prefix cache.

To the balancer an `UpstreamClient` looks like an `EngineClient`. Only the core probes servers; an HTTP worker trusts
the core's routes and learns of a dead server by trying.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.balancer.endpoint import Capacity, Endpoint, WorkerListener
from emberline.config import ConfigError, EndpointConfig
from emberline.net.http_client import ConnectionFailed, ConnectionPool, parse
from emberline.net.periodic import stop
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import EngineLost
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents
from emberline.upstream.servers.disaggregation import DEFAULT_TRANSFER, Adapter, Peer, adapter_for, transfers_of
from emberline.upstream.servers.kv_events import KVSubscriber, key_root
from emberline.upstream.servers.server_load import (
    ConcurrencyLimit,
    NoLoadReport,
    ProbeTimings,
    ProgressCheck,
    sglang_load,
    vllm_load,
)

BOOTSTRAP_PORT = 8998  # of Mooncake and SGLang alike


# --- configuration ----------------------------------------------------------------------------------------------------


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    endpoint: Endpoint  # its address is the URL, its token the key that the server wants
    transfer: str = ""  # KV transfer from prefill to decode; empty: the kind's default
    bootstrap: str = ""  # host:port of a prefill server's bootstrap server; empty: 8998 at its host
    kv_events: str = ""  # "tcp://host:5557"
    kv_replay: str = ""  # "tcp://host:5558", for events that were missed
    tokenizer: str = ""  # file or folder of the model's tokenizer; empty: not available here
    max_running: int = 0  # 0: adapted to its load reports
    context_len: int = 0  # 0: as the server says

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def kind(self) -> str:
        return self.endpoint.kind


def upstream_configs(endpoints: Sequence[EndpointConfig]) -> list[UpstreamConfig]:
    """The configurations of all endpoints but Emberline's own workers. ConfigError says what is wrong with one."""
    configs = [_upstream_config(endpoint) for endpoint in endpoints if endpoint.kind != "emberline"]
    _check_pairs(configs)
    return configs


def _upstream_config(config: EndpointConfig) -> UpstreamConfig:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"endpoint {config.name}: {what}", param="endpoints")

    try:
        parse(config.url)
    except ValueError as error:
        raise wrong(f"url: {error}") from None
    adapter = adapter_for(config.kind, config.transfer)
    if config.transfer and adapter is None:
        known = ", ".join(transfers_of(config.kind)) or "none"
        raise wrong(f"transfer {config.transfer!r} is not known for kind {config.kind!r}; there are {known}")
    if config.role != "both" and adapter is None:
        raise wrong(f"servers of kind {config.kind!r} have no prefill/decode disaggregation: leave role out")
    if config.bootstrap and not config.bootstrap.rpartition(":")[2].isdecimal():
        raise wrong(f"bootstrap is host:port, not {config.bootstrap!r}")
    for name, address in (("kv_events", config.kv_events), ("kv_replay", config.kv_replay)):
        if address and not address.startswith(("tcp://", "ipc://")):
            raise wrong(f"{name} is tcp://host:port, not {address!r}")
    if config.kv_events and not config.tokenizer:
        raise wrong("kv_events are about token ids: give tokenizer, the model's file or folder, too")
    return UpstreamConfig(
        endpoint=Endpoint(
            name=config.name,
            address=config.url,
            token=config.key or "",
            role=config.role,
            kind=config.kind,
            models=config.models,
            alone=config.role != "decode" or adapter is None or adapter.decodes_alone,
        ),
        transfer=config.transfer,
        bootstrap=config.bootstrap,
        kv_events=config.kv_events,
        kv_replay=config.kv_replay,
        tokenizer=config.tokenizer,
        max_running=config.max_running,
        context_len=config.context_len,
    )


def _check_pairs(configs: Sequence[UpstreamConfig]) -> None:
    """A prefill server must be able to transfer KV to every decode server of its model."""
    ways: dict[str, tuple[str, str, str]] = {}
    for config in configs:
        if config.endpoint.role == "both":
            continue
        for model in config.endpoint.models:
            way = (config.kind, config.transfer or DEFAULT_TRANSFER.get(config.kind, ""))
            kind, transfer, name = ways.setdefault(model, (*way, config.name))
            if way != (kind, transfer):
                raise ConfigError(
                    f"endpoints {name} and {config.name} share {model} and cannot transfer KV to each other: "
                    f"{kind}/{transfer} and {'/'.join(way)}",
                    param="endpoints",
                )


# --- the client -------------------------------------------------------------------------------------------------------

MAX_FAILED_PROBES = 3  # in a row: then the server is down, unless bytes of some reply still arrive
MAX_CONTEXT = 1 << 24
DEFAULT_CONTEXT = 131_072
STUCK = "it has work and computes no tokens"
MAX_PROBE_BYTES = 8 << 20

log = logging.getLogger("emberline.balancer")


class UpstreamClient:
    """Connections to one upstream server, and what the balancer needs to know of it."""

    def __init__(self, config: UpstreamConfig, timings: ProbeTimings = ProbeTimings()) -> None:  # noqa: B008
        self._timings = timings
        address = parse(config.endpoint.address)
        self.config = config
        self.pool = ConnectionPool(address, config.endpoint.token)
        self.adapter: Adapter | None = adapter_for(config.kind, config.transfer)
        self.peer = Peer(config.name, address.host, config.bootstrap or f"{address.host}:{BOOTSTRAP_PORT}")
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.problem = "not probed yet"  # empty while it answers
        self.load_problem = ""  # why its load is not known
        self.closing = False
        self.listener: WorkerListener | None = None
        self.kv: KVSubscriber | None = None
        self._probes = ConnectionPool(address, config.endpoint.token)
        self._n_failed_probes = 0
        self._limit = ConcurrencyLimit()
        self._progress = ProgressCheck(timings)
        self._stuck = False  # it is down because it computes nothing
        self._canary: asyncio.Task[None] | None = None
        self._models: tuple[str, ...] = config.endpoint.models
        self._probed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def endpoint(self) -> Endpoint:
        return msgspec.structs.replace(self.config.endpoint, models=self._models)

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

    @property
    def connected(self) -> bool:
        return not self.problem

    @property
    def notes(self) -> str:
        """Problems that do not keep it from working."""
        return "; ".join(filter(None, (self.load_problem, self.kv.problem if self.kv is not None else "")))

    def start(self, watch: bool = True) -> None:
        if not watch:
            self.problem = ""
            self._probed.set()
            self._ready.set()
            return
        self._tasks.append(asyncio.create_task(self._watch(), name=f"endpoint {self.name}"))
        config = self.config
        if config.kv_events and self._models:
            root = key_root(config.kind, self._models[0])
            self.kv = KVSubscriber(self.name, config.kv_events, config.kv_replay, root, self._cached)
            self._tasks.append(asyncio.create_task(self.kv.run(), name=f"kv events {self.name}"))

    async def wait_connected(self, timeout_s: float) -> bool:
        return await _is_set(self._ready, timeout_s)

    async def wait_probed(self, timeout_s: float) -> bool:
        """Wait until the server has answered a probe, or failed one."""
        return await _is_set(self._probed, timeout_s)

    async def close(self) -> None:
        self.closing = True
        await stop(*self._tasks, self._canary)
        self.problem = "closed"
        self.pool.close()
        self._probes.close()

    async def fetch(self, authority: str, path: str) -> Any:
        """JSON of a small GET at another port of this server. ConnectionFailed where there is none."""
        pool = ConnectionPool(parse(f"http://{authority}"))
        try:
            return _json(*await pool.get(path, self._timings.timeout_s, MAX_PROBE_BYTES))
        finally:
            pool.close()

    def lost(self, what: str) -> EngineLost:
        """The error of a request that this server failed. Facts learnt from it may no longer be true."""
        self.peer.facts.clear()
        return EngineLost(self.name, what)

    # --- probes ------------------------------------------------------------------------------------------------------

    async def ask_models(self) -> tuple[str, ...]:
        """The models it serves. ConnectionFailed where it does not list them, or lacks a configured one."""
        listed = _json(*await self._probe("/v1/models"))
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise ConnectionFailed("its /v1/models is no list of models")
        rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        names = tuple(row["id"] for row in rows)
        wanted = self._models or names
        if missing := [name for name in wanted if name not in names]:
            served = ", ".join(names)[:500] or "nothing"
            raise ConnectionFailed(f"it does not serve {', '.join(missing)}; it serves {served}")
        if not wanted:
            raise ConnectionFailed("it serves no models")
        self._models = wanted
        lengths = [row.get("max_model_len") for row in rows if row["id"] in wanted]
        context_len = min((n for n in lengths if type(n) is int and 0 < n < MAX_CONTEXT), default=DEFAULT_CONTEXT)
        config = self.config
        self.info = EngineInfo(
            model=wanted[0],
            fingerprint=f"{config.kind}:{wanted[0]}",
            context_len=config.context_len or context_len,
            vocab_size=0,
            eos_ids=(),
            device="remote",
            backend=config.kind,
            max_running=config.max_running,
            role=config.endpoint.role,
        )
        return wanted

    async def _watch(self) -> None:
        while True:
            load: EngineLoad | None = None
            try:
                if self.problem:
                    await self.ask_models()
                load = await self._ask_load()
                if self._stuck:
                    await self._generate_token()
                self.load_problem = ""
            except ConnectionFailed as error:
                self._probe_failed(str(error))
            except NoLoadReport as error:
                if self.load_problem != str(error):
                    log.warning("endpoint %s: %s; its load is not known", self.name, error)
                self.load_problem = str(error)
                self._probe_answered(None)
            except Exception:  # the watch goes on: without it, nobody would notice when the server dies
                log.exception("endpoint %s: its answers could not be handled", self.name)
                self._probe_failed("its answers to health checks could not be handled")
            else:
                self._probe_answered(load)
            self._probed.set()
            await asyncio.sleep(self._timings.interval_s)

    async def _ask_load(self) -> EngineLoad | None:
        """None: servers of its kind report no load. ConnectionFailed where it is not healthy."""
        kind = self.config.kind
        if kind == "vllm":
            await self._check_health("/health", optional=True)
            status, body = await self._probe("/metrics")
            if status == 200:
                return vllm_load(body.decode("utf-8", "replace"))
            raise NoLoadReport(f"/metrics answers {status}")
        if kind == "sglang":
            status, body = await self._probe("/v1/loads?include=core")
            if status == 200:
                return sglang_load(_json(status, body))
            await self._check_health("/health")
            raise NoLoadReport(f"/v1/loads answers {status}")
        await self._check_health("/v1/models")  # a plain server has that at most
        return None

    async def _check_health(self, path: str, optional: bool = False) -> None:
        """`optional`: a proxy in front of the server may not have the path."""
        status, _ = await self._probe(path)
        if status != 200 and not (optional and status == 404):
            raise ConnectionFailed(f"it answers {status} to health checks")

    async def _generate_token(self) -> None:
        """A canary. ConnectionFailed where it is not answered."""
        if self.config.kind == "sglang":
            status, _ = await self._probe("/health_generate")
        else:
            body = msgspec.json.encode({"model": self._models[0], "prompt": "1", "max_tokens": 1})
            try:
                async with asyncio.timeout(canary_s := self._timings.canary_s):
                    exchange = await self._probes.post("/v1/completions", body)
                    try:
                        status, _ = exchange.status, await exchange.read(MAX_PROBE_BYTES)
                    finally:
                        exchange.close()
            except TimeoutError:
                raise ConnectionFailed(f"{STUCK}: none for {canary_s:g} s after a request for one") from None
        if status != 200:
            raise ConnectionFailed(f"it answers {status} to a request for one token")
        self._progress.progressed(time.monotonic())

    async def _try_canary(self) -> None:
        with contextlib.suppress(ConnectionFailed):
            await self._generate_token()

    async def _probe(self, path: str) -> tuple[int, bytes]:
        return await self._probes.get(path, self._timings.timeout_s, MAX_PROBE_BYTES)

    def _probe_answered(self, load: EngineLoad | None) -> None:
        now_s = time.monotonic()
        self._n_failed_probes = 0
        limit_changed = False
        if load is not None:
            self.load = load
            self._progress.observe(load, now_s)
            limit_changed = self._limit.observe(load) and not self.config.max_running
        if self.problem:
            self.problem, self._stuck = "", False
            self._progress.progressed(now_s)
            self._ready.set()
            log.info("endpoint %s answers", self.name, extra={"kind": self.config.kind, "models": self._models})
            if self.listener is not None:
                self.listener.joined(self.endpoint, self._capacity(), load)
        elif load is not None and self._progress.is_stuck(now_s):
            self._stuck = True
            self._leave(STUCK)
        elif load is not None:
            if self._progress.is_suspect(now_s) and (self._canary is None or self._canary.done()):
                self._canary = asyncio.create_task(self._try_canary(), name=f"canary {self.name}")
            if self.listener is not None:
                if limit_changed:
                    self.listener.resized(self.name, self._capacity())
                self.listener.reported(self.name, load)

    def _capacity(self) -> Capacity:
        return Capacity(
            max_running=self.config.max_running or self._limit.sequences,
            kv_tokens=self.load.kv_total_blocks * BLOCK_TOKENS,
            events=bool(self.config.kv_events),
        )

    def _probe_failed(self, why: str) -> None:
        self._n_failed_probes += 1
        if self.problem:
            if self.problem != why:
                log.warning("endpoint %s: %s", self.name, why)
            self.problem = why
        elif self._n_failed_probes >= MAX_FAILED_PROBES and self.pool.idle_s > self._timings.timeout_s:
            self._leave(why)

    def _leave(self, why: str) -> None:
        """A server that hangs is as lost as one that closes its connections: its requests fail over."""
        log.warning("endpoint %s is down: %s", self.name, why)
        self.problem = why
        self._ready.clear()
        if self.listener is not None:
            self.listener.left(self.name, why)
        self.abort(why)

    def abort(self, why: str) -> None:
        """Fail all exchanges with the server."""
        self.peer.facts.clear()
        self.pool.abort(why)

    def _cached(self, events: KVEvents) -> None:
        if self.listener is not None:
            self.listener.kv_events(self.name, events)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """True once the event is set; False if that takes longer than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _json(status: int, body: bytes) -> Any:
    if status != 200:
        raise ConnectionFailed(f"it answered {status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConnectionFailed(f"its answer is not JSON: {error}") from None
