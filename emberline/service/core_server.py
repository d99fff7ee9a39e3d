"""The core's side of the Unix socket that the other HTTP workers use."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path

from emberline.balancer.route_request import Route, RouteRequest
from emberline.catalog.aliases import AliasTable
from emberline.cluster.membership import Members
from emberline.net.link import Link
from emberline.protocol.errors import EmberlineError, Internal
from emberline.protocol.frames import decode
from emberline.service.core import LocalCore
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
    GetResponse,
    GetStatus,
    LoadModel,
    LogIdle,
    Notice,
    OpenLog,
    PutResponse,
    ReadLog,
    RefreshPrices,
    WorkerLeft,
    to_core_decoder,
)
from emberline.telemetry import tracing

log = logging.getLogger("emberline.core")


class CoreServer:
    """Serves a LocalCore to HTTP workers. The socket's file mode (0600) is the authentication."""

    def __init__(self, core: LocalCore, path: Path) -> None:
        self.core = core
        self.links: set[_HttpWorkerLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._path = path
        self._server: asyncio.AbstractServer | None = None
        core.admission.on_left.add(self._tell_left)
        if core.membership is not None:
            core.membership.on_change = self._tell_all
        core.aliases.on_change = self._tell_all

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
        self.core.admission.on_left.discard(self._tell_left)
        for link in list(self.links):
            link.drop("the core is closing")
        # Not for done tasks that are still listed: waiting for them does not let their callbacks run (Python 3.12).
        while unfinished := [link.closed for link in self.links] + [task for task in self.tasks if not task.done()]:
            await asyncio.wait(unfinished)
        self._path.unlink(missing_ok=True)

    def _tell_left(self, name: str, reason: str) -> None:
        for link in self.links:
            link.send(WorkerLeft(name, reason))

    def _tell_all(self, news: Members | AliasTable) -> None:
        for link in self.links:
            link.send(news)


class _HttpWorkerLink(Link):
    def __init__(self, server: CoreServer) -> None:
        super().__init__()
        self._server = server
        self._admissions: dict[str, asyncio.Task[None]] = {}  # of requests not finalized yet, by id; done or waiting
        self._logs: set[str] = set()  # that this HTTP worker writes

    def on_open(self) -> None:
        self._server.links.add(self)
        if (membership := self._server.core.membership) is not None:
            self.send(membership.members)
        self.send(self._server.core.aliases.table)

    def on_frame(self, payload: bytes) -> None:
        message = decode(to_core_decoder, payload)
        core = self._server.core
        if isinstance(message, Notice):
            for seen in message.observed:
                core.admission.observed(seen.name, seen.load, seen.age_s)
            for kind, times in message.refused.items():
                core.refused(kind, times)
            tracing.add_counts(message.spans)
        elif isinstance(message, FirstToken):
            core.first_token(message.request_id, message.cached_tokens)
        elif isinstance(message, Checkpoint):
            core.checkpoint(message.rows)
        elif isinstance(message, AppendLog):
            core.event_logs.append(message.log_id, message.events, message.done)
            if message.done:
                self._logs.discard(message.log_id)
        elif isinstance(message, Admit):
            self._admissions[message.request.id] = self._spawn(self._reply(message))
        else:
            self._spawn(self._reply(message))

    def on_close(self, reason: str) -> None:
        self._server.links.discard(self)
        for log_id in self._logs:
            self._server.core.event_logs.abandon(log_id)
        self._spawn(self._abandon_all())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)
        return task

    async def _reply(self, call: Call) -> None:
        try:
            self.send(await self._run(call))
        except EmberlineError as error:
            self.send(CoreReply(call.seq, error=error.info()))
        except Exception:
            log.exception("a call of an HTTP worker failed")
            self.send(CoreReply(call.seq, error=Internal("internal error").info()))

    async def _run(self, call: Call) -> CoreReply:
        core = self._server.core
        if isinstance(call, Find):
            return CoreReply(call.seq, known=await core.find(call.account, call.model_version, call.digests))
        if isinstance(call, Admit):
            return CoreReply(call.seq, route=await self._admit(call.request))
        if isinstance(call, Finalize):
            self._cancel_admission(call.end.row.id)
            await core.finalize(call.end)
            return CoreReply(call.seq)
        if isinstance(call, PutResponse):
            return CoreReply(call.seq, done=await core.responses.put(call.record))
        if isinstance(call, GetResponse):
            return CoreReply(call.seq, records=await core.responses.get(call.account, call.response_id, call.whole))
        if isinstance(call, DeleteResponse):
            return CoreReply(call.seq, done=await core.responses.delete(call.account, call.response_id))
        if isinstance(call, OpenLog):
            await core.event_logs.open(call.log)
            self._logs.add(call.log.id)
            return CoreReply(call.seq)
        if isinstance(call, ReadLog):
            part = await core.event_logs.read(call.account, call.log_id, call.after, call.wait_s)
            return CoreReply(call.seq, part=part)
        if isinstance(call, LogIdle):
            return CoreReply(call.seq, idle_s=await core.event_logs.idle_s(call.log_id))
        if isinstance(call, CancelLog):
            await core.event_logs.cancel(call.account, call.log_id)
            return CoreReply(call.seq)
        if isinstance(call, LoadModel):
            await core.load_model(call.model, call.action)
            return CoreReply(call.seq)
        if isinstance(call, ChangeWorkers):
            return CoreReply(call.seq, names=await core.change_workers(call.change))
        if isinstance(call, AskCluster):
            if call.action == "challenge":
                return CoreReply(call.seq, challenge=await core.join_challenge())
            if call.action == "status":
                return CoreReply(call.seq, cluster=await core.cluster_status())
            assert call.signed is not None
            return CoreReply(call.seq, signed=await core.announce(call.signed))
        if isinstance(call, AskPlanner):
            if call.action == "plan":
                return CoreReply(call.seq, plain=await core.scaling_plan(call.model, call.limit))
            return CoreReply(call.seq, plain=await core.set_scaling_bounds(call.model, call.changes))
        if isinstance(call, RefreshPrices):
            await core.refresh_prices()
            return CoreReply(call.seq)
        if isinstance(call, ChangeAlias):
            await core.change_alias(call.name, call.targets)
            return CoreReply(call.seq)
        if isinstance(call, GetHealth):
            return CoreReply(call.seq, health=await core.health())
        if isinstance(call, GetStatus):
            return CoreReply(call.seq, status=await core.status(call.query))
        return CoreReply(call.seq, metrics=await core.metrics())

    async def _admit(self, request: RouteRequest) -> Route:
        try:
            return await self._server.core.admit(request)
        except EmberlineError:
            if not request.avoid:  # it never ran; one that did is still to be finalized
                self._admissions.pop(request.id, None)
            raise

    def _cancel_admission(self, request_id: str) -> None:
        """An admission that still waits has no owner any more."""
        admission = self._admissions.pop(request_id, None)
        if admission is not None:
            admission.cancel()

    async def _abandon_all(self) -> None:
        """The HTTP worker is gone: end its requests."""
        for request_id in list(self._admissions):
            self._cancel_admission(request_id)
            try:
                await self._server.core.abandon(request_id)
            except Exception as error:  # of this request: the others have to end, too
                log.error("no usage row", exc_info=error, extra={"request_id": request_id})
