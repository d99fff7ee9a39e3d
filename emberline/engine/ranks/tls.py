"""Mutual TLS between the ranks of a group on several machines, whose only shared secret is the join token.

Every rank derives the same key and the same certificate from the token, and trusts that certificate alone: whoever does
not know the token can neither pose as rank 0 nor join. Each connection has a thread that encrypts and decrypts, because
others read and write it concurrently, which a TLS object does not allow.
"""

import contextlib
import datetime
import hashlib
import selectors
import socket
import ssl
import tempfile
import threading

from emberline.protocol.errors import BadInput

HANDSHAKE_S = 10.0
_CHUNK = 1 << 16
_NAME = "emberline ranks"
_SINCE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def rank_context(token: str, *, server: bool) -> ssl.SSLContext:
    """The TLS settings of rank 0 (server) or of a follower."""
    certificate, key = _certificate(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the group's, on whichever machine
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with tempfile.NamedTemporaryFile() as file:  # only this user can read it
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def tunnel(sock: socket.socket, context: ssl.SSLContext) -> socket.socket:
    """Encrypt a TCP connection. Returns a socket for plain bytes, which a thread passes on until either end closes.

    Raises BadInput if the other side does not know the token, or OSError if it is gone."""
    server = context.protocol == ssl.PROTOCOL_TLS_SERVER
    sock.settimeout(HANDSHAKE_S)
    try:
        secure = context.wrap_socket(sock, server_side=server)
    except ssl.SSLError as error:
        sock.close()
        raise BadInput(f"wrong join token: TLS between the ranks failed ({error.reason})") from None
    ours, theirs = socket.socketpair()
    threading.Thread(target=_pass_on, args=(secure, theirs), name="rank-tls", daemon=True).start()
    return ours


def _pass_on(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Move bytes both ways. What one side has sent waits here until the other side takes it, and nothing more is read
    meanwhile."""
    secure.setblocking(False)
    plain.setblocking(False)
    to_secure, to_plain = bytearray(), bytearray()
    with contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
        selector.register(secure, selectors.EVENT_READ)
        selector.register(plain, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(0 if secure.pending() and not to_plain else None)}
            if (secure in ready or secure.pending()) and not to_plain:
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not (taken := secure.recv(_CHUNK)):
                        break
                    to_plain += taken
            if plain in ready and not to_secure:
                with contextlib.suppress(BlockingIOError):
                    if not (taken := plain.recv(_CHUNK)):
                        break
                    to_secure += taken
            if to_secure:
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    del to_secure[: secure.send(to_secure)]
            if to_plain:
                with contextlib.suppress(BlockingIOError):
                    del to_plain[: plain.send(to_plain)]
            reads_secure = 0 if to_plain else selectors.EVENT_READ
            reads_plain = 0 if to_secure else selectors.EVENT_READ
            _watch(selector, secure, reads_secure | (selectors.EVENT_WRITE if to_secure else 0))
            _watch(selector, plain, reads_plain | (selectors.EVENT_WRITE if to_plain else 0))
    for sock in (secure, plain):
        with contextlib.suppress(OSError):
            sock.close()


def _watch(selector: selectors.BaseSelector, sock: socket.socket, events: int) -> None:
    known = selector.get_map().get(sock)
    if known is not None and known.events == events:
        return
    if known is not None:
        selector.unregister(sock)
    if events:
        selector.register(sock, events)


def _certificate(token: str) -> tuple[bytes, bytes]:
    """The group's certificate and its key, in PEM. A token always gives the same bytes: Ed25519 signs so."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise BadInput("ranks on several machines need the package cryptography: `pip install cryptography`") from None

    seed = hashlib.scrypt(token.encode(), salt=b"emberline.ranks.tls", n=1 << 14, r=8, p=1, dklen=32)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), encoded
