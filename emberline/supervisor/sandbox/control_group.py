"""Control groups: bounds on the memory, CPU and processes of a program and of all that it starts.

A program with a limit of n CPUs runs on n processors, those that the fewest other programs have: one that computes
without end delays the rest of the machine on these alone. Version 2 where the machine has it and lets this process make
groups, else version 1. A group's name has the id of the process that made it, so that groups of a process that was
killed can be found and removed.
"""

import contextlib
import fcntl
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

_log = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PREFIX = "emberline"
# A program may use its share of a period's CPU time at once, on several cores: other programs then wait that long.
CPU_PERIOD_US = 10_000
_MIN_QUOTA_US, _MAX_PERIOD_US = 1000, 1_000_000  # that the kernel takes
REMOVE_S = 5.0  # for killed processes to be gone
_numbers = itertools.count()


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    memory_bytes: int
    cpus: float
    n_processes: int  # threads count


class Hierarchy(msgspec.Struct, frozen=True):
    """Folders in which this process may make groups, by controller: memory, cpu, pids, and cpuset where it is there."""

    version: int
    folders: dict[str, Path]


CONTROLLERS = ("memory", "cpu", "pids")
_PROCESSORS = "cpuset"  # the controller that binds groups to processors: programs are kept in without it, too


def find_hierarchy(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Hierarchy | None:
    """The hierarchy in which this process may make groups. Returns None if there is none that it may write."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    unified = root / paths.get("", "/").lstrip("/")
    if _delegates(unified, CONTROLLERS):
        binds = _delegates(unified, (_PROCESSORS,))
        return Hierarchy(2, dict.fromkeys((*CONTROLLERS, _PROCESSORS) if binds else CONTROLLERS, unified))
    folders: dict[str, Path] = {}
    for name in (*CONTROLLERS, _PROCESSORS):
        for folder in (root / name / paths.get(name, "/").lstrip("/"), root / name):
            if (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
                folders[name] = folder
                break
    return Hierarchy(1, folders) if folders else None


def _delegates(folder: Path, controllers: Sequence[str]) -> bool:
    """True if groups of version 2 with all of these controllers can be made in this folder."""
    control = folder / "cgroup.subtree_control"
    if not os.access(folder, os.W_OK):
        return False
    try:
        if not set(controllers) <= set((folder / "cgroup.controllers").read_text().split()):
            return False
        if not set(controllers) <= set(control.read_text().split()):
            control.write_text(" ".join(f"+{name}" for name in controllers))
    except OSError:  # processes in the folder itself: version 2 has no groups beside them
        return False
    return True


class MemoryCounters(msgspec.Struct, frozen=True):
    """The memory of a group, as the kernel counts it. `folder` is the group's, of the memory controller."""

    version: int
    folder: Path

    @classmethod
    def of_process(cls, pid: int, root: Path = ROOT) -> "MemoryCounters | None":
        """The counters of the group that a process is in. Returns None if they cannot be found."""
        try:
            lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        except OSError:
            return None
        paths = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
        first, second = root / "memory" / paths.get("memory", ""), root / paths.get("", "")
        found = cls(1, first) if "memory" in paths else cls(2, second)
        return found if (found.folder / "cgroup.procs").exists() else None

    @property
    def memory_bytes(self) -> int:
        """Memory that the group uses now, files in memory included; 0: not known."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / name).read_text())
        return 0

    @property
    def n_out_of_memory(self) -> int:
        """Number of times that the kernel killed a process of the group because the group reached its memory limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):
            lines = (self.folder / name).read_text().split("\n")
            counts = dict(line.split(" ") for line in lines if " " in line)
            return int(counts.get("oom_kill", 0))
        return 0


