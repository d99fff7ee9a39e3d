"""`emberline serve --kv-store mooncake` with two workers: a session changes its worker, the master and the lent memory
are killed while requests run. Minutes on two cores; needs Mooncake and its system libraries."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kv.tiers.pool.mooncake_pool import require_mooncake

require_mooncake()
pytestmark = pytest.mark.slow
WAIT_S = 240.0
N_REQUESTS = 20
MASTER, MEMORY = "mooncake_master", "pool_memory"


class Server:
    def __init__(self, url: str, pid: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=WAIT_S)
        self._pid = pid

    def ask(self, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        body = {"model": "smollm2", "messages": messages, "max_tokens": 6, "temperature": 0}
        answer = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["message"]["content"], answer["usage"]

    def engines(self) -> list[dict[str, Any]]:
        engines: list[dict[str, Any]] = self._client.get("/api/ps").raise_for_status().json()["engines"]
        return engines

    def states(self) -> list[str]:
        """Of the pool, as each worker sees it: what `emberline ps` prints."""
        tiers = [tier for engine in self.engines() for tier in engine["load"].get("tiers", ())]
        return [tier.get("state", "ok") for tier in tiers if tier["name"] == "pool"]

    def pool_bytes(self) -> int:
        tiers = [tier for engine in self.engines() for tier in engine["load"].get("tiers", ())]
        return sum(tier.get("written_bytes", 0) for tier in tiers if tier["name"] == "pool")

    def drain(self, name: str, *, on: bool) -> None:
        path = "/api/workers/drain" if on else "/api/workers/undrain"
        self._client.post(path, json={"name": name}).raise_for_status()

    def kill(self, what: str) -> int:
        """The server's process whose command names it."""
        pid = self.find(what)
        assert pid, f"{what} does not run"
        os.kill(pid, signal.SIGKILL)
        return pid

    def find(self, what: str) -> int:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
                program = words[0] if what == MASTER else words[2] if len(words) > 2 else ""
                if program.endswith((f"/{what}", f".{what}")) and _descends(int(path.parent.name), self._pid):
                    return int(path.parent.name)
            except (OSError, ValueError):
                continue
        return 0


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("pool")
    (home / "models").mkdir()
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--deterministic"]
    flags = ["--replicas", "2", "--kv-bytes", "64M", "--kv-store", "mooncake"]
    environment = {**os.environ, "EMBERLINE_HOME": str(home), "EMBERLINE_KV_POOL_BYTES": "256M"}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    started = Server(json.loads(line)["url"], process.pid)
    wait_until(lambda: started.states() == ["ok", "ok"])
    yield started
    process.terminate()
    assert process.wait(60) == 0


def wait_until(condition: Callable[[], object], limit_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.05)


def session(number: int, n_sentences: int = 20) -> list[dict[str, str]]:
    words = " ".join(f"{number}: item {n} costs {n * (number + 3) % 17}." for n in range(n_sentences))
    return [{"role": "system", "content": words}, {"role": "user", "content": "Say hi."}]


def under_load(server: Server, first: int, disturb: Callable[[], object]) -> None:
    """Run requests of as many new sessions, and disturb them when two have ended. None fails, and all replies are those
    that come when nothing is disturbed."""
    replies: dict[int, str] = {}
    failed: list[str] = []

    def ask(number: int) -> None:
        try:
            replies[number] = server.ask(session(number))[0]
        except (httpx.HTTPError, KeyError) as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(first, first + N_REQUESTS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(replies) + len(failed) >= 2)
    disturb()
    for thread in threads:
        thread.join()
    assert not failed
    wait_until(lambda: server.states() == ["ok", "ok"])
    assert all(server.ask(session(number))[0] == reply for number, reply in list(replies.items())[::4])


def test_a_session_goes_on_at_another_worker(server: Server) -> None:
    share = continued(server, 10)
    assert share >= 0.95


def continued(server: Server, number: int) -> float:
    """The share of the next turn's prompt that another worker takes from the pool."""
    before = {engine["name"]: engine["load"]["prompt_tokens"] for engine in server.engines()}
    messages, n_bytes = session(number, 90), server.pool_bytes()
    text, usage = server.ask(messages)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: _written(server, n_bytes, usage["prompt_tokens"]), 20.0)
    gained = {engine["name"]: engine["load"]["prompt_tokens"] - before[engine["name"]] for engine in server.engines()}
    home = max(gained, key=lambda name: gained[name])
    server.drain(home, on=True)
    try:
        _, usage = server.ask([*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Bye!"}])
    finally:
        server.drain(home, on=False)
    return float(
        usage["prompt_tokens_details"].get("cached_tokens_by_tier", {}).get("pool", 0) / usage["prompt_tokens"]
    )


def _written(server: Server, before: int, n_tokens: int) -> bool:
    bytes_per_token = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, their size, FP16
    return server.pool_bytes() - before >= (n_tokens // 16) * 16 * bytes_per_token


def test_master_and_memory_killed_while_requests_run(server: Server) -> None:
    numbers = itertools.count(1000)

    def kill_master() -> None:
        """Until `ps` says that the pool is degraded: a master is back within a second or two."""
        noticed = threading.Event()

        def look_up() -> None:
            while not noticed.is_set():
                server.ask(session(next(numbers)))

        def kill_and_look() -> bool:
            if pid := server.find(MASTER):
                os.kill(pid, signal.SIGKILL)
            return any(state.startswith("degraded") for state in server.states())

        thread = threading.Thread(target=look_up)
        thread.start()
        wait_until(kill_and_look)
        noticed.set()
        thread.join()
        wait_until(lambda: server.states() == ["ok", "ok"])

    under_load(server, 100, kill_master)
    assert continued(server, 11) >= 0.95, "the pool of the new master is used"
    memory = server.find(MEMORY)
    under_load(server, 200, lambda: server.kill(MEMORY))
    wait_until(lambda: server.find(MEMORY) not in (0, memory))
    wait_until(lambda: continued(server, next(numbers)) >= 0.95)  # memory is lent again
