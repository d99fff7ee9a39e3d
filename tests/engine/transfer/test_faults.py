"""Processes that transfer KV and are killed, cut off or sent garbage. The stand-in engine detects every wrong block."""

import random
import select
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from emberline.kv.transfer.messages import BlocksWritten, Offer, OpenTransport
from emberline.protocol import frames
from emberline.protocol.frames import Abort, Hello, Submit, Welcome, transfer_ticket
from tests.engine.client import Client, engine, wait_until
from tests.engine.fakes import request
from tests.engine.transfer.test_prefill_decode import halves

STANDIN = "standins.standin_engine"
SIZES = ("--head-dim", 256, "--token-budget", 64, "--kv-tokens", 4096, "--context-len", 2048, "--max-running", 16)


@contextmanager
def standin(path, role, *flags, script="chunk_ms=1"):
    args = ("--socket", path, "--role", role, "--id", role, "--script", script, *SIZES, *flags)
    with engine(STANDIN, *args) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


# Every test leaves these engines idle, and gives its prompts a salt of its own: it finds no KV of other tests.


@pytest.fixture(scope="module")
def prefill_engine(folder):
    with standin(folder / "p.sock", "prefill") as (_, address):
        yield address


@pytest.fixture(scope="module")
def shm_engine(folder):
    with standin(folder / "d.sock", "decode") as (_, address):
        yield address


@pytest.fixture(scope="module")
def tcp_engine():
    with standin("tcp:127.0.0.1:0", "decode") as (_, address):
        yield address


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


@pytest.fixture
def decode_engine(transport, request):
    """The address of a decode engine that receives KV by `transport`."""
    return request.getfixturevalue(f"{transport}_engine")


@pytest.fixture
def prefill(prefill_engine):
    with Client(prefill_engine) as client:
        yield client


def ask(id, n=300, start=0, session=None, salt=b"", **sampling):
    ids = [3 + (start + i * (start + 1)) % 40_000 for i in range(n)]
    return request(id, ids, session=session, salt=salt, **{"max_tokens": 3, **sampling})


def transfer_kv(prefill, decode, address, *requests, transfer="t", token="secret"):
    for each in requests:
        first, second = halves(each, address, f"{transfer}-{each.id}", token)
        decode.submit(second)
        prefill.submit(first)


def assert_idle(client, id="rest"):
    """Poll until no block is held; a leak would stay. (Nobody reads what the engine logs: about 200 requests fit.)"""
    for n in range(150):
        client.submit(ask(f"{id}{n}", 2, max_tokens=1))
        client.finish(f"{id}{n}")
        load = client.steps[-1].load
        if (load.kv_used_blocks, load.quarantined, load.awaiting, load.pushing, load.running, load.waiting) == (0,) * 6:
            return
        time.sleep(min(0.5, 0.01 * (n + 1)))
    raise AssertionError(f"leaked: {load}")


def assert_finished(client, id, n_tokens=3):
    assert client.finish(id).error is None
    assert len(client.tokens(id)) == n_tokens


def is_transfer_error(delta):
    return delta.error is not None and (delta.error.kind, delta.error.param) == ("unavailable", "transfer")


def test_blocks_are_intact_under_random_aborts(prefill, transport, decode_engine):
    rng, salt = random.Random(3), f"aborts {transport}".encode()
    with Client(decode_engine) as decode:
        n_before = decode.greeting.load.blocks_received
        ids = [f"r{n}" for n in range(40)]
        for n, id in enumerate(ids):
            transfer_kv(prefill, decode, decode_engine, ask(id, rng.randrange(1, 900), rng.randrange(6), salt=salt))
            if rng.random() < 0.4:
                time.sleep(rng.random() * 0.02)
                if rng.random() < 0.5:
                    decode.abort(ids[rng.randrange(n + 1)])
                else:
                    prefill.abort(f"{ids[rng.randrange(n + 1)]}-p")
        for client, id in ((decode, "cancelled"), (prefill, "error")):  # however late the others were aborted
            first, second = halves(ask(id, 900, salt=salt), decode_engine, f"{transport} {id}")
            for each, half in ((decode, second), (prefill, first)):
                abort = frames.encode(Abort([half.id])) if each is client else b""
                each.sock.sendall(frames.encode(Submit([half])) + abort)
            ids.append(id)
        decode.finish(*ids)
        prefill.finish(*(f"{id}-p" for id in ids))
        ends = [decode.deltas[id][-1] for id in ids]
        assert {end.finish for end in ends} == {"length", "cancelled", "error"}
        assert all(is_transfer_error(end) for end in ends if end.finish == "error"), "wrong KV would be internal"
        assert_idle(prefill)
        assert_idle(decode)
        assert decode.steps[-1].load.blocks_received > n_before + 100


