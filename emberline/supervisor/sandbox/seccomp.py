"""Filters of system calls (seccomp), written as BPF for x86-64 and ARM64.

`data_filter` is for our code over a stranger's data: it reaches no other process, host or file. `program_filter` is for
programs that are not ours: they may start processes and use sockets, and the rarer parts of the kernel are closed.
"""

import ctypes
import os
import struct

import msgspec

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# BPF instructions: load a word of seccomp's data, mask it, jump if equal, jump if a bit is set, return.
_LOAD, _AND, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in seccomp's data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020080  # of users, mounts, processes, network, …: all flags of clone that make a new one
_SET_OWNER = (8, 15)  # commands of fcntl that name a process to be signalled when a file is ready
_SET_OWNER_IOCTLS = (0x8901, 0x8902)  # the same by ioctl
_TERMINAL_IOCTLS = (0x5412, 0x541C)  # type into the terminal, or change its console
_FAMILIES = (1, 2, 10)  # of sockets: Unix, IPv4, IPv6
_INTERNET = (2, 10)
_SOCKET_KIND, _STREAM = 0xF, 1
_X32 = 0x40000000  # bit of x86-64's other numbers for the same calls

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class Machine(msgspec.Struct, frozen=True):
    """System calls of an architecture, by number."""

    audit: int  # as seccomp names the architecture
    clone: int
    prlimit: int
    fcntl: int
    ioctl: int
    socket: int
    data_denied: tuple[int, ...]
    program_denied: tuple[int, ...]


# With the same numbers on all architectures: pidfd_getfd, process_madvise, process_mrelease; open_tree, move_mount,
# fsopen, fsconfig, fsmount, fspick, mount_setattr.
_DENIED = (438, 440, 448, 428, 429, 430, 431, 432, 433, 442)
# data_denied: socket, socketpair, connect, bind, listen; execve, execveat, fork, vfork; ptrace, process_vm_readv,
# process_vm_writev, kill, pidfd_open, pidfd_send_signal; mount, umount2, unshare, setns, open_by_handle_at; bpf,
# perf_event_open, userfaultfd, io_uring_setup, add_key, request_key, keyctl, init_module, finit_module, delete_module,
# kexec_load; tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, setpriority, ioprio_set, sched_setparam,
# sched_setscheduler, sched_setaffinity, sched_setattr; shmget, shmctl, shmat, semget, semctl, semop, semtimedop,
# msgget, msgctl, msgsnd, msgrcv, mq_open, mq_unlink; kexec_file_load, reboot, and _DENIED.
# program_denied: ptrace, process_vm_readv, process_vm_writev, kcmp; mount, umount2, unshare, setns, pivot_root,
# chroot, name_to_handle_at, open_by_handle_at; bpf, perf_event_open, userfaultfd, io_uring_setup, io_uring_enter,
# io_uring_register; add_key, request_key, keyctl; init_module, finit_module, delete_module, kexec_load,
# kexec_file_load, reboot; swapon, swapoff, settimeofday, clock_settime, adjtimex, clock_adjtime, acct, sethostname,
# setdomainname, quotactl, vhangup, syslog, fanotify_init, quotactl_fd, and _DENIED.
MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        56,
        302,
        72,
        16,
        41,
        (
            *(41, 53, 42, 49, 50, 59, 322, 57, 58, 101, 310, 311, 62, 434, 424, 165, 166, 272, 308, 304, 321, 298, 323),
            *(425, 248, 249, 250, 175, 313, 176, 246, 200, 234, 129, 297, 141, 251, 142, 144, 203, 314),
            *(29, 31, 30, 64, 66, 65, 220, 68, 71, 69, 70, 240, 241, 320, 169, *_DENIED),
        ),
        (
            *(101, 310, 311, 312, 165, 166, 272, 308, 155, 161, 303, 304, 321, 298, 323, 425, 426, 427, 248, 249, 250),
            *(175, 313, 176, 246, 320, 169, 167, 168, 164, 227, 159, 305, 163, 170, 171, 179, 153, 103, 300, 443),
            *_DENIED,
        ),
    ),
    "aarch64": Machine(
        0xC00000B7,
        220,
        261,
        25,
        29,
        198,
        (
            *(198, 199, 203, 200, 201, 221, 281, 117, 270, 271, 129, 434, 424, 40, 39, 97, 268, 265, 280, 241, 282),
            *(425, 217, 218, 219, 105, 273, 106, 104, 130, 131, 138, 240, 140, 30, 118, 119, 122, 274),
            *(194, 195, 196, 190, 191, 193, 192, 186, 187, 189, 188, 180, 181, 294, 142, *_DENIED),
        ),
        (
            *(117, 270, 271, 272, 40, 39, 97, 268, 41, 51, 264, 265, 280, 241, 282, 425, 426, 427, 217, 218, 219),
            *(105, 273, 106, 104, 294, 142, 224, 225, 170, 112, 171, 266, 89, 161, 162, 60, 58, 116, 262, 443),
            *_DENIED,
        ),
    ),
}
_CLONE3 = 435  # answered as missing: the C library falls back to clone, whose flags can be looked at


