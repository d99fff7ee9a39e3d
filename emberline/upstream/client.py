"""An upstream server as an endpoint of the balancer: its configuration, health, load and prefix cache.

To the balancer an `UpstreamClient` looks like an `EngineClient`. Only the core probes servers; an HTTP worker trusts
the core's routes and learns of a dead server by trying.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.balancer.endpoint import Capacity, Endpoint, WorkerListener
from emberline.config import ConfigError, EndpointConfig
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import EngineLost
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents
from emberline.upstream.disaggregation import DEFAULT_TRANSFER, Adapter, Peer, adapter_for, transfers_of
from emberline.upstream.http_client import ConnectionFailed, ConnectionPool, parse
from emberline.upstream.kv_events import KVSubscriber, key_root

BOOTSTRAP_PORT = 8998  # of Mooncake and SGLang alike


# --- configuration ----------------------------------------------------------------------------------------------------


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    endpoint: Endpoint  # its address is the URL, its token the key that the server wants
    transfer: str = ""  # KV transfer from prefill to decode; empty: the kind's default
    bootstrap: str = ""  # host:port of a prefill server's bootstrap server; empty: 8998 at its host
    kv_events: str = ""  # "tcp://host:5557"
    kv_replay: str = ""  # "tcp://host:5558", for events that were missed
    tokenizer: str = ""  # file or folder of the model's tokenizer; empty: not available here
    max_running: int = 0  # 0: unknown
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


# --- load reports -----------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOST = 1 << 40


class NoLoadReport(Exception):
    """The server's answer has no load report in it; the message says what is missing."""


def vllm_load(metrics: str) -> EngineLoad:
    """The load report from vLLM's /metrics; several engines behind one port are added up."""
    sums: dict[str, float] = {}
    fullness: list[float] = []
    blocks = 0
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "cache_config_info":
            blocks += _blocks(dict(_LABEL.findall(labels)))
        elif name == "kv_cache_usage_perc":
            fullness.append(_number(value))
        else:
            sums[name] = sums.get(name, 0.0) + _number(value)
    if "num_requests_running" not in sums:
        raise NoLoadReport("/metrics has no vllm:num_requests_running")
    used = max((share for share in fullness if 0 <= share <= 1), default=0.0)
    return EngineLoad(
        running=_count(sums["num_requests_running"]),
        waiting=_count(sums.get("num_requests_waiting", 0)),
        kv_used_blocks=int(used * blocks),
        kv_total_blocks=blocks,
        prompt_tokens=_count(sums.get("prompt_tokens_total", 0)),
        cached_tokens=_count(sums.get("prefix_cache_hits_total", 0)),
        output_tokens=_count(sums.get("generation_tokens_total", 0)),
        preemptions=_count(sums.get("num_preemptions_total", 0)),
    )


def sglang_load(answer: Any) -> EngineLoad:
    """The load report from SGLang's /v1/loads: one entry per data-parallel rank, added up."""
    loads = answer.get("loads", [answer]) if isinstance(answer, dict) else answer
    ranks = loads if isinstance(loads, list) else ()
    ranks = [rank for rank in ranks if isinstance(rank, dict) and "num_running_reqs" in rank]
    if not ranks:
        raise NoLoadReport("/v1/loads has no num_running_reqs")

    def total(name: str) -> int:
        return sum(_count(rank.get(name)) for rank in ranks)

    return EngineLoad(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        waiting_tokens=total("num_waiting_uncached_tokens"),
        kv_used_blocks=total("num_used_tokens") // BLOCK_TOKENS,
        kv_total_blocks=total("max_total_num_tokens") // BLOCK_TOKENS,
    )


