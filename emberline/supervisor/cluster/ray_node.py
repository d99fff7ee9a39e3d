"""The Ray processes of this machine: started, restarted when they end, and ended, exactly those.

Each `ray start` leads a session of its own, in which all that it starts stays; a record of the sessions is in the data
folder. A process id in it counts only together with the time at which the process began, so that none of another
program is ever ended. Workers end with the Ray process that started them.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from emberline.protocol.errors import Unavailable
from emberline.supervisor.cluster.ray_settings import NodeSettings, make_private, ray_command, ray_environment

RECORD = "processes.json"
START_S = 120.0  # for a node to be up
GRACE_S = 10.0  # for Ray to end its processes
KILLED_S = 10.0  # for killed ones to be gone
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
HEALTHY_S = 60.0
POLL_S = 0.05
_UP = b"Ray runtime started"
_KEPT_LINES = 20
_CURRENT_CLUSTER = "ray_current_cluster"  # Ray's file; one that a killed head has left keeps the next from starting

log = logging.getLogger("emberline.cluster")


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    started: int  # in ticks since boot

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        fields = _stat(pid)
        return None if fields is None or fields[0] == "Z" else cls(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the processes that `emberline cluster up` has started on this machine."""

    keeper: ProcessId  # the process that restarts the others
    nodes: tuple[NodeSettings, ...]
    sessions: dict[str, ProcessId] = {}  # by the node's name: the leader of the session

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        try:
            text = (folder / RECORD).read_bytes()
            return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, folder: Path) -> None:
        fresh = folder / f".{RECORD}"
        fresh.write_bytes(msgspec.json.encode(self, enc_hook=str))
        fresh.replace(folder / RECORD)

    def processes(self) -> list[int]:
        """All that run."""
        found = [pid for leader in self.sessions.values() for pid in session_processes(leader)]
        return found + ([self.keeper.pid] if self.keeper.is_alive else [])


def session_processes(leader: ProcessId) -> list[int]:
    """List the processes of the session that `leader` leads or led. The session's id is not reused while any of them
    runs."""
    now = ProcessId.of(leader.pid)
    if now is not None and now != leader:
        return []  # the session is gone, and its id another process's
    found = []
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None and fields[0] != "Z" and int(fields[3]) == leader.pid:
            found.append(int(entry))
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ProcessLookupError):
        return None


def end_session(leader: ProcessId, grace_s: float = GRACE_S) -> None:
    """SIGTERM to the leader, on which it ends the others; what is left then, or after `grace_s`, is killed."""
    end_s = time.monotonic() + grace_s
    if leader.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader.pid, signal.SIGTERM)
    while leader.is_alive and time.monotonic() < end_s:
        time.sleep(POLL_S)
    end_s = time.monotonic() + KILLED_S
    while (left := session_processes(leader)) and time.monotonic() < end_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


class RayNode:
    """One `ray start` and all that it starts."""

    def __init__(self, settings: NodeSettings, on_session: Callable[[], None] = lambda: None) -> None:
        """`on_session` is called when `session` has changed."""
        self.settings = settings
        self._on_session = on_session
        self.session: ProcessId | None = None
        self.n_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)

    async def start(self) -> None:
        """Returns when it is up. Unavailable: it does not start; the text says why."""
        settings = self.settings
        environment = ray_environment(settings)
        make_private(settings.temp_folder)
        (settings.session_folder / _CURRENT_CLUSTER).unlink(missing_ok=True)
        if settings.is_head:
            make_private(settings.state_folder)
        self._up.clear()
        self._tail.clear()
        self._process = await asyncio.create_subprocess_exec(
            *ray_command(settings),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=settings.folder,
            start_new_session=True,
        )
        self.session = ProcessId.of(self._process.pid)
        self._on_session()
        self._reading = asyncio.create_task(self._read(self._process))
        waiting = [asyncio.create_task(self._up.wait()), asyncio.create_task(self._process.wait())]
        try:
            await asyncio.wait(waiting, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not self._up.is_set():
            await self.stop()
            raise Unavailable(f"the Ray {settings.name} did not start: {self._reason()}")

    async def wait_ended(self) -> None:
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        if self.session is not None:
            await asyncio.to_thread(end_session, self.session)
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line without end
            while line := await process.stdout.readline():
                self._tail.append(line.decode(errors="replace").strip())
                log.debug("ray %s: %s", self.settings.name, self._tail[-1])
                if _UP in line:
                    self._up.set()

    def _reason(self) -> str:
        lines = [line for line in self._tail if line]
        telling = [line for line in lines if "rror" in line or "ailed" in line]
        logs = self.settings.session_folder / "session_latest" / "logs"
        return f"{(telling or lines or ['it wrote nothing'])[-1]} (its logs are in {logs})"


class RayNodes:
    """The head, or a node, or both of this machine, kept running by the process that has this object."""

    def __init__(self, settings: Sequence[NodeSettings], folder: Path) -> None:
        self.nodes = [RayNode(each, self._record) for each in settings]
        self._folder = folder
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """One after the other: the first may be the head of the others. Unavailable: one does not start."""
        try:
            for node in self.nodes:
                await node.start()
        except BaseException:
            await self.stop()
            raise
        self._keeping = [
            asyncio.create_task(self._keep(node), name=f"keep {node.settings.name}") for node in self.nodes
        ]

    async def stop(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(node.stop() for node in self.nodes))
        (self._folder / RECORD).unlink(missing_ok=True)
        for node in self.nodes:
            await asyncio.to_thread(shutil.rmtree, node.settings.temp_folder, ignore_errors=True)

    async def _keep(self, node: RayNode) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            began_s = time.monotonic()
            await node.wait_ended()
            if time.monotonic() - began_s > HEALTHY_S:
                backoff_s = MIN_BACKOFF_S
            log.error("the Ray %s has ended; restarting it", node.settings.name)
            await node.stop()  # what is left of it
            while True:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                try:
                    await node.start()
                except Exception as error:
                    log.error("%s; trying again in %.1f s", error, backoff_s)
                else:
                    break
            node.n_restarts += 1
            log.info("the Ray %s runs again", node.settings.name)

    def _record(self) -> None:
        keeper = ProcessId.of(os.getpid())
        assert keeper is not None
        sessions = {node.settings.name: node.session for node in self.nodes if node.session is not None}
        Record(keeper=keeper, nodes=tuple(node.settings for node in self.nodes), sessions=sessions).write(self._folder)


def end_all(folder: Path, grace_s: float = 3 * GRACE_S) -> int:
    """End what `emberline cluster up` has started here, also after its own process was killed. How many processes."""
    record = Record.read(folder)
    if record is None:
        return 0
    n_processes = len(record.processes())
    end_s = time.monotonic() + grace_s
    if record.keeper.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.keeper.pid, signal.SIGTERM)
        while record.keeper.is_alive and time.monotonic() < end_s:
            time.sleep(POLL_S)
        if record.keeper.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.keeper.pid, signal.SIGKILL)
        record = Record.read(folder) or record  # it may have restarted one meanwhile
    for leader in record.sessions.values():
        end_session(leader)
    for node in record.nodes:
        shutil.rmtree(node.temp_folder, ignore_errors=True)
    (folder / RECORD).unlink(missing_ok=True)
    return n_processes
