"""The engine's socket server: one thread receives and sends frames between steps, and sleeps without work.

A second thread sends heartbeats.
"""

import contextlib
import hmac
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any

import msgspec

from emberline.engine.cache_control import CacheControl, StoredCache
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.encoders.request_loop import RequestLoop
from emberline.engine.worker.alive_file import AliveFile
from emberline.engine.worker.client_connection import ClientConnection, ClientLost, ServerLimits
from emberline.protocol import frames
from emberline.protocol.credential import CORE_HOST, worker_host
from emberline.protocol.errors import BadInput, EmberlineError, ErrorInfo, Internal, Unauthorized, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import DeviceUse, EngineInfo, EngineLoad, Heartbeat, Hello, WorkerRole
from emberline.protocol.request import EngineRequest

COMPILE_POLL_S = 0.001  # between looks at a grammar that is being compiled
MAX_DRAIN_S = 86_400.0

_log = logging.getLogger(__name__)


class Server:
    """Owns the listening socket, the connections, and which connection submitted which request."""

    def __init__(
        self,
        listener: socket.socket,
        loop: StepLoop | RequestLoop[Any] | None,
        info: EngineInfo,
        token: str,
        tls: ssl.SSLContext | None = None,
        alive_file: AliveFile | None = None,
        limits: ServerLimits | None = None,
        stored: StoredCache | None = None,
        accept_sender: Callable[[socket.socket, str], None] | None = None,
        device_use: Callable[[], DeviceUse | None] = lambda: None,
    ) -> None:
        """loop: None if only engines that send KV are served.
        tls: clients must show a certificate, that of a core or of the engine that sends KV.
        stored: what clients purge, export and import beside the device pool.
        accept_sender: takes over the connection of an engine that sends KV, with the name of that engine.
        device_use: memory and power of the device, for load reports.
        """
        self._tls = tls
        self._device_use = device_use
        self._alive_file = alive_file
        self._limits = limits = limits or ServerLimits()
        listener.setblocking(False)
        self._listener = listener
        self._serves_clients = loop is not None
        self._loop: StepLoop | RequestLoop[Any] = loop or RequestLoop(max_waiting=0)
        self._cache_control = CacheControl(stored or StoredCache(info.fingerprint), self._loop.purge)
        self._accept_sender = accept_sender
        self._info = msgspec.structs.replace(info, heartbeat_s=limits.heartbeat_s)
        self._token = token
        self.versions = (frames.OLDEST_VERSION, frames.VERSION)  # of the protocol, that clients may speak
        self.restarts = False  # once drained, this engine is to be started again
        self.on_role: Callable[[WorkerRole], None] | None = None  # called with a new role
        self._kv_events = self._loop.kv_events()
        self._selector = selectors.DefaultSelector()
        self._connections: set[ClientConnection] = set()
        self._owners: dict[str, ClientConnection] = {}  # of accepted requests
        self._trace_ids: dict[str, str] = {}  # of those that are traced
        self._ended: list[TokenDelta] = []  # to be logged after their frames were sent
        self._drain_until_s: float | None = None
        self._accept_again_s = inf  # when to accept clients again; inf: the selector watches the listener
        self._busy_s = time.monotonic()  # the last time there was work
        self._flushed_load: EngineLoad | None = None  # the load now, if the last flush has reported it
        self.watch(listener, self._accept)
        for executor in self._loop.executors.values():
            self.watch(executor.queue.wakeup, executor.queue.clear_wakeup)  # the next step handles the notices
        self.watch(self._cache_control.wakeup, self._cache_control.finish)

    @property
    def n_connections(self) -> int:
        return len(self._connections)

    @property
    def n_requests(self) -> int:
        """Number of accepted requests that have not ended."""
        return len(self._owners)

    def watch(self, source: Any, when_readable: Callable[[], object]) -> None:
        """Wake up for something besides the sockets of clients: a signal, the death of the parent."""
        self._selector.register(source, selectors.EVENT_READ, when_readable)

    def drain(self, limit_s: float) -> None:
        """Accept no new work: `run` returns when all is done, or after limit_s. A second call can only shorten that."""
        until_s = time.monotonic() + max(0.0, min(limit_s, MAX_DRAIN_S))
        if self._drain_until_s is None:
            _log.info("draining", extra={"limit_s": limit_s, "requests": len(self._owners)})
        self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)

    def run(self) -> None:
        """Serve until drained."""
        with self._heartbeats():
            while not self._drained():
                self.run_once()
        self._selector.close()
        for connection in self._connections:
            connection.close()
        self._listener.close()
        self._loop.close()

    def run_once(self) -> None:
        """Poll the sockets, make a step, send its deltas; without work, sleep until a client brings some."""
        self._poll()
        if self._loop.busy:
            self._route(self._loop.step(time.monotonic()))
            self._busy_s = time.monotonic()
        elif self._loop.has_idle_task and time.monotonic() >= self._busy_s + self._limits.idle_s:
            self._loop.run_idle_task()
        self._flush()

    def disconnect(self, request_id: str) -> None:
        """Close the connection that submitted this request. (Faults of the stand-in engine.)"""
        if (connection := self._owners.get(request_id)) is not None:
            self._close(connection, "disconnected by the stand-in script")

    @contextlib.contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """Run a thread that sends heartbeats, also while a step or its preparation occupies this thread."""
        stopped, loop = threading.Event(), self._loop

        def beat() -> None:
            while not stopped.wait(self._limits.heartbeat_s):
                beat = Heartbeat(loop.computed_tokens, loop.in_step, loop.preparing, loop.n_prepared, loop.step_s)
                if self._alive_file is not None:
                    self._alive_file.beat(beat)
                if wanting := [c for c in tuple(self._connections) if c.heartbeats]:
                    frame = frames.encode(beat)
                    for connection in wanting:
                        connection.send_heartbeat(frame)

        thread = threading.Thread(target=beat, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if time.monotonic() >= self._accept_again_s:
            self._accept_again_s = inf
            self.watch(self._listener, self._accept)
        for key, events in self._selector.select(self._timeout_s()):
            if not isinstance(key.data, ClientConnection):
                key.data()
            elif key.data in self._connections:  # not closed by an earlier event
                self._serve(key.data, events)
        for connection in [c for c in self._connections if not c.greeted]:
            if time.monotonic() > connection.opened_s + self._limits.hello_timeout_s:
                self._close(connection, "no Hello in time")

    def _timeout_s(self) -> float | None:
        """Seconds to sleep: 0 if there is work to do. Returns None if only clients can bring work."""
        if self._loop.busy and not self._loop.blocked:
            return 0
        limits = [c.opened_s + self._limits.hello_timeout_s for c in self._connections if not c.greeted]
        limits.append(self._accept_again_s)
        if self._loop.busy:
            limits.append(max(self._loop.wake_s, time.monotonic() + COMPILE_POLL_S))
        elif self._loop.has_idle_task:
            limits.append(self._busy_s + self._limits.idle_s)
        if self._drain_until_s is not None:
            limits.append(self._drain_until_s)
        if subscribers := self._subscribers():
            load = self._flushed_load or self._load
            limits.append(self._loop.report_s)
            limits += [c.reported_s + self._limits.report_s for c in subscribers if c.reported_load != load]
        next_s = min(limits, default=inf)
        return None if next_s == inf else max(0.0, next_s - time.monotonic())

    def _drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        if time.monotonic() >= self._drain_until_s:
            error = Unavailable("the engine was shut down before the request finished")
            self._route(self._loop.abort_all(error))
            self._flush()
            return True
        return not self._loop.busy and not any(c.has_backlog for c in self._connections)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept a client. After an error, accept none for a while: the selector would report the same one again."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the client left again, or no descriptor is free
            _log.warning("accept failed: %s", error)
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + self._limits.accept_pause_s
            return
        frames.detect_dead_peer(sock)
        if self._tls is not None:
            sock.setblocking(False)
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError as error:
                _log.warning("accept failed: %s", error)
                sock.close()
                return
        connection = ClientConnection(sock, time.monotonic(), self._limits)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        ungreeted = [c for c in self._connections if not c.greeted]
        if len(ungreeted) > self._limits.ungreeted:
            self._close(min(ungreeted, key=lambda c: c.opened_s), "too many connections without Hello")

    def _serve(self, connection: ClientConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ and not connection.closing:
                for message in connection.receive():
                    self._handle(connection, message)
                    if connection.closing or connection not in self._connections:  # refused, or handed over
                        return
        except ClientLost as error:
            self._close(connection, str(error))
        except Exception:
            _log.exception("a frame could not be handled")
            self._close(connection, "a frame could not be handled")

    def _handle(self, connection: ClientConnection, message: frames.ToEngine) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif isinstance(message, frames.Submit):
            for request in message.requests:
                self._submit(connection, request)
        elif isinstance(message, frames.Abort):
            for request_id in connection.request_ids.intersection(message.ids):
                if (delta := self._loop.abort(request_id)) is not None:
                    self._route([delta])
        elif isinstance(message, frames.CalledTools):
            for request_id in message.ids:
                self._loop.called_tools(request_id)
        elif isinstance(message, frames.Vocabulary):
            try:
                self._loop.set_vocabulary(message)
            except EmberlineError as error:  # its requests would be bound to grammars of other tokens
                raise ClientLost(error.message) from None
        elif isinstance(message, frames.CacheCommand):
            self._cache_control.submit(message, partial(self._send_cache_result, connection))
        elif isinstance(message, frames.WatchKV):
            self._send_kv_events()  # earlier subscribers get the changes; the snapshot contains them
            for event in self._kv_events.subscribe():
                self._send(connection, frames.encode(event))
            connection.subscribed = True
        elif isinstance(message, frames.SetRole):
            self._set_role(message.role)
        else:
            assert isinstance(message, frames.Drain)
            self.restarts |= message.restart
            self.drain(message.limit_s)

    def _set_role(self, role: WorkerRole) -> None:
        """Tell all clients a new role, by which cores route. The engine keeps its sequences and its cache, and computes
        whatever it is sent."""
        if role == self._info.role:
            return
        if role != "both" and not self._info.transfers:
            _log.warning("this engine cannot have the role %s: it does not transfer KV", role)
            return
        _log.info("the role is now %s", role, extra={"before": self._info.role})
        self._info = msgspec.structs.replace(self._info, role=role)
        if self.on_role is not None:
            self.on_role(role)
        frame = frames.encode(frames.Welcome(self._info, self._load))
        for connection in [c for c in self._connections if c.greeted and not c.closing]:
            self._send_or_close(connection, frame)

    def _greet(self, connection: ClientConnection, hello: Hello) -> None:
        if connection.greeted:
            raise ClientLost("a second Hello")
        refusal: EmberlineError | None = None
        expected = frames.transfer_ticket(self._token, hello.peer) if hello.peer else self._token
        expected_host = worker_host(hello.peer) if hello.peer else CORE_HOST
        allowed = bool(hello.peer) or self._serves_clients
        if not allowed or not hmac.compare_digest(hello.token.encode(), expected.encode()):
            refusal = Unauthorized(f"wrong {'ticket' if hello.peer else 'join token'} for this engine")
        elif self._tls is not None and expected_host not in connection.peer_hosts:
            shown = ", ".join(sorted(connection.peer_hosts))
            refusal = Unauthorized(f"the certificate is of {shown}, and not of {expected_host}")
        elif not self.versions[0] <= hello.version <= self.versions[1]:
            refusal = BadInput(
                f"this engine speaks versions {self.versions[0]} to {self.versions[1]} of the protocol, not "
                f"{hello.version}: install releases that follow each other"
            )
        elif hello.peer and (self._accept_sender is None or not self._info.transfers):
            refusal = BadInput("this engine receives no KV from others")
        if refusal is None:
            connection.greet()
            self._send(connection, frames.encode(frames.Welcome(self._info, self._load)))
            connection.heartbeats = hello.heartbeats and not hello.peer
            if hello.peer:
                self._hand_over(connection, hello.peer)
        else:
            _log.warning("refused a client: %s", refusal.message)
            connection.closing = True
            self._send(connection, frames.encode(frames.Refused(refusal.info())))

    def _hand_over(self, connection: ClientConnection, peer: str) -> None:
        """Hand the connection of an engine that sends KV over to a receiver thread."""
        if connection.has_backlog or connection.has_unread:
            raise ClientLost("an engine that sends KV must wait for Welcome")
        assert self._accept_sender is not None
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        self._accept_sender(connection.sock, peer)

    def _submit(self, connection: ClientConnection, request: EngineRequest) -> None:
        try:
            if self._drain_until_s is not None:
                raise Unavailable("the engine is shutting down", retry_after_s=1)
            self._loop.submit(request, time.monotonic())
        except EmberlineError as error:
            self._refuse(connection, request.id, error.info())
        except Exception:
            _log.exception("a request could not be accepted", extra={"request_id": request.id})
            self._refuse(connection, request.id, Internal("the engine could not accept this request").info())
        else:
            self._owners[request.id] = connection
            if request.trace_id:
                self._trace_ids[request.id] = request.trace_id
            connection.request_ids.add(request.id)

    def _refuse(self, connection: ClientConnection, request_id: str, error: ErrorInfo) -> None:
        _log.info("refused: %s", error.message, extra={"request_id": request_id, "kind": error.kind})
        connection.deltas.append(TokenDelta(request_id, finish="error", error=error))

    def _close(self, connection: ClientConnection, why: str) -> None:
        """Close the connection of a client, and abort everything that the client has submitted."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.close()
        for request_id in connection.request_ids:
            del self._owners[request_id]
            self._trace_ids.pop(request_id, None)
            self._loop.abort(request_id)
        _log.info("connection closed: %s", why, extra={"aborted": len(connection.request_ids)})
        connection.request_ids.clear()
        self._flushed_load = None  # perhaps closed in the flush that has reported it: its requests are gone now
        if connection.subscribed and not self._subscribers():
            self._kv_events.unsubscribe()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _route(self, deltas: list[TokenDelta]) -> None:
        if len(self._connections) == 1 and not [delta for delta in deltas if delta.finish]:
            (only,) = self._connections
            only.deltas += deltas
            return
        for delta in deltas:
            connection = self._owners.get(delta.id)
            if connection is None:
                continue  # its client left during the step
            connection.deltas.append(delta)
            if delta.finish is not None:
                del self._owners[delta.id]
                connection.request_ids.remove(delta.id)
                self._ended.append(delta)

    @property
    def _load(self) -> EngineLoad:
        load = self._loop.load
        load.draining, load.device = self._drain_until_s is not None, self._device_use()
        return load

    def _subscribers(self) -> list[ClientConnection]:
        return [c for c in self._connections if c.subscribed]

    def _send_kv_events(self) -> None:
        subscribers = self._subscribers()
        if not subscribers or not (events := self._kv_events.take()):
            return
        encoded = b"".join(frames.encode(message) for message in events)
        for connection in subscribers:
            self._send_or_close(connection, encoded)

    def _send_cache_result(self, connection: ClientConnection, result: frames.CacheResult) -> None:
        if connection in self._connections:
            self._send_or_close(connection, frames.encode(result))

    def _flush(self) -> None:
        """Send a Step frame to each client that has deltas or is due; without deltas, only if steps or load changed."""
        self._send_kv_events()
        now_s = time.monotonic()
        due = [c for c in self._connections if c.deltas or c.is_due(now_s)]
        load = self._flushed_load = self._load if due else None
        for connection in due:
            assert load is not None
            before = connection.reported_load
            changed = connection.subscribed and load != before
            if not connection.deltas and not changed and load.steps == (before.steps if before is not None else 0):
                continue  # nothing advances: no heartbeat
            connection.n_sent += len(b"".join([delta.token_ids for delta in connection.deltas])) >> 2
            frame = frames.encode(frames.Step(connection.deltas, load, connection.n_sent))
            connection.deltas, connection.reported_s, connection.reported_load = [], now_s, load
            self._send_or_close(connection, frame)
        for connection in [c for c in self._connections if c.has_backlog and not c.waits_to_write]:
            self._send_or_close(connection)  # the rest of a heartbeat
        ended, self._ended = self._ended, []
        for delta in ended:
            _log_end(delta, self._trace_ids.pop(delta.id, None))

    def _send_or_close(self, connection: ClientConnection, frame: bytes = b"") -> None:
        try:
            self._send(connection, frame)
        except ClientLost as error:
            self._close(connection, str(error))

    def _send(self, connection: ClientConnection, frame: bytes = b"") -> None:
        connection.send(frame)
        if connection.has_backlog != connection.waits_to_write:
            connection.waits_to_write = connection.has_backlog
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_backlog else 0)
            self._selector.modify(connection.sock, events, connection)
        if connection.closing and not connection.has_backlog:
            raise ClientLost("refused")


def serve_senders(
    listener: socket.socket,
    info: EngineInfo,
    token: str,
    accept: Callable[[socket.socket, str], None],
    limits: ServerLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> Callable[[], None]:
    """Accept engines that send KV to a follower, in a thread. Returns a function that ends it.

    Without a token nobody is served over a network. A Unix socket is protected by its file mode.
    """
    if not token and listener.family != socket.AF_UNIX:
        listener.close()
        return listener.close
    server = Server(listener, None, info, token, tls, limits=limits, accept_sender=accept)
    stopped, stop = socket.socketpair()
    server.watch(stopped, lambda: server.drain(0.0))
    threading.Thread(target=server.run, name="kv-senders", daemon=True).start()
    return stop.close


def _log_end(delta: TokenDelta, trace_id: str | None) -> None:
    level = logging.WARNING if delta.finish == "error" else logging.DEBUG  # the core logs every end
    if not _log.isEnabledFor(level):
        return
    usage = msgspec.to_builtins(delta.usage) if delta.usage is not None else {}
    message = delta.error.message if delta.error is not None else f"finished: {delta.finish}"
    _log.log(level, "%s", message, extra={"request_id": delta.id, "trace_id": trace_id, **usage})
