"""Where a webhook is sent: a URL that has been read once, so that nobody reads it another way later."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from emberline.protocol.errors import BadInput

MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[^\s\\\x00-\x20\x7f]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


class Target(NamedTuple):
    secure: bool
    host: str  # a name in ASCII or an address without brackets; what the certificate must say
    port: int
    path: str  # with the query; begins with /

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"


def parse_target(url: str, param: str = "url") -> Target:
    """BadInput says what is wrong with the URL."""
    if len(url) > MAX_URL_CHARS:
        raise BadInput(f"the URL is longer than {MAX_URL_CHARS} characters", param=param)
    if not _PLAIN.fullmatch(url):
        raise BadInput("the URL holds spaces, backslashes or control characters; percent-encode them", param=param)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        ascii_host = (host or "").encode("idna").decode() if host and not host.isascii() else host
    except ValueError as bad:
        raise BadInput(f"the URL cannot be read: {bad}", param=param) from None
    if parts.scheme not in _PORTS:
        raise BadInput("the URL must begin with https:// (or http://, inside the network)", param=param)
    if "@" in parts.netloc:
        raise BadInput("the URL must not hold a user name or password; deliveries are signed instead", param=param)
    if not ascii_host or not _HOST.fullmatch(ascii_host) or port == 0:
        raise BadInput("the URL names no host, or no valid port", param=param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii():
        raise BadInput("the URL's path and query must be percent-encoded", param=param)
    return Target(parts.scheme == "https", ascii_host, port or _PORTS[parts.scheme], path)
