"""Where an engine listens."""

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process. The name is unique in the fleet and stable over restarts: affinity hashes it."""

    name: str
    address: str  # "unix:/path/to.sock" or "tcp:host:port"
    token: str = ""  # the secret to join

    def split(self) -> tuple[str | None, str, int]:
        """(path, "", 0) of a Unix socket, (None, host, port) of a TCP one."""
        scheme, _, rest = self.address.partition(":")
        if scheme == "unix" and rest:
            return rest, "", 0
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"endpoint {self.name}: {self.address!r} is neither unix:/path nor tcp:host:port")
        return None, host.strip("[]"), int(port)
