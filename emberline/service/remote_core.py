"""The core as an HTTP worker uses it, over a Unix socket."""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.route_request import Route, RouteRequest
from emberline.catalog.aliases import Aliases, AliasTable
from emberline.cluster.cluster import ClusterStatus
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.membership import Members, WorkerChange
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.net.link import Link, dial
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import Unavailable, from_info
from emberline.protocol.frames import decode
from emberline.protocol.member import Challenge, Signed
from emberline.service.core import RequestEnd
from emberline.service.core_protocol import (
    Admit,
    AppendLog,
    AskCluster,
    AskPlanner,
    Call,
    CancelLog,
    ChangeAlias,
    ChangeWorkers,
    Checkpoint,
    CoreReply,
    DeleteResponse,
    Finalize,
    Find,
    FirstToken,
    GetHealth,
    GetMetrics,
    GetResponse,
    GetStatus,
    LoadModel,
    LogIdle,
    Notice,
    Observation,
    OpenLog,
    PutResponse,
    ReadLog,
    RefreshPrices,
    WorkerLeft,
    from_core_decoder,
)
from emberline.service.event_log import LogLimits, LogPart, NewLog
from emberline.telemetry import tracing
from emberline.telemetry.health import Health
from emberline.telemetry.status import Status, StatusQuery
from emberline.text.prompt import KnownPrefix

log = logging.getLogger("emberline.core")


class RemoteCore:
    """Implements Core. Every call raises Unavailable while the core is not connected."""

    def __init__(
        self,
        socket_path: Path,
        engines: Collection[EngineClient],
        on_left: Callable[[str, str], None] = lambda name, reason: None,
        follow: Callable[[Members], Awaitable[None]] | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        """`on_left` is called with the name of a worker that the core has lost, and why; `follow` with the workers
        that have joined and left."""
        self._endpoint = Endpoint(name="core", address=f"unix:{socket_path}")
        self.responses = RemoteResponses(self._call)
        self.event_logs = RemoteEventLogs(self._call, self._tell)
        self.aliases = Aliases()  # as the core has told them
        self._timings = timings
        self._engines = engines
        self._on_left = on_left
        self._follow = follow
        self._following: set[asyncio.Future[None]] = set()
        self._refused: Counter[str] = Counter()  # since the last notice
        self._noticed_s = 0.0  # when the last notice went out
        self._link: _CoreLink | None = None
        self._linked = asyncio.Event()
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._send_notices())]

    @property
    def connected(self) -> bool:
        return self._link is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._linked.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> KnownPrefix | None:
        return (await self._call(lambda seq: Find(seq, account, model_version, digests))).known

    async def admit(self, request: RouteRequest) -> Route:
        route = (await self._call(lambda seq: Admit(seq, request))).route
        assert route is not None
        return route

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        if self._link is not None:
            self._link.send(FirstToken(request_id, cached_tokens))

    def checkpoint(self, rows: Sequence[UsageRow]) -> None:
        if self._link is not None:
            self._link.send(Checkpoint(list(rows)))

    async def finalize(self, end: RequestEnd) -> None:
        await self._call(lambda seq: Finalize(seq, end))

    async def health(self) -> Health:
        try:
            health = (await self._call(GetHealth)).health
        except Unavailable as error:
            return Health(False, {"core": error.message})
        assert health is not None
        return health

    async def metrics(self) -> bytes:
        return (await self._call(GetMetrics)).metrics

    async def status(self, query: StatusQuery) -> Status:
        found = (await self._call(lambda seq: GetStatus(seq, query))).status
        assert found is not None
        return found

    async def change_workers(self, change: WorkerChange) -> list[str]:
        return (await self._call(lambda seq: ChangeWorkers(seq, change))).names

    async def join_challenge(self) -> Challenge:
        found = (await self._call(lambda seq: AskCluster(seq, "challenge"))).challenge
        assert found is not None
        return found

    async def announce(self, signed: Signed) -> Signed:
        found = (await self._call(lambda seq: AskCluster(seq, "announce", signed))).signed
        assert found is not None
        return found

    async def cluster_status(self) -> ClusterStatus:
        found = (await self._call(lambda seq: AskCluster(seq, "status"))).cluster
        assert found is not None
        return found

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        found = (await self._call(lambda seq: AskPlanner(seq, "plan", model, limit))).plain
        assert found is not None
        return found

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        return (await self._call(lambda seq: AskPlanner(seq, "set_bounds", model, changes=changes))).plain

    async def refresh_prices(self) -> None:
        await self._call(RefreshPrices)

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        """The core tells the new table before it replies."""
        await self._call(lambda seq: ChangeAlias(seq, name, None if targets is None else dict(targets)))

    async def load_model(self, model: str, action: Literal["load", "unload"]) -> None:
        await self._call(lambda seq: LoadModel(seq, model, action))

    def refused(self, kind: str) -> None:
        self._refused[kind] += 1

    async def close(self) -> None:
        self._send_notice()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, make: Callable[[int], Call]) -> CoreReply:
        if self._link is None:
            raise Unavailable("the core process is not reachable", retry_after_s=1)
        seq = next(self._numbers)
        reply = await self._link.call(seq, make(seq))
        if reply.error is not None:
            raise from_info(reply.error)
        return reply

    def _tell(self, message: AppendLog) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _stay_connected(self) -> None:
        delays = self._timings.reconnect_delays()
        while True:
            link = _CoreLink(self._on_left, self._on_members, self.aliases.follow)
            try:
                self._link = await dial(link, self._endpoint.split())
                self._linked.set()
                delays = self._timings.reconnect_delays()
                await link.closed
                log.warning("the connection to the core process was lost")
            except OSError as error:
                log.debug("the core process is not reachable: %s", error)
            finally:
                self._link = None
                self._linked.clear()
                link.drop("the HTTP worker is closing")
            await asyncio.sleep(next(delays))

    def _on_members(self, members: Members) -> None:
        if self._follow is not None:
            following = asyncio.ensure_future(self._follow(members))
            self._following.add(following)
            following.add_done_callback(self._following.discard)

    async def _send_notices(self) -> None:
        while True:
            await asyncio.sleep(self._timings.notice_interval_s)
            self._send_notice()

    def _send_notice(self) -> None:
        """What is new since the last notice; nothing while this HTTP worker is idle."""
        now_s = time.monotonic()
        active = [client for client in self._engines if client.progress_s > self._noticed_s]
        if self._link is None or not (active or self._refused or tracing.has_new_counts()):
            return
        refused, self._refused = dict(self._refused), Counter()
        self._noticed_s = now_s
        observed = [Observation(client.name, client.load, now_s - client.progress_s) for client in active]
        self._link.send(Notice(observed, refused, tracing.take_counts()))