def test_a_dead_prefill_engine_leaks_nothing(tmp_path, prefill, transport, decode_engine):
    rng, salt = random.Random(4), f"dead prefill {transport}".encode()
    with Client(decode_engine) as decode:
        for n in range(2):
            die = f"standin:die_at={rng.randrange(64, 700)}"
            with standin(tmp_path / f"p{n}.sock", "prefill") as (process, p), Client(p) as dying:
                ids = [f"r{n}-{k}" for k in range(4)]
                for k, id in enumerate(ids):
                    wanted = ask(id, 800, 10 * n + k, session=die if k == 3 else None, salt=salt)
                    transfer_kv(dying, decode, decode_engine, wanted, transfer=transport)
                process.wait(60)
                decode.finish(*ids)
                for id in ids:
                    end = decode.deltas[id][-1]
                    assert end.finish == "length" or is_transfer_error(end)
                assert is_transfer_error(decode.deltas[ids[3]][-1])
            assert_idle(decode, f"rest{n}-")
        transfer_kv(prefill, decode, decode_engine, ask("after", 800, 2, salt=salt), transfer=f"{transport} after")
        assert_finished(decode, "after")
        assert sum(decode.deltas["after"][0].usage.cached_by_tier.values()) == 784
        assert_idle(prefill)


def test_a_dead_decode_engine_leaks_nothing(tmp_path, prefill, transport):
    rng, salt = random.Random(5), f"dead decode {transport}".encode()
    for n in range(2):
        address = tmp_path / f"d{n}.sock" if transport == "shm" else "tcp:127.0.0.1:0"
        with standin(address, "decode") as (process, d), Client(d) as decode:
            ids = [f"r{n}-{k}" for k in range(4)]
            for k, id in enumerate(ids):
                transfer_kv(prefill, decode, d, ask(id, 800, 10 * n + k, salt=salt))
            time.sleep(rng.random() * 0.03)
            process.kill()
            prefill.finish(*(f"{id}-p" for id in ids))
            for id in ids:
                end = prefill.deltas[f"{id}-p"][-1]
                assert end.finish == "stop" or is_transfer_error(end)
        assert_idle(prefill, f"rest{n}-")


class Proxy:
    """A TCP proxy that cuts the connection after `limit` bytes towards the decode engine."""

    def __init__(self, target, limit):
        self.target, self.limit = target, limit
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"
        self.socks = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(self.target)
            self.socks += [here, there]
            threading.Thread(target=self.relay, args=(here, there, self.limit), daemon=True).start()
            threading.Thread(target=self.relay, args=(there, here, None), daemon=True).start()

    def relay(self, source, target, limit):
        n = 0
        try:
            while data := source.recv(4096):
                data = data if limit is None else data[: limit - n]
                target.sendall(data)
                n += len(data)
                if n == limit:
                    break
        except OSError:
            pass
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        for sock in (self.listener, *self.socks):
            sock.close()


