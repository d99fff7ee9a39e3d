"""The server under test, restarted whenever it dies, and the thread that kills its processes."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
START_S = 300.0  # on a machine that has other things to do
ENGINES = ("standins.standin_engine", "emberline.engine.worker")
HTTP_WORKERS = ("tests.soak.http_worker",)


def free_port() -> int:
    """Not one that the kernel gives to connections of others before it is used, or to one that is to be refused."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


class Server:
    """Restarted whenever it dies, as by a service manager."""

    def __init__(self, command: list[str], port: int, env: dict[str, str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._command = command
        self._env = env
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self.n_starts = 0

    def start(self) -> None:
        self._thread.start()
        self.wait_ready()

    def stop(self) -> int:
        """Stop it with SIGTERM and return its exit status."""
        self._stopping.set()
        process = self._process
        assert process is not None
        process.terminate()
        self._thread.join(60)
        return int(process.wait(5))

    def abandon(self) -> None:
        """Do not restart it."""
        self._stopping.set()

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while not self.ready:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the server does not come back; its log is {self._log}")
            time.sleep(0.05)

    def wait_restarted(self, n_starts: int) -> None:
        """Until one is ready that was started after the first `n_starts`. The HTTP workers of a killed core may still
        answer for a moment; the next one starts when they have left the port."""
        end_s = time.monotonic() + START_S
        while self.n_starts == n_starts:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the server is not started again; its log is {self._log}")
            time.sleep(0.02)
        self.wait_ready()

    @property
    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def all_connected(self) -> bool:
        """Whether every engine and upstream is connected."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/ps", timeout=5) as answer:
                return all(engine["ok"] for engine in json.load(answer)["engines"])
        except (OSError, urllib.error.URLError):
            return False

    def pids(self, kind: str) -> list[int]:
        process = self._process
        if process is None or process.poll() is not None:
            return []
        if kind == "core":
            return [process.pid]
        return children(process.pid, ENGINES if kind == "engine" else HTTP_WORKERS)

    def _keep(self) -> None:
        with self._log.open("ab") as log:
            while not self._stopping.is_set():
                self._wait_for_port()
                self.n_starts += 1
                self._process = subprocess.Popen(
                    self._command, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True
                )
                self._process.wait()

    def _wait_for_port(self) -> None:
        """The HTTP workers of a killed core hold the port until they notice its death."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", self._port))
                    return
                except OSError:
                    time.sleep(0.02)


def children(parent: int, modules: tuple[str, ...]) -> list[int]:
    """Return the ids of the child processes of `parent` that run one of `modules`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if int(status[1]) == parent and any(module in words for module in modules):
            found.append(int(folder.name))
    return found


class Killer(threading.Thread):
    """Kills a random live process `n` times at random moments; after a core it waits until the server is ready."""

    def __init__(
        self,
        server: Server,
        n: int,
        rng: random.Random,
        mean_s: float,
        kinds: tuple[str, ...],
        minutes: float,
    ) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._n = n
        self._rng = rng
        self._mean_s = mean_s
        self._kinds = kinds
        self._end_s = time.monotonic() + 60 * minutes
        self.killed: dict[str, int] = dict.fromkeys(kinds, 0)
        self.moments_us: list[int] = []
        self.problem: Exception | None = None

    @property
    def total(self) -> int:
        return sum(self.killed.values())

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self._end_s

    def run(self) -> None:
        try:
            while self.total < self._n and not self.out_of_time:
                self._kill_one()
        except Exception as error:
            self.problem = error

    def _kill_one(self) -> None:
        time.sleep(self._rng.expovariate(1 / self._mean_s))
        kind, n_starts = self._rng.choice(self._kinds), self._server.n_starts
        pids = self._server.pids(kind)
        if not pids:
            return
        try:
            os.kill(self._rng.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed[kind] += 1
        self.moments_us.append(time.time_ns() // 1000)
        if kind == "core":
            self._server.wait_restarted(n_starts)


def command(script: str, standin_flags: str, port: int, http_workers: int) -> list[str]:
    """Start a server of tests/soak/server.py; flags of serve may follow."""
    words = [sys.executable, "-m", "tests.soak.server", script, standin_flags, "--port", str(port)]
    return [*words, "--http-workers", str(http_workers), "--json"]
