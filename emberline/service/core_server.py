"""The core's side of the Unix socket that door processes use."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path

from emberline.balancer.route_request import Route, RouteRequest
from emberline.protocol.errors import EmberlineError, Internal
from emberline.service.connection import Link
from emberline.service.core import LocalCore
from emberline.service.core_protocol import (
    Admit,
    Answer,
    AskHealth,
    Began,
    Call,
    Find,
    Forget,
    Keep,
    Notice,
    Recall,
    Settle,
    to_core_decoder,
)

log = logging.getLogger("emberline.core")


class CoreServer:
    """Answers doors out of a LocalCore. The socket is for this user alone; a door needs no other proof."""

    def __init__(self, core: LocalCore, path: Path) -> None:
        self.core = core
        self.links: set[_DoorLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._path = path
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        umask = os.umask(0o177)
        try:
            self._server = await loop.create_unix_server(lambda: _DoorLink(self), str(self._path))
        finally:
            os.umask(umask)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in list(self.links):
            link.drop("the core is closing")
        while self.links or self.tasks:
            await asyncio.gather(*self.tasks, *(link.closed for link in self.links))
        self._path.unlink(missing_ok=True)


class _DoorLink(Link):
    def __init__(self, server: CoreServer) -> None:
        super().__init__()
        self._server = server
        # What this door has asked an engine for and not settled yet; the task that admits it is done or still waiting.
        self._admissions: dict[str, asyncio.Task[None]] = {}  # by request id

    def on_open(self) -> None:
        self._server.links.add(self)

    def on_frame(self, payload: bytes) -> None:
        message = to_core_decoder.decode(payload)
        if isinstance(message, Notice):
            self._absorb(message)
        elif isinstance(message, Began):
            self._server.core.began(message.request_id, message.cached_tokens)
        elif isinstance(message, Admit):
            self._admissions[message.ask.id] = self._spawn(self._answer(message))
        else:
            self._spawn(self._answer(message))

    def on_close(self, reason: str) -> None:
        self._server.links.discard(self)
        self._spawn(self._abandon())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)
        return task

    def _absorb(self, notice: Notice) -> None:
        core = self._server.core
        for seen in notice.seen:
            core.admission.observed(seen.name, seen.load, seen.age_s)
        for kind, times in notice.refused.items():
            core.refused(kind, times)

    async def _answer(self, call: Call) -> None:
        try:
            self.send(await self._run(call))
        except EmberlineError as error:
            self.send(Answer(call.seq, error=error.info()))
        except Exception:
            log.exception("a door's call failed")
            self.send(Answer(call.seq, error=Internal("internal error").info()))

    async def _run(self, call: Call) -> Answer:
        core = self._server.core
        if isinstance(call, Find):
            return Answer(call.seq, known=await core.find(call.account, call.model_version, call.digests))
        if isinstance(call, Admit):
            return Answer(call.seq, route=await self._admit(call.ask))
        if isinstance(call, Settle):
            self._close(call.settlement.row.id)
            await core.settle(call.settlement)
            return Answer(call.seq)
        if isinstance(call, Keep):
            return Answer(call.seq, done=await core.responses.keep(call.record))
        if isinstance(call, Recall):
            return Answer(call.seq, records=await core.responses.recall(call.account, call.response_id, call.whole))
        if isinstance(call, Forget):
            return Answer(call.seq, done=await core.responses.forget(call.account, call.response_id))
        if isinstance(call, AskHealth):
            return Answer(call.seq, health=await core.health())
        return Answer(call.seq, metrics=await core.metrics())

    async def _admit(self, ask: RouteRequest) -> Route:
        try:
            return await self._server.core.admit(ask)
        except EmberlineError:
            if not ask.avoid:  # it never ran; one that did is still to be settled
                self._admissions.pop(ask.id, None)
            raise

    def _close(self, request_id: str) -> None:
        """An admission that still waits has nobody left to wait for."""
        admission = self._admissions.pop(request_id, None)
        if admission is not None:
            admission.cancel()

    async def _abandon(self) -> None:
        """The door is gone: end what it had open."""
        for request_id in list(self._admissions):
            self._close(request_id)
            try:
                await self._server.core.abandon(request_id)
            except EmberlineError as error:
                log.error("no usage row: %s", error.message, extra={"request_id": request_id})
