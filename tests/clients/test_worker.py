"""The example Worker (examples/worker) with Emberline as its `env.AI`: under miniflare, workerd and `wrangler dev`."""

import json
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.clients.conftest import ANSWER, HERE, LIMIT_S, TEXT, Run, last_json
from tests.soak.server_process import free_port

EXAMPLE = HERE.parent.parent / "examples" / "worker"
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def worker(installed: Path) -> Path:
    """The example, where node finds its packages."""
    if not list((installed / "node_modules" / "@cloudflare").glob("workerd-*")):
        pytest.skip(f"workerd has no binary for {platform.system()} on {platform.machine()}")
    folder = installed / "worker"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "package*.json"))
    return folder


class Started(NamedTuple):
    """A Worker that runs."""

    host: str
    url: str


@contextmanager
def started(command: list[str | Path], folder: Path, environment: dict[str, str], port: int) -> Iterator[Started]:
    log = Path(environment["HOME"]) / f"{port}.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            list(map(str, command)), cwd=folder, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            yield wait_until_up(Started(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"), process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_up(worker: Started, process: subprocess.Popen[bytes], log: Path) -> Started:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"{worker.url}/models", timeout=10, trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return worker
    raise AssertionError(f"the Worker did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def with_node(node: Path, environment: dict[str, str]) -> dict[str, str]:
    return environment | {"PATH": f"{node.parent}:{environment['PATH']}"}


@pytest.fixture(scope="module")
def miniflare(worker: Path, node: Path, server: str, with_node: dict[str, str]) -> Iterator[Started]:
    """The example as it is, with its `ai` binding."""
    port = free_port()
    variables = {"EMBERLINE": server, "PORT": str(port)}
    with started([node, "dev.mjs"], worker, with_node | variables, port) as found:
        yield found


@pytest.fixture(scope="module")
def wrangler_dev(worker: Path, node: Path, server: str, with_node: dict[str, str]) -> Iterator[Started]:
    """The example with a service as its `AI`."""
    port = free_port()
    settings = worker / "ai" / "wrangler.jsonc"
    settings.write_text(settings.read_text().replace("http://127.0.0.1:8686", server))
    wrangler = worker.parent / "node_modules" / "wrangler" / "bin" / "wrangler.js"
    configs = ["-c", "wrangler.dev.jsonc", "-c", "ai/wrangler.jsonc"]
    command = [node, wrangler, "dev", *configs, "--port", str(port), "--inspector-port", "0"]
    with started(command, worker, with_node, port) as found:
        yield found


@pytest.fixture(scope="module")
def workerd(
    worker: Path, server: str, with_node: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """A Worker with the binding alone, in workerd without anything around it."""
    folder, port = tmp_path_factory.mktemp("workerd"), free_port()
    config = (HERE / "workerd.capnp").read_text().replace("127.0.0.1:8686", server.removeprefix("http://"))
    (folder / "config.capnp").write_text(config.replace("127.0.0.1:8787", f"127.0.0.1:{port}"))
    shutil.copy(HERE / "plain_worker.js", folder)
    program = worker.parent / "node_modules" / "workerd" / "bin" / "workerd"
    with started([program, "serve", "config.capnp"], folder, with_node, port) as found:
        yield found


@pytest.fixture(params=["miniflare", "wrangler_dev"])
def example(request: pytest.FixtureRequest) -> Started:
    found: Started = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["miniflare", "wrangler_dev", "workerd"])
def url(request: pytest.FixtureRequest) -> str:
    found: Started = request.getfixturevalue(request.param)
    return found.url


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, params={"q": "Hi"}, timeout=LIMIT_S, trust_env=False)


def test_run(url: str) -> None:
    found = get(url, "/run").json()
    assert found["response"] == TEXT
    assert found["usage"]["completion_tokens"] > 3


def test_a_stream(url: str) -> None:
    lines = [line.removeprefix("data: ") for line in get(url, "/stream").text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["response"] for line in lines) == TEXT


def test_the_vercel_ai_sdk_over_the_binding(example: Started) -> None:
    found = get(example.url, "/ask").json()
    assert (found["text"], found["usage"]["outputTokens"] > 3) == (TEXT, True)


def test_models(url: str) -> None:
    assert [model["name"] for model in get(url, "/models").json()] == [MODEL]


def test_an_error_is_thrown_with_its_code(url: str) -> None:
    found = get(url, "/fail").json()
    assert found["name"] == "AiError"
    assert found["message"].startswith("5007: ")


def test_a_chat_agent_with_tools(example: Started, run: Run, node: Path, installed: Path) -> None:
    """Cloudflare's agents package: the reply comes over its WebSocket, with the tool's call and result in it."""
    shutil.copy(HERE / "chat.mjs", installed)
    parts: list[dict[str, Any]] = last_json(run(node, "chat.mjs", example.host, "bern", "What is the weather in Bern?"))
    by_type = {part["type"]: part for part in parts}
    assert by_type["tool-input-available"]["input"] == {"city": "Bern"}
    assert by_type["tool-output-available"]["output"] == {"city": "Bern", "sky": "clear"}
    assert "".join(part["delta"] for part in parts if part["type"] == "text-delta") == ANSWER
    assert "finish" in by_type


def test_the_examples_packages_are_those_that_are_tested() -> None:
    wanted = json.loads((EXAMPLE / "package.json").read_text())
    tested = json.loads((HERE / "package.json").read_text())["dependencies"]
    packages = wanted["dependencies"] | wanted["devDependencies"]
    assert packages.items() <= tested.items()
