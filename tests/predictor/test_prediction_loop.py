"""The loop of a predictor's worker, with a server that does what a hostile predictor could make it do."""

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.predictor.cog_server import CogServer, PredictorCrashed
from emberline.predictor.prediction_loop import BEGIN_S, CANCEL_S, LATE_S, OF_LAST, PredictionLoop
from emberline.protocol.errors import BadInput, Cancelled, DeadlineExceeded, EmberlineError, PredictionFailed, TooLarge
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import MAX_PROBLEM_CHARS
from emberline.protocol.prediction import PIECE_BYTES, Manifest, Prediction, PredictParams
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.supervisor.sandbox.protections import find_protections

MANIFEST = Manifest(
    model="@me/x", version=1, digest="", reference="run.py:Runner", interpreter="python", input={}, output={}
)


class HeldServer:
    """Computes until it is told to end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.may_end = threading.Event()
        self.log = self
        self.logged: list[str] = []
        self.prediction = Prediction()

    def add(self, text: str) -> None:
        """Log a line."""
        self.logged.append(text)

    def predict(self, name: str, given: bytes, limit_s: float, on_output: Any, context: bytes) -> Prediction:
        self.begun.append(name)
        self.may_end.wait(60)
        return self.prediction

    def cancel(self, name: str) -> bool:
        self.cancelled.append(name)
        return False

    def kill(self) -> None:
        self.may_end.set()


def request(name: str, given: bytes = b"{}") -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=b"", sampling=SamplingParams(), predict=PredictParams(input=given))


def until(holds: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def held() -> Any:
    server, crashes = HeldServer(), []
    loop = PredictionLoop(MANIFEST, server, crashes.append)  # type: ignore[arg-type]
    yield loop, server, crashes
    loop.close()


def test_an_aborted_prediction_leaves_nothing_in_memory(held: Any) -> None:
    loop, server, _ = held
    loop.submit(request("first"), time.monotonic())
    until(lambda: server.begun)
    given = bytes(1 << 20)
    alone = sys.getrefcount(given)
    for number in range(3):
        loop.submit(request(f"left-{number}", given), time.monotonic())
        assert loop.abort(f"left-{number}") is not None
    assert sys.getrefcount(given) == alone
    loop.submit(request("last"), time.monotonic())
    server.may_end.set()
    until(lambda: loop.step(time.monotonic()) or server.begun == ["first", "last"])
    until(lambda: any(delta.id == "last" and delta.finish == "stop" for delta in loop.step(time.monotonic())))
    assert server.begun == ["first", "last"]


def test_a_large_output_comes_in_pieces_a_frame_each(held: Any) -> None:
    loop, server, _ = held
    server.prediction = Prediction(output=msgspec.Raw(b'"' + b"x" * (5 * PIECE_BYTES // 2) + b'"'), logs="done")
    server.may_end.set()
    for takes_pieces in (True, False):
        asked = request(f"large-{takes_pieces}")
        params = msgspec.structs.replace(asked.predict, takes_pieces=takes_pieces)
        loop.submit(msgspec.structs.replace(asked, predict=params), time.monotonic())
        frames: list[list[TokenDelta]] = []
        until(lambda: frames.append(loop.step(time.monotonic())) or not loop.busy)  # noqa: B023
        *pieces, last = [delta for frame in frames for delta in frame]
        found = msgspec.json.decode(last.values, type=Prediction)
        if not takes_pieces:
            assert (pieces, found) == ([], server.prediction), "a core of an older release gets it whole"
            continue
        assert max(sum(len(delta.values) for delta in frame) for frame in frames) <= PIECE_BYTES
        assert [len(delta.values) for delta in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2 + 2]
        whole = msgspec.structs.replace(found, pieces=tuple(delta.values for delta in pieces))
        assert (whole.whole, whole.logs) == (bytes(server.prediction.output), "done")


def test_the_limit_of_time_ends_a_prediction_whose_server_dribbles(held: Any) -> None:
    loop, server, crashes = held
    loop.submit(request("slow"), time.monotonic())
    until(lambda: server.begun)
    late_s = time.monotonic() + MANIFEST.resources.predict_s + LATE_S + 1
    deltas = loop.step(late_s)
    assert [(delta.id, delta.error.kind) for delta in deltas if delta.error] == [("slow", DeadlineExceeded.kind)]
    until(lambda: server.cancelled == ["slow"])
    assert loop.load.problem == "the prediction did not end within 600 s"
    assert server.logged == ["prediction slow failed: the prediction did not end within 600 s"]
    loop.step(late_s + CANCEL_S + 1)
    assert set(crashes) == {"a prediction that was cancelled goes on"}


def test_a_client_that_leaves_as_its_prediction_ends_costs_nothing(held: Any) -> None:
    loop, server, crashes = held
    server.may_end.set()
    loop.submit(request("done"), time.monotonic())
    select.select([loop.wakeup], [], [], 30)  # it has ended
    assert os.eventfd_read(loop.wakeup) == 1
    assert loop.abort("done") is not None
    loop.step(time.monotonic() + CANCEL_S + 60)
    assert crashes == []


def test_the_core_is_told_once_of_a_prediction_that_takes_some_time(held: Any) -> None:
    loop, server, _ = held
    now_s = time.monotonic()
    loop.submit(request("slow"), now_s)
    until(lambda: server.begun)
    assert loop.step(now_s) == []
    assert now_s < loop.wake_s <= time.monotonic() + BEGIN_S
    (begin,) = loop.step(time.monotonic() + BEGIN_S)
    assert (begin.id, begin.finish, begin.usage.predictions) == ("slow", None, 1)
    assert loop.step(time.monotonic() + BEGIN_S) == []
    assert loop.wake_s > time.monotonic() + BEGIN_S


class FailingServer(HeldServer):
    """Fails with a message of the predictor's own, which can be an echo of its input."""

    scratch_is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.outcome: Prediction | EmberlineError = PredictionFailed(
            f"the predictor failed: {os.strerror(errno.ENOSPC)}"
        )

    def predict(self, name: str, given: bytes, limit_s: float, on_output: Any, context: bytes) -> Prediction:
        if isinstance(self.outcome, Prediction):
            return self.outcome
        raise self.outcome


