"""One process of ours, kept running: started, awaited, its log lines carried on, restarted when it dies."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from emberline import log as logs
from emberline.protocol.errors import Unavailable

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
HEALTHY_S = 60.0  # a run this long forgives the crashes before it
KILLED_S = 5.0  # how long a killed process may take to be gone
MAX_LINE_BYTES = 1 << 20
KEPT_LINES = 20  # of its log, for the error when it never gets ready

_SECRETS = frozenset(
    {"EMBERLINE_AUTH_KEY", "EMBERLINE_SECRET", "HF_TOKEN"}
)  # a child is given what it needs, not these

log = logging.getLogger("emberline.supervisor")


class ChildFailed(Unavailable):
    """A process ended before it was ready for the first time."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    module: str  # run as `python -m` runs it
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = {}  # beside our own
    fds: tuple[int, ...] = ()  # open files it inherits


class Child:
    """A supervised process. One JSON line on stdout says `"ready": true`, or `false` and the `error`.

    If it dies before it was ever ready, `wait_ready` raises ChildFailed and that is the end; if later, it is started
    again, after a pause that doubles with every crash. That it ends when we are killed is its own business.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.ready_line: dict[str, Any] = {}  # the last one
        self.n_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._became_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._problem = ""  # why it is not ready, in its own words
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def start(self) -> None:
        """Returns as soon as the process exists, so that it works while the caller does something else."""
        assert self._task is None
        process = await self._spawn()
        self._task = asyncio.create_task(self._keep_running(process), name=f"child {self.name}")

    async def wait_ready(self) -> None:
        await asyncio.shield(self._became_ready)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, which lets it finish what runs; after `grace_s`, SIGKILL to it and all it started."""
        self._stopping = True
        if self._task is None:
            return
        if self.pid is not None:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self._task], timeout=grace_s)
        if self.pid is not None:
            log.warning("%s did not stop within %.0f s, killing it", self.name, grace_s)
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._task], timeout=KILLED_S)
        self._task.cancel()  # it may be waiting to start the process again
        await asyncio.wait([self._task])
        if not self._became_ready.done():
            self._became_ready.cancel()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _keep_running(self, process: asyncio.subprocess.Process) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            started_s = time.monotonic()
            code = await self._attend(process)
            if self._stopping:
                return
            if not self._became_ready.done():
                self._became_ready.set_exception(ChildFailed(f"{self.name} {_ending(code)}: {self._reason()}"))
                return
            if time.monotonic() - started_s > HEALTHY_S:
                retry_s = FIRST_RETRY_S
            log.error("%s %s; starting it again in %.1f s", self.name, _ending(code), retry_s)
            await asyncio.sleep(retry_s)
            if self._stopping:
                return
            retry_s = min(2 * retry_s, LAST_RETRY_S)
            self.n_restarts += 1
            process = await self._spawn()

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._last_lines.clear()
        self._problem = ""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self.spec.module, *self.spec.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(),
            limit=MAX_LINE_BYTES,
            pass_fds=self.spec.fds,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to hear and to pass on
        )
        return self._process

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        return {**inherited, "EMBERLINE_LOG_FORMAT": "json", **self.spec.env}

    async def _attend(self, process: asyncio.subprocess.Process) -> int:
        """Read what the process writes until it has ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [asyncio.create_task(self._read(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            code = await process.wait()
            await asyncio.wait(readers, timeout=1.0)  # a grandchild may hold the pipes open
        finally:
            for reader in readers:
                reader.cancel()
        return code

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await pipe.readline()
            except ValueError:  # a line beyond MAX_LINE_BYTES: nothing a log needs
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if line and not (line.startswith('{"ready":') and self._is_ready_line(line)):
                self._last_lines.append(line)
                logs.relay(line, process=self.name)

    def _is_ready_line(self, line: str) -> bool:
        try:
            said = json.loads(line)
        except ValueError:
            return False
        if not isinstance(said, dict) or not isinstance(said.get("ready"), bool):
            return False
        if not said["ready"]:
            self._problem = str(said.get("error", ""))
            return True
        self.ready_line = said
        if not self._became_ready.done():
            self._became_ready.set_result(None)
        return True

    def _reason(self) -> str:
        """Why it ended, as far as its last words tell."""
        if self._problem:
            return self._problem
        for line in reversed(self._last_lines):
            try:
                parsed = json.loads(line)
            except ValueError:
                return line
            if isinstance(parsed, dict) and "message" in parsed:
                trace = str(parsed.get("exception", "")).strip()
                return trace.splitlines()[-1] if trace else str(parsed["message"])
        return "it said nothing"

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)  # it leads a session of its own
            else:
                os.kill(pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
