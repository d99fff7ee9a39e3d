"""The last step before a program that is not ours: `python -m emberline.supervisor.sandbox.enter DESCRIPTOR`.

The process enters the program's control group, sets resource limits, confines itself, and becomes the program, or
bubblewrap, which becomes it. It keeps its id, and ends with the thread that started it. How to become the program comes
by a descriptor, not in the arguments, which every user of the machine can read.
"""

import ctypes
import os
import resource
import signal
import sys

import msgspec

from emberline.supervisor.sandbox import landlock, seccomp
from emberline.supervisor.sandbox.confinement import forbid_new_privileges

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_N_CAPABILITIES = 64
NOBODY = 65534  # the user and group of foreign programs
ARGUMENTS = "{arguments}"  # stands in bubblewrap's command for a descriptor with further arguments
FILTER = "{filter}"  # stands in a command for the number of the descriptor of the filter of system calls
FILE = "{file:"  # FILE + content + "}" stands for the number of a descriptor from which the content can be read


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Instructions for becoming a program: its command, environment and limits."""

    command: tuple[str, ...]  # of bubblewrap, or of the program itself
    groups: tuple[str, ...] = ()  # files of control groups to which to write the process's id
    limits: dict[str, int] = {}  # resource limits, by their name in the module `resource`
    arguments: tuple[str, ...] = ()  # for bubblewrap; empty: the program runs without it
    environment: dict[str, str] = {}  # without bubblewrap
    readable: tuple[str, ...] = ()  # without bubblewrap: for Landlock
    writable: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    folder: str = "/"
    bare: bool = False  # the operator insists: neither bubblewrap nor Landlock


def main() -> None:
    with open(int(sys.argv[1]), "rb") as given:
        entry = msgspec.json.decode(given.read(), type=Entry)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for group in entry.groups:
        with open(group, "w") as file:
            file.write(str(os.getpid()))
    for name, value in entry.limits.items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))
    if entry.arguments:
        further = "\0".join(_resolved(argument) for argument in entry.arguments)
        numbers = {ARGUMENTS: str(readable_descriptor(further.encode()))}
        command = [numbers.get(argument, argument) for argument in entry.command]
        os.execve(command[0], command, {})
    for folder in entry.writable:
        if os.geteuid() == 0 and os.path.isdir(folder):
            os.chown(folder, NOBODY, NOBODY)
    os.chdir(entry.folder)
    for capability in range(_N_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.geteuid() == 0:  # root could change the modes of files, which Landlock does not look at
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if not forbid_new_privileges(libc):
        raise SystemExit("the kernel does not forbid new privileges")
    if not entry.bare and not landlock.apply(libc, entry.readable, entry.writable, entry.ports):
        raise SystemExit("Landlock could not be applied")
    if not seccomp.apply(seccomp.program_filter(only_streams=True), libc) and not entry.bare:
        raise SystemExit("the filter of system calls could not be applied")
    os.execve(entry.command[0], entry.command, entry.environment)


def _resolved(argument: str) -> str:
    """An argument of bubblewrap's, with the number of a descriptor in place of what is to be read from it."""
    if argument == FILTER:
        return str(readable_descriptor(seccomp.program_filter(only_streams=False) or b""))
    if argument.startswith(FILE):
        return str(readable_descriptor(argument[len(FILE) : -1].encode()))
    return argument


def readable_descriptor(content: bytes) -> int:
    """Open a descriptor, which the next program inherits, from which the content can be read."""
    descriptor = os.memfd_create("emberline", 0)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return descriptor


if __name__ == "__main__":
    main()
