"""Landlock: takes files, TCP ports, signals and abstract sockets away from a process, except what rules give back."""

import ctypes
import os
import struct
from collections.abc import Sequence

# Landlock's system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag: return the version of the interface
_BENEATH, _PORT = 1, 2  # kinds of rules
# The rights over files that each version knows, and since when it knows TCP, signals and abstract sockets.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
TCP_SINCE, _SCOPES_SINCE = 4, 6
_BIND_AND_CONNECT = 3
_READ = 0b1101  # execute, read a file, list a folder
_ON_FILES = 0b1100_0000_0000_0111  # the rights that a rule for a file may give: execute, write, read, truncate, ioctl
_DEVICES = 1 << 6 | 1 << 11  # make character and block devices: never given back


def version(libc: ctypes.CDLL) -> int:
    """The version that this kernel has; 0 or less if it has none."""
    return int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def apply(
    libc: ctypes.CDLL, readable: Sequence[str] = (), writable: Sequence[str] = (), ports: Sequence[int] = ()
) -> bool:
    """Confine this process to these files and folders, and to these TCP ports. Returns False if that cannot be.

    Open descriptors stay usable."""
    known = version(libc)
    if known < 1:
        return False
    all_rights = _FILE_RIGHTS[min(known, max(_FILE_RIGHTS))]
    rights = struct.pack("=Q", all_rights)
    if known >= TCP_SINCE:
        rights += struct.pack("=Q", _BIND_AND_CONNECT)
    if known >= _SCOPES_SINCE:
        rights += struct.pack("=Q", 3)  # abstract sockets and signals
    ruleset = libc.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow_path(libc, ruleset, path, _READ)
        for path in writable:
            _allow_path(libc, ruleset, path, all_rights & ~_DEVICES)
        for port in ports if known >= TCP_SINCE else ():
            rule = struct.pack("=QQ", _BIND_AND_CONNECT, port)
            libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(_PORT), rule, ctypes.c_uint32(0))
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def _allow_path(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    """Give rights over a file or folder back. A path that is not there is left out."""
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _ON_FILES, beneath)
        libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)
