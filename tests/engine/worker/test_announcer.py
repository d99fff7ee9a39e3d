"""What a worker does with the answers of cores, which a small HTTP server gives."""

import argparse
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.engine.worker import announcer as module
from emberline.engine.worker.announcer import Announcer, CoreUnreachable, Joining, open_joining
from emberline.protocol import member as members
from emberline.protocol.credential import Credential
from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.frames import EngineInfo
from emberline.protocol.member import Announcement, Signed, Standing

KEY = b"k" * 32
PATIENCE_S = 60.0
Answer = Callable[[Announcement], tuple[int, Any]]


class FakeCore:
    def __init__(self) -> None:
        self.heard: list[Announcement] = []
        self.cluster = "c1"
        self.key = KEY
        self.answer: Answer = lambda said: (200, self.standing(said))
        core = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/base/api/cluster/challenge":
                    status, answer = 200, {"challenge": secrets.token_hex(8), "cluster": core.cluster}
                else:
                    assert self.path == "/base/api/cluster/announce"
                    said = members.verified(KEY, msgspec.json.decode(body, type=Signed), Announcement, "proof")
                    core.heard.append(said)
                    status, answer = core.answer(said)
                encoded = msgspec.json.encode(answer)
                self.send_response(status)
                self.send_header("content-length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/base/"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def standing(self, said: Announcement, **more: Any) -> Signed:
        fields = {"challenge": said.challenge, "epoch": 7, "is_current": True, "renew_s": 0.01}
        return members.sign(self.key, Standing(**{**fields, **more}))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def core() -> Iterator[FakeCore]:
    core = FakeCore()
    yield core
    core.close()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the worker would end."""
    ended = threading.Event()
    monkeypatch.setattr(module.os, "kill", lambda *_: ended.set())
    return ended


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", default="tcp:127.0.0.1:7070")
    parser.add_argument("--id", default="")
    module.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def credential(tmp_path: Path) -> str:
    path = tmp_path / "w0.credential"
    path.write_text(Credential(name="w0", cluster="c1", key=KEY).encode())
    path.chmod(0o600)
    return str(path)


INFO = EngineInfo(model="m", fingerprint="f", context_len=8, vocab_size=8, eos_ids=(2,))


def announcer_of(credential: str, *urls: str, more: tuple[str, ...] = ()) -> Announcer:
    words = [word for url in urls for word in ("--join", url)]
    joining = Joining(arguments(*words, "--credential", credential, *more))
    return joining.announcer(INFO, "tcp:127.0.0.1:7071")


def test_it_announces_itself_again_and_again_and_then_that_it_ends(core: FakeCore, credential: str) -> None:
    announcer = announcer_of(credential, core.url, more=("--region", "eu", "--account", "acme"))
    announcer.start()
    while len(core.heard) < 3:
        threading.Event().wait(0.005)
    announcer.leave()
    first, last = core.heard[0], core.heard[-1]
    assert (first.name, first.address, first.region, first.account) == ("w0", "tcp:127.0.0.1:7071", "eu", "acme")
    assert (first.epoch, core.heard[1].epoch, last.epoch) == (0, 7, 7)
    assert last.leaving
    assert not any(said.leaving for said in core.heard[:-1])
    assert len({said.challenge for said in core.heard}) == len(core.heard)
    assert announcer.problem == ""


def test_a_superseded_worker_ends(core: FakeCore, credential: str, ended: threading.Event) -> None:
    announcer = announcer_of(credential, core.url)
    core.answer = lambda said: (200, core.standing(said, is_current=not said.epoch, epoch=7 + bool(said.epoch)))
    announcer.start()
    assert ended.wait(PATIENCE_S)
    assert announcer.problem == "a newer worker called w0 has joined (epoch 8): this one ends"
    assert announcer.is_superseded
    announcer.leave()
    assert not any(said.leaving for said in core.heard), "the row is not its own any more"


def test_a_worker_that_is_refused_at_first_ends_and_later_goes_on(
    core: FakeCore, credential: str, ended: threading.Event
) -> None:
    refusal = 400, {"error": {"message": "run `emberline pull m` there"}}
    announcer = announcer_of(credential, core.url)
    core.answer = lambda said: refusal if said.epoch else (200, core.standing(said))
    announcer.start()
    while len(core.heard) < 4:  # nobody proved that the later ones come from a core
        threading.Event().wait(0.005)
    announcer.leave()
    assert not ended.is_set()
    core.answer = lambda said: refusal
    second = announcer_of(credential, core.url)
    second.start()
    assert ended.wait(PATIENCE_S)
    assert "run `emberline pull m` there" in second.problem
    assert not second.is_superseded


def test_an_answer_must_be_proved(core: FakeCore, credential: str) -> None:
    announcer = announcer_of(credential, core.url)
    core.key = b"x" * 32
    with pytest.raises(Unauthorized, match="does not know this worker's join key"):
        announcer.announce()
    core.key = KEY
    old = core.standing(core.heard[0])
    core.answer = lambda said: (200, old)
    with pytest.raises(Unauthorized, match="another announcement"):
        announcer.announce()


def test_another_cluster_is_noticed(core: FakeCore, credential: str) -> None:
    core.cluster = "c2"
    with pytest.raises(module.Refused, match=r"belongs to cluster c2, and this worker's credential to c1"):
        announcer_of(credential, core.url).announce()


def test_any_core_will_do(core: FakeCore, credential: str) -> None:
    with socket.socket() as silent:  # nobody else can have its port, and it does not listen
        silent.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert announcer_of(credential, away, core.url).announce().epoch == 7
        with pytest.raises(CoreUnreachable, match=away):
            announcer_of(credential, away).announce()
    core.answer = lambda said: (503, {"error": {"message": "starting"}})
    with pytest.raises(CoreUnreachable, match="starting"):
        announcer_of(credential, core.url).announce()
    core.answer = lambda said: (200, ["?"])
    with pytest.raises(CoreUnreachable, match="no core of a cluster"):
        announcer_of(credential, core.url).announce()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--join", "10.0.0.1"], "the URL of a core"),
        (["--join", "http://c", "--id", "w1"], "emberline cluster credential w1"),
        (["--join", "http://c", "--socket", "unix:/x"], "every core can reach"),
        (["--region", "eu"], "give --join URL, too"),
    ],
)
def test_flags_that_cannot_work_together(words: list[str], match: str, credential: str) -> None:
    more = ["--credential", credential] if "--join" in words else []
    with pytest.raises(BadInput, match=match):
        open_joining(arguments(*words, *more))


def test_without_flags_nothing_is_announced() -> None:
    assert open_joining(arguments()) is None


@pytest.mark.parametrize(
    ("address", "advertise", "expected"),
    [
        ("tcp:127.0.0.1:7071", "", "tcp:127.0.0.1:7071"),
        ("tcp:0.0.0.0:7071", "", "tcp:127.0.0.1:7071"),
        ("tcp:0.0.0.0:7071", "gpu7", "tcp:gpu7:7071"),
        ("tcp:0.0.0.0:7071", "gpu7:9", "tcp:gpu7:9"),
        ("tcp:[::1]:7", "", "tcp:[::1]:7"),
        ("tcp:0.0.0.0:7071", "[fd00::7]", "tcp:[fd00::7]:7071"),
    ],
)
def test_the_address_for_cores(address: str, advertise: str, expected: str) -> None:
    assert module._advertised(address, advertise, "http://127.0.0.1:80") == expected


def test_no_secret_is_shown(credential: str) -> None:
    shown = repr(Credential.open(Path(credential)))
    assert KEY.hex() not in shown
    assert json.dumps(KEY.decode()) not in shown
