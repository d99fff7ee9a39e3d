"""The address of a cluster's KV pool, as it is passed to processes."""

from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

_OPTIONS = frozenset({"host", "protocol", "device", "metrics"})


class StoreSettings(msgspec.Struct, frozen=True):
    """Address of a pool. `host` is the address at which peers reach this machine's client."""

    master: str  # host:port
    host: str = "127.0.0.1"
    protocol: str = "tcp"  # or rdma
    device: str = ""  # of RDMA
    metrics: str = ""  # host:port of the master's HTTP server; empty: unknown

    @property
    def url(self) -> str:
        """mooncake://MASTER?host=…: how it is written on a command line."""
        given = {name: getattr(self, name) for name in ("host", "protocol", "device", "metrics")}
        return f"mooncake://{self.master}?{urlencode({name: value for name, value in given.items() if value})}"

    @classmethod
    def parse(cls, url: str) -> "StoreSettings":
        """ValueError: it is no such URL."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        if parts.scheme != "mooncake" or not parts.hostname or not parts.port or not set(options) <= _OPTIONS:
            raise ValueError(f"{url!r} is not mooncake://HOST:PORT, with options {', '.join(sorted(_OPTIONS))}")
        return cls(parts.netloc, **options)
