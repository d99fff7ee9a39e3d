"""Starts what the golden exchanges talk to: `emberline serve` in front of stand-ins.

This module is the only one here that knows how Emberline is started. The server is the real command in a process of
its own; its engine is the stand-in engine, whose tokens are scripted; its upstream servers and providers are the
stand-ins of `standins`, which live in a thread of the test process and record what they receive.
"""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from emberline.catalog.model_store import ModelStore
from emberline.cli.models import load_text
from emberline.text.text_model import TextModel
from standins.openai_script import ServerScript, StandinPrefixCache
from standins.standin_openai import HttpConnection, HttpRequest, StandinServer
from standins.standin_providers import ProviderScript, StandinAnthropic, StandinGemini, StandinOpenAI
from tests.golden import files

T = TypeVar("T")
Standin = StandinServer | StandinAnthropic | StandinGemini | StandinOpenAI
ADMIN_KEY = "sk-admin-0123456789abcdef"
PATIENCE_S = 60.0
# A record that has not changed for SETTLE_S is taken as it is. A busy machine may write a row later: the first record
# that is not as expected gets FIRST_SETTLE_S.
SETTLE_S, FIRST_SETTLE_S = 1.0, 20.0
USAGE_ORDER = "model, status, input_tokens, output_tokens, created_us"  # jobs of a batch run in any order

# Upstream OpenAI-compatible servers by name. Each serves one model of its own, so that a fault (and the circuit
# breaker that it opens) belongs to one case.
UPSTREAMS = {
    "vllm": ("vllm", ServerScript(tokens=4)),
    "sglang": ("sglang", ServerScript(tokens=4)),
    "compatible": ("openai", ServerScript(tokens=4)),
    "down": ("openai", ServerScript(tokens=4, status=500)),
    "limited": ("openai", ServerScript(tokens=4, status=429)),
    "refusing": ("openai", ServerScript(tokens=4, status=400, message="scripted refusal")),
    "breaking": ("openai", ServerScript(tokens=4, fault_ms=1000, error_after=2)),
    "cutting": ("openai", ServerScript(tokens=4, fault_ms=1000, cut_after=2)),
}

CONFIG = """
[auth]
key = "{admin}"
[server]
drain_timeout_s = 0
[webhooks]
allowed_networks = ["127.0.0.0/8"]
[accounts]
provider_networks = ["127.0.0.0/8"]
[aliases]
assistant = "smollm2"
[[endpoints]]
name = "engine"
url = "{engine}"
kind = "emberline"
models = ["smollm2"]
[[providers]]
name = "anthropic"
url = "{anthropic}"
key = "sk-provider"
models = ["claude-opus-5"]
[[providers]]
name = "gemini"
url = "{gemini}"
key = "sk-provider"
models = ["gemini-3-pro"]
[[providers]]
name = "openai"
url = "{openai}"
key = "sk-provider"
models = ["gpt-test"]
[[providers]]
name = "hanging"
kind = "openai"
url = "{hanging}"
key = "sk-provider"
timeout_s = 0.2
[[prices]]
model = "@cf/huggingfacetb/smollm2-135m-instruct"
input = 1.0
cached_input = 0.1
output = 2.0
[[prices]]
model = "vllm-model"
input = 3.0
output = 4.0
[[prices]]
model = "openai/gpt-test"
input = 5.0
output = 6.0
[[prices]]
model = "anthropic/claude-opus-5"
input = 7.0
cached_input = 0.7
output = 8.0
[[gateways]]
name = "guarded"
guardrails = [
  {{ name = "words", pattern = "forbidden", on = "request" }},
  {{ name = "reply", pattern = "w2-", on = "response", hold = "whole" }},
  {{ name = "note", pattern = "remarkable", on = "request", action = "flag" }},
]
[[gateways]]
name = "patient"
max_attempts = 3
retry_delay_ms = 1
log_content = true
fallbacks = {{ "down-model" = ["vllm-model"] }}
[[gateways]]
name = "hasty"
request_timeout_ms = 200
"""


class WebhookReceiver:
    """Accepts every delivery and records it."""

    def __init__(self) -> None:
        self.received: list[HttpRequest] = []
        self.script = ProviderScript()
        self.port = 0
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[HttpConnection] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HttpConnection(self._take, self._connections), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()

    async def _take(self, request: HttpRequest, connection: HttpConnection) -> None:
        self.received.append(request)
        connection.reply(200, b"{}")


class Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = PATIENCE_S) -> T:
        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await work

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class ServerLog:
    """The JSON lines that the server has written to stderr.

    Lines at debug level are no part of what is compared; they tell that a request is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._by_request: dict[str, list[dict[str, Any]]] = {}
        self._by_account: dict[str, list[dict[str, Any]]] = {}

    def lines(self, request_id: str) -> list[dict[str, Any]]:
        """The lines of one request so far. Its id may be written with or without hyphens, or as part of a job's."""
        return [line for line in self._all(request_id) if line["level"] != "debug"]

    def has_ended(self, request_id: str) -> bool:
        return any(line["logger"] == "emberline.api.app" for line in self._all(request_id))

    def lines_of_account(self, account: str) -> list[dict[str, Any]]:
        """The lines that name the account: one for each request that was accepted, by a client or from the queue."""
        self._read()
        return self._by_account.get(account, [])

    def _all(self, request_id: str) -> list[dict[str, Any]]:
        self._read()
        return self._by_request.get(_digits(request_id), [])

    def _read(self) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        for line in (json.loads(text) for text in whole.splitlines() if text.startswith(b"{")):
            self._by_request.setdefault(_digits(line["request_id"]), []).append(line)
            self._by_account.setdefault(str(line.get("account")), []).append(line)


def _digits(request_id: str) -> str:
    """The random part of a request's id, without hyphens."""
    found = re.search("[0-9a-f]{32}", request_id.replace("-", ""))
    return found[0] if found else request_id


class Stage:
    """The running server, its stand-ins by name, and what they and the store have recorded."""

    def __init__(
        self,
        url: str,
        home: Path,
        log: ServerLog,
        background: Background,
        standins: dict[str, Any],
        token_ids: Callable[[str], list[int]],
    ) -> None:
        self.url = url
        self.log = log
        self.background = background
        self.standins = standins
        self.token_ids = token_ids  # of a text, for the stand-in engine to say
        self.settle_s = SETTLE_S if files.is_writing() else FIRST_SETTLE_S  # for the next record
        self._store = home / "emberline.db"

    def reset(self) -> None:
        """Forget what the stand-ins have received and cached, and what a case made them reply."""
        for name, standin in self.standins.items():
            standin.received.clear()
            if isinstance(standin, StandinServer):
                standin.cache = StandinPrefixCache()
                standin.script = parse_of(UPSTREAMS[name][1])
            elif name != "hanging":
                standin.script = ProviderScript()

    def usage_rows(self, account: str) -> list[dict[str, Any]]:
        """The usage rows of an account, without columns that are empty and without the measured device time."""
        with sqlite3.connect(f"file:{self._store}?mode=ro", uri=True, timeout=PATIENCE_S) as store:
            store.row_factory = sqlite3.Row
            rows = store.execute(f"SELECT * FROM usage WHERE account = ? ORDER BY {USAGE_ORDER}", (account,)).fetchall()
        columns = [{**row, "device_ms": None} for row in rows]
        return [{name: value for name, value in row.items() if value not in ("", None)} for row in columns]


def parse_of(script: ServerScript) -> ServerScript:
    """A copy of a script, whose counters a stand-in may change."""
    return ServerScript(**{name: getattr(script, name) for name in script.__struct_fields__})


@contextmanager
def running_stage(smollm2: Path, folder: Path) -> Iterator[Stage]:
    """The server and its stand-ins, until the block ends."""
    with ExitStack() as stack:
        background = Background()
        stack.callback(background.close)
        standins: dict[str, Any] = {
            name: StandinServer(kind, f"{name}-model", parse_of(script))  # type: ignore[arg-type]
            for name, (kind, script) in UPSTREAMS.items()
        }
        standins |= {"anthropic": StandinAnthropic(), "gemini": StandinGemini(), "openai": StandinOpenAI()}
        standins |= {"hanging": StandinOpenAI(ProviderScript(hang=True)), "hook": WebhookReceiver()}
        for standin in standins.values():
            background.run(standin.start())
            stack.callback(background.run, standin.close())
        engine = f"unix:{folder}/engine.sock"
        started = ["--socket", engine, "--name", "smollm2", "--context-len", "1024", "--script", "say=echo"]
        stack.enter_context(_process("standins.standin_engine", *started, log=folder / "engine.log"))
        home = folder / "home"
        (home / "models").mkdir(parents=True)
        (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
        urls = {name: standins[name].url for name in ("anthropic", "gemini", "openai", "hanging")}
        endpoints = "".join(
            f'[[endpoints]]\nname = "{name}"\nkind = "{kind}"\nurl = "{standins[name].url}"\nkey = "sk-{name}"\n'
            for name, (kind, _) in UPSTREAMS.items()
        )
        (home / "emberline.toml").write_text(CONFIG.format(admin=ADMIN_KEY, engine=engine, **urls) + endpoints)
        flags = ["serve", "--port", "0", "--json", "--log-level", "debug", "--data-dir", str(home)]
        ready = stack.enter_context(_process("emberline.cli.main", *flags, log=folder / "server.log"))
        yield Stage(ready["url"], home, ServerLog(folder / "server.log"), background, standins, _encoder(home))


def _encoder(home: Path) -> Callable[[str], list[int]]:
    text_model = load_text(ModelStore(home).resolve("smollm2"))
    assert isinstance(text_model, TextModel)
    return lambda text: list(array("I", text_model.encode(text, special=True)))


@contextmanager
def _process(module: str, *arguments: str, log: Path) -> Iterator[dict[str, Any]]:
    """A process that has reported ready; its ready line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EMBERLINE_", "OTEL_"))}
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        process.stdout.close()
