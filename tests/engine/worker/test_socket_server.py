"""The socket server of an engine, with a fake model in pure Python."""

import contextlib
import socket
import struct
import threading
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.engine.addresses import listening
from emberline.engine.core.plan import StepPlan
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker.client_connection import ServerLimits
from emberline.engine.worker.process import join_token
from emberline.engine.worker.socket_server import Server
from emberline.protocol import frames
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import (
    Abort,
    Drain,
    EngineInfo,
    Heartbeat,
    Hello,
    Refused,
    Step,
    Submit,
    WatchKV,
    Welcome,
)
from tests.engine.client import Client, wait_until
from tests.engine.fakes import EOS, FULL, VOCAB, FakeRunner, expected, request, scheduler_of
from tests.examples import n_examples

LONG = {"max_tokens": None}


def framed(payload):
    return struct.pack("<I", len(payload)) + payload


class Engine:
    """A server in a thread. `pause` delays its steps."""

    def __init__(self, path, idle_task=None, transfers=(), limits=None, **setup):
        self.scheduler, self.cache = scheduler_of(**{"n_blocks": 400, "context_len": 4000, **setup})
        self.runner = FakeRunner(self.cache)
        self.go = threading.Event()
        self.go.set()
        launch = self.runner.launch
        self.runner.launch = lambda plan: self.go.wait(60) and launch(plan)
        self.info = EngineInfo(model="fake", fingerprint="fake", context_len=4000, vocab_size=VOCAB, eos_ids=(EOS,))
        self.info = msgspec.structs.replace(self.info, transfers=transfers)
        self._listening = listening(str(path))
        listener, self.address = self._listening.__enter__()
        self.loop = StepLoop(self.scheduler, self.runner, idle_task=idle_task)
        self.server = Server(listener, self.loop, self.info, "secret", limits=limits)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def stop(self):
        self.go.set()
        if self.thread.is_alive():
            try:
                with Client(self.address) as client:
                    client.send(Drain(0))
                    self.thread.join(60)
            except ConnectionError:
                self.thread.join(60)
        self._listening.__exit__(None, None, None)
        assert not self.thread.is_alive()


@pytest.fixture
def engine(tmp_path, request):
    """Parameters are fields of ServerLimits."""
    limits = ServerLimits(**getattr(request, "param", {}))
    engine = Engine(tmp_path / "engine.sock", limits=limits)
    yield engine
    engine.stop()


def with_limits(**limits):
    return pytest.mark.parametrize("engine", [limits], indirect=True, ids=["limits"])


def test_hello_is_answered_with_engine_info(engine):
    with Client(engine.address) as client:
        assert isinstance(client.greeting, Welcome)
        assert client.greeting.info == msgspec.structs.replace(engine.info, heartbeat_s=1.0)
        assert client.greeting.load.kv_total_blocks == 399


@with_limits(heartbeat_s=60.0)  # no empty steps in between
def test_one_step_frame_carries_all_deltas_of_a_step(engine):
    with Client(engine.address) as client, Client(engine.address) as other:
        client.submit(*(request(f"r{n}", [n + 1] * 5, max_tokens=6) for n in range(3)))
        other.submit(request("x", [5, 5], max_tokens=6))
        client.finish("r0", "r1", "r2")
        other.finish("x")
        assert set(other.deltas) == {"x"}
        for n in range(3):
            assert (
                client.tokens(f"r{n}") == expected([n + 1] * 5, request("", [1], max_tokens=6).sampling, [FULL], 999)[0]
            )
        assert max(len(step.deltas) for step in client.steps) == 3
        assert len(client.steps) <= 8
        assert client.steps[-1].load.output_tokens >= 18


def test_refused_requests_get_a_terminal_delta(engine):
    with Client(engine.address) as client:
        client.submit(request("empty", []), request("fine", [1]), request("long", [1] * 5000))
        client.finish("empty", "fine", "long")
        assert client.deltas["empty"][0].error.kind == "bad_input"
        assert client.deltas["long"][0].error.kind == "context_exceeded"
        assert client.deltas["fine"][-1].finish == "length"


def test_an_id_in_use_is_refused(engine):
    engine.go.clear()
    with Client(engine.address) as client, Client(engine.address) as other:
        client.submit(request("a", [1]))
        wait_until(lambda: engine.scheduler.busy)
        other.submit(request("a", [2]))
        engine.go.set()
        assert other.finish("a").error.kind == "bad_input"
        assert client.finish("a").finish == "length"


