"""The engine's socket: clients in, frames out, one thread. It polls between steps and sleeps when there is no work."""

import hmac
import logging
import selectors
import socket
import time
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from emberline.engine.client_connection import Connection, ConnectionLost
from emberline.engine.step_loop import StepLoop
from emberline.protocol import frames
from emberline.protocol.errors import BadInput, EmberlineError, ErrorInfo, Internal, Unauthorized, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import (
    Abort,
    Drain,
    EngineInfo,
    Hello,
    Refused,
    Step,
    Submit,
    Vocabulary,
    WatchKV,
    Welcome,
)
from emberline.protocol.request import EngineRequest

HELLO_LIMIT_S = 5.0
HEARTBEAT_S = 1.0  # a client whose requests wait for longer hears that the engine computes
REPORT_S = 0.2  # after which whoever watches the cache hears of another load, too, whoever it is of
QUIET_S = 0.5  # without work; then the engine sees to its chores, for which a request may have to wait a little
HELD_UP_S = 0.001  # between looks at a grammar that is being compiled
MAX_DRAIN_S = 86_400.0

_log = logging.getLogger(__name__)


class Server:
    """Owns the listening socket, the connections, and which of them asked for which request."""

    def __init__(self, listener: socket.socket, engine: StepLoop, info: EngineInfo, token: str) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._engine = engine
        self._info = info
        self._token = token.encode()
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._owners: dict[str, Connection] = {}  # of the requests that the engine has accepted
        self._ended: list[TokenDelta] = []  # to be logged, once their clients were told
        self._drain_until_s: float | None = None
        self._busy_s = time.monotonic()  # the last time there was work
        self.watch(listener, self._accept)
        if engine.hub is not None:
            self.watch(engine.hub.wake, engine.hub.swallow)  # the next step hears what there is

    def watch(self, source: Any, when_readable: Callable[[], None]) -> None:
        """Wake up for something beside the sockets of clients: a signal, the parent's death."""
        self._selector.register(source, selectors.EVENT_READ, when_readable)

    def drain(self, limit_s: float) -> None:
        """Take no new work; `run` returns when all is done, or after limit_s. A second call can only shorten that."""
        until_s = time.monotonic() + max(0.0, min(limit_s, MAX_DRAIN_S))
        if self._drain_until_s is None:
            _log.info("draining", extra={"limit_s": limit_s, "requests": len(self._owners)})
        self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)

    def run(self) -> None:
        """Serve until drained."""
        while not self._drained():
            self.turn()
        self._selector.close()
        for connection in self._connections:
            connection.sock.close()
        self._listener.close()
        if self._engine.hub is not None:
            self._engine.hub.close()

    def turn(self) -> None:
        """A look at the sockets, a step, and what came of it; without work, a sleep until a client brings some."""
        self._poll()
        if self._engine.busy:
            self._route(self._engine.step(time.monotonic()))
            self._busy_s = time.monotonic()
        elif self._engine.has_chores and time.monotonic() >= self._busy_s + QUIET_S:
            self._engine.do_chore()
        self._flush()

    def drop(self, request_id: str) -> None:
        """Hang up on whoever asked for this request. (Faults of the stand-in.)"""
        if (connection := self._owners.get(request_id)) is not None:
            self._close(connection, "told to hang up")

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for key, events in self._selector.select(self._patience_s()):
            if not isinstance(key.data, Connection):
                key.data()
            elif key.data in self._connections:  # not closed by an earlier event
                self._serve(key.data, events)
        self._forget_strangers()

    def _patience_s(self) -> float | None:
        """How long to sleep at most: not at all with work to do, for ever when only clients can bring some."""
        if self._engine.busy and not self._engine.held_up:
            return 0
        limits = [c.opened_s + HELLO_LIMIT_S for c in self._connections if not c.greeted]
        if self._engine.busy:
            limits.append(max(self._engine.next_s, time.monotonic() + HELD_UP_S))
        elif self._engine.has_chores:
            limits.append(self._busy_s + QUIET_S)
        if self._drain_until_s is not None:
            limits.append(self._drain_until_s)
        limits += [c.told_s + REPORT_S for c in self._uninformed()]
        soonest_s = min(limits, default=inf)
        return None if soonest_s == inf else max(0.0, soonest_s - time.monotonic())

    def _forget_strangers(self) -> None:
        strangers = [c for c in self._connections if not c.greeted]
        for connection in strangers:
            if time.monotonic() > connection.opened_s + HELLO_LIMIT_S:
                self._close(connection, "no Hello in time")

    def _drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        if time.monotonic() >= self._drain_until_s:
            self._route(self._engine.abort_all(Unavailable("the engine was shut down before the request finished")))
            self._flush()
            return True
        return not self._engine.busy and not any(c.has_backlog for c in self._connections)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the client left again, or no descriptor is free
            _log.warning("accept failed: %s", error)
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, time.monotonic())
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ and not connection.closing:
                for payload in connection.receive():
                    if connection in self._connections:  # else it was handed over, or closed by what came before
                        self._handle(connection, frames.to_engine_decoder.decode(payload))
        except (ConnectionLost, msgspec.DecodeError) as error:
            self._close(connection, str(error))

    def _handle(self, connection: Connection, message: frames.ToEngine) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif not connection.greeted:
            raise ConnectionLost(f"{type(message).__name__} before Hello")
        elif isinstance(message, Submit):
            for request in message.requests:
                self._submit(connection, request)
        elif isinstance(message, Abort):
            for request_id in connection.request_ids.intersection(message.ids):
                if (delta := self._engine.abort(request_id)) is not None:
                    self._route([delta])
        elif isinstance(message, Vocabulary):
            self._learn(connection, message)
        elif isinstance(message, WatchKV):
            self._watch_cache(connection)
        else:
            assert isinstance(message, Drain)
            self.drain(message.limit_s)

    def _watch_cache(self, connection: Connection) -> None:
        """The others hear what is new first: a snapshot has it all."""
        self._tell_watchers()
        for message in self._engine.watch_cache():
            self._send(connection, frames.encode(message))
        connection.watches = True

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if connection.greeted:
            raise ConnectionLost("a second Hello")
        refusal: EmberlineError | None = None
        if not hmac.compare_digest(hello.token.encode(), self._token):
            refusal = Unauthorized("this engine does not know that token")
        elif hello.version != frames.VERSION:
            refusal = BadInput(f"this engine speaks version {frames.VERSION} of the protocol, not {hello.version}")
        elif hello.peer and (self._engine.hub is None or not self._info.transfers):
            refusal = BadInput("this engine takes no KV from others")
        if refusal is None:
            connection.greeted = True
            self._send(connection, frames.encode(Welcome(self._info, self._engine.load)))
            if hello.peer:
                self._hand_over(connection, hello.peer)
        else:
            _log.warning("refused a client: %s", refusal.message)
            connection.closing = True
            self._send(connection, frames.encode(Refused(refusal.info())))

    def _hand_over(self, connection: Connection, peer: str) -> None:
        """What follows on this connection is KV: the transfers' threads read it."""
        if connection.has_backlog or connection.has_unread:
            raise ConnectionLost("an engine that pushes KV is to wait for its welcome")
        assert self._engine.hub is not None
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        self._engine.hub.adopt(connection.sock, peer)

    def _submit(self, connection: Connection, request: EngineRequest) -> None:
        try:
            if self._drain_until_s is not None:
                raise Unavailable("the engine is shutting down", retry_after_s=1)
            self._engine.submit(request, time.monotonic())
        except EmberlineError as error:
            self._refuse(connection, request.id, error.info())
        except Exception:
            _log.exception("a request could not be taken", extra={"request_id": request.id})
            self._refuse(connection, request.id, Internal("the engine could not take this request").info())
        else:
            self._owners[request.id] = connection
            connection.request_ids.add(request.id)

    def _learn(self, connection: Connection, vocabulary: Vocabulary) -> None:
        try:
            self._engine.learn(vocabulary)
        except EmberlineError as error:  # its requests would be bound to grammars of other tokens
            raise ConnectionLost(error.message) from None

    def _refuse(self, connection: Connection, request_id: str, error: ErrorInfo) -> None:
        _log.info("refused: %s", error.message, extra={"request_id": request_id, "kind": error.kind})
        connection.deltas.append(TokenDelta(request_id, finish="error", error=error))

    def _close(self, connection: Connection, why: str) -> None:
        """Nobody listens any more: everything it asked for ends here."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for request_id in connection.request_ids:
            del self._owners[request_id]
            self._engine.abort(request_id)
        _log.info("connection closed: %s", why, extra={"aborted": len(connection.request_ids)})
        connection.request_ids.clear()
        if connection.watches and not any(c.watches for c in self._connections):
            self._engine.unwatch_cache()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _route(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            connection = self._owners.get(delta.id)
            if connection is None:
                continue  # its client left during the step
            connection.deltas.append(delta)
            if delta.finish is not None:
                del self._owners[delta.id]
                connection.request_ids.remove(delta.id)
                self._ended.append(delta)

    def _tell_watchers(self) -> None:
        watchers = [c for c in self._connections if c.watches]
        if not watchers or not (events := self._engine.cache_events()):
            return
        told = b"".join(frames.encode(message) for message in events)
        for connection in watchers:
            try:
                self._send(connection, told)
            except ConnectionLost as error:
                self._close(connection, str(error))

    def _uninformed(self) -> list[Connection]:
        """Watchers that know of another load than there is."""
        watchers = [c for c in self._connections if c.watches]
        if not watchers:
            return []
        load = self._engine.load
        return [c for c in watchers if c.told_load != load]

    def _overdue(self, connection: Connection, now_s: float) -> bool:
        return connection.waits(now_s, HEARTBEAT_S) or (connection.watches and now_s >= connection.told_s + REPORT_S)

    def _flush(self) -> None:
        """One Step frame per connection with news. An empty one says that steps were made, if not for that client."""
        self._tell_watchers()
        now_s = time.monotonic()
        owed = [c for c in self._connections if c.deltas or self._overdue(c, now_s)]
        load = self._engine.load if owed else None
        for connection in owed:
            assert load is not None
            news = connection.watches and load != connection.told_load
            if not connection.deltas and not news and load.steps == connection.told_steps:
                continue  # nothing moves: no sign of life
            frame = frames.encode(Step(connection.deltas, load))
            connection.deltas, connection.told_s, connection.told_steps = [], now_s, load.steps
            connection.told_load = load
            try:
                self._send(connection, frame)
            except ConnectionLost as error:
                self._close(connection, str(error))
        ended, self._ended = self._ended, []
        for delta in ended:
            _log_end(delta)

    def _send(self, connection: Connection, frame: bytes = b"") -> None:
        waited = connection.has_backlog
        connection.send(frame)
        if connection.has_backlog != waited:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_backlog else 0)
            self._selector.modify(connection.sock, events, connection)
        if connection.closing and not connection.has_backlog:
            raise ConnectionLost("refused")


def _log_end(delta: TokenDelta) -> None:
    usage = msgspec.to_builtins(delta.usage) if delta.usage is not None else {}
    level = logging.WARNING if delta.finish == "error" else logging.INFO
    message = delta.error.message if delta.error is not None else f"finished: {delta.finish}"
    _log.log(level, "%s", message, extra={"request_id": delta.id, **usage})
