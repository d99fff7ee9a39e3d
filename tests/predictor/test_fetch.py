"""The fetch phase of a push: granted hosts alone, files that stay, weights shared by versions, and a fast return."""

import http.server
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.net.egress_policy import EgressPolicy
from emberline.predictor.cog_server import CogServer
from emberline.predictor.egress_proxy import EgressProxy
from emberline.predictor.environments import Environment
from emberline.predictor.fetch import HUB, FetchGrant, place_weights
from emberline.predictor.project import Weights, read_project
from emberline.predictor.versions import PredictorVersions, PushSettings
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge, Unavailable, Unsupported
from emberline.protocol.prediction import Resources
from emberline.supervisor.sandbox.program import Sandbox
from emberline.supervisor.sandbox.protections import find_protections
from tests.predictor.conftest import FileServer, copy_project, write_project

RESOURCES = Resources(memory_bytes=512 << 20, scratch_bytes=64 << 20, cpus=2.0, setup_s=60.0)
LOOPBACK = ("127.0.0.0/8",)
needs_sandbox = pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here")


def fetch(proxy: Path, url: str) -> httpx.Response:
    """Ask for a URL as programs behind a proxy do."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(proxy)), trust_env=False) as client:
        return client.send(client.build_request("GET", url, extensions={"target": url.encode()}))


def test_a_proxy_leads_to_granted_hosts_only(tmp_path: Path, files: FileServer) -> None:
    (files.folder / "a").write_text("content")
    refused: list[str] = []
    proxy = EgressProxy(tmp_path / "proxy", [files.HOST], EgressPolicy(LOOPBACK), refused.append)
    try:
        assert fetch(tmp_path / "proxy", files.url("a")).text == "content"
        other = fetch(tmp_path / "proxy", files.url("a").replace(files.HOST, "127.0.0.3"))
        assert other.status_code == 403
        assert refused == ["127.0.0.3 is not a granted host: push with --fetch-from 127.0.0.3"]
    finally:
        proxy.close()


def test_a_granted_host_must_not_lead_into_the_network(tmp_path: Path, files: FileServer) -> None:
    proxy = EgressProxy(tmp_path / "proxy", ["*"], EgressPolicy(), lambda why: None)
    try:
        answer = fetch(tmp_path / "proxy", files.url("a"))
        assert (answer.status_code, files.asked) == (403, [])
        assert "is inside the network" in answer.text
    finally:
        proxy.close()


def test_weights_of_a_project(tmp_path: Path) -> None:
    config = """
weights:
  - {name: own, source: {uri: parts}, target: /src/model/parts}
  - {name: hub, source: {uri: "hf://org/repo@v1", include: ["*.safetensors"]}, target: /src/weights}
