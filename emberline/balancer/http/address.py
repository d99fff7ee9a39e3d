"""Where a server listens, from its URL."""

import ssl
from typing import NamedTuple
from urllib.parse import urlsplit


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str  # in front of every route, "" or "/like/this"

    @property
    def host_header(self) -> str:
        """The default port goes unsaid, as some servers' Host checks want it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.tls else None


def parse(url: str) -> Address:
    """ValueError says what is wrong with it. A trailing /v1 is how people write base URLs: routes bring their own."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError(f"{parts.scheme}://{parts.hostname}/… must have no query, fragment, user or password")
    tls = parts.scheme == "https"
    port = parts.port  # ValueError where it is out of range
    path = parts.path.rstrip("/").removesuffix("/v1")
    if any(not "!" <= char <= "~" for char in parts.hostname + path):
        raise ValueError(f"{url!r} has characters that a URL cannot have")
    return Address(parts.hostname, (443 if tls else 80) if port is None else port, tls, path)
