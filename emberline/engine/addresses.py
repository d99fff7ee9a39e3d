"""Addresses of engine processes: sockets that they listen on, and what a process tells the ones it starts."""

import argparse
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from emberline.protocol.errors import BadInput

TOKEN_VARIABLE = "EMBERLINE_WORKER_TOKEN"
# The process that has started an engine process, which must not outlive it. One that was started by hand has none.
PARENT_VARIABLE = "EMBERLINE_PARENT_PID"
RANK_0_VARIABLE = "EMBERLINE_STARTED_BY_RANK_0"  # set if that is rank 0 of the same worker


@contextlib.contextmanager
def listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """Listen at the address: yields the socket, and the address with the actual port."""
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
        before = os.umask(0o177)  # the socket is private to its owner from the moment it exists
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen()
        try:
            yield listener, f"unix:{path}"
        finally:
            path.unlink(missing_ok=True)


def free_address(address: str) -> str:
    """Return tcp:HOST:PORT with another port of the same host that is free at this moment."""
    host = address.removeprefix("tcp:").rpartition(":")[0]
    with socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        return f"tcp:{host}:{free.getsockname()[1]}"


def _remove_stale(path: Path) -> None:
    """Remove the socket file of an engine that died; refuse one that answers."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise BadInput(f"another engine listens on {path}")
    path.unlink()


def positive(text: str) -> int:
    """Parse a number of at least 1, for `argparse`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
