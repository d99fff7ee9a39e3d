"""A place for an agent to work in: a project folder, a home of its own, and Emberline as its only model."""

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.clients.play import Play
from tests.e2e.clients.stage import staged

KEY = "none"  # on loopback, any will do
PATIENCE_S = 100
# Whatever is not on this machine is a closed port: an agent that phones home does not get there.
_NOWHERE = "http://127.0.0.1:9"
_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), _NOWHERE)
_LOCAL = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_KEPT = ("PATH", "LANG", "TMPDIR", "USER")


@dataclass(frozen=True, slots=True)
class Request:
    """What one of the agent's requests cost."""

    input_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Workshop:
    installed: Path  # where scripts/agents puts the agents
    gguf: Path
    folder: Path
    model: str
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)

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
    def performing(self, play: Play) -> Iterator["Workshop"]:
        with staged(play, self.gguf, self.folder / "server") as url:
            self.url = url
            yield self

    def write(self, name: str, text: str) -> Path:
        path = self.project / name
        path.write_text(text)
        return path

    def run(self, program: str | Path, *arguments: str, **environment: str) -> str:
        """What the agent printed; that it ended well is asserted."""
        done = subprocess.run(
            [self.installed / "node_modules" / ".bin" / program, *arguments],  # an absolute path stays itself
            cwd=self.project,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def events(self, program: str, *arguments: str, **environment: str) -> list[dict[str, object]]:
        """The same for an agent that prints lines of JSON."""
        lines = self.run(program, *arguments, **environment).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def requests(self) -> list[Request]:
        """The agent's requests so far, from the server's own books."""
        query = "SELECT input_tokens, cached_by_tier FROM usage WHERE status = 'finished' ORDER BY created_us"
        with closing(sqlite3.connect(self.folder / "server" / "emberline.db")) as books:
            rows = books.execute(query).fetchall()
        return [Request(n_input, sum(json.loads(tiers).values())) for n_input, tiers in rows]
