"""A hostile program: tries to get out of its sandbox in many ways, and prints what came of each as JSON.

Run by tests with the plain interpreter, not imported: `python escapes.py ATTEMPT ARGUMENT …`.
"""

import ctypes
import json
import os
import socket
import sys


def call(name: str, *arguments: object) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
    return "done"


def system_call(number: int, *arguments: int) -> str:
    return call("syscall", ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments))


def connect(family: int, address: object, kind: int = socket.SOCK_STREAM) -> str:
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
        sock.send(b"x")
    return "done"


def write(path: str) -> str:
    with open(path, "w") as file:
        file.write("x")
    return "done"


def read(path: str) -> str:
    with open(path, "rb") as file:
        return repr(file.read(64))


def fork_many() -> str:
    children = 0
    try:
        while children < 5000:
            if os.fork() == 0:
                signal_wait()
            children += 1
    except OSError:
        pass
    return str(children)


def signal_wait() -> None:
    import time

    time.sleep(60)
    os._exit(0)


def fill(folder: str) -> str:
    n_bytes = 0
    try:
        with open(f"{folder}/large", "wb", buffering=0) as file:
            while n_bytes < 10 << 30:
                n_bytes += file.write(b"x" * (1 << 20))
    except OSError as error:
        return f"{type(error).__name__} after {n_bytes >> 20} MiB"
    return "wrote all"


def allocate() -> str:
    held = [bytearray(b"x" * (8 << 20)) for _ in range(1024)]
    return f"{len(held)} pieces"


ATTEMPTS = {
    "read": read,
    "list": lambda path: str(os.listdir(path)),
    "write": write,
    "mode": lambda path: str(os.chmod(path, 0o777)),
    "remove": lambda path: str(os.unlink(path)),
    "link": lambda path: str(os.symlink(path, f"{os.environ['HOME']}/link")) + read(f"{os.environ['HOME']}/link"),
    "tcp": lambda port: connect(socket.AF_INET, ("127.0.0.1", int(port))),
    "tcp6": lambda port: connect(socket.AF_INET6, ("::1", int(port))),
    "udp": lambda port: connect(socket.AF_INET, ("127.0.0.1", int(port)), socket.SOCK_DGRAM),
    "raw": lambda _: connect(socket.AF_INET, ("127.0.0.1", 1), socket.SOCK_RAW),
    "internet": lambda _: connect(socket.AF_INET, ("1.1.1.1", 443)),
    "unix": lambda path: connect(socket.AF_UNIX, path),
    "abstract": lambda name: connect(socket.AF_UNIX, "\0" + name),
    "netlink": lambda _: str(socket.socket(16, socket.SOCK_RAW)),
    "packet": lambda _: str(socket.socket(17, socket.SOCK_RAW)),
    "vsock": lambda _: str(socket.socket(40, socket.SOCK_STREAM)),
    "signal": lambda pid: str(os.kill(int(pid), 0)),
    "memory_of": lambda pid: read(f"/proc/{pid}/mem"),
    "environment_of": lambda pid: read(f"/proc/{pid}/environ"),
    "environment": lambda name: os.environ[name],
    "trace": lambda pid: call("ptrace", 16, int(pid), 0, 0),
    "mount": lambda _: call("mount", b"none", os.environ["HOME"].encode(), b"tmpfs", 0, 0),
    "unshare_users": lambda _: call("unshare", 0x10000000),
    "unshare_network": lambda _: call("unshare", 0x40000000),
    "chroot": lambda _: str(os.chroot(os.environ["HOME"])),
    "root": lambda _: str(os.setuid(0)),
    "host_name": lambda _: call("sethostname", b"x", 1),
    "bpf": lambda _: system_call(321, 0, 0, 0),
    "keys": lambda _: system_call(250, 0, 0, 0),
    "io_uring": lambda _: system_call(425, 1, 0),
    "userfaultfd": lambda _: system_call(323, 0),
    "open_by_handle": lambda _: system_call(304, 0, 0, 0),
    "groups": lambda _: write("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "device": lambda _: str(os.mknod(f"{os.environ['HOME']}/disk", 0o60666, os.makedev(254, 0))),
    "fork": lambda _: fork_many(),
    "fill": lambda _: fill(os.environ["HOME"]),
    "allocate": lambda _: allocate(),
    "scratch": lambda _: write(f"{os.environ['HOME']}/file"),
    "descriptors": lambda _: str([each for each in os.listdir("/proc/self/fd") if int(each) > 3]),
}


def main() -> None:
    outcomes = {}
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    for name, argument in pairs:
        try:
            outcome = ATTEMPTS[name](argument)
        except Exception as error:
            outcome = f"refused: {type(error).__name__} {error}"
        outcomes[f"{name} {argument}"] = outcome
    print(json.dumps(outcomes), flush=True)


main()