def test_a_cut_connection_fails_only_its_transfer(prefill, tcp_engine):
    rng, salt = random.Random(6), b"cut"
    with Client(tcp_engine) as decode:
        target = ("127.0.0.1", int(tcp_engine.rpartition(":")[2]))
        for n in range(6):
            proxy = Proxy(target, rng.randrange(300, 600_000))
            transfer_kv(prefill, decode, proxy.address, ask(f"cut{n}", 800, n, salt=salt), transfer=f"x{n}")
            transfer_kv(prefill, decode, tcp_engine, ask(f"whole{n}", 400, 50 + n, salt=salt))
            assert_finished(decode, f"whole{n}")
            decode.finish(f"cut{n}")
            prefill.finish(f"cut{n}-p")
            assert is_transfer_error(decode.deltas[f"cut{n}"][-1])
            assert is_transfer_error(prefill.deltas[f"cut{n}-p"][-1])
            proxy.close()
            transfer_kv(prefill, decode, tcp_engine, ask(f"again{n}", 800, n, salt=salt), transfer=f"y{n}")
            assert_finished(decode, f"again{n}")
        assert_idle(prefill)
        assert_idle(decode)


def test_a_mismatched_offer_fails_only_its_request(tmp_path, prefill, shm_engine):
    salt = b"mismatched"
    with ExitStack() as stack:
        decode = stack.enter_context(Client(shm_engine))
        engines = {
            "weights": standin(tmp_path / "w.sock", "prefill", "--fingerprint", "another"),
            "layout": standin(tmp_path / "l.sock", "prefill", "--head-dim", 128),
        }
        clients = {"good": prefill}
        for name, each in engines.items():
            clients[name] = stack.enter_context(Client(stack.enter_context(each)[1]))
        for name in ("weights", "layout"):
            transfer_kv(clients[name], decode, shm_engine, ask(name, salt=salt))
            for end in (decode.finish(name), clients[name].finish(f"{name}-p")):
                assert is_transfer_error(end)
                assert "weights" in end.error.message or "another KV layout" in end.error.message
        first, _ = halves(ask("short", 300, salt=salt), shm_engine, "lengths", "secret")
        _, second = halves(ask("short", 200, salt=salt), shm_engine, "lengths", "secret")
        prefill.submit(first)
        decode.submit(second)
        for end in (decode.finish("short"), prefill.finish("short-p")):
            assert is_transfer_error(end)
            assert "blocks" in end.error.message
        first, _ = halves(ask("content", 300, salt=salt), shm_engine, "contents", "secret")
        _, second = halves(ask("content", 300, start=1, salt=salt), shm_engine, "contents", "secret")
        prefill.submit(first)
        decode.submit(second)
        for end in (decode.finish("content"), prefill.finish("content-p")):
            assert is_transfer_error(end)
            assert "another prompt" in end.error.message
        for name, token in (("token", "wrong"), ("nobody", "secret")):
            address = shm_engine if name == "token" else f"unix:{tmp_path}/nobody.sock"
            first, _ = halves(ask(name, salt=salt), address, name, token)
            prefill.submit(first)
            assert is_transfer_error(prefill.finish(f"{name}-p"))
        transfer_kv(prefill, decode, shm_engine, ask("good", salt=salt))
        assert_finished(decode, "good")
        for client in (decode, *clients.values()):
            assert_idle(client)


def ended_first(id, one, other):
    """The client whose request of this name has ended, and the other one."""
    while True:
        for client in select.select([one, other], [], [], 60)[0]:
            client.step()
            while client.has_messages:
                client.step()
            if id in client.deltas and client.deltas[id][-1].finish is not None:
                return (one, other) if client is one else (other, one)


def test_two_senders_with_the_same_name(tmp_path, prefill, shm_engine):
    one, salt = prefill, b"same name"
    with (
        standin(tmp_path / "b.sock", "prefill") as (_, b),
        Client(shm_engine) as decode,
        Client(b) as other,
    ):
        for n in range(6):
            transfer_kv(one if n % 2 else other, decode, shm_engine, ask(f"r{n}", 500, n, salt=salt), transfer="two")
        for n in range(6):
            assert_finished(decode, f"r{n}")
        first, _ = halves(ask("same", 300, 9, salt=salt), shm_engine, "same", "secret")
        second, third = halves(ask("same", 300, 9, salt=salt), shm_engine, "same", "secret")
        one.submit(first)
        other.submit(second)
        refused, accepted = ended_first("same-p", one, other)
        assert "offered twice" in refused.finish("same-p").error.message
        decode.submit(third)
        assert_finished(decode, "same")
        assert accepted.finish("same-p").finish == "stop"
        assert_idle(decode)


