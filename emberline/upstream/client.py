"""One of other people's servers as an endpoint: its connections, and what the fleet wants to know of it.

To the fleet it looks like an `EngineClient`. Only the core watches it; a door trusts the core's routes and learns of a
dead server by trying.
"""

import asyncio
import logging
import math
import re
import time
from typing import Any

import msgspec

from emberline.balancer.endpoint import Capacity, Endpoint, WorkerListener
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import EngineLost
from emberline.protocol.frames import EngineInfo, EngineLoad, KVEvents
from emberline.upstream.config import UpstreamConfig
from emberline.upstream.disaggregation import Adapter, Peer
from emberline.upstream.http_client import Broken, Pool, parse
from emberline.upstream.kv_events import KVSubscriber, key_root

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOST = 1 << 40


class NoLoad(Exception):
    """The answer is no account of a load."""


def vllm_load(metrics: str) -> EngineLoad:
    """From /metrics; several engines behind one port are added up."""
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
        raise NoLoad("/metrics has no vllm:num_requests_running")
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
    """From /v1/loads: one entry per data-parallel rank, added up."""
    told = answer.get("loads", [answer]) if isinstance(answer, dict) else answer
    listed = told if isinstance(told, list) else ()
    ranks = [rank for rank in listed if isinstance(rank, dict) and "num_running_reqs" in rank]
    if not ranks:
        raise NoLoad("/v1/loads has no num_running_reqs")

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
    """A number that counts something; NaN, negative and absurd ones are lies and count as none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return 0
    return int(value) if 0 <= value < _MOST else 0


PROBE_S = 2.0  # between two looks at a server
ANSWER_S = 5.0  # for it to answer such a look
FAILURES = 3  # in a row, and it counts as gone, unless it still sends what was asked of it
MAX_CONTEXT = 1 << 24
DEFAULT_CONTEXT = 131_072
MAX_PROBE_BYTES = 8 << 20
_HEALTH = {"vllm": "/health", "sglang": "/health"}  # a plain server has /v1/models at most

log = logging.getLogger("emberline.balancer")


class Upstream:
    def __init__(self, server: UpstreamConfig) -> None:
        address = parse(server.endpoint.address)
        self.server = server
        self.pool = Pool(address, server.endpoint.token)
        self.adapter: Adapter | None = server.adapter()
        self.peer = Peer(server.name, address.host, server.meeting_point)
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.progress_s = 0.0
        self.problem = "not asked yet"  # empty while it answers
        self.load_problem = ""  # why its load is not known, if it is not
        self.closing = False
        self.listener: WorkerListener | None = None
        self.tells_kv = bool(server.kv_events)  # what its cache gains and loses
        self.kv: KVSubscriber | None = None
        self._probes = Pool(address, server.endpoint.token)
        self._n_failures = 0
        self._models: tuple[str, ...] = server.endpoint.models
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def endpoint(self) -> Endpoint:
        return msgspec.structs.replace(self.server.endpoint, models=self._models)

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

    @property
    def connected(self) -> bool:
        return not self.problem

    @property
    def notes(self) -> str:
        """What does not keep it from working, and should be known."""
        return "; ".join(filter(None, (self.load_problem, self.kv.problem if self.kv is not None else "")))

    def start(self, watch: bool = True) -> None:
        if not watch:
            self.problem = ""
            self._ready.set()
            return
        self._tasks.append(asyncio.create_task(self._watch(), name=f"endpoint {self.name}"))
        server = self.server
        if server.kv_events and self._models:
            root = key_root(server.kind, self._models[0])
            self.kv = KVSubscriber(self.name, server.kv_events, server.kv_replay, root, self._cached)
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
        """JSON of a small GET at another port of this server; Broken when there is none."""
        pool = Pool(parse(f"http://{authority}"))
        try:
            return _json(*await pool.get(path, ANSWER_S, MAX_PROBE_BYTES))
        finally:
            pool.close()

    def lost(self, what: str) -> EngineLost:
        """The error of a request that this server has failed. What was learnt of it may be true no longer."""
        self.peer.facts.clear()
        return EngineLost(self.name, what)

    # --- watching ----------------------------------------------------------------------------------------------------

    async def ask_models(self) -> tuple[str, ...]:
        """What it serves, as it says itself; Broken when it says nothing of the kind."""
        listed = _json(*await self._probes.get("/v1/models", ANSWER_S, MAX_PROBE_BYTES))
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise Broken("its /v1/models is no list of models")
        rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        names = tuple(row["id"] for row in rows)
        wanted = self._models or names
        if missing := [name for name in wanted if name not in names]:
            raise Broken(f"it does not serve {', '.join(missing)}; it serves {', '.join(names)[:500] or 'nothing'}")
        if not wanted:
            raise Broken("it serves no models")
        self._models = wanted
        lengths = [row.get("max_model_len") for row in rows if row["id"] in wanted]
        self._welcome(min((n for n in lengths if type(n) is int and 0 < n < MAX_CONTEXT), default=DEFAULT_CONTEXT))
        return wanted

    def _welcome(self, context_len: int) -> None:
        server = self.server
        self.info = EngineInfo(
            model=self._models[0],
            fingerprint=f"{server.kind}:{self._models[0]}",
            context_len=server.context_len or context_len,
            vocab_size=0,
            eos_ids=(),
            device="remote",
            backend=server.kind,
            max_running=server.max_running,
            role=server.endpoint.role,
        )

    async def _watch(self) -> None:
        while True:
            try:
                if self.problem:
                    await self.ask_models()
                load = await self._ask_load()
            except Broken as error:
                self._failed(str(error))
            except NoLoad as error:
                if self.load_problem != str(error):
                    log.warning("endpoint %s: %s; its load is not known", self.name, error)
                self.load_problem = str(error)
                self._answers(EngineLoad())
            else:
                self.load_problem = ""
                self._answers(load)
            await asyncio.sleep(PROBE_S)

    async def _ask_load(self) -> EngineLoad:
        kind = self.server.kind
        if kind == "vllm":
            status, body = await self._probes.get("/metrics", ANSWER_S, MAX_PROBE_BYTES)
            if status == 200:
                return vllm_load(body.decode("utf-8", "replace"))
        elif kind == "sglang":
            status, body = await self._probes.get("/v1/loads?include=core", ANSWER_S, MAX_PROBE_BYTES)
            if status == 200:
                return sglang_load(_json(status, body))
        status, _ = await self._probes.get(_HEALTH.get(kind, "/v1/models"), ANSWER_S, MAX_PROBE_BYTES)
        if status != 200:
            raise Broken(f"it says {status} when asked whether it is well")
        return EngineLoad()

    def _answers(self, load: EngineLoad) -> None:
        self.load = load
        self.progress_s = time.monotonic()
        self._n_failures = 0
        if self.problem:
            self.problem = ""
            self._ready.set()
            log.info("endpoint %s answers", self.name, extra={"kind": self.server.kind, "models": self._models})
            if self.listener is not None and self.info is not None:
                self.listener.joined(self.endpoint, Capacity.of(self.info, self.tells_kv), load)
        elif self.listener is not None:
            self.listener.reported(self.name, load)

    def _failed(self, why: str) -> None:
        """A server that stays silent is as gone as one that hangs up: those who wait for it are told."""
        self._n_failures += 1
        if self.problem:
            if self.problem != why:
                log.warning("endpoint %s: %s", self.name, why)
            self.problem = why
        elif self._n_failures >= FAILURES and self.pool.silent_s > ANSWER_S:
            log.warning("endpoint %s is gone: %s", self.name, why)
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
        raise Broken(f"it answered {status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken(f"its answer is not JSON: {error}") from None
