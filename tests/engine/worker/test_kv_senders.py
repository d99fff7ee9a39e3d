"""Where a follower receives KV: who may connect, and what those who may not can do."""

import contextlib
import errno
import socket
import time
from contextlib import ExitStack

import pytest

from emberline.engine.addresses import listening
from emberline.engine.ranks import rank_group
from emberline.engine.worker.client_connection import ServerLimits
from emberline.engine.worker.socket_server import Server, serve_senders
from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.protocol import frames
from emberline.protocol.frames import EngineInfo, Hello, Refused, Welcome, transfer_ticket
from tests.engine.client import wait_until
from tests.kv.transfer.rank_groups import GROUP, serve

INFO = EngineInfo(model="m", fingerprint="fake", context_len=1, vocab_size=1, eos_ids=(), transfers=("tcp",))


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def transfers(closing):
    size = GROUP.block_bytes
    manager = host_transfers("fake", [GROUP], HostMemory([memoryview(bytearray(size))], [size]))
    closing.callback(manager.close)
    return manager


def dial(address):
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def refuses(address):
    try:
        dial(address).close()
    except ConnectionRefusedError:
        return True
    return False


def greeted(address, ticket, peer="sender"):
    connection = PeerConnection(dial(address))
    try:
        connection.send(Hello(ticket, peer=peer))
        return connection.receive(frames.from_engine_decoder)
    finally:
        connection.close()


def test_who_has_no_ticket_is_refused(closing, transfers):
    address = serve("tcp:127.0.0.1:0", transfers, INFO, closing)
    assert isinstance(greeted(address, transfer_ticket("", "sender")), Refused)
    assert isinstance(greeted(address, transfer_ticket("secret", "sender")), Welcome)


def test_without_a_token_nobody_is_served_over_a_network(closing, transfers):
    """A worker that joins a cluster has none for its ranks: anybody could make a ticket."""
    address = serve("tcp:127.0.0.1:0", transfers, INFO, closing, token="")
    assert refuses(address)


def test_who_sends_no_kv_is_refused(closing, transfers):
    address = serve("tcp:127.0.0.1:0", transfers, INFO, closing)
    for ticket in ("secret", transfer_ticket("secret", "")):
        assert isinstance(greeted(address, ticket, peer=""), Refused)


def test_a_rank_of_another_machine_is_reached_where_it_connects_from():
    assert rank_group._reached("tcp:0.0.0.0:71", "10.0.0.2") == "tcp:10.0.0.2:71"
    assert rank_group._reached("tcp:[::]:71", "fd00::2") == "tcp:[fd00::2]:71"
    assert rank_group._reached("tcp:10.0.1.2:71", "10.0.0.2") == "tcp:10.0.1.2:71"
    assert rank_group._reached("tcp:0.0.0.0:71", "") == "tcp:0.0.0.0:71", "at the host of its worker: `dialed`"
    assert rank_group._reached("", "10.0.0.2") == ""


class Exhausted:
    """A listening socket whose process has no file descriptor left, at the first n attempts to accept."""

    def __init__(self, listener, n=1):
        self._listener, self._n, self.n_attempts = listener, n, 0
        self.fileno, self.setblocking, self.close = listener.fileno, listener.setblocking, listener.close
        self.family = listener.family

    def accept(self):
        self.n_attempts += 1
        if self.n_attempts <= self._n:
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()


def test_an_error_does_not_end_the_listener(closing, transfers):
    listener, address = closing.enter_context(listening("tcp:127.0.0.1:0"))
    closing.callback(serve_senders(Exhausted(listener), INFO, "secret", transfers.accept))
    assert isinstance(greeted(address, transfer_ticket("secret", "sender")), Welcome)


def test_a_process_without_descriptors_does_not_try_without_pause(closing, transfers):
    """The selector reports a client that cannot be accepted over and over."""
    listener, address = closing.enter_context(listening("tcp:127.0.0.1:0"))
    exhausted, limits = Exhausted(listener, n=1 << 30), ServerLimits(accept_pause_s=600)
    server = Server(exhausted, None, INFO, "secret", limits=limits, accept_sender=transfers.accept)
    woken, waker = map(closing.enter_context, socket.socketpair())
    waker.send(b"x")
    server.watch(woken, lambda: None)  # the server never sleeps
    with dial(address):
        while not exhausted.n_attempts:
            server.run_once()
        for _ in range(5):
            server.run_once()
    assert exhausted.n_attempts == 1


def test_a_greeting_has_a_limit_however_slowly_it_is_sent(closing, transfers):
    limits = ServerLimits(hello_timeout_s=0.5)
    address = serve("tcp:127.0.0.1:0", transfers, INFO, closing, limits=limits)
    until_s = time.monotonic() + 60
    with dial(address) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(frames.LENGTH.pack(frames.MAX_HELLO_BYTES))
        while time.monotonic() < until_s:
            slow.sendall(b"\0")
            time.sleep(0.05)  # the whole frame would take minutes
    assert time.monotonic() < until_s
    assert isinstance(greeted(address, transfer_ticket("secret", "sender")), Welcome)


def test_nobody_is_accepted_after_the_end(closing, transfers):
    listener, address = closing.enter_context(listening("tcp:127.0.0.1:0"))
    serve_senders(listener, INFO, "secret", transfers.accept)()
    wait_until(lambda: refuses(address))