def test_a_predictor_starts_again_if_its_scratch_space_is_full_and_not_if_it_says_so() -> None:
    server, crashes = FailingServer(), list[str]()
    loop = PredictionLoop(MANIFEST, server, crashes.append)  # type: ignore[arg-type]
    try:
        for is_full in (False, True):
            server.scratch_is_full = is_full
            loop.submit(request(f"full-{is_full}"), time.monotonic())
            until(lambda: any(delta.finish == "error" for delta in loop.step(time.monotonic())))
            loop.step(time.monotonic())
            assert bool(crashes) is is_full
    finally:
        loop.close()


class LoglessServer(FailingServer):
    """Has no room on its disk for a line of the log."""

    def add(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failure_that_cannot_be_logged_leaves_the_slot_free() -> None:
    server = LoglessServer()
    loop = PredictionLoop(MANIFEST, server, lambda why: None)  # type: ignore[arg-type]
    try:
        for name in ("first", "second"):
            loop.submit(request(name), time.monotonic())
            until(lambda name=name: any(delta.id == name and delta.error for delta in loop.step(time.monotonic())))
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (PredictionFailed("the predictor failed: no"), "the predictor failed: no"),
        (DeadlineExceeded("did not end within 3 s"), "did not end within 3 s"),
        (TooLarge("the output is too large"), "the output is too large"),
        (Prediction(warning="it printed a secret"), "it printed a secret"),
        (PredictionFailed("x" * 10_000), "x" * MAX_PROBLEM_CHARS),
        (Prediction(), ""),
        (BadInput("the predictor refuses this input: n is too large"), ""),
        (Cancelled("the prediction was cancelled"), ""),
    ],
)
def test_the_load_report_has_the_latest_problem_among_the_last_predictions(
    outcome: Prediction | EmberlineError, shown: str
) -> None:
    server = FailingServer()
    loop = PredictionLoop(MANIFEST, server, lambda why: None)  # type: ignore[arg-type]

    def predict(name: str) -> None:
        loop.submit(request(name), time.monotonic())
        until(lambda: any(delta.id == name and delta.finish for delta in loop.step(time.monotonic())))

    try:
        server.outcome = outcome
        predict("first")
        assert loop.load.problem == shown
        if isinstance(outcome, EmberlineError):
            assert server.logged == [f"prediction first failed: {outcome.message}"]
        server.outcome = Prediction()
        for number in range(OF_LAST - 1):
            predict(f"well-{number}")
        assert loop.load.problem == shown
        predict("last")
        assert loop.load.problem == ""
    finally:
        loop.close()


