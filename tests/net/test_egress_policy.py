"""SSRF protection: no form of URL or name reaches a private address."""

import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.net.egress_policy import EgressPolicy, Target, is_public, parse_target
from emberline.protocol.errors import BadInput

INSIDE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "168.63.129.16",
    "100.64.0.1",
    "100.127.255.254",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "::ffff:0:127.0.0.1",  # IPv4-translated
    "::ffff:0:8.8.8.8",
    "2606:4700::5efe:10.0.0.1",  # ISATAP
    "2606:4700::200:5efe:8.8.8.8",
    "64:ff9b::10.0.0.1",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::8.8.8.8",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]
OUTSIDE = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]


def to(*addresses: str, allow: Sequence[str] = ()) -> EgressPolicy:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return EgressPolicy(allow, resolve)


@pytest.mark.parametrize("address", INSIDE)
async def test_private_addresses_are_refused(address: str) -> None:
    with pytest.raises(BadInput, match="inside the network") as refused:
        await to(address).addresses(parse_target("https://innocent.example/hook"))
    assert address not in refused.value.message
    with pytest.raises(BadInput, match="inside the network"):  # one of several is one too many
        await to("8.8.8.8", address).addresses(parse_target("https://innocent.example/hook"))


@pytest.mark.parametrize("address", OUTSIDE)
async def test_public_addresses_are_allowed(address: str) -> None:
    assert len(await to(address).addresses(parse_target("https://receiver.example/"))) == 1
    with pytest.raises(BadInput, match="https"):
        await to(address).addresses(parse_target("http://receiver.example/"))


@given(st.ip_addresses(v=4))
def test_embedded_addresses_are_checked(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) | number)
    assert is_public(mapped) == is_public(address)
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | number)
    assert is_public(nat64) == is_public(address)
    assert not is_public(ipaddress.IPv6Address(number))
    assert not is_public(ipaddress.IPv6Address((0x2002 << 112) | (number << 80)))
    assert not (is_public(address) and (address.is_private or address.is_multicast or address.is_reserved))


async def test_allowed_ranges() -> None:
    reach = to("10.1.2.3", allow=["10.0.0.0/8"])
    assert await reach.addresses(parse_target("http://inside.example/")) == ["10.1.2.3"]
    assert await to("::ffff:10.1.2.3", allow=["10.0.0.0/8"]).addresses(parse_target("http://x/")) == ["10.1.2.3"]
    with pytest.raises(BadInput, match="inside the network"):
        await to("192.168.0.1", allow=["10.0.0.0/8"]).addresses(parse_target("https://inside.example/"))
    with pytest.raises(BadInput, match=r"10\.0\.0\.1/8"):
        EgressPolicy(["10.0.0.1/8"])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "0x7f.1", "2130706433", "127.1", "0177.0.0.1"])
async def test_system_resolver_results_are_checked(host: str) -> None:
    with pytest.raises(BadInput, match=r"inside the network|cannot be resolved"):
        await EgressPolicy().addresses(parse_target(f"https://{host}/hook"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://a.example/", "https"),
        ("file:///etc/passwd", "https"),
        ("gopher://a.example/", "https"),
        ("//a.example/", "https"),
        ("https://", "host"),
        ("https://:443/", "host"),
        ("https://user:secret@a.example/", "password"),
        ("https://user@a.example/", "password"),
        ("https://a.example\\@b.example/", "backslash"),
        ("https://a.example/\r\nx: y", "control"),
        ("https://a.example/ x", "spaces"),
        ("https://a.example:0/", "port"),
        ("https://a.example:99999/", "read"),
        ("https://[::1/", "read"),
        ("https://a.example/é", "percent-encoded"),
        ("https://a_b%2e.example/", "host"),
        ("https://a.example/" + "x" * 2048, "longer"),
    ],
)
def test_invalid_urls(url: str, why: str) -> None:
    with pytest.raises(BadInput, match=why) as refused:
        parse_target(url)
    assert refused.value.param == "url"


def test_valid_urls() -> None:
    assert parse_target("https://a.example") == Target(True, "a.example", 443, "/")
    assert parse_target("http://a.example:81/x?y=1#z") == Target(False, "a.example", 81, "/x?y=1")
    assert parse_target("https://bücher.example/").host == "xn--bcher-kva.example"
    assert parse_target("https://[2606:4700::1111]:8443/").authority == "[2606:4700::1111]:8443"
    assert parse_target("https://a.example:443/").authority == "a.example"
