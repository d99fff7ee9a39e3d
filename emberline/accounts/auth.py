"""Authentication in its first form: local mode, where anyone who reaches the port may ask, and one static key."""

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from hmac import compare_digest

from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.request import Principal

LOCAL_ACCOUNT = "local"  # of requests whose path names none
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Authenticator:
    """Turns a request's headers and account into a Principal, or refuses. Without a key everyone is let in."""

    def __init__(self, secret: Secret, key: str | None = None) -> None:
        self._secret = secret
        self._key_digest = _digest(key) if key else None
        self._key_id = secret.derive("key-id", key, size=6).hex() if key else ""

    @property
    def needs_key(self) -> bool:
        return self._key_digest is not None

    def principal(self, account: str, key_id: str) -> Principal:
        """Who asked, for work that is done later."""
        return Principal(account=account, key_id=key_id, salt=self._secret.derive("kv", account))

    def authenticate(self, headers: Mapping[str, str], account: str = LOCAL_ACCOUNT) -> Principal:
        """`headers` finds names in lower case. The account is the tenant: its salt keeps its cached KV apart."""
        if not self._admits(headers):
            raise Unauthorized("a valid API key is needed: send it as `Authorization: Bearer <key>`")
        if not _ACCOUNT.fullmatch(account):
            raise BadInput("account names are 1 to 64 letters, digits, - and _, and begin with a letter or digit")
        return self.principal(account, self._key_id)

    def _admits(self, headers: Mapping[str, str]) -> bool:
        expected = self._key_digest
        return expected is None or any(compare_digest(_digest(key), expected) for key in _presented(headers))


def _presented(headers: Mapping[str, str]) -> Iterator[str]:
    """Every key a dialect's client may have sent: OpenAI's and Cloudflare's, Cloudflare's older, Anthropic's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for name in ("x-auth-key", "x-api-key"):
        if key := headers.get(name):
            yield key


def _digest(key: str) -> bytes:
    """Hashed before comparing, so that not even the length shows."""
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
