"""Parts of every engine process: flags, a listening socket, signals, a watched parent, a ready line on stdout."""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from emberline.engine.addresses import PARENT_VARIABLE, RANK_0_VARIABLE, TOKEN_VARIABLE, positive
from emberline.engine.worker.announcer import Announcer, add_arguments
from emberline.engine.worker.socket_server import Server
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.mooncake import MooncakeEngine, Pool
from emberline.kv.transfer.transport import SHARED_MEMORY, TransportUnavailable
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.frames import WorkerRole

# The step loop asks for the interpreter's lock after every kernel, and a thread that loads weights several times for
# each piece. Python's default is 0.005.
SWITCH_INTERVAL_S = 0.0005
RESTART_STATUS = 75  # of a process that is to be started again; EX_TEMPFAIL of sysexits.h
PARENT_GONE_S = 5.0  # for this process to end after its parent
DRAIN_S = 30.0  # after SIGTERM; a Drain frame has its own limit

_PR_SET_PDEATHSIG = 1  # of prctl
_log = logging.getLogger(__name__)


def arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """Parser of the flags that every engine process has."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description, allow_abbrev=False)
    parser.add_argument("--socket", required=True, metavar="ADDRESS", help="unix:PATH (or just PATH) or tcp:HOST:PORT")
    parser.add_argument("--name", default="", help="the model name that clients use")
    parser.add_argument("--id", default="", metavar="NAME", help="name of this engine in its log")
    parser.add_argument("--role", choices=get_args(WorkerRole), default="both", help="which stage to serve")
    parser.add_argument("--cores", type=cores, metavar="N,N", help="CPU cores to run on")
    parser.add_argument("--nice", type=lambda text: os.nice(int(text)), metavar="N", help="niceness to add")
    parser.add_argument("--prefill-nice", type=int, default=0, metavar="N", help="niceness while its role is prefill")
    parser.add_argument("--mooncake", metavar="PROTOCOL", help="transfer KV by Mooncake, too: tcp, or rdma:DEVICE")
    parser.add_argument("--max-running", type=positive, default=64, metavar="N", help="maximum running sequences")
    parser.add_argument("--token-budget", type=positive, default=512, metavar="N", help="maximum tokens per step")
    parser.add_argument("--alive-file", type=Path, metavar="FILE", help="to touch every second while it makes progress")
    add_arguments(parser)
    return parser


def cores(text: str) -> list[int]:
    """Parse a list of cores, and pin the process to them at once: threads that start later inherit it."""
    numbers = [int(word) for word in text.split(",")]
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, numbers)
    return numbers


class NicePrefill:
    """Lets other processes of the same cores go first while this worker's role is prefill.

    A worker whose role changes to prefill keeps its priority if the system would not allow it to go back.
    """

    def __init__(self, niceness: int) -> None:
        self._niceness = niceness
        self._before = os.nice(0)

    def __call__(self, role: WorkerRole, is_first: bool = False) -> None:
        if not self._niceness or (role == "prefill" and not is_first and not self._can_return()):
            return
        wanted = self._before + (self._niceness if role == "prefill" else 0)
        try:
            for task in os.listdir("/proc/self/task") if sys.platform == "linux" else ["0"]:
                with contextlib.suppress(ProcessLookupError):  # a thread that has ended
                    os.setpriority(os.PRIO_PROCESS, int(task), wanted)
        except PermissionError:
            _log.warning("the niceness stays as it is: only root may decrease it")

    def _can_return(self) -> bool:
        if os.geteuid() == 0:
            return True
        return sys.platform == "linux" and 20 - resource.getrlimit(resource.RLIMIT_NICE)[0] <= self._before


def join_token(address: str) -> str:
    """The join token that clients must present. Raises BadInput if a TCP port has none, which no file mode protects."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and address.startswith("tcp:"):
        raise BadInput(f"an engine on a TCP port needs a join token in {TOKEN_VARIABLE}")
    return token