def test_only_the_owner_of_a_request_can_abort_it(engine):
    with Client(engine.address) as client, Client(engine.address) as other:
        client.submit(request("a", [1], **LONG))
        client.step()
        other.abort("a", "unknown")
        other.submit(request("b", [1]))
        other.finish("b")
        assert "a" not in other.deltas
        client.abort("a")
        assert client.finish("a").finish == "cancelled"
    wait_until(lambda: engine.cache.n_used == 0)


def test_a_lost_connection_aborts_its_requests(engine):
    with Client(engine.address) as other:
        client = Client(engine.address)
        client.submit(request("a", [1], **LONG), request("b", [2], **LONG))
        client.step()
        other.submit(request("c", [3], max_tokens=200))
        client.close()
        other.finish("c")
    wait_until(lambda: engine.cache.n_used == 0 and not engine.scheduler.busy)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff\xff\xff",
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 0),
        frames.encode(Welcome(EngineInfo(model="", fingerprint="", context_len=1, vocab_size=1, eos_ids=()), None)),
        frames.encode(Hello("secret")),
        framed(b"\x82\xa4type\xa5abort\xa3ids\x91\xa2\xff\xff"),
        framed(b"\x83\xa4type\xa5abort\xa3ids\x90\xa1x" + b"\x91" * 60_000 + b"\xc0"),
    ],
    ids=["huge", "garbage", "empty", "wrong direction", "second hello", "not UTF-8", "nested"],
)
def test_a_malformed_frame_closes_that_connection_alone(engine, payload):
    with Client(engine.address) as client, Client(engine.address) as bad:
        client.submit(request("a", [1], max_tokens=300))
        bad.sock.sendall(payload)
        with pytest.raises(ConnectionError):
            bad.receive()
        assert client.finish("a").finish == "length"


@pytest.mark.parametrize(
    ("hello", "kind"),
    [(Hello("wrong"), "unauthorized"), (Hello(""), "unauthorized"), (Hello("ключ"), "unauthorized"),
     (Hello("secret", version=frames.OLDEST_VERSION - 1), "bad_input"),
     (Hello("secret", version=99), "bad_input")],
)  # fmt: skip
def test_a_wrong_hello_is_refused(engine, hello, kind):
    with Client(engine.address, greet=False) as client:
        client.send(hello)
        message = client.receive()
        assert isinstance(message, Refused)
        assert message.error.kind == kind
        with pytest.raises(ConnectionError):
            client.receive()


def test_a_role_changes_while_a_request_runs_and_the_prefix_cache_stays(tmp_path):
    engine = Engine(tmp_path / "engine.sock", transfers=("tcp",))
    prompt = [1, 2, 3, 4] * 16
    roles = []
    engine.server.on_role = roles.append
    with (
        Client(engine.address) as core,
        Client(engine.address) as other,
        Client(engine.address, version=frames.OLDEST_VERSION) as older,
    ):
        core.submit(request("first", prompt, max_tokens=2))
        core.finish("first")
        engine.go.clear()
        core.submit(request("runs", [5, 1, 2], max_tokens=8))
        wait_until(lambda: engine.scheduler.busy)
        other.send(frames.SetRole("prefill"))
        other.send(frames.SetRole("prefill"))  # which it has
        engine.go.set()
        for client in (other, older):
            while not isinstance(message := client.receive(), Welcome):
                assert isinstance(message, Step | Heartbeat)
            assert message.info.role == "prefill"
        while not isinstance(message := core.receive(), Welcome):
            core.take(message)
        assert message.info.role == "prefill"
        assert core.finish("runs").finish in ("length", "stop")
        core.submit(request("again", prompt, max_tokens=2))
        assert core.finish("again").usage.cached_tokens >= 48
    with Client(engine.address) as later:
        assert later.greeting.info.role == "prefill"
    assert roles == ["prefill"]
    engine.stop()


def test_a_role_that_needs_kv_transfers_is_not_taken_without_them(engine):
    with Client(engine.address) as client:
        client.send(frames.SetRole("decode"))
        client.submit(request("a", [1], max_tokens=1))
        client.finish("a")  # frames are handled in order
    with Client(engine.address) as later:
        assert later.greeting.info.role == "both"


