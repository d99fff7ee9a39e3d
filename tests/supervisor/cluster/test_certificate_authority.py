"""Certificates of the cluster's authority, used by a stand-in engine and its clients."""

import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from emberline.protocol.credential import client_context, hosts_of, server_context, worker_host
from emberline.supervisor.cluster.certificate_authority import CertificateAuthority

AUTHORITY = CertificateAuthority(b"a" * 32, "c1")


def pem_of(name: str, authority: CertificateAuthority = AUTHORITY) -> str:
    return authority.worker_credential(name, b"k" * 32).pem


def test_every_core_has_the_same_authority() -> None:
    again = CertificateAuthority(b"a" * 32, "c1")
    assert pem_of("w0").split("-----BEGIN CERTIFICATE")[-1] == pem_of("w1", again).split("-----BEGIN CERTIFICATE")[-1]
    assert pem_of("w0") != pem_of("w0"), "each has a key of its own"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    for sock in pair:
        sock.settimeout(30)
    yield pair
    for sock in pair:
        sock.close()


def shake_hands(
    pair: tuple[socket.socket, socket.socket], server: ssl.SSLContext, client: ssl.SSLContext, host: str
) -> tuple[set[str], str | None]:
    """The names that the server sees, and the version of TLS. SSLError: they do not agree."""
    seen: list[set[str]] = []
    failed: list[Exception] = []

    def serve() -> None:
        try:
            with server.wrap_socket(pair[0], server_side=True) as sock:
                seen.append(hosts_of(sock))
                sock.send(b"hello")
        except OSError as error:
            failed.append(error)
            pair[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(pair[1], server_hostname=host) as sock:
            assert sock.recv(5) == b"hello"
            version = sock.version()
    finally:
        pair[1].close()
        thread.join()
    return seen[0], version


def test_both_sides_are_verified_with_tls_1_3(pair: tuple[socket.socket, socket.socket]) -> None:
    core = client_context(AUTHORITY.core_pem())
    seen, version = shake_hands(pair, server_context(pem_of("W_0")), core, worker_host("W_0"))
    assert (seen, version) == ({"core.emberline"}, "TLSv1.3")


def test_another_worker_cannot_stand_in(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(pair, server_context(pem_of("w1")), client_context(AUTHORITY.core_pem()), worker_host("w0"))


def test_a_core_of_another_cluster_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    other = CertificateAuthority(b"o" * 32, "c1")
    with pytest.raises((OSError, AssertionError)):
        shake_hands(pair, server_context(pem_of("w0")), client_context(other.core_pem()), worker_host("w0"))


def test_a_client_without_a_certificate_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _, begin, rest = pem_of("w0").rpartition("-----BEGIN")
    anonymous.load_verify_locations(cadata=begin + rest)
    with pytest.raises((OSError, AssertionError)):
        shake_hands(pair, server_context(pem_of("w0")), anonymous, worker_host("w0"))
