"""The listening socket of a server: bound before the models load, opened to clients when they can be served."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from emberline.config import ConfigError, ServerConfig

LISTEN_BACKLOG = 2048


@contextlib.contextmanager
def bind(server: ServerConfig) -> Iterator[socket.socket]:
    """Yield a socket that is bound and does not listen: until `listen`, clients are refused immediately."""
    host = server.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"there is no address {server.host!r} to listen on: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with _socket_errors_explained(server):
            sock.bind(address)
        yield sock


def listen(sock: socket.socket, server: ServerConfig) -> None:
    """Accept connections on a bound socket."""
    with _socket_errors_explained(server):
        sock.listen(LISTEN_BACKLOG)


@contextlib.contextmanager
def _socket_errors_explained(server: ServerConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{server.host}:{server.port}"
        if error.errno == errno.EADDRINUSE:
            hint = "If it is Emberline, `emberline ps` shows what it serves; otherwise choose another port"
            raise ConfigError(f"{where} is in use. {hint}: emberline serve --port {server.port + 1}") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"this user may not listen on {where}; choose a port from 1024 up") from error
        raise ConfigError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from error
