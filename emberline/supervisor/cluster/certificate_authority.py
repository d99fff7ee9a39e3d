"""The cluster's own certificate authority, for TLS between cores and workers.

Its key is derived from the root secret, and everything in its certificate is fixed. So every core of a cluster has the
same authority without a file to copy, and can make certificates itself. Workers need only what Python has.
"""

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Any

from emberline.protocol.credential import CORE_HOST, Credential, worker_host

KEY_BYTES = 32
VALID_DAYS = 3650
_BEGINS = datetime(2026, 1, 1, tzinfo=UTC)  # of the authority; the end is far away
_ENDS = datetime(2126, 1, 1, tzinfo=UTC)
_CLOCKS = timedelta(days=2)  # how much the clocks of two machines may differ


class CertificateAuthority:
    def __init__(self, key: bytes, cluster: str) -> None:
        """`key` has KEY_BYTES, and is derived from the root secret."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self._cluster = cluster
        self._certificate = self._make(f"emberline cluster {cluster}", None, self._key.public_key(), _BEGINS, _ENDS)

    def worker_credential(self, name: str, join_key: bytes) -> Credential:
        return Credential(name=name, cluster=self._cluster, key=join_key, pem=self._issue(worker_host(name)))

    def core_pem(self) -> str:
        """Private key and certificates of a core."""
        return self._issue(CORE_HOST)

    def node_pem(self, address: str) -> str:
        """Private key and certificates of a Ray node, whose address is in it: Ray's TLS knows no Ed25519 keys."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return self._issue(address, ec.generate_private_key(ec.SECP256R1()))

    def _issue(self, host: str, key: Any = None) -> str:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key, now = key or Ed25519PrivateKey.generate(), datetime.now(UTC)
        certificate = self._make(host, host, key.public_key(), now - _CLOCKS, now + timedelta(days=VALID_DAYS))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = serialization.Encoding.PEM
        parts: list[bytes] = [private, certificate.public_bytes(pem), self._certificate.public_bytes(pem)]
        return b"".join(parts).decode()

    def _make(self, subject: str, host: str | None, public_key: Any, begins: datetime, ends: datetime) -> Any:
        """The authority's own certificate where there is no host."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        issuer = f"emberline cluster {self._cluster}"
        own = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public_key)
            .serial_number(1 if host is None else x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=0 if host is None else None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), False)
            .add_extension(_key_usage(signs=host is None), True)
        )
        if host is not None:
            usages = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.SubjectAlternativeName([_name(host)]), False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        return builder.sign(self._key, None)


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
