"""The sealed form of provider keys before schema version 18, read once more by the migration to today's form.

Its context was the account and the provider alone, so the address in the row could be changed. The cipher was keyed
BLAKE2b in counter mode, with a second BLAKE2b as MAC. A release that refuses stores below schema version 18 needs
neither this module nor `ProviderKeys.bind`.
"""

import hmac
from hashlib import blake2b

from emberline.accounts.sealing import encode_context
from emberline.accounts.secret import Secret
from emberline.protocol.errors import Internal

VERSION = b"\x01"
_NONCE_BYTES = 24
_TAG_BYTES = 32
_BLOCK_BYTES = 64


class UnboundOpener:
    """Opens secrets of the earlier form. Nothing is sealed in it any more."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._stream_key = secret.derive(f"{purpose}.stream", size=32)
        self._mac_key = secret.derive(f"{purpose}.mac", size=32)

    def open(self, sealed: bytes, *context: str) -> str:
        """The secret. Raises Internal if it was sealed under another root secret, for another context, or changed."""
        version, rest = sealed[:1], sealed[1:]
        nonce, tag, data = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:][:_TAG_BYTES], rest[_NONCE_BYTES + _TAG_BYTES :]
        mac = blake2b(nonce, key=self._mac_key, digest_size=_TAG_BYTES, person=b"emberline.mac")
        mac.update(encode_context(context) + len(data).to_bytes(8, "little") + data)
        if version != VERSION or not hmac.compare_digest(tag, mac.digest()):
            raise Internal("a stored secret does not open in its place")
        n_blocks = -(-len(data) // _BLOCK_BYTES)
        blocks = (
            blake2b(nonce + number.to_bytes(8, "little"), key=self._stream_key, person=b"emberline.strm").digest()
            for number in range(n_blocks)
        )
        return bytes(a ^ b for a, b in zip(data, b"".join(blocks))).decode()
