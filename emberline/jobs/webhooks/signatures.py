"""Signatures of deliveries after Standard Webhooks 1.0, so that a receiver can tell that one came from here.

An endpoint's secret is derived from the root secret, its id and its version: none is kept anywhere.
"""

import hmac
from base64 import b64encode
from collections.abc import Sequence

from emberline.accounts.secret import Secret

PREFIX = "whsec_"
_KEY_BYTES = 32


def signing_key(secret: Secret, endpoint_id: str, version: int) -> bytes:
    return secret.derive("webhook-signing", endpoint_id, str(version), size=_KEY_BYTES)


def shown(key: bytes) -> str:
    """The key as its owner configures it at the receiver."""
    return PREFIX + b64encode(key).decode()


def signed_headers(keys: Sequence[bytes], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The headers of one attempt. Several keys: while a secret is being rotated, each of them signs."""
    content = b"%s.%d.%s" % (message_id.encode(), timestamp_s, body)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{_signature(key, content)}" for key in keys),
    }


def _signature(key: bytes, content: bytes) -> str:
    return b64encode(hmac.digest(key, content, "sha256")).decode()