"""
    folder = write_project(tmp_path / "p", "def run(a: str) -> str: ...\n", config=config)
    (folder / "parts").mkdir()
    (folder / "parts" / "w").write_text("w")
    own, hub = read_project(folder).weights
    assert (hub.repository, hub.revision, hub.include, hub.target) == (
        "org/repo",
        "v1",
        ("*.safetensors",),
        "/src/weights",
    )
    place_weights([own], folder, tmp_path / "shared", FetchGrant(), lambda line: None)
    assert (folder / "model" / "parts" / "w").read_text() == "w"
    with pytest.raises(Unsupported, match="push with --fetch-from huggingface"):
        place_weights([hub], folder, tmp_path / "shared", FetchGrant(), lambda line: None)
    with pytest.raises(BadInput, match="which the project does not have"):
        place_weights([Weights(name="x", target="/src/x", path="x")], folder, tmp_path, FetchGrant(), print)


def test_weights_of_a_project_outside_of_it_are_in_its_version(tmp_path: Path) -> None:
    config = "weights:\n  - {name: own, source: {uri: parts}, target: /weights}\n"
    folder = write_project(tmp_path / "p", "class Runner:\n    def run(self) -> str: ...\n", config=config)
    (folder / "parts").mkdir()
    (folder / "parts" / "w").write_text("w")

    def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
        return Environment("shared", str(folder / "cog.yaml"), ())

    pushed = PredictorVersions(tmp_path / "home", build).push(folder, PushSettings(name="own"), lambda line: None)
    ((found, seen),) = pushed.mounts
    assert seen == "/weights"
    assert (Path(found) / "w").read_text() == "w"


@pytest.mark.parametrize("is_operators", [True, False])
def test_an_account_gets_nothing_by_the_operators_token(
    is_operators: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given.append(self.headers["authorization"])
            self.send_error(401)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_operator")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    private = Weights(name="w", target="/src/w", repository="org/private")
    with pytest.raises(Unavailable, match="refused org/private"):
        place_weights([private], tmp_path, tmp_path, FetchGrant(hosts=(HUB,), is_operators=is_operators), print)
    server.shutdown()
    server.server_close()
    assert given
    assert ("Bearer hf_of_the_operator" in given) is is_operators


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("3", "must be a list"),
        ("[{source: {uri: a}}]", "`source.uri` and `target` are needed"),
        ("[{source: {uri: ../a}, target: /src/a}]", "neither in the project nor hf://"),
        ("[{source: {uri: 's3://a'}, target: /src/a}]", "neither in the project nor hf://"),
        ("[{source: {uri: a}, target: /src/../etc}]", "must be a folder such as"),
        ("[{source: {uri: 'hf://a'}, target: /src/a}]", "is not hf://ORG/NAME"),
    ],
)
def test_weights_that_are_refused(weights: str, message: str, tmp_path: Path) -> None:
    folder = write_project(tmp_path / "p", "def run(a: str) -> str: ...\n", config=f"weights: {weights}\n")
    with pytest.raises(EmberlineError, match=re.escape(message)):
        read_project(folder)


@needs_sandbox
@pytest.mark.slow
def test_a_push_that_fetches_and_a_return_that_does_not(
    versions: PredictorVersions, tmp_path: Path, files: FileServer
) -> None:
    """A predictor that loads for 5 s does so once. `benchmarks/predictors.py` measures its return from zero."""
    _open_to_all(tmp_path)
    (files.folder / "model.bin").write_text("weights")
    config = f"environment: ['WEIGHTS_URL={files.url('model.bin')}', 'COMPILE_S=5']\n"
    folder = copy_project(tmp_path / "p", "fetches", config)
    lines: list[str] = []
    grant = FetchGrant(hosts=(files.HOST,), allowed_networks=LOOPBACK)
    settings = PushSettings(name="fetches", resources=RESOURCES, fetch=grant)
    manifest = versions.push(folder, settings, lines.append)
    assert manifest.setup_s > 5
    assert manifest.fetched_bytes == len("weights") + len("compiled")
    assert files.asked == ["/model.bin"]
    files.close()

    took_s = []
    for _ in range(2):
        began_s = time.monotonic()
        server = CogServer(manifest, versions.path(manifest).parent, Sandbox(find_protections()), {}, tmp_path / "log")
        try:
            server.wait_ready()
            took_s.append(time.monotonic() - began_s)
            prediction = server.predict("1", b'{"text":"x"}', 10, None)
            assert bytes(prediction.output) == b'["x","weights","compiled"]'
        finally:
            server.kill()
    assert manifest.setup_s - min(took_s) > 4, "the machine may be busy, but the 5 s are saved"


@needs_sandbox
@pytest.mark.slow
def test_a_push_that_may_not_fetch_says_why(versions: PredictorVersions, tmp_path: Path, files: FileServer) -> None:
    _open_to_all(tmp_path)
    (files.folder / "model.bin").write_bytes(os.urandom(3 << 20))
    config = f"environment: ['WEIGHTS_URL={files.url('model.bin')}', 'COMPILE_S=60']\n"
    folder = copy_project(tmp_path / "p", "fetches", config)
    elsewhere = PushSettings(resources=RESOURCES, fetch=FetchGrant(hosts=("example.org",), allowed_networks=LOOPBACK))
    with pytest.raises(Unavailable, match=r"HTTP Error 403.*127\.0\.0\.2 is not a granted host"):
        versions.push(folder, elsewhere, lambda line: None)
    small = FetchGrant(hosts=(files.HOST,), allowed_networks=LOOPBACK, max_bytes=1 << 20)
    with pytest.raises(TooLarge, match="setup fetched more than 1 MiB"):
        versions.push(folder, PushSettings(resources=RESOURCES, fetch=small), lambda line: None)
    assert versions.list("@me/p") == []


def _open_to_all(folder: Path) -> None:
    """Let every user enter the folders of pytest, for machines without bubblewrap."""
    for each in (folder, *list(folder.parents)[:2]):
        each.chmod(0o755)
