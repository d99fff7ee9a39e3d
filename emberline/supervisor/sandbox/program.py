"""Programs that are not ours, such as predictors: what one may see and use, and one that runs.

A program has no network, sees the folders that it was given and nothing else, and is bounded in memory, CPU, processes
and scratch space. Killing it ends all that it has started, too.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from emberline.protocol.errors import Unavailable
from emberline.protocol.sizes import format_limit
from emberline.supervisor.sandbox import control_group
from emberline.supervisor.sandbox.control_group import ControlGroup, GroupLimits
from emberline.supervisor.sandbox.enter import ARGUMENTS, FILE, FILTER, NOBODY, Entry, readable_descriptor
from emberline.supervisor.sandbox.protections import Protections

SCRATCH = "/tmp"  # where the program may write
_IN_MEMORY = (SCRATCH, "/dev/shm")  # each with a bound of its own
FULL_SHARE = 0.01  # of a scratch space that is left when it counts as full
_ENTER = "emberline.supervisor.sandbox.enter"
# Folders and files of the system that every program sees.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_MOUNTED = ("/usr", "/bin", "/sbin", "/lib", "/proc", "/dev")  # folders of the system, which have their parents
_SETTINGS = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl", "/etc/pki", "/etc/ca-certificates"),
    *("/etc/alternatives", "/etc/localtime", "/etc/fonts", "/etc/mime.types", "/etc/os-release", "/etc/nsswitch.conf"),
    "/sys/devices/system/cpu",
)
_FILES = {
    "/etc/passwd": "nobody:x:65534:65534:nobody:/tmp:/bin/false\n",
    "/etc/group": "nogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/resolv.conf": "",
}
_log = logging.getLogger(__name__)
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str  # in which it begins
    readable: Sequence[tuple[str, str]]  # folders and files, and where the program sees them
    writable: Sequence[tuple[str, str]] = ()  # folders that stay
    memory_bytes: int  # of all its processes, without scratch space
    scratch_bytes: int = 1 << 30
    cpus: float = 1.0
    n_processes: int = 256  # threads count
    n_files: int = 1024  # open descriptors of a process
    cpu_s: int = 0  # CPU time of a process; 0: no bound
    ports: tuple[int, ...] = ()  # TCP ports that it may use where no network namespace keeps it on the machine
    gpus: tuple[str, ...] = ()  # numbers of devices; nobody else may use them meanwhile


class Running:
    """A process that was started: of a program, or the engine's command of a container."""

    _process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def processors(self) -> set[int]:
        """Processors that it runs on. Empty if it may run on all, or that is not known."""
        return set()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait(self, limit_s: float) -> bool:
        """Wait for it to end. Returns False after `limit_s`."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class RunningProgram(Running):
    """A program that was started. `kill` it in any case, also after it has ended."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", group: ControlGroup | None, scratch: str, memory_limit: int
    ) -> None:
        self._process = process
        self._group = group
        self._scratch = scratch  # a folder on disk; empty: in memory
        self._memory_limit = memory_limit

    @property
    def descriptor(self) -> int:
        """A descriptor that becomes readable once the program has ended. Its caller closes it."""
        return os.pidfd_open(self._process.pid)

    @property
    def memory_bytes(self) -> int:
        """Memory that it uses, with all processes and scratch files; 0: not known."""
        counters = None if self._group is None else self._group.counters
        return 0 if counters is None else counters.memory_bytes

    @property
    def processors(self) -> set[int]:
        return set() if self._group is None else self._group.processors

    @property
    def scratch_is_full(self) -> bool:
        """True if the program has no scratch space left. False if that is not known."""
        if self._scratch:
            return _is_full(self._scratch)
        try:  # bubblewrap itself is outside, and its child is inside
            inside = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return False
        return any(is_full_inside(pid) for pid in inside)

    @property
    def problem(self) -> str:
        """Why it ended, as far as the launcher knows; empty if it only ended."""
        counters = None if self._group is None else self._group.counters
        if counters is not None and counters.n_out_of_memory:
            return f"it used more than its {format_limit(self._memory_limit)} of memory"
        status = self._process.poll()
        if status is None or status == 0:
            return ""
        return f"it was ended by {_signal_name(-status)}" if status < 0 else f"it ended with status {status}"

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and all that it has started. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._group is not None:
            self._group.remove()
            self._group = None
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def is_full_inside(pid: str) -> bool:
    """True if the process, which is in a sandbox, has no scratch space left. False if that is not known."""
    return any(_is_full(f"/proc/{pid}/root{place}") for place in _IN_MEMORY)


def _is_full(folder: str) -> bool:
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail < FULL_SHARE * space.f_blocks


