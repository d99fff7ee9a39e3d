"""Checks that a Ray cluster refuses calls without its token.

A Ray cluster that does not refuse them runs the code of anyone who reaches its port. Before one is used, the probe
therefore sends its head a harmless call without a token: first in the clear, then over TLS with our certificate. The
probe is one gRPC call in raw HTTP/2 frames, since Ray's own client takes its settings from the environment of the whole
process, and waits for a minute.
"""

import socket
import ssl
import struct
import time

from emberline.protocol.errors import BadInput, Unavailable

TIMEOUT_S = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_METHOD = b"/ray.rpc.NodeInfoGcsService/CheckAlive"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_MAX_FRAMES = 64

NO_ANSWER, REFUSED, ANSWERED = "no answer", "refused", "answered"


def check_guarded(host: str, port: int, tls: ssl.SSLContext, timeout_s: float = TIMEOUT_S) -> None:
    """Unavailable: there is no Ray of ours. BadInput: it answers without its token."""
    where = f"{host}:{port}"
    try:
        plain, secure = ask(host, port, None, timeout_s), ask(host, port, tls, timeout_s)
    except OSError as error:
        raise Unavailable(f"no Ray head answers at {where}: {error.strerror or error}") from None
    if ANSWERED in (plain, secure):
        raise BadInput(
            f"the Ray at {where} answers without a token: whoever reaches its port can run code on its machines. End "
            "it as it was started, and start it with `emberline cluster up`, which turns token authentication "
            "(RAY_AUTH_MODE=token) and TLS on"
        )
    if secure != REFUSED:
        raise Unavailable(
            f"what listens at {where} is no Ray of this cluster: it does not accept this machine's certificate"
        )


def ask(host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float = TIMEOUT_S) -> str:
    """Send a call without a token and return the outcome. Raises OSError if nothing listens there."""
    end_s = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout=timeout_s) as plain:
        try:
            if tls is None:
                return _call(plain, end_s)
            with tls.wrap_socket(plain, server_hostname=host) as sock:
                return _call(sock, end_s)
        except OSError:  # it speaks another protocol, or wants another certificate
            return NO_ANSWER


def _call(sock: socket.socket, end_s: float) -> str:
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", _METHOD),
        (b":authority", b"ray"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)
    request = _frame(_HEADERS, _END_HEADERS, 1, block) + _frame(_DATA, _END_STREAM, 1, bytes(5))  # an empty message
    sock.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + request)
    for _ in range(_MAX_FRAMES):
        kind, flags, stream, _ = _read_frame(sock, end_s)
        if kind == _SETTINGS and not flags & _ACK:
            sock.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _DATA and stream == 1:
            return ANSWERED
        elif kind == _GOAWAY or (stream == 1 and (kind != _HEADERS or flags & _END_STREAM)):
            return REFUSED  # an error has headers only
    return NO_ANSWER


def _text(value: bytes) -> bytes:
    """A header's name or value, not compressed (HPACK)."""
    assert len(value) < 127
    return bytes([len(value)]) + value


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _read_frame(sock: socket.socket, end_s: float) -> tuple[int, int, int, bytes]:
    head = _read(sock, 9, end_s)
    n_bytes = int.from_bytes(head[:3], "big")
    if n_bytes > 1 << 20:
        raise OSError("no HTTP/2 frame")
    return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFF_FFFF, _read(sock, n_bytes, end_s)


def _read(sock: socket.socket, n: int, end_s: float) -> bytes:
    data = b""
    while len(data) < n:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data