def test_other_frames_before_hello_close_the_connection(engine):
    for message in (Submit([request("a", [1])]), Abort(["a"]), Drain(0), Submit([request("a", [1] * 20_000)])):
        with Client(engine.address, greet=False) as client:
            with contextlib.suppress(ConnectionError):  # of a long one only the beginning may be read
                client.send(message)
            with pytest.raises(ConnectionError):
                client.receive()
    assert not engine.scheduler.busy


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\x82\xa4type\xa5hello\xa5token\xa2\xff\xff"),
        framed(b"\x91" * 60_000),
        framed(b"\x83\xa4type\xa5hello\xa5token\xa1a\xa1x" + b"\x91" * 4000 + b"\xc0"),
        struct.pack("<I", frames.MAX_HELLO_BYTES + 1),  # refused before a byte of it has come
        frames.encode(Hello("secret" + "x" * frames.MAX_HELLO_BYTES)),
    ],
    ids=["not UTF-8", "nested", "nested in a short frame", "large", "long token"],
)
def test_no_bytes_without_a_token_disturb_the_engine(engine, data):
    with Client(engine.address) as client, Client(engine.address, greet=False) as attacker:
        client.submit(request("a", [1], max_tokens=300))
        with contextlib.suppress(ConnectionError):  # Python decides how deep a frame may be nested; or it is refused
            attacker.sock.sendall(data)
            assert isinstance(attacker.receive(), Refused)
        assert client.finish("a").finish == "length"


@settings(max_examples=n_examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(max_size=100), greeted=st.booleans())
def test_every_byte_string_is_survived(engine, payload, greeted):
    with Client(engine.address, greet=greeted) as attacker:
        attacker.sock.sendall(framed(payload) + payload)
        attacker.sock.shutdown(socket.SHUT_WR)
        while attacker.sock.recv(1 << 16):
            pass
    assert engine.thread.is_alive()


@with_limits(ungreeted=3, hello_timeout_s=60.0)
def test_of_many_connections_without_hello_the_oldest_is_closed(engine):
    silent = [Client(engine.address, greet=False) for _ in range(5)]
    for client in silent[:2]:
        with pytest.raises(ConnectionError):
            client.receive()
    silent[2].send(Hello("secret"))
    assert isinstance(silent[2].receive(), Welcome)
    for client in silent:
        client.close()


@with_limits(hello_timeout_s=0.05)
def test_a_connection_without_hello_times_out(engine):
    with Client(engine.address, greet=False) as client, pytest.raises(ConnectionError):
        client.receive()


@with_limits(backlog_bytes=10_000)
def test_a_client_that_does_not_read_is_disconnected(engine):
    with Client(engine.address) as slow, Client(engine.address) as client:
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.submit(*(request("x" * 50_000 + str(n), [1], **LONG) for n in range(4)))
        wait_until(lambda: engine.server.n_connections == 1 and not engine.scheduler.busy)
        client.submit(request("a", [1]))
        assert client.finish("a").finish == "length"


@with_limits(backlog_bytes=10_000, report_s=0.0)
def test_a_subscriber_hears_of_the_end_of_a_client_that_did_not_read(engine):
    """The client is disconnected in the very flush that tells the subscriber of its running requests."""
    with Client(engine.address) as subscriber, Client(engine.address) as slow:
        subscriber.send(WatchKV())
        subscriber.sock.settimeout(30)
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.submit(*(request("x" * 50_000 + str(n), [1], **LONG) for n in range(4)))
        loads = []
        while not loads or max(loads) == 0 or loads[-1] > 0:
            message = subscriber.receive()
            if isinstance(message, Step):
                loads.append(message.load.running + message.load.waiting)
        assert max(loads) == 4


@with_limits(heartbeat_s=0.02)
def test_a_waiting_client_gets_heartbeats_while_steps_are_made(engine):
    """A prompt may take minutes; without heartbeats its client could not tell that from an engine that hangs."""
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: (time.sleep(0.005), launch(plan))[1]
    with Client(engine.address) as client, Client(engine.address) as idle:
        client.submit(request("a", [1] * 1000))  # 32 chunks of 32
        client.finish("a")
        empty = [step for step in client.steps if not step.deltas]
        assert len(empty) >= 3
        assert [step.load.steps for step in empty] == sorted({step.load.steps for step in empty})
        assert empty[0].load.running == 1
        idle.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            idle.receive()


