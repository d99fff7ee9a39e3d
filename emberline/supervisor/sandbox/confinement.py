"""Confines the calling process for the rest of its life: resource limits, Landlock and seccomp.

Resource limits work everywhere. Landlock takes files and TCP away, seccomp the system calls that reach other processes,
other hosts or the kernel's rarer parts. What a kernel lacks is returned by name, for the log: the rest still holds.
"""

import ctypes
import resource

import msgspec

from emberline.supervisor.sandbox import landlock, seccomp

LANDLOCK, SECCOMP = "Landlock", "seccomp"
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a process. It has no files, network or other processes in any case."""

    memory_bytes: int  # of address space, beyond what the process has when it is confined
    n_files: int = 16  # open descriptors


def confine(limits: Confinement) -> list[str]:
    """Confine this process. Returns the names of the protections that this kernel does not have.

    Everything that the process needs of files (modules, time zones) must be in memory by now."""
    bounds = {
        resource.RLIMIT_AS: _address_space() + limits.memory_bytes,
        resource.RLIMIT_NOFILE: limits.n_files,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, bound in bounds.items():
        resource.setrlimit(which, (bound, bound))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):  # not Linux
        return [LANDLOCK, SECCOMP]
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if not forbid_new_privileges(libc):
        return [LANDLOCK, SECCOMP]
    has = {LANDLOCK: landlock.apply(libc), SECCOMP: seccomp.apply(seccomp.data_filter(), libc)}
    return [name for name, applied in has.items() if not applied]


def forbid_new_privileges(libc: ctypes.CDLL) -> bool:
    """Let no program that this process executes gain privileges, as both protections demand. False: it cannot be."""
    return bool(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def bound_cpu_time(seconds: float) -> None:
    """Let the kernel end this process once it has used about so many more seconds of CPU time than by now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard))


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: a generous guess
        return 1 << 29
