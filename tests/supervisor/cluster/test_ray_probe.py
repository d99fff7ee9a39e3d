"""A Ray that answers without its token is found, by a fake server with the same frames."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.protocol.errors import BadInput, Unavailable
from emberline.supervisor.cluster import ray_probe
from emberline.supervisor.cluster.certificate_authority import CertificateAuthority
from emberline.supervisor.cluster.ray_settings import NodeCredential, tls_context, write_credential

SETTINGS = bytes.fromhex("000000 04 00 00000000")
HEADERS = bytes.fromhex("000001 01 04 00000001 88")
DATA = bytes.fromhex("000005 00 00 00000001 0000000000")
TRAILERS_ONLY = bytes.fromhex("000001 01 05 00000001 88")
ANSWER, REFUSAL = SETTINGS + HEADERS + DATA, SETTINGS + TRAILERS_ONLY
PATIENCE_S = 60.0


@contextlib.contextmanager
def server(plain: bytes, secure: bytes | None, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answers with these bytes: to clients that speak in the clear, and to those with TLS."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                is_tls = sock.recv(1, socket.MSG_PEEK) == b"\x16"
                if is_tls and context is not None and secure is not None:
                    with context.wrap_socket(sock, server_side=True) as wrapped:
                        wrapped.recv(1 << 16)
                        wrapped.sendall(secure)
                        wrapped.recv(1 << 16)
                elif not is_tls and plain:
                    sock.recv(1 << 16)
                    sock.sendall(plain)
                    sock.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture
def client(tmp_path: Path) -> ssl.SSLContext:
    pem = CertificateAuthority(bytes(32), "c").node_pem("127.0.0.1")
    write_credential(NodeCredential(address="127.0.0.1", cluster="c", token="t", pem=pem), tmp_path / "ray")
    return tls_context(tmp_path / "ray")


@pytest.fixture
def secure(tmp_path: Path, client: ssl.SSLContext) -> ssl.SSLContext:
    folder = tmp_path / "ray"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "node.pem"), str(folder / "node.key"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_a_ray_without_token_and_tls_is_refused(client: ssl.SSLContext) -> None:
    with server(ANSWER, None) as port:
        assert ray_probe.ask("127.0.0.1", port, None, PATIENCE_S) == ray_probe.ANSWERED
        with pytest.raises(BadInput, match=r"answers without a token.*emberline cluster up"):
            ray_probe.check_guarded("127.0.0.1", port, client, PATIENCE_S)


def test_a_ray_with_tls_and_without_token_is_refused(client: ssl.SSLContext, secure: ssl.SSLContext) -> None:
    with server(b"", ANSWER, secure) as port, pytest.raises(BadInput, match="answers without a token"):
        ray_probe.check_guarded("127.0.0.1", port, client, PATIENCE_S)


def test_a_ray_that_wants_its_token_is_used(client: ssl.SSLContext, secure: ssl.SSLContext) -> None:
    with server(b"HTTP/1.1 400\r\n\r\n", REFUSAL, secure) as port:
        ray_probe.check_guarded("127.0.0.1", port, client, PATIENCE_S)


def test_what_is_no_ray_of_this_cluster(client: ssl.SSLContext) -> None:
    with server(b"", None) as port, pytest.raises(Unavailable, match="no Ray of this cluster"):
        ray_probe.check_guarded("127.0.0.1", port, client, PATIENCE_S)
    with socket.socket() as silent:  # nobody else can have its port, and it does not listen
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(Unavailable, match="no Ray head answers"):
            ray_probe.check_guarded("127.0.0.1", silent.getsockname()[1], client, PATIENCE_S)
