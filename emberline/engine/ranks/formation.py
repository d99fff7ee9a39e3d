"""Forming a rank group: rank 0 listens, followers join with a token, and both sides must agree on what they run.

The address is a Unix socket in a private folder where rank 0 starts its followers itself, or a TCP port where they are
started on other machines, with mutual TLS (`tls`). What differs is refused with the values of both sides.
"""

import hmac
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from emberline.engine.ranks import messages
from emberline.engine.ranks.messages import Join, RankFacts, Refused, Welcome
from emberline.engine.ranks.plan_channel import PlanReader, SharedMemoryReader
from emberline.engine.ranks.plan_ring import RingReader, RingWriter
from emberline.engine.ranks.tls import rank_context, tunnel
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.protocol import frames
from emberline.protocol.errors import BadInput

FORM_S = 120.0  # for all followers to join
_HELLO_S = 10.0  # for a connection to say who it is
_MAX_JOIN_BYTES = 16 << 10
_RETRY_S = 0.2
_POLL_S = 0.05
_MAX_GREETINGS = 256  # connections that have not said who they are; further ones wait in the listener's queue

_log = logging.getLogger(__name__)


class Rendezvous:
    """Rank 0's side, until all followers have joined."""

    def __init__(
        self, listener: socket.socket, facts: RankFacts, token: str, store: str, ring: RingWriter | None
    ) -> None:
        self._listener, self._facts, self._token = listener, facts, token
        self._context = None if listener.family == socket.AF_UNIX else rank_context(token, server=True)
        self._store, self._ring = store, ring
        self._joined: dict[int, PeerConnection] = {}
        self._lock = threading.Lock()  # of what is known of those who have joined
        self._closed = False  # nobody is admitted any more
        self._greeting = threading.BoundedSemaphore(_MAX_GREETINGS)

    def wait(self, timeout_s: float = FORM_S, check: Callable[[], None] = lambda: None) -> list[PeerConnection]:
        """The followers' connections, rank 1 first. BadInput: they did not all come. `check` is called meanwhile, and
        raises if one cannot come any more."""
        layout = self._facts.layout
        limit_s = time.monotonic() + timeout_s
        try:
            while len(self._joined) < layout.n_ranks - 1:
                check()
                if time.monotonic() > limit_s:
                    missing = ", ".join(str(rank) for rank in range(1, layout.n_ranks) if rank not in self._joined)
                    raise BadInput(f"rank {missing} of {layout.n_ranks} did not join within {timeout_s:g} seconds")
                if select.select([self._listener], [], [], _POLL_S)[0] and self._greeting.acquire(timeout=_POLL_S):
                    sock = self._listener.accept()[0]
                    threading.Thread(target=self._greet, args=(sock,), name="rank-hello", daemon=True).start()
        except BaseException:
            with self._lock:
                self._closed = True
                for connection in self._joined.values():
                    connection.close()
            raise
        with self._lock:
            self._closed = True
            return [self._joined[rank] for rank in range(1, layout.n_ranks)]

    def _greet(self, sock: socket.socket) -> None:
        """Admit or refuse whoever has connected, on a thread of its own."""
        try:
            connection = _connection(sock, self._context)
        except (BadInput, OSError) as error:
            _log.warning("a rank was refused: %s", error)
            sock.close()
        else:
            self._admit(connection)
        finally:
            self._greeting.release()

    def _admit(self, connection: PeerConnection) -> None:
        connection.set_timeout(_HELLO_S)
        try:
            join = connection.receive(messages.to_leader, _MAX_JOIN_BYTES)
            with self._lock:
                reason = self._reason_to_refuse(join)
                if reason is None and isinstance(join, Join):
                    local = connection.local and self._ring is not None
                    descriptors = [self._ring.descriptor] if local and self._ring is not None else []
                    connection.send(Welcome(self._store, len(descriptors)), descriptors)
                    connection.set_timeout(None)
                    self._joined[join.rank] = connection
                    return
            connection.send(Refused(reason or "not a Join"))
        except PeerConnectionLost as error:
            reason = str(error)
        _log.warning("a rank was refused: %s", reason)
        connection.close()

    def _reason_to_refuse(self, join: messages.ToLeader) -> str | None:
        if not isinstance(join, Join):
            return "a follower begins with Join"
        if not hmac.compare_digest(join.token.encode(), self._token.encode()):
            return "wrong join token"
        n_ranks = self._facts.layout.n_ranks
        if not 0 < join.rank < n_ranks:
            return f"there is no rank {join.rank}: this group has ranks 1 to {n_ranks - 1} beside rank 0"
        if self._closed:
            return "rank 0 does not wait any more"
        if join.rank in self._joined:
            return f"rank {join.rank} has joined already"
        if differences := self._facts.differences(join.facts):
            return f"rank {join.rank} cannot join rank 0: {'; '.join(differences)}"
        return None


def join_group(
    address: str, rank: int, token: str, facts: RankFacts, timeout_s: float = FORM_S
) -> tuple[PeerConnection, Welcome, PlanReader | None]:
    """A follower's side. BadInput: it was refused, or there is no rank 0 at the address. The reader is None where plans
    come over the connection, which carries other messages until the follower is ready: then `ConnectionReader`."""
    sock = _connect(address, timeout_s)
    try:
        connection = _connection(sock, None if sock.family == socket.AF_UNIX else rank_context(token, server=False))
    except OSError as error:
        raise BadInput(f"rank 0 at {address} ended the connection: {error}") from None
    connection.set_timeout(timeout_s)
    try:
        connection.send(Join(rank, token, facts))
        answer = connection.receive(messages.to_follower)
    except PeerConnectionLost as error:
        raise BadInput(f"rank 0 at {address} ended the connection: {error}") from None
    if not isinstance(answer, Welcome):
        raise BadInput(answer.message if isinstance(answer, Refused) else "rank 0 did not answer Join")
    connection.set_timeout(None)
    reader: PlanReader | None = None
    if answer.n_descriptors:
        (descriptor,) = connection.take_descriptors(1)
        reader = SharedMemoryReader(RingReader(descriptor, rank - 1))
        os.close(descriptor)
    return connection, answer, reader


def _connection(sock: socket.socket, context: ssl.SSLContext | None) -> PeerConnection:
    """A connection between two ranks: encrypted and authenticated by the join token, except on one machine (None)."""
    if context is None:
        return PeerConnection(sock)
    frames.detect_dead_peer(sock)
    hosts = str(sock.getsockname()[0]), str(sock.getpeername()[0])
    return PeerConnection(tunnel(sock, context), hosts)


def _connect(address: str, timeout_s: float) -> socket.socket:
    limit_s = time.monotonic() + timeout_s
    while True:
        try:
            if address.startswith("tcp:"):
                host, _, port = address.removeprefix("tcp:").rpartition(":")
                return socket.create_connection((host.strip("[]"), int(port)), timeout=_HELLO_S)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(Path(address.removeprefix("unix:"))))
            return sock
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or time.monotonic() > limit_s:
                raise BadInput(f"rank 0 cannot be reached at {address}: {error}") from None
            time.sleep(_RETRY_S)
