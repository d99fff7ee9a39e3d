"""Injects faults of every kind at random moments: into engines, HTTP workers, the core, upstreams and PostgreSQL."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence

from tests.databases import StoppablePostgres
from tests.soak.server_process import ROOT, Server

STALL_LIMIT_S = 60.0  # within which the server must have replaced a stopped engine
SCRIPT = "tokens=40,ttft_ms=20,itl_ms=10"
# What an upstream does to its next requests. A hang is worth a few requests only: each waits for the stall limit.
UPSTREAM_FAULTS = {
    "upstream_hangs": "hang=true,times=2",
    "upstream_nonsense": "garbage=true,times=4",
    "upstream_bad_json": "bad_json=true,times=4",
    "upstream_error": "status=500,times=4",
    "upstream_cut": "cut_after=7,times=4",
    "upstream_error_event": "error_after=5,times=4",
    "upstream_no_done": "no_done=true,times=4",
}


class Upstream:
    """A stand-in for a vLLM server, a process of its own that keeps its port over restarts."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        words = ["--port", str(self.port), "--kind", "vllm", "--model", "standin", "--script", SCRIPT]
        command = [sys.executable, "-m", "standins.standin_openai", *words]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def set_script(self, faults: str) -> None:
        """Replies with these faults; a server that is being restarted keeps its own."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/standin", f"{SCRIPT},{faults}".encode())
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):
            pass


class FaultInjector(threading.Thread):
    """`n` faults with random pauses of `mean_s`. Faults that last are undone by a thread of their own, one at a time of
    each kind; one upstream (the last) is never touched, so that every request can be served."""

    def __init__(
        self,
        server: Server,
        upstreams: Sequence[Upstream],
        postgres: StoppablePostgres | None,
        rng: random.Random,
        n: int,
        mean_s: float,
    ) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._upstreams = list(upstreams)
        self._postgres = postgres
        self._rng = rng
        self._n = n
        self._mean_s = mean_s
        self._lasting: dict[str, threading.Thread] = {}
        self.injected: Counter[str] = Counter()
        self.disconnects_s: list[tuple[float, float]] = []  # from when until when connections of clients may break
        self.problems: list[str] = []
        self.stopped = threading.Event()

    @property
    def total(self) -> int:
        return self.injected.total()

    def run(self) -> None:
        faults: list[tuple[str, int, Callable[[], bool]]] = [
            ("engine_killed", 4, self._kill_engine),
            ("engine_stopped", 2, self._stop_engine),
            ("http_worker_killed", 3, self._kill_http_worker),
            ("core_killed", 1, self._kill_core),
            ("upstream_killed", 2, self._kill_upstream),
            ("upstream_stopped", 1, self._stop_upstream),
            *(
                (name, 1, lambda script=script: self._script_upstream(script))
                for name, script in UPSTREAM_FAULTS.items()
            ),
        ]
        if self._postgres is not None:
            faults += [("store_away", 1, self._stop_store), ("store_slow", 2, self._slow_store)]
        try:
            while self.total < self._n and not self.stopped.is_set():
                time.sleep(self._rng.expovariate(1 / self._mean_s))
                name, _, inject = self._rng.choices(faults, [weight for _, weight, _ in faults])[0]
                if inject():
                    self.injected[name] += 1
            for thread in self._lasting.values():
                thread.join(STALL_LIMIT_S + 30)
        except Exception as error:
            self.problems.append(f"fault injection ended: {error!r}")

    def _kill(self, kind: str) -> bool:
        pids = self._server.pids(kind)
        if not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._rng.choice(pids), signal.SIGKILL)
        return True

    def _kill_engine(self) -> bool:
        return self._kill("engine")

    def _kill_http_worker(self) -> bool:
        killed = self._kill("http_worker")
        if killed:
            self.disconnects_s.append((time.monotonic(), time.monotonic()))
        return killed

    def _kill_core(self) -> bool:
        killed_s, n_starts = time.monotonic(), self._server.n_starts
        if not self._kill("core"):
            return False
        self._server.wait_restarted(n_starts)
        self.disconnects_s.append((killed_s, time.monotonic()))  # its HTTP workers end when they notice
        return True

    def _stop_engine(self) -> bool:
        """SIGSTOP: the server itself has to notice, move the streams and replace the process. Not while one starts: how
        long that may take depends on the model, so that a start that hangs is noticed much later."""
        pids = self._server.pids("engine")
        if len(pids) < 2 or not self._server.all_connected():
            return False
        pid = self._rng.choice(pids)

        def watch() -> None:
            end_s = time.monotonic() + STALL_LIMIT_S
            while time.monotonic() < end_s:
                if not os.path.exists(f"/proc/{pid}"):
                    return
                time.sleep(0.1)
            self.problems.append(f"a stopped engine was not replaced within {STALL_LIMIT_S} s")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        return self._last("engine_stopped", lambda: os.kill(pid, signal.SIGSTOP), watch)

    def _kill_upstream(self) -> bool:
        upstream = self._rng.choice(self._upstreams[:-1])

        def restart() -> None:
            time.sleep(0.5)
            upstream.start()

        return self._last("upstream", upstream.kill, restart)

    def _stop_upstream(self) -> bool:
        upstream = self._rng.choice(self._upstreams[:-1])

        def go_on() -> None:
            time.sleep(10.0)
            upstream.send_signal(signal.SIGCONT)

        return self._last("upstream", lambda: upstream.send_signal(signal.SIGSTOP), go_on)

    def _script_upstream(self, script: str) -> bool:
        if "upstream" in self._lasting and self._lasting["upstream"].is_alive():
            return False
        self._rng.choice(self._upstreams[:-1]).set_script(script)
        return True

    def _stop_store(self) -> bool:
        postgres = self._postgres
        assert postgres is not None

        def start() -> None:
            time.sleep(2.0)
            postgres.start()

        return self._last("store", postgres.stop, start)

    def _slow_store(self) -> bool:
        """Every connection stands still for two seconds."""
        postgres, pids = self._postgres, list[int]()
        assert postgres is not None

        def stop() -> None:
            pids.extend(postgres.backend_pids())
            signal_all(signal.SIGSTOP)

        def signal_all(number: int) -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

        def go_on() -> None:
            time.sleep(2.0)
            signal_all(signal.SIGCONT)

        return self._last("store", stop, go_on)

    def _last(self, group: str, begin: Callable[[], object], end: Callable[[], None]) -> bool:
        """A fault that lasts, at most one of its group at a time."""
        if group in self._lasting and self._lasting[group].is_alive():
            return False
        try:
            begin()
        except ProcessLookupError:
            return False
        self._lasting[group] = threading.Thread(target=end, daemon=True)
        self._lasting[group].start()
        return True
