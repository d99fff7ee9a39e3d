"""Projects, and the environment with Cog's server that serves them."""

import fcntl
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from emberline.predictor import environments
from emberline.predictor.environments import Environment
from emberline.predictor.versions import Build, PredictorVersions

PROJECTS = Path(__file__).parent / "projects"
# Environments that tests share, on this machine.
ENVIRONMENTS = Path(os.environ.get("EMBERLINE_TEST_CACHE") or "~/.cache/emberline-tests").expanduser() / "predictors"


@pytest.fixture(scope="session")
def cog_environment() -> Environment:
    """An environment with Cog's server and nothing else, built once per machine."""
    cache = ENVIRONMENTS
    cache.mkdir(parents=True, exist_ok=True)
    known = cache / f"{environments.COG}-compiled.json"
    with open(cache / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if known.exists():
            found = json.loads(known.read_text())
            if Path(found[1]).exists():
                return Environment(found[0], found[1], tuple(found[2]))
        built = environments.build(cache, (), "")
        known.write_text(json.dumps(built))
        return built


@pytest.fixture
def build(cog_environment: Environment) -> Build:
    """Gives every version the same environment."""

    def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
        return cog_environment

    return build


@pytest.fixture
def versions(tmp_path: Path, build: Build) -> PredictorVersions:
    return PredictorVersions(tmp_path / "home", build)


class FileServer:
    """An HTTP server of the files in a folder, at an address of this machine that no proxy setting exempts."""

    HOST = "127.0.0.2"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                asked.append(self.path)

        self._server = http.server.ThreadingHTTPServer((self.HOST, 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://{self.HOST}:{self._server.server_port}/{name}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileServer]:
    server = FileServer(tmp_path / "web")
    yield server
    server.close()


def write_project(folder: Path, source: str = "", name: str = "run.py", config: str = "") -> Path:
    """A project of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cog.yaml").write_text(f'run: "{name}:Runner"\n{config}')
    if source:
        (folder / name).write_text(source)
    return folder


def copy_project(folder: Path, name: str, config: str = "") -> Path:
    """A project of the tests, in a folder of its own."""
    return write_project(folder, (PROJECTS / f"{name}.py").read_text(), config=config)
