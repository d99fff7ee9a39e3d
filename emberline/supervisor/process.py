"""A supervised child process: started, awaited, its log lines relayed, restarted when it dies."""

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from emberline import log as logs
from emberline.engine.addresses import PARENT_VARIABLE
from emberline.protocol.errors import Unavailable

MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_S = 60.0  # a run of this length resets the backoff
KILL_TIMEOUT_S = 5.0  # for a killed process to be gone
MAX_LINE_BYTES = 1 << 20
KEPT_LINES = 20  # of its log, for the error message of a failed start
HEARTBEAT = '{"heartbeat": true}'  # a line on a child's standard output
HEARTBEAT_S = 1.0  # between two heartbeats of a child, and between two checks of them
START_S = 180.0  # for a child to send its first heartbeat: it loads vocabularies and may wait 30 s for engines

# A child inherits no secret: what it needs is passed in `env`. Of our own variables it inherits these, of the others
# all but those whose name or value looks like a credential.
_INHERITED = frozenset({"EMBERLINE_HOME", "EMBERLINE_LOG_LEVEL", "EMBERLINE_KERNEL_CACHE"})
_SECRET_NAME = re.compile(
    r"(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PAT|PASSPHRASE|CREDENTIALS?|HEADERS)(_|$)|PASSW|_PWD$", re.I
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # a URL with a password

log = logging.getLogger("emberline.supervisor")


class ProcessFailed(Unavailable):
    """A process exited before it was ready for the first time."""


class HeartbeatLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times after which a child without heartbeats is killed and restarted."""

    silent_s: float  # since the last heartbeat
    start_s: float = START_S  # since the start, for the first one
    check_s: float = HEARTBEAT_S  # between two checks


async def send_heartbeats(output: int, interval_s: float = HEARTBEAT_S) -> None:
    """Write heartbeats to the descriptor `output`, from a child's event loop, until the supervisor is gone.

    A heartbeat is dropped if the pipe is full, as when the supervisor is stopped: to wait would stop every stream.
    """
    room = select.poll()
    room.register(output, select.POLLOUT)
    with contextlib.suppress(OSError):  # the supervisor is gone
        while True:
            if room.poll(0):
                os.write(output, f"{HEARTBEAT}\n".encode())
            await asyncio.sleep(interval_s)


async def wait_or_stop(waiting: Coroutine[Any, Any, object], stop: asyncio.Event) -> None:
    """Wait for `waiting`, and raise its exception, or for `stop`, and cancel it."""
    tasks = [asyncio.create_task(waiting), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


class HeartbeatMonitor:
    """Tells a child that is stopped, or whose event loop hangs, from one that is slow on a busy machine.

    A check counts at most `check_s` of silence: if this process was stopped or starved itself, the child's heartbeats
    may lie unread in the pipe.
    """

    def __init__(self, limits: HeartbeatLimits) -> None:
        self._limits = limits
        self._has_started = False  # True after the readiness report or the first heartbeat
        self._silent_s = 0.0
        self._checked_s = 0.0

    def beat(self) -> None:
        """Note a heartbeat of the child."""
        self._has_started, self._silent_s = True, 0.0

    def problem(self, now_s: float) -> str:
        """Why the child has to be killed; empty if it has not been silent for too long. Call it every `check_s`."""
        self._silent_s += min(now_s - self._checked_s, self._limits.check_s)
        self._checked_s = now_s
        if self._has_started and self._silent_s > self._limits.silent_s:
            return f"it is stopped or hangs, no heartbeat for {self._limits.silent_s:g} s; its connections end"
        if not self._has_started and self._silent_s > self._limits.start_s:
            return f"it is stopped or hangs, it did not start within {self._limits.start_s:g} s"
        return ""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    module: str  # run with `python -m`
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = {}  # in addition to the inherited environment
    fds: tuple[int, ...] = ()  # open file descriptors to inherit
    may_end: bool = False  # with status 0, by itself: it is not restarted then
    input: bytes = b""  # for its standard input, at every start: secrets, which are kept in no file
    heartbeats: HeartbeatLimits | None = None  # None: the process sends none
    backoff_s: float = MIN_BACKOFF_S  # before the first restart; doubles with each, up to MAX_BACKOFF_S


class SupervisedProcess:
    """The child reports readiness as one JSON line on stdout: `"ready": true`, or `false` and the `error`.

    If it dies before it was ever ready, `wait_ready` raises ProcessFailed and it is not restarted; later it is
    restarted with exponential backoff. The child itself has to notice the death of this process. A child whose spec
    has limits of heartbeats prints HEARTBEAT every HEARTBEAT_S once it is ready, from its event loop.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.ready_line: dict[str, Any] = {}  # of the latest start
        self.n_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_error = ""  # reported by the child, or why it was killed
        self._log_tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._monitor: HeartbeatMonitor | None = None  # of the running process
        self.problem = ""  # why it ended the last time, although nobody had stopped it

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while the process runs, otherwise None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Returns as soon as the process exists; it loads while the caller continues."""
        assert self._task is None
        process = await self._spawn()
        self._task = asyncio.create_task(self._keep_running(process), name=f"supervise {self.name}")

    async def wait_ready(self) -> None:
        await asyncio.shield(self._ready)

    async def wait_ended(self) -> None:
        """Wait until the process neither runs nor will be restarted."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def kill(self, why: str) -> None:
        """SIGKILL its whole process group; it is restarted as after any death."""
        log.error("killing %s: %s", self.name, why)
        self._signal(signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, on which it drains; after `grace_s`, SIGKILL to its whole process group."""
        self._stopping = True
        if self._task is None:
            return
        if self.pid is not None:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self._task], timeout=grace_s)
        if self.pid is not None:
            log.warning("%s did not stop within %.0f s, killing it", self.name, grace_s)
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._task], timeout=KILL_TIMEOUT_S)
        self._task.cancel()  # it may be in its backoff sleep
        await asyncio.wait([self._task])
        if not self._ready.done():
            self._ready.cancel()

    async def _keep_running(self, process: asyncio.subprocess.Process | None) -> None:
        backoff_s = self.spec.backoff_s
        while True:
            if process is not None:
                started_s = time.monotonic()
                code = await self._read_until_exit(process)
                if self._stopping:
                    return
                if not self._ready.done():
                    self._ready.set_exception(ProcessFailed(f"{self.name} {_describe_exit(code)}: {self._reason()}"))
                    return
                if self.spec.may_end and code == 0:
                    log.info("%s has ended", self.name)
                    return
                if time.monotonic() - started_s > HEALTHY_S:
                    backoff_s = self.spec.backoff_s
                self.problem = f"{_describe_exit(code)}: {self._reason()}"
                log.error("%s %s; restarting it in %.1f s", self.name, _describe_exit(code), backoff_s)
            await asyncio.sleep(backoff_s)
            if self._stopping:
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                process = await self._spawn()
                self.n_restarts += 1
            except OSError as error:  # out of memory, processes or descriptors: it may pass
                process = None
                log.error("%s could not be started: %s; trying again in %.1f s", self.name, error, backoff_s)

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._log_tail.clear()
        self._start_error = ""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.spec.module, *self.spec.arguments),
            stdin=asyncio.subprocess.PIPE if self.spec.input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(),
            limit=MAX_LINE_BYTES,
            pass_fds=self.spec.fds,
            start_new_session=True,  # Ctrl-C at the terminal reaches only this process, which stops the child
        )
        if self.spec.input:
            assert self._process.stdin is not None
            self._process.stdin.write(self.spec.input)
            self._process.stdin.close()
        return self._process

    def _environment(self) -> dict[str, str]:
        own = {"EMBERLINE_LOG_FORMAT": "json", PARENT_VARIABLE: str(os.getpid())}
        return {**inherited_environment(os.environ), **own, **self.spec.env}

    async def _read_until_exit(self, process: asyncio.subprocess.Process) -> int:
        """Relay the output of the process until it has exited; kill it if its heartbeats stop."""
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [asyncio.create_task(self._relay(pipe)) for pipe in (process.stdout, process.stderr)]
        tasks = [*readers]
        if (limits := self.spec.heartbeats) is not None:
            self._monitor = HeartbeatMonitor(limits)
            tasks.append(asyncio.create_task(self._watch(self._monitor, limits.check_s)))
        try:
            code = await process.wait()
            await asyncio.wait(readers, timeout=1.0)  # a grandchild may hold the pipes open
        finally:
            for task in tasks:
                task.cancel()
        return code

    async def _watch(self, monitor: HeartbeatMonitor, check_s: float) -> None:
        """Kill the process once its heartbeats are missing for too long."""
        while not (problem := monitor.problem(time.monotonic())):
            await asyncio.sleep(check_s)
        self._start_error = problem
        self.kill(problem)

    async def _relay(self, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await pipe.readline()
            except ValueError:  # longer than MAX_LINE_BYTES: dropped
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if line == HEARTBEAT:
                if self._monitor is not None:
                    self._monitor.beat()
            elif line and not (line.startswith('{"ready":') and self._accept_ready_line(line)):
                self._log_tail.append(line)
                logs.relay(line, process=self.name)

    def _accept_ready_line(self, line: str) -> bool:
        """Take the child's readiness report. Returns False if the line is none."""
        try:
            report = json.loads(line)
        except ValueError:
            return False
        if not isinstance(report, dict) or not isinstance(report.get("ready"), bool):
            return False
        if not report["ready"]:
            self._start_error = str(report.get("error", ""))
            return True
        self.ready_line = report
        if self._monitor is not None:
            self._monitor.beat()  # it may stop before its first heartbeat
        if not self._ready.done():
            self._ready.set_result(None)
        return True

    def _reason(self) -> str:
        """Why it exited, from its own report or the end of its log."""
        if self._start_error:
            return self._start_error
        for line in reversed(self._log_tail):
            try:
                parsed = json.loads(line)
            except ValueError:
                return line
            if isinstance(parsed, dict) and "message" in parsed:
                trace = str(parsed.get("exception", "")).strip()
                return trace.splitlines()[-1] if trace else str(parsed["message"])
        return "it wrote nothing to its log"

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)  # it leads a session, so a group, of its own
            else:
                os.kill(pid, number)


class ProcessGroup:
    """Processes that are started and stopped together."""

    def __init__(self, processes: Iterable[SupervisedProcess]) -> None:
        self.processes = list(processes)

    async def start(self) -> None:
        """Every process exists when this returns; `wait_ready` waits for them to serve."""
        await asyncio.gather(*(process.start() for process in self.processes))

    async def wait_ready(self) -> None:
        """Raises ProcessFailed when one cannot start."""
        await asyncio.gather(*(process.wait_ready() for process in self.processes))

    async def stop(self, grace_s: float) -> None:
        """Lets them finish running requests for `grace_s` seconds."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes))


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that a child inherits: no keys, tokens or passwords, and nothing of our
    configuration."""

    def is_secret(name: str, value: str) -> bool:
        if name.startswith("EMBERLINE_"):
            return name not in _INHERITED
        return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))

    return {name: value for name, value in environ.items() if not is_secret(name, value)}


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
