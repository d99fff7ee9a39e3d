"""Authentication: one static API key, or none in local mode, where everyone who reaches the port is admitted."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest

from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.request import Principal

LOCAL_ACCOUNT = "local"  # where the request's path names no account
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Authenticator:
    """Turns a request's headers and account into a Principal, or raises Unauthorized."""

    def __init__(self, secret: Secret, key: str | None = None) -> None:
        self._salt_of = lru_cache(1024)(lambda account: secret.derive("kv", account))
        self._key_digest = _digest(key) if key else None
        self._key_id = secret.derive("key-id", key, size=6).hex() if key else ""

    @property
    def needs_key(self) -> bool:
        return self._key_digest is not None

    def principal(self, account: str, key_id: str) -> Principal:
        """The principal of an account whose key was checked before: for queued jobs."""
        return Principal(account=account, key_id=key_id, salt=self._salt_of(account))

    def authenticate(self, headers: Mapping[str, str], account: str = LOCAL_ACCOUNT) -> Principal:
        """headers: by lower-case name. The account is the tenant; its salt isolates its cached KV blocks."""
        if not self._is_authorized(headers):
            raise Unauthorized("a valid API key is needed: send it as `Authorization: Bearer <key>`")
        if not _ACCOUNT.fullmatch(account):
            raise BadInput("account names are 1 to 64 letters, digits, - and _, and begin with a letter or digit")
        return self.principal(account, self._key_id)

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        expected = self._key_digest
        return expected is None or any(compare_digest(_digest(key), expected) for key in _presented(headers))


def _presented(headers: Mapping[str, str]) -> Iterator[str]:
    """The keys in the headers of OpenAI's, Cloudflare's (current and older) and Anthropic's clients."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for name in ("x-auth-key", "x-api-key"):
        if key := headers.get(name):
            yield key


def _digest(key: str) -> bytes:
    """Hashed before comparing, so that the time does not depend on the length either."""
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
