"""Host and Origin checks: protection of a local server against web pages (CORS, DNS rebinding).

A page's script can send requests to loopback, and with DNS rebinding even under its own name. So the Host header must
be an allowed name, and the Origin header, where a browser sends one, must be our own or an allowed one.
"""

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from emberline.api.http.errors import HeaderList
from emberline.api.http.exchange import Reply
from emberline.net.http_server import Message, Scope, Send
from emberline.protocol.errors import Forbidden

ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_EXPOSED = (
    b"x-request-id, x-emberline-stream-id, x-emberline-warning, cf-ai-req-id, request-id, retry-after, retry-after-ms"
)
_MAX_AGE_S = b"600"
# workerd sends the requests of a Worker's `AI` binding under this name. It is allowed for them alone, and not to pages:
# whoever owns the name could make it resolve to loopback.
BINDING_HOST = "workers-binding.ai"
BINDING_PATHS = ("/run", "/ai-gateway/", "/ai-api/")


class Guard:
    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = {"localhost", *(_name(host) or host.lower() for host in hosts)}
        self._origins = {origin.rstrip("/").lower() for origin in origins}

    def readable_by(self, scope: Scope) -> str | None:
        """The Origin whose pages may read the response, refusals included; None: no CORS headers."""
        hosts, origins = _hosts_and_origins(scope)
        if len(origins) != 1:
            return None
        host = hosts[0] if len(hosts) == 1 and self._host_allowed(hosts[0], scope) else ""
        return origins[0] if self._origin_allowed(origins[0], host) else None

    def check(self, scope: Scope) -> None:
        """Raise Forbidden for a Host or an Origin that is not allowed."""
        hosts, origins = _hosts_and_origins(scope)
        if hosts == [BINDING_HOST] and scope["path"].startswith(BINDING_PATHS) and not origins:
            return
        if len(hosts) != 1 or not self._host_allowed(hosts[0], scope):
            shown = hosts[0][:100] if hosts else ""
            raise Forbidden(f"the host {shown!r} is not allowed; add it with --allowed-host")
        if origins and (len(origins) > 1 or not self._origin_allowed(origins[0], hosts[0])):
            raise Forbidden(f"the origin {origins[0][:100]!r} is not allowed; add it with --cors-origin")

    def _host_allowed(self, host: str, scope: Scope) -> bool:
        name = _name(host)
        if name is None:
            return False
        if ANY in self._hosts or name in self._hosts or name.endswith(".localhost"):
            return True
        address = _address(name)
        # DNS rebinding needs a name: an address is safe if it is the one this connection arrived at.
        return address is not None and (address.is_loopback or name == (scope.get("server") or ("",))[0])

    def _origin_allowed(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        own = bool(host) and origin.partition("://")[2] == host.lower()
        return own or origin in self._origins or ANY in self._origins


def preflight(scope: Scope) -> Reply | None:
    """The response to a CORS preflight request; None for any other request."""
    headers = dict(scope["headers"])
    if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    allowed: HeaderList = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", _MAX_AGE_S),
    ]
    if b"access-control-request-private-network" in headers:
        allowed.append((b"access-control-allow-private-network", b"true"))
    return Reply(204, b"", headers=allowed)


def with_cors_headers(send: Send, origin: str) -> Send:
    """`send` with the headers that let a page of `origin` read the response."""
    cors: HeaderList = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *cors]}
        await send(message)

    return send_with_cors


def _hosts_and_origins(scope: Scope) -> tuple[list[str], list[str]]:
    """Values of all Host and of all Origin headers."""
    hosts: list[str] = []
    origins: list[str] = []
    for name, value in scope["headers"]:
        if name == b"host":
            hosts.append(value.decode("latin-1"))
        elif name == b"origin":
            origins.append(value.decode("latin-1"))
    return hosts, origins


@lru_cache(256)
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


@lru_cache(256)
def _name(host: str) -> str | None:
    """The name or address in a Host header, lower case, without port, brackets and final dot."""
    match = _HOST.fullmatch(host)
    return match.group(1).strip("[]").rstrip(".").lower() if match else None
