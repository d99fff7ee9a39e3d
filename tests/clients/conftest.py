"""Tests with clients of other servers, which `make clients` installs; without EMBERLINE_CLIENTS none is collected."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.reply_script import reply_script, text_reply, tool_call
from tests.e2e.clients.scripted_server import scripted_server

INSTALLED = os.environ.get("EMBERLINE_CLIENTS", "")  # the folder with node_modules and a Python environment
HERE = Path(__file__).parent
LIMIT_S = 240

TEXT = "Hello from Emberline."
ANSWER = "It is clear in Bern."
SCRIPT = reply_script(
    text_reply(TEXT),
    tool_call("weather", trigger="What is the weather in Bern?", city="Bern"),
    text_reply(ANSWER, trigger='"sky"'),
)
# No client may need anything but the server: a closed port is the proxy to everything else.
_CLOSED_PORT = "http://127.0.0.1:9"
_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _CLOSED_PORT)
_LOCAL = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_QUIET = {"WRANGLER_SEND_METRICS": "false", "AI_SDK_LOG_WARNINGS": "false", "NO_COLOR": "1", "CI": "1"}

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]

Run = Callable[..., str]


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(SCRIPT, smollm2, tmp_path_factory.mktemp("server") / "home") as url:
        yield url


@pytest.fixture(scope="session")
def installed() -> Path:
    return Path(INSTALLED).absolute()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a client: an empty home, no credentials, nothing but loopback in reach."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, **_PROXIES, **_LOCAL, **_QUIET, "HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="session")
def node(installed: Path) -> Path:
    """Node.js of the version that the lock has: wrangler needs a newer one than many systems have."""
    path = installed / "node_modules" / ".bin" / "node"
    works = path.exists() and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0
    return path if works else pytest.skip("the npm package `node` has no binary for this machine")


@pytest.fixture(scope="session")
def run(environment: dict[str, str], installed: Path) -> Run:
    """Run a program to its successful end; returns what it printed."""

    def run(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd or installed,
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def last_json(printed: str) -> Any:
    return json.loads(printed.strip().splitlines()[-1])
