"""A client's connection to an engine: bounded reads, a bounded backlog, and what the client is yet to be sent."""

import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from emberline.protocol import frames
from emberline.protocol.credential import hosts_of
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad, FrameBuffer

_RECV_BYTES = 256 << 10


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """Times and bounds of an engine's socket server."""

    hello_timeout_s: float = 5.0  # for a new connection's Hello
    heartbeat_s: float = 1.0  # between two heartbeats; also between load reports to a client with open requests
    report_s: float = 0.2  # between load reports to a subscriber of KV events
    idle_s: float = 0.5  # without work, after which idle tasks run; a request may have to wait for one of them
    backlog_bytes: int = 64 << 20  # unsent bytes after which a client that does not read is disconnected
    ungreeted: int = 64  # connections without a valid Hello; the oldest is closed for one more
    accept_pause_s: float = 0.1  # before clients are accepted again, after an error: out of file descriptors, say


class ClientLost(Exception):
    """Says why a client is gone, or is to be disconnected."""


class ClientConnection:
    """Receives and sends bounded amounts of bytes on a non-blocking socket. The server decides what frames mean.

    One thread uses it, except for `send_heartbeat`.
    """

    def __init__(self, sock: socket.socket, opened_s: float, limits: ServerLimits) -> None:
        self._limits = limits
        sock.setblocking(False)
        self.sock = sock
        self.opened_s = opened_s
        self.greeted = False
        self.closing = False  # once the backlog is sent
        self.subscribed = False  # to KV events
        self.heartbeats = False  # the client wants them
        self.waits_to_write = False  # the selector reports when the socket takes more
        self.peer_hosts: set[str] = set()  # in the client's certificate, once TLS has verified it
        self.request_ids: set[str] = set()
        self.deltas: list[TokenDelta] = []  # for the next Step frame
        self.n_sent = 0  # output tokens in all Step frames
        self.reported_s = opened_s  # when the last Step frame was sent, and the load in it
        self.reported_load: EngineLoad | None = None
        self._frames = FrameBuffer(frames.MAX_HELLO_BYTES)
        self._backlog = deque[memoryview]()  # frames that are not sent yet, of the first perhaps only the rest
        self._n_backlog = 0  # bytes of these
        self._sending = threading.Lock()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def has_unread(self) -> bool:
        return self._frames.has_partial_frame

    def is_due(self, now_s: float) -> bool:
        """True if a frame without deltas is to be sent when there is something to report."""
        heartbeat = bool(self.request_ids) and now_s - self.reported_s > self._limits.heartbeat_s
        return heartbeat or (self.subscribed and now_s >= self.reported_s + self._limits.report_s)

    def greet(self) -> None:
        """Accept frames of any kind from now on, after a valid Hello."""
        self.greeted = True
        self._frames.max_bytes = frames.MAX_FRAME_BYTES

    def receive(self) -> Iterator[frames.ToEngine]:
        """Read once, so that a flood cannot delay steps. Yields the messages that are complete now."""
        try:
            data = self._receive_tls(self.sock) if isinstance(self.sock, ssl.SSLSocket) else self.sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ClientLost(str(error)) from None
        if data is None:
            return
        if not data:
            raise ClientLost("closed by the client")
        try:
            for payload in self._frames.feed(data):
                yield frames.decode(frames.to_engine_decoder if self.greeted else frames.hello_decoder, payload)
        except frames.FrameError as error:
            raise ClientLost(str(error)) from None

    def _receive_tls(self, sock: ssl.SSLSocket) -> bytes | None:
        """Read all records that have come, of 16 KiB at most: requests that come together start in one step. Returns
        None if nothing has come. The lock keeps two threads from using the encryption concurrently."""
        received = bytearray()
        with self._sending:
            try:
                if not self.peer_hosts:
                    sock.do_handshake()
                    self.peer_hosts = hosts_of(sock)
                while len(received) < _RECV_BYTES:
                    record = sock.recv(_RECV_BYTES)
                    if not record:
                        return bytes(received)
                    received += record
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return bytes(received) if received else None
        return bytes(received)

    def send(self, frame: bytes = b"") -> None:
        """Send what the socket takes, and keep the rest. Without a frame, go on with what was kept."""
        with self._sending:
            try:
                self._send_kept(frame)
            except OSError as error:
                raise ClientLost(str(error)) from None
        if self._n_backlog > self._limits.backlog_bytes:
            raise ClientLost("the client reads too slowly")

    def _send_kept(self, frame: bytes) -> None:
        """Keep the frame behind the others and send until the socket takes no more. Copies nothing: a large backlog
        takes no longer than a small one."""
        if frame:
            self._backlog.append(memoryview(frame))
            self._n_backlog += len(frame)
        try:
            while self._backlog:
                first = self._backlog[0]
                n_sent = self.sock.send(first)
                self._n_backlog -= n_sent
                if n_sent < len(first):
                    self._backlog[0] = first[n_sent:]
                    return
                self._backlog.popleft()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass  # TLS wants the same bytes again

    def send_heartbeat(self, frame: bytes) -> None:
        """Send a heartbeat, from the thread of heartbeats, unless the client does not read. A lost client is noticed
        elsewhere."""
        with self._sending, contextlib.suppress(OSError):
            if self.heartbeats and not self._backlog:
                self._send_kept(frame)

    def close(self) -> None:
        with self._sending:
            self.heartbeats = False
            self.sock.close()
