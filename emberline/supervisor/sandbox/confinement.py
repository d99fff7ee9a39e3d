"""Confines the calling process for the rest of its life: resource limits, Landlock and seccomp.

Resource limits work everywhere. Landlock takes files and TCP away, seccomp the system calls that reach other processes,
other hosts or the kernel's rarer parts. What a kernel lacks is returned by name, for the log: the rest still holds.
"""

import ctypes
import os
import resource
import struct

import msgspec

LANDLOCK, SECCOMP = "Landlock", "seccomp"
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 38, 22, 4
_SECCOMP_MODE_FILTER = 2

# Landlock's system calls have the same numbers on all architectures.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_VERSION = 1  # flag: return the version of the interface
# The rights over files that each version of Landlock knows, and since when it knows TCP, signals and abstract sockets.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_TCP_SINCE, _SCOPES_SINCE = 4, 6

# BPF instructions: load a word of seccomp's data, jump if equal, jump if a bit is set, return.
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in seccomp's data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000
_SET_OWNER = (8, 15)  # commands of fcntl that name a process to be signalled when a file is ready
_SET_OWNER_IOCTLS = (0x8901, 0x8902)  # the same by ioctl
_X32 = 0x40000000  # bit of x86-64's other numbers for the same calls


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a process. It has no files, network or other processes in any case."""

    memory_bytes: int  # of address space, beyond what the process has when it is confined
    n_files: int = 16  # open descriptors


class _Machine(msgspec.Struct, frozen=True):
    """System calls of an architecture, by number."""

    audit: int  # as seccomp names the architecture
    clone: int
    prlimit: int
    fcntl: int
    ioctl: int
    denied: tuple[int, ...]


# With the same numbers on all architectures: pidfd_getfd, process_madvise, process_mrelease; open_tree, move_mount,
# fsopen, fsconfig, fsmount, fspick, mount_setattr.
_DENIED = (438, 440, 448, 428, 429, 430, 431, 432, 433, 442)
# socket, socketpair, connect, bind, listen; execve, execveat, fork, vfork; ptrace, process_vm_readv, process_vm_writev,
# kill, pidfd_open, pidfd_send_signal; mount, umount2, unshare, setns, open_by_handle_at; bpf, perf_event_open,
# userfaultfd, io_uring_setup, add_key, request_key, keyctl, init_module, finit_module, delete_module, kexec_load;
# tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, setpriority, ioprio_set, sched_setparam, sched_setscheduler,
# sched_setaffinity, sched_setattr; shmget, shmctl, shmat, semget, semctl, semop, semtimedop, msgget, msgctl, msgsnd,
# msgrcv, mq_open, mq_unlink; kexec_file_load, reboot, and _DENIED.
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        56,
        302,
        72,
        16,
        (
            *(41, 53, 42, 49, 50, 59, 322, 57, 58, 101, 310, 311, 62, 434, 424, 165, 166, 272, 308, 304, 321, 298, 323),
            *(425, 248, 249, 250, 175, 313, 176, 246, 200, 234, 129, 297, 141, 251, 142, 144, 203, 314),
            *(29, 31, 30, 64, 66, 65, 220, 68, 71, 69, 70, 240, 241, 320, 169, *_DENIED),
        ),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        220,
        261,
        25,
        29,
        (
            *(198, 199, 203, 200, 201, 221, 281, 117, 270, 271, 129, 434, 424, 40, 39, 97, 268, 265, 280, 241, 282),
            *(425, 217, 218, 219, 105, 273, 106, 104, 130, 131, 138, 240, 140, 30, 118, 119, 122, 274),
            *(194, 195, 196, 190, 191, 193, 192, 186, 187, 189, 188, 180, 181, 294, 142, *_DENIED),
        ),
    ),
}
_CLONE3 = 435  # answered as missing: the C library falls back to clone, whose flags can be looked at


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
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return [LANDLOCK, SECCOMP]
    has = {LANDLOCK: _apply_landlock(libc), SECCOMP: _apply_seccomp(libc)}
    return [name for name, applied in has.items() if not applied]


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


def _apply_landlock(libc: ctypes.CDLL) -> bool:
    """Take all files and TCP ports away: a ruleset without a rule. Open descriptors stay usable."""
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    if version < 1:
        return False
    rights = struct.pack("=Q", _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))])
    if version >= _TCP_SINCE:
        rights += struct.pack("=Q", 3)  # bind and connect
    if version >= _SCOPES_SINCE:
        rights += struct.pack("=Q", 3)  # abstract sockets and signals
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        return bool(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def _apply_seccomp(libc: ctypes.CDLL) -> bool:
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        return False
    filter_bytes = b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(machine))
    instructions = ctypes.create_string_buffer(filter_bytes, len(filter_bytes))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    program = Program(len(filter_bytes) // 8, ctypes.addressof(instructions))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _program(machine: _Machine) -> list[tuple[int, int, int, int]]:
    """The filter: instruction, how far to jump if true and if false, and its operand."""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_SET, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in machine.denied:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    program += _refuse_commands(machine.fcntl, _SET_OWNER) + _refuse_commands(machine.ioctl, _SET_OWNER_IOCTLS)
    return [
        *program,
        (_JUMP_EQUAL, 0, 4, machine.prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 0, 1, 0),  # of this process
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_JUMP_EQUAL, 0, 3, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_SET, 1, 0, _CLONE_THREAD),  # threads are allowed
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse_commands(number: int, commands: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The part of the filter that refuses a call whose second argument is one of these."""
    n = len(commands)
    return [
        (_JUMP_EQUAL, 0, n + 3, number),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        *((_JUMP_EQUAL, n - at, 0, command) for at, command in enumerate(commands)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