def receive_transports(transfers: TransferManager | None, args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the transports by which this engine receives KV. They do not depend on its role, which may change."""
    if transfers is None:
        return ()
    tcp = args.socket.startswith("tcp:")
    return tuple(name for name in transfers.receives_by if name != SHARED_MEMORY or not tcp)


def own_host(args: argparse.Namespace) -> str:
    """The host at which other machines reach this engine."""
    return args.socket.removeprefix("tcp:").rpartition(":")[0] if args.socket.startswith("tcp:") else "127.0.0.1"


def mooncake_engine(pools: Sequence[Pool], args: argparse.Namespace) -> MooncakeEngine | None:
    """Mooncake's Transfer Engine over our pools. Returns None if no flag asks for it."""
    if not args.mooncake:
        return None
    try:
        return MooncakeEngine(pools, own_host(args), args.mooncake)
    except TransportUnavailable as error:
        raise BadInput(str(error), param="mooncake") from None


class Parent:
    """Ends this process when the one that has started it has died, so that no orphan keeps the memory.

    The kernel continues this process if it is stopped. A thread ends it after `gone_s` if its step hangs. A process
    that was started by hand outlives its shell.
    """

    def __init__(self, gone_s: float = PARENT_GONE_S) -> None:
        """Raises SystemExit if the parent has died before this was called."""
        self._gone_s = gone_s
        given = os.environ.pop(PARENT_VARIABLE, "")
        self.is_rank_0 = bool(os.environ.pop(RANK_0_VARIABLE, ""))
        self._pid = int(given) if given else 0
        self._descriptor: int | None = None
        if not self._pid:
            return
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or gone already
            self._descriptor = os.pidfd_open(self._pid)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
            threading.Thread(target=self._exit_if_hanging, args=(self._descriptor,), daemon=True).start()
        if os.getppid() != self._pid:
            self._gone()

    def watch(self, server: Server) -> None:
        """End the process by the server's loop when the parent has died."""
        if not self._pid:
            return
        if os.getppid() != self._pid:
            self._gone()
        elif self._descriptor is not None:
            server.watch(self._descriptor, self._gone)
        else:
            signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == self._pid else self._gone())
            signal.setitimer(signal.ITIMER_REAL, 5.0, 5.0)

    def _exit_if_hanging(self, descriptor: int) -> None:
        select.select([descriptor], [], [])
        time.sleep(self._gone_s)
        os._exit(1)

    def _gone(self) -> None:
        _log.warning("the parent process is gone")
        raise SystemExit(1)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector: it takes a seventh of the time of importing torch, whose objects all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_on_signals() -> None:
    """Let signals end the process immediately while a model is loaded, as they do by default.

    Process 1, that of a container, would not notice them: the kernel spares it signals that it does not handle.
    """
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _exit)


def share_interpreter() -> None:
    """Let threads take the interpreter's lock from each other often, so that none waits long for it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _exit(number: int, frame: object) -> None:
    os._exit(128 + number)


def serve(server: Server, parent: Parent, ready: dict[str, Any], announcer: Announcer | None = None) -> int:
    """Serve until the server is drained. Returns the exit status. Raises BadInput if the cluster refuses the worker.

    A JSON line on stdout tells that clients may connect. A worker that joins a cluster then announces itself.
    """
    share_interpreter()
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        server.watch(reader, lambda: reader.recv(4096))  # the handler has run; this only woke the selector
        drain = _DrainOnSignal(server)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored: under `nohup`
                signal.signal(number, drain)
        parent.watch(server)
        print(json.dumps({"ready": True, "pid": os.getpid(), **ready}), flush=True)
        if announcer is not None:
            announcer.start()
        server.run()
        signal.set_wakeup_fd(-1)
    if announcer is not None:
        (announcer.stop if server.restarts else announcer.leave)()
        if announcer.problem and not announcer.is_superseded:  # else a restart would take the name from the newer one
            raise BadInput(announcer.problem)
        if announcer.problem:
            return 0
    return RESTART_STATUS if server.restarts else 0


class _DrainOnSignal:
    """Drains on the first signal, and ends the process immediately on the second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit_s = DRAIN_S

    def __call__(self, number: int, frame: object) -> None:
        self._server.drain(self._limit_s)
        self._limit_s = 0.0


def fail(error: Exception) -> int:
    """Report a failed start, in the log and instead of the ready line."""
    expected = isinstance(error, EmberlineError | ValueError | OSError)
    _log.error("%s", error, exc_info=None if expected else error)
    print(json.dumps({"ready": False, "error": str(error)}), flush=True)
    return 1