class Sandbox:
    """Starts programs with the protections of this machine."""

    def __init__(self, protections: Protections, *, insists: bool = False) -> None:
        """`insists`: the operator wants programs to run even where this machine cannot keep them in."""
        self.protections = protections
        self._insists = insists
        if protections.hierarchy is not None:
            control_group.remove_abandoned(protections.hierarchy)

    def start(
        self, program: Program, output: int, inherited: Sequence[int] = (), stdin: int = subprocess.DEVNULL
    ) -> RunningProgram:
        """Start a program that writes to the descriptor `output` and inherits other descriptors.

        It ends with the thread that calls this. Raises Unavailable if this machine cannot keep it in, or cannot start
        it."""
        if problem := self.protections.refusal(insists=self._insists):
            raise Unavailable(problem)
        if not self.protections.bubblewrap and os.geteuid() == 0:
            seen = {place: path for path, place in (*program.readable, *program.writable)}
            _check_reachable([_placed(each, seen) for each in (program.command[0], program.folder)])
        group = self._group(program)
        scratch = "" if self.protections.bubblewrap else tempfile.mkdtemp(prefix="emberline-scratch-")
        entry = readable_descriptor(msgspec.json.encode(self._entry(program, group, scratch)))
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _ENTER, str(entry)],
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=(entry, *inherited),
                env=_entering_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            if group is not None:
                group.remove()
            raise Unavailable(f"a sandboxed program cannot be started: {error.strerror}") from None
        finally:
            os.close(entry)
        return RunningProgram(process, group, scratch, program.memory_bytes)

    def _group(self, program: Program) -> ControlGroup | None:
        if self.protections.hierarchy is None:
            return None
        limits = GroupLimits(
            memory_bytes=program.memory_bytes + program.scratch_bytes,
            cpus=program.cpus,
            n_processes=program.n_processes,
        )
        try:
            return ControlGroup(self.protections.hierarchy, limits)
        except OSError as error:
            raise Unavailable(f"no control group can be made for a sandboxed program: {error.strerror}") from None

    def _entry(self, program: Program, group: ControlGroup | None, scratch: str) -> Entry:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": program.n_files}
        if program.cpu_s:
            limits["RLIMIT_CPU"] = program.cpu_s
        if not self.protections.bounds_memory:
            limits["RLIMIT_AS"] = program.memory_bytes + program.scratch_bytes
        groups = () if group is None else tuple(group.process_files)
        if self.protections.bubblewrap:
            drop_root = self.protections.drop_root
            return Entry(
                command=(self.protections.bubblewrap, "--args", ARGUMENTS, "--", *drop_root, *program.command),
                arguments=tuple(_bubblewrap_arguments(program, bool(drop_root))),
                groups=groups,
                limits=limits,
            )
        # Without a mount namespace the program sees its folders where they are, and its scratch folder is on disk.
        places = {seen: path for path, seen in (*program.readable, *program.writable)} | {SCRATCH: scratch}
        return Entry(
            command=tuple(_placed(argument, places) for argument in program.command),
            environment={name: _placed(value, places) for name, value in program.environment.items()},
            groups=groups,
            limits=limits | {"RLIMIT_FSIZE": program.scratch_bytes},
            readable=(*_SYSTEM, *_SETTINGS, "/dev", "/proc", *(path for path, _ in program.readable)),
            writable=("/dev/null", scratch, *(path for path, _ in program.writable)),
            ports=program.ports,
            folder=places.get(program.folder, program.folder),
            bare=not self.protections.landlock,
        )


def _bubblewrap_arguments(program: Program, is_root: bool) -> list[str]:
    """Mounts, namespaces and variables of a program. For root, no user namespace: its only user would be root outside,
    who owns devices and settings of the kernel. The step before the program becomes another user (`drop_root`)."""
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    if is_root:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            arguments += ["--cap-add", capability]
    else:
        arguments += ["--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for name, value in program.environment.items():
        arguments += ["--setenv", name, value]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    for path in _SETTINGS:
        arguments += ["--ro-bind-try", path, path]
    for path, content in _FILES.items():
        arguments += ["--ro-bind-data", f"{FILE}{content}}}", path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in _IN_MEMORY:
        arguments += ["--perms", "1777", "--size", str(program.scratch_bytes), "--tmpfs", path]
    seen = [seen for _, seen in (*program.readable, *program.writable)]
    for parent in sorted({str(parent) for each in seen for parent in PurePosixPath(each).parents}, key=len):
        if not parent.startswith(_MOUNTED) and parent != "/":
            arguments += ["--perms", "0755", "--dir", parent]
    for path, place in program.readable:
        arguments += ["--ro-bind", path, place]
    for path, place in program.writable:
        arguments += ["--bind", path, place]
    for device in [*_GPU_DEVICES, *(f"/dev/nvidia{number}" for number in program.gpus)] if program.gpus else []:
        arguments += ["--dev-bind-try", device, device]
    # Only scratch space may be written: the roots of / and /dev are memory without a bound otherwise.
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", FILTER, "--chdir", program.folder]


def _check_reachable(paths: Sequence[str]) -> None:
    """Raise Unavailable for a path that another user than root cannot reach: without mounts of its own, a program sees
    it where it is."""
    for path in paths:
        for parent in Path(path).absolute().parents:
            if not parent.stat().st_mode & 0o001:
                _log.error("a sandboxed program's user may not enter %s", parent)
                raise Unavailable(
                    "root runs foreign programs as another user, who may not enter the folder of this one: install "
                    "bubblewrap, or use a data folder that every user may enter (--data-dir)"
                )


def _placed(text: str, places: Mapping[str, str]) -> str:
    """A path as it is outside, if the text is the path of one of these places or inside of one."""
    for seen, path in places.items():
        if text == seen or text.startswith(f"{seen}/"):
            return path + text[len(seen) :]
    return text


def _entering_environment() -> dict[str, str]:
    """Variables of the step before the program, which passes none of them on."""
    inherited = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH")
    found = {name: os.environ[name] for name in inherited if name in os.environ}
    return found | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
