"""Which addresses a webhook may reach: the public ones, and what the operator lists.

A tenant chooses the URL, so a name that leads inside the network would make this server its messenger there. A name is
resolved, every address it has is checked, and the connection goes to a checked address: nobody resolves a second time.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from emberline.jobs.target import Target
from emberline.protocol.errors import BadInput

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

RESOLVE_S = 5.0
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Beside what `ipaddress` calls private. Tunnels carry an IPv4 address inside, and no receiver lives behind one.
_CLOSED = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "168.63.129.16/32",  # a cloud's metadata, in public space
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "198.18.0.0/15",
        "224.0.0.0/3",  # multicast, reserved, broadcast
        "::/96",  # IPv4-compatible
        "64:ff9b:1::/48",  # NAT64 of one's own network
        "100::/64",
        "2001::/23",  # Teredo and other protocols' own
        "2002::/16",  # 6to4
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/9",  # link-local, and site-local before it was given up
        "ff00::/8",
    )
)


class Reach:
    """The operator's decision, and the resolver it is asked with."""

    def __init__(self, allow: Iterable[str] = (), resolve: Resolve | None = None) -> None:
        self._allowed = [parse_network(text) for text in allow]
        self._resolve = resolve or _system_resolve

    async def addresses(self, target: Target) -> list[str]:
        """Addresses of the target to connect to; BadInput where it may not be reached, or does not exist."""
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise BadInput(f"{target.host} cannot be resolved", param="url") from None
        except TimeoutError:
            raise BadInput(f"{target.host} was not resolved within {RESOLVE_S:g} s", param="url") from None
        addresses = [_plain(ipaddress.ip_address(text)) for text in found]
        if not addresses:
            raise BadInput(f"{target.host} has no address", param="url")
        for address in addresses:
            self._check(address, target)
        return list(dict.fromkeys(str(address) for address in addresses))

    def _check(self, address: Address, target: Target) -> None:
        if any(address in network for network in self._allowed):
            return
        if not is_public(address):
            # Which address it was is not for the tenant: it would map the network.
            raise BadInput(
                f"{target.host} is inside the network; deliveries there are off unless the operator lists the range "
                "in [webhooks] allow",
                param="url",
            )
        if not target.secure:
            raise BadInput("the URL must begin with https://: what is delivered leaves the network", param="url")


def is_public(address: Address) -> bool:
    address = _plain(address)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not any(address in network for network in _CLOSED)


def parse_network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip())
    except ValueError as bad:
        raise BadInput(f"{text!r} is not a range of addresses such as 10.0.0.0/8: {bad}") from None


def _plain(address: Address) -> Address:
    """An IPv4 address written as IPv6 is that IPv4 address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else ipaddress.IPv4Address(mapped)


async def _system_resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]
