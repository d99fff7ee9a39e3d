"""What an engine process is besides its engine: an address, signals, a parent, and a line that says it is ready."""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from emberline.engine.socket_server import Server
from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer import shared_memory
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.mooncake import Engine
from emberline.kv.transfer.transport import TransportClosed
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.frames import WorkerRole

TOKEN_VARIABLE = "EMBERLINE_WORKER_TOKEN"
DRAIN_S = 30.0  # after SIGTERM; a Drain frame names its own limit

_log = logging.getLogger(__name__)


def arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """The flags that every engine process has."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description, allow_abbrev=False)
    parser.add_argument("--socket", required=True, metavar="ADDRESS", help="unix:PATH (or just PATH) or tcp:HOST:PORT")
    parser.add_argument("--name", default="", help="the model's name, as clients call it")
    parser.add_argument("--id", default="", metavar="NAME", help="this engine's own name, unique in its fleet")
    parser.add_argument("--role", choices=get_args(WorkerRole), default="both", help="prompts, replies or both")
    parser.add_argument("--cores", type=cores, metavar="N,N", help="the only cores to run on")
    parser.add_argument(
        "--nice", type=lambda text: os.nice(int(text)), metavar="N", help="give way to others by so much"
    )
    parser.add_argument("--mooncake", metavar="HOW", help="move KV by its Transfer Engine, too: tcp, or rdma:DEVICE")
    parser.add_argument("--max-running", type=positive, default=64, metavar="N", help="sequences computed at once")
    parser.add_argument("--token-budget", type=positive, default=512, metavar="N", help="tokens computed in a step")
    return parser


def cores(text: str) -> list[int]:
    """Binds the process to them as soon as they are read: threads that start later inherit it."""
    numbers = [int(word) for word in text.split(",")]
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, numbers)
    return numbers


def join_token(address: str) -> str:
    """The secret that clients must know. A Unix socket is guarded by its file mode, a TCP port by nothing else."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and address.startswith("tcp:"):
        raise BadInput(f"an engine on a TCP port needs a token to join in {TOKEN_VARIABLE}")
    return token


def transfers(hub: TransferManager | None, args: argparse.Namespace) -> tuple[str, ...]:
    """Ways in which other engines may push KV to this one. Who prefills pushes to others."""
    if hub is None or args.role == "prefill":
        return ()
    return tuple(way for way in hub.takes_by if way != shared_memory.NAME or not args.socket.startswith("tcp:"))


def mooncake(memory: HostMemory, args: argparse.Namespace) -> Engine | None:
    """Mooncake's Transfer Engine over our pools, where it was asked for."""
    if not args.mooncake:
        return None
    host = args.socket.removeprefix("tcp:").rpartition(":")[0] if args.socket.startswith("tcp:") else "127.0.0.1"
    try:
        return Engine(memory, host, args.mooncake)
    except TransportClosed as error:
        raise BadInput(str(error), param="mooncake") from None


@contextlib.contextmanager
def listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, and its address with the port that was found for port 0."""
    if address.startswith("tcp:"):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        if not host or not port.isdigit():
            raise BadInput(f"{address!r} is not tcp:HOST:PORT")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), int(port)), family=family) as listener:
            yield listener, f"tcp:{host}:{listener.getsockname()[1]}"
        return
    path = Path(address.removeprefix("unix:"))
    with socket.socket(socket.AF_UNIX) as listener:
        _remove_stale(path)
        before = os.umask(0o177)  # the socket is its owner's alone from the moment it exists
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen()
        try:
            yield listener, f"unix:{path}"
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """A socket file whose engine died is in the way; one that answers is somebody's."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise BadInput(f"another engine listens on {path}")
    path.unlink()


class Parent:
    """Notices the death of the process that started us, however it died; no orphan engine keeps the memory."""

    def __init__(self) -> None:
        self._pid = os.getppid()
        self._descriptor: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or gone already
            self._descriptor = os.pidfd_open(self._pid)

    def watch(self, server: Server) -> None:
        if os.getppid() != self._pid:
            self._gone()
        elif self._descriptor is not None:
            server.watch(self._descriptor, self._gone)
        else:
            signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == self._pid else self._gone())
            signal.setitimer(signal.ITIMER_REAL, 5.0, 5.0)

    def _gone(self) -> None:
        _log.warning("the parent process is gone")
        raise SystemExit(1)


def serve(server: Server, parent: Parent, ready: dict[str, Any]) -> None:
    """Serve until drained; one JSON line on stdout says when clients may come."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        server.watch(reader, lambda: _swallow(reader))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _Signalled(server))
        parent.watch(server)
        print(json.dumps({"ready": True, "pid": os.getpid(), **ready}), flush=True)
        server.run()
        signal.set_wakeup_fd(-1)


def _swallow(reader: socket.socket) -> None:
    reader.recv(4096)  # the handler has run; this only woke the selector


class _Signalled:
    """The first signal drains, the second ends it now."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit_s = DRAIN_S

    def __call__(self, number: int, frame: object) -> None:
        self._server.drain(self._limit_s)
        self._limit_s = 0.0


def fail(error: Exception) -> int:
    """Start-up went wrong: say so, to the log and to whoever reads stdout for the ready line."""
    expected = isinstance(error, EmberlineError | ValueError | OSError)
    _log.error("%s", error, exc_info=None if expected else error)
    print(json.dumps({"ready": False, "error": str(error)}), flush=True)
    return 1


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
