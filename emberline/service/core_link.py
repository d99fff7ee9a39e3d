"""The core and the other HTTP workers of a machine, over a Unix socket: what each end serves to the other.

A new operation of the core is a method of `Core`, `Operations`, `ClusterAdmin`, `ResponseStore` or `EventLogs` and its
implementation: `net/rpc.py` makes the messages from the annotations. News of the core go the same way back.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from emberline.catalog.aliases import Aliases, AliasTable
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.membership import Members
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.net.link import dial
from emberline.net.periodic import every, stop
from emberline.net.rpc import Maker, Message, Peer, Table
from emberline.protocol.errors import EmberlineError, Unavailable
from emberline.protocol.frames import EngineLoad
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service.core import ClusterAdmin, Core, LocalCore, Operations, RequestEnd
from emberline.service.event_log import EventLogs, NewLog
from emberline.service.responses import ResponseStore
from emberline.telemetry import tracing

log = logging.getLogger("emberline.core")


class HttpWorkerReports(Protocol):
    """Observations of an HTTP worker, sent about once a second while there are new ones."""

    def observed(self, name: str, load: EngineLoad, age_s: float) -> None:
        """Note the last load report that the HTTP worker received on its own connection to a worker."""

    def count_spans(self, counts: Mapping[str, int]) -> None:
        """Add the numbers of spans since the last report, by outcome of their export."""


class CoreNews(Protocol):
    """News from the core to all HTTP workers."""

    def worker_left(self, name: str, reason: str) -> None:
        """Drop the requests on a worker that the core has lost, or found stuck, which an HTTP worker cannot see."""

    def members_changed(self, members: Members) -> None: ...

    def aliases_changed(self, table: AliasTable) -> None: ...


class CoreServices(NamedTuple):
    """Interfaces that the core serves to an HTTP worker."""

    core: Core
    reports: HttpWorkerReports
    responses: ResponseStore
    event_logs: EventLogs
    operations: Operations
    cluster: ClusterAdmin


class HttpWorkerServices(NamedTuple):
    """Interfaces that an HTTP worker serves to the core."""

    news: CoreNews


TO_CORE, TO_HTTP_WORKER = Table(CoreServices), Table(HttpWorkerServices)


class LinkCore:
    """The core as one HTTP worker uses it: owns the admissions and event logs that end when that worker dies."""

    def __init__(self, core: LocalCore) -> None:
        self._core = core
        self._admissions: dict[str, asyncio.Task[Any]] = {}  # of requests not finalized yet, by id; done or waiting
        self._logs: set[str] = set()  # ids of the event logs that this HTTP worker writes
        self.find, self.remember, self.n_ahead = core.find, core.remember, core.n_ahead
        self.first_token, self.checkpoint = core.first_token, core.checkpoint
        self.refused, self.observed, self.count_spans = core.refused, core.admission.observed, tracing.add_counts
        logs = core.event_logs
        self.limits, self.read, self.idle_s, self.cancel = logs.limits, logs.read, logs.idle_s, logs.cancel
        self.hold = logs.hold
        self.services = CoreServices(self, self, core.responses, self, core, core)

    async def admit(self, request: RouteRequest) -> Route:
        admission = asyncio.current_task()
        assert admission is not None
        self._admissions[request.id] = admission
        try:
            return await self._core.admit(request)
        except EmberlineError:
            if not request.avoid:  # it never ran; one that did is still to be finalized
                self._admissions.pop(request.id, None)
            raise

    async def finalize(self, end: RequestEnd) -> int:
        self._cancel_admission(end.row.id)
        return await self._core.finalize(end)

    async def open(self, log: NewLog) -> None:
        await self._core.event_logs.open(log)
        self._logs.add(log.id)

    def append(self, log_id: str, events: list[bytes], done: bool = False) -> None:
        self._core.event_logs.append(log_id, events, done)
        if done:
            self._logs.discard(log_id)

    async def abandon(self) -> None:
        """End the requests and event logs of the HTTP worker, which is gone."""
        for log_id in self._logs:
            self._core.event_logs.abandon(log_id)
        for request_id in list(self._admissions):
            self._cancel_admission(request_id)
            try:
                await self._core.abandon(request_id)
            except Exception as error:  # of this request: the others have to end, too
                log.error("no usage row", exc_info=error, extra={"request_id": request_id})

    def _cancel_admission(self, request_id: str) -> None:
        """Cancel an admission that still waits: it has no owner any more."""
        if (admission := self._admissions.pop(request_id, None)) is not None:
            admission.cancel()


class CoreServer:
    """Serves a LocalCore to HTTP workers. The socket's file mode (0600) is the authentication."""

    def __init__(self, core: LocalCore, path: Path) -> None:
        self.core = core
        self.links: set[_HttpWorkerLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of calls that are served, and of links that were lost
        self._path = path
        self._server: asyncio.AbstractServer | None = None
        self._news = TO_HTTP_WORKER.remote(self._tell_all).news
        core.admission.on_left.add(self._news.worker_left)
        if core.membership is not None:
            core.membership.on_change = self._news.members_changed
        core.aliases.on_change = self._news.aliases_changed

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        umask = os.umask(0o177)
        try:
            self._server = await loop.create_unix_server(lambda: _HttpWorkerLink(self), str(self._path))
        finally:
            os.umask(umask)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.core.admission.on_left.discard(self._news.worker_left)
        for link in list(self.links):
            link.drop("the core is closing")
        # Not for done tasks that are still listed: waiting for them does not let their callbacks run (Python 3.12).
        while unfinished := [link.closed for link in self.links] + [task for task in self.tasks if not task.done()]:
            await asyncio.wait(unfinished)
        self._path.unlink(missing_ok=True)

    def _tell_all(self, news: Message) -> None:
        for link in self.links:
            link.send(news)


class _HttpWorkerLink(Peer):
    """The core's end of its link to one HTTP worker."""

    def __init__(self, server: CoreServer) -> None:
        self._server, self._core = server, LinkCore(server.core)
        super().__init__("an HTTP worker", TO_CORE, self._core.services, TO_HTTP_WORKER, server.tasks)

    def on_open(self) -> None:
        self._server.links.add(self)
        news, core = TO_HTTP_WORKER.remote(self.send).news, self._server.core
        if core.membership is not None:
            news.members_changed(core.membership.members)
        news.aliases_changed(core.aliases.table)

    def on_close(self, reason: str) -> None:
        super().on_close(reason)
        self._server.links.discard(self)
        self.spawn(self._core.abandon())


class RemoteCore:
    """Implements CoreAccess in an HTTP worker. Every call raises Unavailable while the core is not connected."""

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
        remote = self._remote = TO_CORE.remote(self._send, self._call)
        self.find, self.remember = remote.core.find, remote.core.remember
        self.admit, self.n_ahead, self.finalize = remote.core.admit, remote.core.n_ahead, remote.core.finalize
        self.first_token, self.checkpoint = remote.core.first_token, remote.core.checkpoint
        self.responses, self.event_logs = remote.responses, remote.event_logs
        self.operations, self.cluster_admin = remote.operations, remote.cluster
        self.aliases = Aliases()  # as the core has told them
        self.aliases_changed, self.worker_left = self.aliases.follow, on_left
        self._address = (str(socket_path), "", 0)
        self._timings = timings
        self._engines = engines
        self._follow = follow
        self._following: set[asyncio.Future[None]] = set()
        self._refused: Counter[str] = Counter()  # since the last report
        self._reported_s = 0.0  # when the last report was sent
        self._link: Peer | None = None
        self._linked = asyncio.Event()
        reporting = every(timings.notice_interval_s, self._report, log, "nothing was reported to the core")
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(reporting)]

    @property
    def connected(self) -> bool:
        return self._link is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._linked.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def refused(self, kind: str, times: int = 1) -> None:
        self._refused[kind] += times

    def members_changed(self, members: Members) -> None:
        if self._follow is not None:
            following = asyncio.ensure_future(self._follow(members))
            self._following.add(following)
            following.add_done_callback(self._following.discard)

    async def close(self) -> None:
        self._report()
        await stop(*self._tasks)

    def _send(self, notice: Message) -> None:
        if self._link is not None:
            self._link.send(notice)

    def _call(self, request: Maker, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Awaitable[Any]:
        if self._link is None:
            raise Unavailable("the core process is not reachable", retry_after_s=1)
        return self._link.call(request, args, kwargs)

    async def _stay_connected(self) -> None:
        delays = self._timings.reconnect_delays()
        while True:
            link = Peer("the core process", TO_HTTP_WORKER, HttpWorkerServices(self), TO_CORE)
            try:
                self._link = await dial(link, self._address)
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

    def _report(self) -> None:
        """Tell the core what is new since the last report: nothing while this HTTP worker is idle."""
        if self._link is None:
            return
        now_s = time.monotonic()
        for client in self._engines:
            if client.progress_s > self._reported_s:
                self._remote.reports.observed(client.name, client.load, now_s - client.progress_s)
        self._reported_s = now_s
        for kind, times in self._refused.items():
            self._remote.core.refused(kind, times)
        self._refused.clear()
        if spans := tracing.take_counts():
            self._remote.reports.count_spans(spans)
