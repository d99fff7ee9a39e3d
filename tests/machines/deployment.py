"""A cluster on machines, made with the commands that a user has: `cluster init`, `credential`, `serve`, `worker`."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster_processes import ADMIN, PATIENCE_S, CoreProcess, wait_until
from tests.machines.machines import Machine

PORT = 8686
CLI = (sys.executable, "-m", "emberline.cli.main")
STANDIN = (sys.executable, "-m", "standins.standin_engine")


class MachineCore(CoreProcess):
    def __init__(self, process: "subprocess.Popen[str]", machine: Machine) -> None:
        super().__init__(process, f"http://{machine.address}:{PORT}")
        self.machine = machine


class Deployment:
    """Cores and workers of one cluster. Ended with `close`."""

    def __init__(self, folder: Path, store_url: str, weights: Path) -> None:
        self.folder = folder
        self.store_url = store_url
        self.model = ""  # its id, once a core runs
        self.cores: dict[str, MachineCore] = {}  # by the name of their machine
        self.workers: list[subprocess.Popen[str]] = []
        self.command = CLI  # of a core
        self._weights = weights
        self._env = {"EMBERLINE_STORE_URL": store_url, "EMBERLINE_AUTH_KEY": ADMIN}
        self._first: Machine | None = None  # where the cluster was made

    def init(self, machine: Machine) -> None:
        """On the first core's machine."""
        self._first = machine
        machine.run(*CLI, "cluster", "init", env={**self._env, "EMBERLINE_HOME": str(self._home(machine))})

    def credential(self, name: str) -> Path:
        """The file for a worker, made where the cluster was."""
        path = self.folder / f"{name}.credential"
        if not path.exists():
            assert self._first is not None, "init comes first"
            env = {"EMBERLINE_HOME": str(self._home(self._first))}
            self._first.run(*CLI, "cluster", "credential", name, "--out", path, env=env)
        return path

    def start_cores(
        self, *machines: Machine, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> list[MachineCore]:
        """They start at the same time, and have started when this returns."""
        assert self._first is not None, "init comes first"
        secret = self._home(self._first) / "secret"
        for machine in machines:
            home = self._home(machine)
            home.mkdir(parents=True, exist_ok=True)
            if not (home / "secret").exists():
                shutil.copy(secret, home / "secret")
        started = [self.start_serve(machine, flags, env) for machine in machines]
        for machine, process in zip(machines, started, strict=True):
            assert process.stdout is not None
            assert process.stdout.readline(), f"the core of {machine.name} did not start: {self.log_of(machine.name)}"
            self.cores[machine.name] = MachineCore(process, machine)
        self.model = self.cores[machines[0].name].call("GET", "/v1/models")["data"][0]["id"]
        return [self.cores[machine.name] for machine in machines]

    def start_serve(
        self, machine: Machine, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """`emberline serve`, which prints a line once it has started."""
        where = ("--host", "0.0.0.0", "--port", str(PORT), "--auth", "keys", "--core-only", "--json")
        return machine.start(
            *(*self.command, "serve", self._weights, *where, *flags),
            env={**self._env, "EMBERLINE_HOME": str(self._home(machine)), **(env or {})},
            log=self.folder / f"{machine.name}.log",
        )

    def start_worker(
        self,
        name: str,
        machine: Machine,
        *flags: str,
        joins: list[MachineCore] | None = None,
        is_real: bool = False,
        engine: tuple[str | Path, ...] = STANDIN,
        credential: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """It joins at all cores unless `joins` says which. The stand-in engine, unless it is to be the real one."""
        urls = [core.url for core in (self.cores.values() if joins is None else joins)]
        if is_real:
            engine = (*CLI, "worker", "--model", self._weights, "--device", "cpu", "--threads", "1")
            engine = (*engine, "--kv-bytes", str(64 << 20), "--deterministic")
        process = machine.start(
            *(*engine, "--name", self.model, "--socket", "tcp:0.0.0.0:0"),
            *(word for url in urls for word in ("--join", url)),
            *("--credential", credential or self.credential(name)),
            *flags,
            env={"EMBERLINE_HOME": str(self._home(machine)), **(env or {})},
            log=self.folder / f"{name}.log",
        )
        self.workers.append(process)
        return process

    def wait_connected(
        self, *names: str, cores: list[MachineCore] | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        """Until every core has a connection to each of these workers."""
        for core in self.cores.values() if cores is None else cores:
            wait_until(
                lambda core=core: is_connected(core, *names),  # type: ignore[misc]
                f"{names} did not join at {core.url}; {[self.log_of(name)[-1000:] for name in names]}",
                patience_s,
            )

    def log_of(self, name: str) -> str:
        """Of a worker, or of the core on a machine."""
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def end_workers(self) -> None:
        """Those that run take themselves off the list."""
        _end(self.workers)
        self.workers = []

    def close(self) -> None:
        self.end_workers()
        _end([core.process for core in self.cores.values()])

    def _home(self, machine: Machine) -> Path:
        return self.folder / machine.name


def is_connected(core: CoreProcess, *names: str) -> bool:
    members = core.members()
    return all(members.get(name, {}).get("connected") for name in names)


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
