"""Encryption of small secrets at rest, such as the keys of providers, under keys derived from the root secret.

The standard library has no block cipher, so keyed BLAKE2b is the one primitive: as a pseudorandom function in counter
mode it makes the key stream, and it authenticates nonce, context and ciphertext (encrypt, then MAC). Each purpose has a
key of its own, and each secret a random nonce of 192 bits.
"""

import hmac
import secrets
from hashlib import blake2b

from emberline.accounts.secret import Secret
from emberline.protocol.errors import Internal

_NONCE_BYTES = 24
_TAG_BYTES = 32
_BLOCK_BYTES = 64
_VERSION = b"\x01"


class Sealer:
    """Seals and opens secrets. What is sealed in one context, such as an account, does not open in another."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._stream_key = secret.derive(f"{purpose}.stream", size=32)
        self._mac_key = secret.derive(f"{purpose}.mac", size=32)

    def seal(self, text: str, *context: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._crypt(text.encode(), nonce)
        return _VERSION + nonce + self._tag(nonce, sealed, context) + sealed

    def open(self, sealed: bytes, *context: str) -> str:
        """Internal where it was sealed under another root secret, for another context, or changed."""
        version, rest = sealed[:1], sealed[1:]
        nonce, tag, data = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:][:_TAG_BYTES], rest[_NONCE_BYTES + _TAG_BYTES :]
        if version != _VERSION or not hmac.compare_digest(tag, self._tag(nonce, data, context)):
            raise Internal("a stored secret cannot be opened: it was sealed under another root secret; store it again")
        return self._crypt(data, nonce).decode()

    def _crypt(self, data: bytes, nonce: bytes) -> bytes:
        """Encrypt or decrypt: the function is its own inverse."""
        n_blocks = -(-len(data) // _BLOCK_BYTES)
        blocks = (
            blake2b(nonce + number.to_bytes(8, "little"), key=self._stream_key, person=b"emberline.strm").digest()
            for number in range(n_blocks)
        )
        return bytes(a ^ b for a, b in zip(data, b"".join(blocks)))

    def _tag(self, nonce: bytes, data: bytes, context: tuple[str, ...]) -> bytes:
        mac = blake2b(nonce, key=self._mac_key, digest_size=_TAG_BYTES, person=b"emberline.mac")
        for part in (*(text.encode() for text in context), data):
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()