def data_filter() -> bytes | None:
    """The filter for our code over a stranger's data. Returns None on an architecture that has none here."""
    if (machine := MACHINES.get(os.uname().machine)) is None:
        return None
    return _encode(
        [
            *_head(machine, machine.data_denied),
            *_refuse_commands(machine.fcntl, _SET_OWNER),
            *_refuse_commands(machine.ioctl, _SET_OWNER_IOCTLS),
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
    )


def program_filter(*, only_streams: bool) -> bytes | None:
    """The filter for a program that is not ours. Returns None on an architecture that has none here.

    `only_streams` refuses datagrams and raw packets, where no network namespace keeps them on the machine."""
    if (machine := MACHINES.get(os.uname().machine)) is None:
        return None
    return _encode(
        [
            *_head(machine, machine.program_denied),
            *_refuse_commands(machine.ioctl, _TERMINAL_IOCTLS),
            (_JUMP_EQUAL, 0, 1, _CLONE3),
            (_RETURN, 0, 0, _ERRNO | _ENOSYS),
            (_JUMP_EQUAL, 0, 4, machine.clone),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_SET, 0, 1, _CLONE_NAMESPACES),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
            (_RETURN, 0, 0, _ALLOW),
            *_check_socket(machine.socket, only_streams),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )


def apply(program: bytes | None, libc: ctypes.CDLL) -> bool:
    """Filter the system calls of this process from now on. Returns False if that cannot be."""
    if program is None:
        return False
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    given = Program(len(program) // 8, ctypes.addressof(instructions))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) == 0)


def _encode(program: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _head(machine: Machine, denied: tuple[int, ...]) -> list[Instruction]:
    """Kill what calls by another architecture's numbers, load the call's number, and refuse the denied ones."""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_SET, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in denied:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return program


def _refuse_commands(number: int, commands: tuple[int, ...]) -> list[Instruction]:
    """The part of the filter that refuses a call whose second argument is one of these."""
    n = len(commands)
    return [
        (_JUMP_EQUAL, 0, n + 3, number),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        *((_JUMP_EQUAL, n - at, 0, command) for at, command in enumerate(commands)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]


def _check_socket(number: int, only_streams: bool) -> list[Instruction]:
    """The part of the filter that allows sockets of three families, and ends the filter for this call."""
    kinds: list[Instruction] = []
    if only_streams:
        kinds = [
            (_JUMP_EQUAL, 1, 0, _INTERNET[0]),
            (_JUMP_EQUAL, 0, 4, _INTERNET[1]),
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_AND, 0, 0, _SOCKET_KIND),
            (_JUMP_EQUAL, 1, 0, _STREAM),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
        ]
    n = len(_FAMILIES)
    checks: list[Instruction] = [
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_JUMP_EQUAL, n - at, 0, family) for at, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        *kinds,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [(_JUMP_EQUAL, 0, len(checks), number), *checks]
