"""`emberline serve` as processes: a real engine, and the stand-in engine behind several HTTP workers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.pull import pull
from emberline.cli import doctor, models
from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming
from emberline.cli.serve import fetch_models
from emberline.config import resolve
from emberline.protocol.errors import BadInput
from emberline.server.address import ServerAddress
from emberline.server.core_process import local_models, serve
from emberline.server.listener import bind
from emberline.server.signals import run_until_terminated
from tests.cli.console import emberline, emberline_process
from tests.soak.server_process import children
from tests.standin import standin_worker

SMALL = "@local/models/smollm2"


@pytest.fixture(scope="module")
def home(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder where the default model is, without fetching it again."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "models").mkdir()
    (folder / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    assert ModelStore(folder).find(DEFAULT_MODEL) is not None
    return folder


def log_file(home: Path) -> Path:
    return home / "stderr.log"


@pytest.fixture(scope="module")
def small(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The two-layer model's folder, under the name smollm2."""
    folder = tmp_path_factory.mktemp("small") / "smollm2"
    folder.symlink_to(tiny_model)
    return str(folder)


@pytest.fixture(scope="module")
def ready(small: str, home: Path) -> Iterator[dict[str, Any]]:
    """A running server's ready line, with its process."""
    pull(small, ModelStore(home))
    serve = ["emberline.cli.main", "serve", "--port", "0", "--json", "--kv-bytes", "64M", "--threads", "1", SMALL]
    with log_file(home).open("w") as log:  # a pipe that nobody reads would stop it once full
        process = subprocess.Popen(
            [sys.executable, "-m", *serve],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "EMBERLINE_HOME": str(home), "EMBERLINE_SERVER_DRAIN_TIMEOUT_S": "300"},
        )
    assert process.stdout is not None
    yield {**json.loads(process.stdout.readline() or "{}"), "process": process}
    process.kill()
    process.communicate()


def port_of(ready: dict[str, Any]) -> str:
    return str(ready["url"].rpartition(":")[2])


def test_ready_line(ready: dict[str, Any]) -> None:
    assert ready["ready"] is True
    assert ready["models"] == [SMALL]
    (worker,) = ready["workers"]
    assert worker["device"] == "cpu"
    assert 0 < worker["kv_bytes"] <= 64 << 20


def test_the_core_does_not_load_torch(ready: dict[str, Any]) -> None:
    assert "libtorch" not in Path(f"/proc/{ready['process'].pid}/maps").read_text()


def test_run_uses_the_running_server(ready: dict[str, Any], tmp_path: Path) -> None:
    done = emberline("run", "--port", port_of(ready), "--max-tokens", "8", "-v", "smollm2", "Hello", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens at" in done.stderr
    assert not (tmp_path / "models").exists()


def test_ps_and_doctor_find_the_server(ready: dict[str, Any], home: Path) -> None:
    report = json.loads(emberline("ps", "--json", "--port", port_of(ready), home=home).stdout)
    assert [engine["model"] for engine in report["engines"]] == [SMALL]
    config = resolve({"server.port": port_of(ready)}, {}, home)
    assert doctor.port(config).detail.startswith("an Emberline server runs")
    assert [check.status for check in doctor.models(config)] == ["ok", "ok"]  # the default model and the served one


def test_second_server_on_the_port_or_the_folder_is_refused(ready: dict[str, Any], home: Path, tmp_path: Path) -> None:
    done = emberline("serve", "--port", port_of(ready), home=tmp_path)
    assert done.returncode == 1
    assert "is in use" in done.stderr
    done = emberline("serve", "--port", "0", home=home)
    assert done.returncode == 1
    assert "uses the data folder" in done.stderr


def test_sighup_drains_as_sigterm_does(ready: dict[str, Any], home: Path) -> None:
    host, _, port = ready["url"].removeprefix("http://").partition(":")
    timing, process = ChatTiming(), ready["process"]
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 20,
        "ignore_eos": True,
    }
    pieces = client.chat(ServerAddress(host, int(port)), body, timing)
    next(pieces)
    process.send_signal(signal.SIGHUP)
    for _ in pieces:
        pass
    assert timing.output_tokens == 20
    assert process.wait(60) == 0
    assert not Path(f"/proc/{ready['workers'][0]['pid']}").exists()
    logged = [json.loads(line) for line in log_file(home).read_text().splitlines()]
    assert any(line["request_id"] and line["process"] == "core" for line in logged)
    assert not [line for line in logged if line["level"] == "error"]