class ControlGroup:
    """One group. Its methods block for microseconds, except `remove`."""

    def __init__(self, hierarchy: Hierarchy, limits: GroupLimits) -> None:
        """Make the group. Raises OSError."""
        name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._version = hierarchy.version
        self._folders = {each: folder / name for each, folder in hierarchy.folders.items()}
        for folder in set(self._folders.values()):
            folder.mkdir()
        try:
            self._set(limits)
        except OSError:
            self.remove()
            raise

    def _set(self, limits: GroupLimits) -> None:
        period = min(max(CPU_PERIOD_US, int(_MIN_QUOTA_US / limits.cpus)), _MAX_PERIOD_US)
        quota = max(_MIN_QUOTA_US, int(limits.cpus * period))
        if self._version == 2:
            self._write("memory", "memory.max", limits.memory_bytes)
            self._write("memory", "memory.swap.max", 0, optional=True)
            self._write("cpu", "cpu.max", f"{quota} {period}")
        else:
            self._write("memory", "memory.limit_in_bytes", limits.memory_bytes)
            self._write("memory", "memory.memsw.limit_in_bytes", limits.memory_bytes, optional=True)
            self._write("cpu", "cpu.cfs_period_us", period)
            self._write("cpu", "cpu.cfs_quota_us", quota)
        self._write("pids", "pids.max", limits.n_processes)
        if (folder := self._folders.get(_PROCESSORS)) is not None:
            try:
                _bind(folder, math.ceil(limits.cpus), self._version)
            except OSError as error:  # a container that hides its processors, say: the other limits hold all the same
                _log.warning("a program is not bound to processors: %s", error)
                del self._folders[_PROCESSORS]
                if folder not in self._folders.values():
                    folder.rmdir()  # a group of version 1 without processors takes no process

    @property
    def process_files(self) -> list[str]:
        """Files to which a process writes its id to enter the group."""
        return [str(folder / "cgroup.procs") for folder in sorted(set(self._folders.values()))]

    @property
    def counters(self) -> MemoryCounters | None:
        """The group's memory; None: the machine has no control group for memory."""
        folder = self._folders.get("memory")
        return None if folder is None else MemoryCounters(self._version, folder)

    @property
    def processors(self) -> set[int]:
        """Processors to which the group is bound. Empty if it may run on all."""
        folder = self._folders.get(_PROCESSORS)
        return set() if folder is None else _numbered(folder / "cpuset.cpus")

    def kill(self) -> None:
        """Kill all processes of the group."""
        folder = self._folders.get("pids") or next(iter(self._folders.values()))
        with contextlib.suppress(OSError):
            if self._version == 2 and (folder / "cgroup.kill").exists():
                (folder / "cgroup.kill").write_text("1")
                return
            for line in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)

    def remove(self) -> None:
        """Kill what is left of the group and remove it."""
        end_s = time.monotonic() + REMOVE_S
        left = set(self._folders.values())
        while left:
            self.kill()
            for folder in list(left):
                with contextlib.suppress(FileNotFoundError):
                    try:
                        folder.rmdir()
                    except OSError:
                        if time.monotonic() < end_s:
                            continue
                left.discard(folder)
            if left:
                time.sleep(0.01)

    def _write(self, controller: str, file: str, value: object, *, optional: bool = False) -> None:
        if (folder := self._folders.get(controller)) is None:
            return
        with contextlib.suppress(*([OSError] if optional else [])):
            (folder / file).write_text(str(value))


def _bind(group: Path, n_processors: int, version: int) -> None:
    """Bind a group to the processors that the fewest other groups have. The lock keeps two processes from choosing the
    same ones at once."""
    parent = group.parent
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if version == 1:  # a group of version 1 takes no process before it has memory nodes
            (group / "cpuset.mems").write_text((parent / "cpuset.effective_mems").read_text())
        effective = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
        taken = [_numbered(each) for each in parent.glob(f"{PREFIX}-*-*/cpuset.cpus")]
        # Of equals those with the highest numbers: the first processor serves most interrupts.
        free = sorted(_numbered(parent / effective), key=lambda each: (sum(each in own for own in taken), -each))
        (group / "cpuset.cpus").write_text(",".join(map(str, sorted(free[:n_processors]))))
    finally:
        os.close(descriptor)


def _numbered(path: Path) -> set[int]:
    """The processors in a file such as "0-3,8". Empty if the group is gone."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def remove_abandoned(hierarchy: Hierarchy) -> None:
    """Kill and remove the groups of processes that were killed before they could do so themselves."""
    for folder in set(hierarchy.folders.values()):
        for group in folder.glob(f"{PREFIX}-*-*"):
            owner = group.name.split("-")[1]
            if owner.isdigit() and not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    for pid in (group / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    group.rmdir()