class RemoteResponses:
    """Implements ResponseStore on the core's."""

    def __init__(self, call: Callable[[Callable[[int], Call]], Awaitable[CoreReply]]) -> None:
        self._call = call

    async def put(self, record: StoredResponse) -> bool:
        return (await self._call(lambda seq: PutResponse(seq, record))).done

    async def get(self, account: str, response_id: str, whole: bool = False) -> list[StoredResponse]:
        return (await self._call(lambda seq: GetResponse(seq, account, response_id, whole))).records

    async def delete(self, account: str, response_id: str) -> bool:
        return (await self._call(lambda seq: DeleteResponse(seq, account, response_id))).done


class RemoteEventLogs:
    """Implements EventLogs on the core's."""

    def __init__(
        self,
        call: Callable[[Callable[[int], Call]], Awaitable[CoreReply]],
        tell: Callable[[AppendLog], None],
    ) -> None:
        self.limits = LogLimits()
        self._call = call
        self._tell = tell

    async def open(self, log: NewLog) -> None:
        await self._call(lambda seq: OpenLog(seq, log))

    def append(self, log_id: str, events: list[bytes], done: bool = False) -> None:
        self._tell(AppendLog(log_id, events, done))

    async def read(self, account: str, log_id: str, after: int, wait_s: float) -> LogPart:
        part = (await self._call(lambda seq: ReadLog(seq, account, log_id, after, wait_s))).part
        assert part is not None
        return part

    async def idle_s(self, log_id: str) -> float:
        return (await self._call(lambda seq: LogIdle(seq, log_id))).idle_s

    async def cancel(self, account: str, log_id: str) -> None:
        await self._call(lambda seq: CancelLog(seq, account, log_id))


class _CoreLink(Link):
    def __init__(
        self,
        on_left: Callable[[str, str], None],
        on_members: Callable[[Members], None],
        on_aliases: Callable[[AliasTable], None],
    ) -> None:
        super().__init__()
        self._on_aliases = on_aliases
        self._on_left = on_left
        self._on_members = on_members
        self._waiting: dict[int, asyncio.Future[CoreReply]] = {}

    async def call(self, seq: int, call: Call) -> CoreReply:
        if self.closed.done():
            raise Unavailable("the connection to the core process was lost", retry_after_s=1)
        reply: asyncio.Future[CoreReply] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = reply
        self.send(call)
        try:
            return await reply
        finally:
            del self._waiting[seq]

    def on_frame(self, payload: bytes) -> None:
        reply = decode(from_core_decoder, payload)
        if isinstance(reply, WorkerLeft):
            return self._on_left(reply.name, reply.reason)
        if isinstance(reply, Members):
            return self._on_members(reply)
        if isinstance(reply, AliasTable):
            return self._on_aliases(reply)
        waiter = self._waiting.get(reply.seq)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def on_close(self, reason: str) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(Unavailable("the connection to the core process was lost", retry_after_s=1))