def garbage():
    rng = random.Random(7)
    yield b"\xff" * 64
    yield struct.pack("<I", 1 << 31)
    yield struct.pack("<I", 5) + b"hello"
    yield frames.encode(Hello("secret"))
    yield frames.encode(BlocksWritten(3, [(0, 1)]))
    yield frames.encode(OpenTransport("shm"))
    yield frames.encode(OpenTransport("shm")) + frames.encode(OpenTransport("tcp"))
    yield frames.encode(OpenTransport("pigeon"))
    yield frames.encode(Offer("t", "standin", ("x",), (1,), -1, b""))
    yield struct.pack("<I", 20) + b"\x82\xa4type\xa4open\xa3way\xa5\xff\xff\xff"
    yield struct.pack("<I", 60_014) + b"\x82\xa4type\xa4open\xa1x" + b"\x91" * 60_000
    for _ in range(20):
        payload = rng.randbytes(rng.randrange(1, 40))
        yield struct.pack("<I", len(payload)) + payload


def test_garbage_on_a_transfer_connection_is_contained(prefill, transport, decode_engine):
    with Client(decode_engine) as decode:
        for data in garbage():
            peer = Client(decode_engine, greet=False)
            peer.send(Hello(transfer_ticket("secret", "peer"), peer="peer"))
            assert isinstance(peer.receive(), Welcome)
            with suppress(ConnectionError):  # it may be closed before the end of it is sent
                peer.sock.sendall(data)
            peer.close()
        early = Client(decode_engine, greet=False)
        early.sock.sendall(frames.encode(Hello(transfer_ticket("secret", "early"), peer="early")) + b"\0")
        early.close()
        wanted = ask("after", salt=f"garbage {transport}".encode())
        transfer_kv(prefill, decode, decode_engine, wanted, transfer=f"garbage {transport}")
        assert_finished(decode, "after")
        assert_idle(decode)


def test_a_ticket_admits_its_sender_and_nothing_else(shm_engine):
    ticket = transfer_ticket("secret", "p")
    for hello in (Hello(ticket), Hello(ticket, peer="other"), Hello("secret", peer="p"), Hello("", peer="p")):
        with Client(shm_engine, greet=False) as client:
            client.send(hello)
            assert client.receive().error.kind == "unauthorized"
    with Client(shm_engine, greet=False) as client:
        client.send(Hello(ticket, peer="p"))
        assert isinstance(client.receive(), Welcome)


def test_engines_that_receive_no_kv_refuse_senders(tmp_path, prefill):
    with standin(tmp_path / "b.sock", "both") as (_, b), Client(b) as both:
        first, second = halves(ask("a"), b, "t", "secret")
        prefill.submit(first)
        end = prefill.finish("a-p")
        assert is_transfer_error(end)
        assert "receives no KV" in end.error.message
        both.submit(second)
        assert is_transfer_error(both.finish("a"))


def test_a_draining_prefill_engine_finishes_its_transfers(tmp_path, shm_engine):
    with (
        standin(tmp_path / "p.sock", "prefill", script="chunk_ms=20") as (process, p),
        Client(shm_engine) as decode,
        Client(p) as prefill,
    ):
        transfer_kv(prefill, decode, shm_engine, ask("slow", 1000, salt=b"draining"))
        wait_until(lambda: prefill.step().deltas)
        process.send_signal(signal.SIGTERM)
        assert_finished(decode, "slow")
        assert prefill.finish("slow-p").finish == "stop"
        assert process.wait(60) == 0
        assert_idle(decode)
