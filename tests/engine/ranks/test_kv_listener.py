"""Where a follower receives KV: who may connect, and what those who may not can do."""

import contextlib
import errno
import socket
import time
from contextlib import ExitStack

import pytest

from emberline.engine.ranks import rank_group
from emberline.engine.ranks.kv_listener import KVListener
from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.protocol import frames
from emberline.protocol.frames import EngineInfo, Hello, Refused, Welcome, transfer_ticket
from tests.kv.transfer.rank_groups import GROUP

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


def dial(listener):
    host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def greeted(listener, ticket):
    connection = PeerConnection(dial(listener))
    try:
        connection.send(Hello(ticket, peer="sender"))
        return connection.receive(frames.from_engine_decoder)
    finally:
        connection.close()


def test_who_has_no_ticket_is_refused(closing, transfers):
    listener = KVListener("tcp:127.0.0.1:0", closing)
    listener.serve(transfers, INFO, "secret")
    assert isinstance(greeted(listener, transfer_ticket("", "sender")), Refused)
    assert isinstance(greeted(listener, transfer_ticket("secret", "sender")), Welcome)


def test_without_a_token_nobody_is_served_over_a_network(closing, transfers):
    """A worker that joins a cluster has none for its ranks: anybody could make a ticket."""
    listener = KVListener("tcp:127.0.0.1:0", closing)
    listener.serve(transfers, INFO, "")
    with pytest.raises(ConnectionRefusedError):
        dial(listener)


def test_a_rank_of_another_machine_is_reached_where_it_connects_from():
    assert rank_group._reached("tcp:0.0.0.0:71", "10.0.0.2") == "tcp:10.0.0.2:71"
    assert rank_group._reached("tcp:[::]:71", "fd00::2") == "tcp:[fd00::2]:71"
    assert rank_group._reached("tcp:10.0.1.2:71", "10.0.0.2") == "tcp:10.0.1.2:71"
    assert rank_group._reached("tcp:0.0.0.0:71", "") == "tcp:0.0.0.0:71", "at the host of its worker: `dialed`"
    assert rank_group._reached("", "10.0.0.2") == ""


class Exhausted:
    """A listening socket whose process has no file descriptor left, once."""

    def __init__(self, listener):
        self._listener, self._failed = listener, False

    def accept(self):
        if not self._failed:
            self._failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def fileno(self):
        return self._listener.fileno()


def test_an_error_does_not_end_the_listener(closing, transfers):
    listener = KVListener("tcp:127.0.0.1:0", closing)
    listener._listener = Exhausted(listener._listener)
    listener.serve(transfers, INFO, "secret")
    assert isinstance(greeted(listener, transfer_ticket("secret", "sender")), Welcome)


def test_a_greeting_has_a_limit_however_slowly_it_is_sent(closing, transfers):
    listener = KVListener("tcp:127.0.0.1:0", closing, max_greetings=1, greeting_s=0.5)
    listener.serve(transfers, INFO, "secret")
    until_s = time.monotonic() + 60
    with dial(listener) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(frames.LENGTH.pack(frames.MAX_HELLO_BYTES))
        while time.monotonic() < until_s:
            slow.sendall(b"\0")
            time.sleep(0.05)  # the whole frame would take minutes
    assert time.monotonic() < until_s
    while True:  # its place is free a moment later
        with contextlib.suppress(Exception):
            assert isinstance(greeted(listener, transfer_ticket("secret", "sender")), Welcome)
            return
        assert time.monotonic() < until_s
