"""The environment of an agent under test: a project folder, a home folder, and Emberline as its only model."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberline.cli.agents import AGENTS, Endpoint, Settings
from tests.e2e.clients.reply_script import ReplyScript
from tests.e2e.clients.scripted_server import CONTEXT_LEN, scripted_server

KEY = "none"  # on loopback, any key is accepted
TIMEOUT_S = 100
# A closed port as the proxy: the agent can reach this machine only.
_CLOSED_PORT = "http://127.0.0.1:9"
_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), _CLOSED_PORT)
_LOCAL = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_KEPT = ("PATH", "LANG", "TMPDIR", "USER")


def json_lines(printed: str) -> list[dict[str, Any]]:
    """The objects in the output of a program that prints one per line."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The token counts of one request."""

    input_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class AgentWorkspace:
    installed: Path  # where scripts/agents puts the agents
    gguf: Path
    folder: Path
    model: str
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        self.home.mkdir()
        self.project.mkdir()
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.environment = {**kept, **_PROXIES, **_LOCAL, "HOME": str(self.home), "TERM": "dumb"}

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @contextmanager
    def serving(self, script: ReplyScript) -> Iterator["AgentWorkspace"]:
        with scripted_server(script, self.gguf, self.folder / "server") as url:
            self.url = url
            yield self

    def settings(self, agent: str, path: str = "") -> Settings:
        """Settings of `emberline launch` for the agent; `path` is behind the server's address."""
        to = Endpoint(url=self.url + path, model=self.model, context_window=CONTEXT_LEN, key=KEY)
        return AGENTS[agent].settings(to)

    def write(self, name: str, text: str) -> Path:
        path = self.project / name
        path.write_text(text)
        return path

    def run(self, program: str | Path, *arguments: str, **environment: str) -> str:
        """Run an agent successfully; returns its output."""
        return self._run([self.installed / "node_modules" / ".bin" / program, *arguments], environment)  # or its path

    def launch(self, agent: str, *arguments: str, **environment: str) -> str:
        """Run an agent by `emberline launch`, which gives it its settings; returns its output."""
        installed = self.installed / "node_modules" / ".bin"
        options = ("--url", self.url, "--model", self.model, "--", *arguments)
        path = {"PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}
        return self._run(
            [sys.executable, "-m", "emberline.cli.main", "launch", agent, *options], {**environment, **path}
        )

    def _run(self, command: list[str | Path], environment: dict[str, str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.project,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def events(self, program: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
        """As `run`, for an agent that prints JSON lines."""
        return json_lines(self.run(program, *arguments, **environment))

    def requests(self) -> list[AgentRequest]:
        """The agent's requests so far, from the server's usage ledger."""
        query = "SELECT input_tokens, cached_by_tier FROM usage WHERE status = 'finished' ORDER BY created_us"
        with closing(sqlite3.connect(self.folder / "server" / "emberline.db")) as database:
            rows = database.execute(query).fetchall()
        return [AgentRequest(n_input, sum(json.loads(tiers).values())) for n_input, tiers in rows]