def test_run_starts_a_temporary_server(tiny_model: Path, tmp_path: Path) -> None:
    words = ("run", "--temperature", "0", "--max-tokens", "4", str(tiny_model), "Hello")
    done = emberline_process(*words, home=tmp_path, EMBERLINE_PORT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("http_workers", [1, 2])
def test_a_signal_as_soon_as_it_answers_drains(tiny_model: Path, tmp_path: Path, http_workers: int) -> None:
    """One HTTP worker may answer long before the other is ready."""
    config = resolve({"server.port": 0, "server.http_workers": http_workers}, {}, tmp_path)
    entry = ModelStore(tmp_path).resolve(str(tiny_model))
    ended = threading.Event()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        """Tell nobody."""

    def signal_when_it_answers(url: str) -> None:
        started: list[int] = []
        while http_workers > 1 and len(started) < http_workers and not ended.wait(0.005):
            started = children(os.getpid(), ("emberline.server.http_worker",))
        for pid in started[1:]:
            os.kill(pid, signal.SIGSTOP)
        while not ended.wait(0.005):
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
                os.kill(os.getpid(), signal.SIGTERM)
                break
        for pid in started[1:]:
            os.kill(pid, signal.SIGCONT)

    with bind(config.server) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        watcher = threading.Thread(target=signal_when_it_answers, args=(url,), daemon=True)
        watcher.start()
        try:
            assert run_until_terminated(serve(config, [entry], listener, announce, make_spec=standin_worker())) == 0
        finally:
            ended.set()
            watcher.join()


def test_a_killed_core_leaves_no_secret_behind(small: str, home: Path, tmp_path: Path) -> None:
    """The start parameters of HTTP workers hold the API key. Nothing can clean up after SIGKILL."""
    serve = ["tests.soak.server", "say=count", "", "--port", "0", "--json", "--http-workers", "2", small]
    process = subprocess.Popen(
        [sys.executable, "-m", *serve],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(home), "EMBERLINE_AUTH_KEY": "top-secret", "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    large = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "x": "y" * (1 << 21)}
    headers = {"authorization": "Bearer top-secret"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=large, headers=headers, timeout=60)
    process.kill()
    process.communicate()
    assert answer.status_code == 200, answer.text
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_socket()]
    assert not [path for path in files if "top-secret" in _text(path)]


def test_files_are_verified_once_per_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And outside the event loop: gigabytes may have to be hashed."""
    verified: list[str] = []
    monkeypatch.setattr(models, "verify", lambda store, card: verified.append(card.id))
    config = resolve({"engine.models": ("smollm2",)}, {}, home)
    entries = fetch_models(config)
    assert verified == [DEFAULT_MODEL]
    assert local_models(config, entries, {DEFAULT_MODEL: ()}) == {DEFAULT_MODEL: entries[0].path}
    assert verified == [DEFAULT_MODEL]


def test_a_download_of_the_server_is_a_line_of_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    config = resolve({"engine.models": (str(broken),)}, {}, tmp_path)
    with caplog.at_level("INFO"), pytest.raises(BadInput):
        fetch_models(config, is_logged=True)
    assert [vars(record)["model"] for record in caplog.records if record.message == "pulling a model"] == [str(broken)]
    assert capsys.readouterr().err == ""


def test_broken_model_is_reported(tmp_path: Path, home: Path) -> None:
    source = next((home / "models").glob("*/*.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(source.read_bytes()[:1000])
    done = emberline("serve", "--port", "0", str(broken), home=tmp_path)
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr
