"""The address of a server as its own machine or a client reaches it, and the credential to send there."""

import ipaddress
import socket
import time
from urllib.parse import urlsplit

import msgspec

from emberline.accounts.operator_ticket import operator_ticket
from emberline.accounts.secret import Secret
from emberline.config import Config, ConfigError, is_loopback

_DEFAULT_PORTS = {"http": 80, "https": 443}


class ServerAddress(msgspec.Struct, frozen=True):
    """Host and port of a server, and the API key or root secret with which requests are authenticated."""

    host: str
    port: int
    key: str | None = None
    secret: Secret | None = None  # of this machine's data folder: without a key, it makes operator tickets
    scheme: str = "http"
    prefix: str = ""  # of every path, behind a proxy that has one

    @classmethod
    def of(cls, config: Config) -> "ServerAddress":
        """The address at which this machine reaches a server with this configuration."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
        return cls(host.strip("[]"), config.server.port, config.auth.key, _secret(config, host, config.auth.key))

    @classmethod
    def for_client(cls, config: Config) -> "ServerAddress":
        """The address of the server that commands talk to: `[client] url`, else this machine's own, to which alone
        this machine's admin key is sent."""
        if not config.client.url:
            own = cls.of(config)
            key = config.client.key
            return own if key is None else msgspec.structs.replace(own, key=key, secret=None)
        url = urlsplit(config.client.url)
        try:
            port = url.port or _DEFAULT_PORTS[url.scheme]
        except ValueError:
            raise ConfigError(f"{config.client.url} has no valid port", param="client.url") from None
        host = url.hostname or ""
        key = config.client.key or (config.auth.key if _is_own_address(host) else None)
        return cls(host, port, key, _secret(config, host, key), url.scheme, url.path.rstrip("/"))

    @property
    def credential(self) -> str | None:
        """The API key, or an operator's ticket, which is valid for a minute and for this machine only."""
        return self.key or (operator_ticket(self.secret, int(time.time())) if self.secret is not None else None)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.scheme == "https" and self.port == _DEFAULT_PORTS["https"] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.prefix}"


def _secret(config: Config, host: str, key: str | None) -> Secret | None:
    """The root secret of this machine's data folder, for its own server and where there is no key."""
    return Secret.existing(config.home) if key is None and _is_own_address(host) else None


def _is_own_address(host: str) -> bool:
    """True if the host is loopback or another address of this machine. Names are not resolved: they may change."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host.strip("[]")).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))
    except (ValueError, OSError):
        return is_loopback(host)
    return True