def _blocks(labels: dict[str, str]) -> int:
    n_blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(n_blocks) * int(size) // BLOCK_TOKENS if n_blocks.isdecimal() and size.isdecimal() else 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _count(value: Any) -> int:
    """NaN, negative and absurd numbers count as 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return 0
    return int(value) if 0 <= value < _MOST else 0


# --- the client -------------------------------------------------------------------------------------------------------

PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 5.0
MAX_FAILED_PROBES = 3  # in a row: then the server is down, unless bytes of some reply still arrive
MAX_CONTEXT = 1 << 24
DEFAULT_CONTEXT = 131_072
MAX_PROBE_BYTES = 8 << 20
_HEALTH = {"vllm": "/health", "sglang": "/health"}  # a plain server has /v1/models at most

log = logging.getLogger("emberline.balancer")


class UpstreamClient:
    """Connections to one upstream server, and what the balancer needs to know of it."""

    def __init__(self, config: UpstreamConfig) -> None:
        address = parse(config.endpoint.address)
        self.config = config
        self.pool = ConnectionPool(address, config.endpoint.token)
        self.adapter: Adapter | None = adapter_for(config.kind, config.transfer)
        self.peer = Peer(config.name, address.host, config.bootstrap or f"{address.host}:{BOOTSTRAP_PORT}")
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.progress_s = 0.0
        self.problem = "not probed yet"  # empty while it answers
        self.load_problem = ""  # why its load is not known
        self.closing = False
        self.listener: WorkerListener | None = None
        self.kv: KVSubscriber | None = None
        self._probes = ConnectionPool(address, config.endpoint.token)
        self._n_failed_probes = 0
        self._models: tuple[str, ...] = config.endpoint.models
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
            self._ready.set()
            return
        self._tasks.append(asyncio.create_task(self._watch(), name=f"endpoint {self.name}"))
        config = self.config
        if config.kv_events and self._models:
            root = key_root(config.kind, self._models[0])
            self.kv = KVSubscriber(self.name, config.kv_events, config.kv_replay, root, self._cached)
            self._tasks.append(asyncio.create_task(self.kv.run(), name=f"kv events {self.name}"))

    async def wait_connected(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.problem = "closed"
        self.pool.close()
        self._probes.close()

    async def fetch(self, authority: str, path: str) -> Any:
        """JSON of a small GET at another port of this server. ConnectionFailed where there is none."""
        pool = ConnectionPool(parse(f"http://{authority}"))
        try:
            return _json(*await pool.get(path, PROBE_TIMEOUT_S, MAX_PROBE_BYTES))
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
            try:
                if self.problem:
                    await self.ask_models()
                load = await self._ask_load()
            except ConnectionFailed as error:
                self._probe_failed(str(error))
            except NoLoadReport as error:
                if self.load_problem != str(error):
                    log.warning("endpoint %s: %s; its load is not known", self.name, error)
                self.load_problem = str(error)
                self._probe_answered(EngineLoad())
            else:
                self.load_problem = ""
                self._probe_answered(load)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _ask_load(self) -> EngineLoad:
        kind = self.config.kind
        if kind == "vllm":
            status, body = await self._probe("/metrics")
            if status == 200:
                return vllm_load(body.decode("utf-8", "replace"))
        elif kind == "sglang":
            status, body = await self._probe("/v1/loads?include=core")
            if status == 200:
                return sglang_load(_json(status, body))
        status, _ = await self._probe(_HEALTH.get(kind, "/v1/models"))
        if status != 200:
            raise ConnectionFailed(f"it answers {status} to health checks")
        return EngineLoad()

    async def _probe(self, path: str) -> tuple[int, bytes]:
        return await self._probes.get(path, PROBE_TIMEOUT_S, MAX_PROBE_BYTES)

    def _probe_answered(self, load: EngineLoad) -> None:
        self.load = load
        self.progress_s = time.monotonic()
        self._n_failed_probes = 0
        if self.problem:
            self.problem = ""
            self._ready.set()
            log.info("endpoint %s answers", self.name, extra={"kind": self.config.kind, "models": self._models})
            if self.listener is not None and self.info is not None:
                self.listener.joined(self.endpoint, Capacity.of(self.info, bool(self.config.kv_events)), load)
        elif self.listener is not None:
            self.listener.reported(self.name, load)

    def _probe_failed(self, why: str) -> None:
        """A server that hangs is as lost as one that closes its connections: its requests fail over."""
        self._n_failed_probes += 1
        if self.problem:
            if self.problem != why:
                log.warning("endpoint %s: %s", self.name, why)
            self.problem = why
        elif self._n_failed_probes >= MAX_FAILED_PROBES and self.pool.idle_s > PROBE_TIMEOUT_S:
            log.warning("endpoint %s is down: %s", self.name, why)
            self.problem = why
            self._ready.clear()
            self.peer.facts.clear()
            if self.listener is not None:
                self.listener.left(self.name, why)
            self.pool.abort(why)

    def _cached(self, events: KVEvents) -> None:
        if self.listener is not None:
            self.listener.kv_events(self.name, events)


def _json(status: int, body: bytes) -> Any:
    if status != 200:
        raise ConnectionFailed(f"it answered {status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConnectionFailed(f"its answer is not JSON: {error}") from None