@with_limits(heartbeat_s=0.0)
def test_an_engine_without_progress_sends_no_heartbeat(engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "plan", StepPlan)  # work, and nothing planned
    with Client(engine.address) as client:
        client.submit(request("a", [1]))
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.receive()


def test_heartbeats_tell_a_long_step_from_an_idle_engine(tmp_path):
    engine = Engine(tmp_path / "engine.sock", limits=ServerLimits(heartbeat_s=0.02))
    try:
        with Client(engine.address, greet=False) as client, Client(engine.address) as other:
            client.send(Hello("secret", heartbeats=True))
            welcome, idle = client.receive(), client.receive()
            assert welcome.info.heartbeat_s == 0.02
            assert idle == Heartbeat()
            client.submit(request("a", [1] * 50, max_tokens=2))
            client.finish("a")
            measured = beat_of(client, lambda beat: beat.computed_tokens == 51 and not beat.in_step)
            engine.go.clear()
            client.submit(request("b", [2] * 50, max_tokens=2))
            hanging = beat_of(client, lambda beat: beat.in_step)
            assert hanging.computed_tokens == measured.computed_tokens
            assert hanging.step_s > 0
            assert beat_of(client, lambda beat: True) == hanging
            engine.go.set()
            client.finish("b")
            other.sock.settimeout(0.1)
            with pytest.raises(TimeoutError):  # it did not ask for them
                other.receive()
    finally:
        engine.stop()


def beat_of(client, is_wanted):
    """The next heartbeat that is wanted; anything else is skipped."""
    while not (isinstance(message := client.receive(), Heartbeat) and is_wanted(message)):
        pass
    return message


def test_idle_tasks_run_after_a_while_without_requests(tmp_path):
    idle_at_s, worked_s = [], []

    def idle_task():
        if worked_s:
            idle_at_s.append(time.monotonic())
        return len(idle_at_s) < 3

    engine = Engine(tmp_path / "engine.sock", idle_task, limits=ServerLimits(idle_s=0.2))
    try:
        with Client(engine.address) as client:
            engine.go.clear()
            client.submit(request("a", [1, 2], max_tokens=3))
            wait_until(lambda: engine.scheduler.busy)
            worked_s.append(time.monotonic())
            engine.go.set()
            client.finish("a")
            wait_until(lambda: not engine.loop.has_idle_task)
            assert len(idle_at_s) == 3, "the last one said so"
            assert min(idle_at_s) >= worked_s[0] + 0.2
            client.submit(request("b", [1, 2], max_tokens=3))
            client.finish("b")
    finally:
        engine.stop()


def test_drain_finishes_running_requests_and_refuses_new_ones(engine):
    engine.go.clear()
    with Client(engine.address) as client:
        client.submit(request("a", [1], max_tokens=50))
        wait_until(lambda: engine.scheduler.busy)
        client.send(WatchKV())
        client.send(Drain(60))
        client.submit(request("b", [1]))
        engine.go.set()
        assert client.finish("b").error.kind == "unavailable"
        assert client.finish("a").finish == "length"
        assert client.steps[-1].load.draining, "so that nobody sends it more"
    engine.thread.join(60)
    assert not engine.thread.is_alive()


def test_drain_aborts_requests_at_its_limit(engine):
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: (threading.Event().wait(0.01), launch(plan))[1]
    with Client(engine.address) as client:
        client.submit(request("a", [1], **LONG))
        client.step()
        client.send(Drain(0.1))
        assert client.finish("a").error.kind == "unavailable"
    engine.thread.join(60)
    assert not engine.thread.is_alive()


def test_a_socket_file_is_private_and_replaced_only_when_stale(tmp_path):
    path = tmp_path / "engine.sock"
    with listening(f"unix:{path}") as (_, address):
        assert address == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BadInput, match="another engine"), listening(str(path)):
            pass
    assert not path.exists()
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(path))
    left_behind.close()
    with listening(str(path)):
        pass


def test_tcp_needs_a_token(monkeypatch):
    monkeypatch.delenv("EMBERLINE_WORKER_TOKEN", raising=False)
    with pytest.raises(BadInput, match="EMBERLINE_WORKER_TOKEN"):
        join_token("tcp:127.0.0.1:0")
    assert join_token("unix:/tmp/x") == ""
    with pytest.raises(BadInput, match="tcp:HOST:PORT"), listening("tcp:80"):
        pass
