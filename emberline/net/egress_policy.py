"""SSRF protection: URLs of tenants may reach public addresses, and the private ranges that the operator allows.

A tenant chooses the URL, so a name that resolves to a private address would give the tenant access to the operator's
network. The name is resolved once, every address is checked, and the connection is made to a checked address.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from emberline.protocol.errors import BadInput

MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[^\s\\\x00-\x20\x7f]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


class Target(NamedTuple):
    secure: bool
    host: str  # an ASCII name or an address without brackets; the certificate is checked against it
    port: int
    path: str  # with the query; begins with /

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"


def parse_target(url: str, param: str = "url") -> Target:
    """The parts of a tenant's URL; BadInput where it is not valid."""
    if len(url) > MAX_URL_CHARS:
        raise BadInput(f"the URL is longer than {MAX_URL_CHARS} characters", param=param)
    if not _PRINTABLE.fullmatch(url):
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
        raise BadInput("the URL must not hold a user name or password", param=param)
    if not ascii_host or not _HOST.fullmatch(ascii_host) or port == 0:
        raise BadInput("the URL names no host, or no valid port", param=param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii():
        raise BadInput("the URL's path and query must be percent-encoded", param=param)
    return Target(parts.scheme == "https", ascii_host, port or _PORTS[parts.scheme], path)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

RESOLVE_S = 5.0
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# All IPv6 addresses that are routed on the Internet. Outside of it are also the forms that embed an IPv4 address:
# mapped, translated, compatible and local-use NAT64.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_ISATAP = (0x5EFE, 0x0200_5EFE)  # in front of an IPv4 address, in an interface identifier
# Blocked in addition to what `ipaddress` calls private. Tunnel prefixes embed an IPv4 address.
_BLOCKED = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "168.63.129.16/32",  # a cloud provider's metadata service
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "198.18.0.0/15",
        "224.0.0.0/3",  # multicast, reserved, broadcast
        "2001::/23",  # Teredo and other protocol assignments
        "2002::/16",  # 6to4
        "3fff::/20",
    )
)


class EgressPolicy:
    """Resolves a target and checks its addresses against the operator's allow list."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        resolve: Resolve | None = None,
        setting: str = "[webhooks] allowed_networks",
    ) -> None:
        """`setting`: where the operator lists the private ranges in `allow`."""
        self._setting = setting
        self._allowed = [parse_network(text) for text in allow]
        self._resolve = resolve or _system_resolve

    async def addresses(self, target: Target) -> list[str]:
        """The addresses to connect to; BadInput where the target is not allowed or does not resolve."""
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise BadInput(f"{target.host} cannot be resolved", param="url") from None
        except TimeoutError:
            raise BadInput(f"{target.host} was not resolved within {RESOLVE_S:g} s", param="url") from None
        addresses = [_unmapped(ipaddress.ip_address(text)) for text in found]
        if not addresses:
            raise BadInput(f"{target.host} has no address", param="url")
        for address in addresses:
            self._check(address, target)
        return list(dict.fromkeys(str(address) for address in addresses))

    def _check(self, address: Address, target: Target) -> None:
        if any(address in network for network in self._allowed):
            return
        if not is_public(address):
            # The address is not named, since that would let a tenant map the network.
            raise BadInput(
                f"{target.host} is inside the network, which URLs of accounts may not reach unless the operator lists "
                f"the range in {self._setting}",
                param="url",
            )
        if not target.secure:
            raise BadInput("the URL must begin with https://: what is sent there leaves the network", param="url")


def is_public(address: Address) -> bool:
    address = _unmapped(address)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.version == 6 and (address not in _GLOBAL_UNICAST or int(address) >> 32 & 0xFFFFFFFF in _ISATAP):
        return False
    return address.is_global and not any(address in network for network in _BLOCKED)


def parse_network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip())
    except ValueError as bad:
        raise BadInput(f"{text!r} is not a range of addresses such as 10.0.0.0/8: {bad}") from None


def _unmapped(address: Address) -> Address:
    """The IPv4 address of an IPv4-mapped IPv6 address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else ipaddress.IPv4Address(mapped)


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]
