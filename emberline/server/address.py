"""The address of a server as its own machine reaches it, and the credential of its operator."""

import ipaddress
import socket
import time

import msgspec

from emberline.accounts.operator_ticket import operator_ticket
from emberline.accounts.secret import Secret
from emberline.config import Config, is_loopback


class ServerAddress(msgspec.Struct, frozen=True):
    """Host and port of a server, and the API key or root secret with which requests are authenticated."""

    host: str
    port: int
    key: str | None = None
    secret: Secret | None = None  # of this machine's data folder: without a key, it makes operator tickets

    @classmethod
    def of(cls, config: Config) -> "ServerAddress":
        """The address at which this machine reaches a server with this configuration."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
        secret = Secret.existing(config.home) if config.auth.key is None and _is_own_address(host) else None
        return cls(host.strip("[]"), config.server.port, config.auth.key, secret)

    @property
    def credential(self) -> str | None:
        """The API key, or an operator's ticket, which is valid for a minute and for this machine only."""
        return self.key or (operator_ticket(self.secret, int(time.time())) if self.secret is not None else None)

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


def _is_own_address(host: str) -> bool:
    """True if the host is loopback or another address of this machine. Names are not resolved: they may change."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host.strip("[]")).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))
    except (ValueError, OSError):
        return is_loopback(host)
    return True
