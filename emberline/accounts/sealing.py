"""Encryption of small secrets at rest, such as the keys of providers, under keys derived from the root secret.

ChaCha20-Poly1305 authenticates a secret together with its context: all that decides where the secret goes. Each purpose
has a key of its own, and each secret a random nonce.
"""

import secrets
from typing import TYPE_CHECKING

from emberline.accounts.secret import Secret
from emberline.protocol.errors import Internal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

NONCE_BYTES = 12
VERSION = b"\x02"  # the first byte of a sealed secret; 1 is the form of `unbound_sealing`


class Sealer:
    """Seals and opens secrets. What is sealed in one context, such as an account, does not open in another."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._key = secret.derive(f"{purpose}.aead", size=32)

    def seal(self, text: str, *context: str) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._cipher().encrypt(nonce, text.encode(), encode_context(context))

    def open(self, sealed: bytes, *context: str) -> str:
        """The secret. Raises Internal if it was sealed under another root secret, for another context, or changed."""
        from cryptography.exceptions import InvalidTag

        version, nonce, data = sealed[:1], sealed[1:][:NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            if version != VERSION or len(nonce) < NONCE_BYTES:
                raise InvalidTag
            return self._cipher().decrypt(nonce, data, encode_context(context)).decode()
        except InvalidTag:
            raise Internal("a stored secret does not open in its place") from None

    def _cipher(self) -> "ChaCha20Poly1305":
        """The library is imported when it is needed first: most starts open no secret."""
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return ChaCha20Poly1305(self._key)


def encode_context(context: tuple[str, ...]) -> bytes:
    """The parts with their lengths, so that no two contexts have the same bytes."""
    parts = [part.encode() for part in context]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