class HostileSandbox:
    """Runs no program: a thread answers in its place, at the socket that it would have."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self.protections = find_protections()
        self.pid, self.memory_bytes, self.problem = 0, 0, ""
        self.status: int | None = None

    def start(self, program: Any, output: int, descriptors: tuple[int, ...]) -> "HostileSandbox":
        self._listener = socket.socket(fileno=socket.dup(descriptors[0]))
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def kill(self) -> None:
        self._listener.close()

    def wait(self, limit_s: float) -> bool:
        return False

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with socket.create_server(("127.0.0.1", 0)) as server, client:
            with socket.create_connection(server.getsockname()) as given:
                socket.send_fds(client, [b"x"], [given.fileno()])
            connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            self._answer(connection)


def test_a_stream_that_never_ends_is_ended(tmp_path: Path) -> None:
    def pings(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for _ in range(10_000):
            try:
                connection.sendall(b": ping\n")
            except OSError:
                return
            time.sleep(0.001)

    server = CogServer(MANIFEST, tmp_path, HostileSandbox(pings), {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        with pytest.raises(DeadlineExceeded, match=r"did not end within 0.05 s"):
            server.predict("a", b"{}", 0.05, lambda chunk: None)
    finally:
        server.kill()


REPLY = b'{"status":"succeeded","output":"well"}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: %d\r\n\r\n%s" % (len(REPLY), REPLY),
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n9\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (REPLY[:9], len(REPLY) - 9, REPLY[9:]),
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: %d\r\n\r\n%s" % (len(REPLY), REPLY),
    ],
)
@pytest.mark.parametrize("n_bytes", [1, 100_000])
def test_a_reply_is_read_in_whatever_pieces_it_comes_and_the_connection_is_kept(
    answer: bytes, n_bytes: int, tmp_path: Path
) -> None:
    def in_pieces(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for at in range(0, len(answer), n_bytes):
                connection.sendall(answer[at : at + n_bytes])
            connection.recv(1 << 16)

    server = CogServer(MANIFEST, tmp_path, HostileSandbox(in_pieces), {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        for name in ("a", "b"):  # the sandbox gives out one connection
            assert bytes(server.predict(name, b"{}", 30.0, None).output) == b'"well"'
    finally:
        server.kill()


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", UPGRADE, HEAD + b"content-length: 100\r\n\r\n{", b""])
def test_a_reply_that_is_no_http_or_has_no_end_fails_the_prediction(answer: bytes, tmp_path: Path) -> None:
    sandbox = HostileSandbox(lambda connection: connection.sendall(answer))
    server = CogServer(MANIFEST, tmp_path, sandbox, {}, tmp_path / "log")  # type: ignore[arg-type]
    sandbox.status = 1  # else its health is asked for, of nobody
    try:
        with pytest.raises(PredictorCrashed):
            server.predict("a", b"{}", 30.0, None)
    finally:
        server.kill()


@pytest.mark.parametrize("start", [HEAD + b"x: ", HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: "])
def test_a_header_without_end_fails_the_prediction(start: bytes, tmp_path: Path) -> None:
    def floods(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(start)
            while True:
                connection.sendall(b"x" * 1024)

    sandbox = HostileSandbox(floods)
    server = CogServer(MANIFEST, tmp_path, sandbox, {}, tmp_path / "log")  # type: ignore[arg-type]
    sandbox.status = 1
    try:
        with pytest.raises(PredictorCrashed):
            server.predict("a", b"{}", 5.0, None)
    finally:
        server.kill()


def test_an_output_that_is_too_deep_fails_the_prediction(tmp_path: Path) -> None:
    reply = b'{"status":"succeeded","output":%s%s}' % (b"[" * 100_000, b"]" * 100_000)
    answer = HEAD + b"content-length: %d\r\n\r\n%s" % (len(reply), reply)
    sandbox = HostileSandbox(lambda connection: connection.sendall(answer))
    server = CogServer(MANIFEST, tmp_path, sandbox, {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        with pytest.raises(PredictionFailed, match="sent what is no prediction: maximum recursion depth"):
            server.predict("a", b"{}", 30.0, None)
    finally:
        server.kill()


def test_a_reply_that_comes_too_slowly_is_ended(tmp_path: Path) -> None:
    def dribbles(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"content-length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                connection.sendall(b" ")
                time.sleep(0.001)

    server = CogServer(MANIFEST, tmp_path, HostileSandbox(dribbles), {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        with pytest.raises(DeadlineExceeded, match=r"did not end within 0.05 s"):
            server.predict("a", b"{}", 0.05, None)
    finally:
        server.kill()


def test_a_reply_whose_end_comes_too_late_is_none(tmp_path: Path) -> None:
    def pauses(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for part in (HEAD + b"content-length: %d\r\n\r\n" % len(REPLY), REPLY):
                time.sleep(0.3)
                connection.sendall(part)

    server = CogServer(MANIFEST, tmp_path, HostileSandbox(pauses), {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        with pytest.raises(DeadlineExceeded, match=r"did not end within 0.4 s"):
            server.predict("a", b"{}", 0.4, None)
    finally:
        server.kill()


def test_a_relay_that_sends_no_connection_is_refused(tmp_path: Path) -> None:
    class OtherSandbox(HostileSandbox):
        def _serve(self) -> None:
            for _ in range(3):
                client, _ = self._listener.accept()
                with client, (tmp_path / "log").open() as file, socket.socket(socket.AF_UNIX) as other:
                    socket.send_fds(client, [b"x"], [other.fileno(), file.fileno()])

    server = CogServer(MANIFEST, tmp_path, OtherSandbox(lambda _: None), {}, tmp_path / "log")  # type: ignore[arg-type]
    try:
        assert server.health() == "STARTING"
        with pytest.raises(PredictorCrashed):
            server.predict("a", b"{}", 1.0, None)
    finally:
        server.kill()
