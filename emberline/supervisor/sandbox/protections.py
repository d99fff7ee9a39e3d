"""The protections against foreign programs that this machine has: bubblewrap, control groups, Landlock, seccomp."""

import ctypes
import os
import shutil
import subprocess
from functools import cached_property

import msgspec

from emberline.supervisor.sandbox import landlock, seccomp
from emberline.supervisor.sandbox.control_group import CONTROLLERS, Hierarchy, find_hierarchy
from emberline.supervisor.sandbox.enter import NOBODY

PROBE_S = 20.0
_PROBE = ("--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
_PROBE_USERS = ("--unshare-user", "--disable-userns")
_DROP_ROOT = (
    "--reuid",
    str(NOBODY),
    "--regid",
    str(NOBODY),
    "--clear-groups",
    "--bounding-set",
    "-all",
    "--inh-caps",
    "-all",
    "--no-new-privs",
    "--",
)


class Protections(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Found once, when the first program is about to be started."""

    bubblewrap: str = ""  # its path; empty: it is not here, or does not work
    bubblewrap_problem: str = ""
    drop_root: tuple[str, ...] = ()  # if root starts programs: the command by which one becomes another user
    hierarchy: Hierarchy | None = None  # of control groups that this process may make
    landlock: int = 0  # the version of the kernel's interface
    seccomp: bool = False

    @property
    def bounds_memory(self) -> bool:
        """True if a control group bounds the memory of all processes of a program."""
        return self.hierarchy is not None and "memory" in self.hierarchy.folders

    @cached_property
    def missing(self) -> list[str]:
        """The protections that this machine lacks, and what each of them would do."""
        found = []
        if not self.bubblewrap:
            found.append(f"bubblewrap ({self.bubblewrap_problem}): own process ids, an own network, scratch quotas")
            if self.landlock < landlock.TCP_SINCE:
                found.append("Landlock of version 4: files and TCP")
        has = () if self.hierarchy is None else self.hierarchy.folders
        if lacking := [name for name in CONTROLLERS if name not in has]:
            what = "limits are those of single processes, and CPU time is not shared out"
            found.append(f"control groups for {', '.join(lacking)}: {what}")
        if not self.seccomp:
            found.append("seccomp for this processor: rare system calls stay open")
        return found

    def refusal(self, *, insists: bool) -> str:
        """Why no foreign program may run here; empty if it may."""
        if self.bubblewrap or insists or (self.landlock >= landlock.TCP_SINCE and self.seccomp):
            return ""
        return (
            f"this machine cannot keep foreign code in: it lacks {'; '.join(self.missing)}. Install bubblewrap "
            "(apt-get install bubblewrap), or set sandbox.bare = true to run it without protection"
        )


def find_protections(path: str | None = None) -> Protections:
    """Look at this machine. Blocks for some milliseconds. `path`: where to look for bubblewrap; None: in PATH."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return Protections(bubblewrap_problem="only Linux has it")
    is_root = os.geteuid() == 0
    setpriv = shutil.which("setpriv", path=path)
    bubblewrap, problem = _find_bubblewrap(path, () if is_root else _PROBE_USERS)
    if bubblewrap and is_root and setpriv is None:
        bubblewrap, problem = "", "root needs setpriv beside it, of util-linux"
    return Protections(
        bubblewrap=bubblewrap,
        drop_root=(setpriv, *_DROP_ROOT) if is_root and setpriv is not None else (),
        bubblewrap_problem=problem,
        hierarchy=find_hierarchy(),
        landlock=max(0, landlock.version(libc)),
        seccomp=os.uname().machine in seccomp.MACHINES,
    )


def _find_bubblewrap(path: str | None, users: tuple[str, ...]) -> tuple[str, str]:
    """The path of a bubblewrap that works, or why there is none."""
    found = shutil.which("bwrap", path=path)
    if found is None:
        return "", "not installed: apt-get install bubblewrap"
    try:
        done = subprocess.run(
            [found, *_PROBE, *users, "--", "/bin/true"], capture_output=True, timeout=PROBE_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        return "", done.stderr.decode(errors="replace").strip()[:200] or f"it ends with status {done.returncode}"
    return found, ""
