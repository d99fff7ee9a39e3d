"""The credential of a worker: its join key and, for TLS between machines, its certificate and that of the cluster.

It is one file, which only its owner may read, or the same text in EMBERLINE_WORKER_CREDENTIAL. `emberline cluster
credential NAME` makes it. Connections use TLS 1.3, and both sides show a certificate of the cluster's own authority: a
core one for `core.emberline`, a worker one for its name.
"""

import base64
import binascii
import contextlib
import os
import re
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.member import MemberName

VARIABLE = "EMBERLINE_WORKER_CREDENTIAL"
CORE_HOST = "core.emberline"
_BLOCK = re.compile(r"-----BEGIN EMBERLINE WORKER-----\s*([A-Za-z0-9+/=\s]+)-----END EMBERLINE WORKER-----")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
_KEY_BYTES = 32


class _Identity(msgspec.Struct, frozen=True):
    name: MemberName
    cluster: str
    key: bytes


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cluster: str  # id of the cluster
    key: bytes  # the join key
    pem: str = ""  # private key, certificate, and the authority's certificate; empty: no TLS

    def __repr__(self) -> str:
        return f"Credential(name={self.name!r}, cluster={self.cluster!r}, key=…)"

    def encode(self) -> str:
        identity = msgspec.json.encode(_Identity(self.name, self.cluster, self.key))
        body = base64.encodebytes(identity).decode()
        return f"-----BEGIN EMBERLINE WORKER-----\n{body}-----END EMBERLINE WORKER-----\n{self.pem}"

    @classmethod
    def parse(cls, text: str) -> "Credential":
        try:
            found = _BLOCK.search(text)
            identity = msgspec.json.decode(base64.b64decode(found[1] if found else ""), type=_Identity)
        except (binascii.Error, msgspec.MsgspecError):
            identity = None
        if identity is None or len(identity.key) != _KEY_BYTES:
            raise BadInput("this is no worker credential: make one with `emberline cluster credential NAME`")
        return cls(name=identity.name, cluster=identity.cluster, key=identity.key, pem=_BLOCK.sub("", text).strip())

    @classmethod
    def open(cls, path: Path | None, environ: Mapping[str, str] = os.environ) -> "Credential":
        """Read the credential from the file, or else from the environment. Raises BadInput that says what is wrong with
        it."""
        if path is None and not environ.get(VARIABLE):
            raise BadInput(
                "a worker that joins a cluster needs a credential: make one with `emberline cluster credential NAME` "
                f"on a core's machine, and give it as --credential FILE or in {VARIABLE}"
            )
        return cls.parse(environ[VARIABLE] if path is None else read_private(path))


def read_private(path: Path) -> str:
    """The text of a file that nobody but its owner may read."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise BadInput(f"{path} holds a secret and is open to others (mode {mode:o}): run chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


def worker_host(name: str) -> str:
    """The host name in a worker's certificate. Not one to resolve."""
    return f"{name.lower()}.worker.emberline"


def server_context(pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is resumed; a ticket would make a socket readable without a message
    return _with_certificates(context, pem)


def client_context(pem: str) -> ssl.SSLContext:
    """TLS context of a client. It checks the name in the server's certificate: pass `worker_host(name)`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _with_certificates(context, pem)


def hosts_of(sock: ssl.SSLSocket) -> set[str]:
    """The host names in the verified certificate of the other side."""
    certificate: dict[str, Any] = sock.getpeercert() or {}
    return {value.lower() for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}


def _with_certificates(context: ssl.SSLContext, pem: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    certificates = _CERTIFICATE.findall(pem)
    try:
        context.load_verify_locations(cadata=certificates[-1])
        with _as_file(pem) as path:
            context.load_cert_chain(path)
    except (IndexError, ssl.SSLError) as error:
        raise BadInput(f"the certificates of this credential cannot be used: {error}; make a new one") from None
    return context


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """OpenSSL's interface reads keys from files only: one in memory, where the system has such."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("emberline-credential"), "w") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile("w") as file:  # mode 600
        file.write(text)
        file.flush()
        yield file.name
