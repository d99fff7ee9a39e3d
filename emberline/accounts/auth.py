"""Authentication: turns the credentials of a request into a Principal.

Local mode needs no key: everyone who reaches the port may do everything. Elsewhere there are API keys of the directory,
the configured admin key, and operator tickets. Nothing but the credentials decides who the caller is.
"""

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from hmac import compare_digest

from emberline.accounts.account import LOCAL_ACCOUNT, OWN_ACCOUNT, check_account_name
from emberline.accounts.api_key import MAX_KEY_CHARS, PREFIX, ApiKey, is_well_formed, key_digest
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.operator_ticket import OPERATOR, TICKET_PREFIX, is_operator_ticket
from emberline.accounts.secret import Secret
from emberline.protocol.errors import Forbidden, Unauthorized
from emberline.protocol.request import Principal

GATEWAY_AUTHORIZATION = b"cf-aig-authorization"  # where it is sent, the others are a provider's
_CREDENTIALS = (b"authorization", b"x-auth-key", b"x-api-key")
_HOW = "send it as `Authorization: Bearer <key>`"

RawHeaders = Iterable[tuple[bytes, bytes]]  # names in lower case


class UnknownKey(Unauthorized):
    """A well-formed key that this process does not know, perhaps not yet."""


class Authenticator:
    """Checks keys in memory; `key` is the configured admin key. Without `required` and a key, local mode."""

    def __init__(
        self,
        secret: Secret,
        key: str | None = None,
        directory: KeyDirectory | None = None,
        required: bool = False,
        shares_kv: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`shares_kv`: accounts have one salt, so that each finds the KV of what others have sent, and can tell by the
        time to the first token what that was. `clock` returns Unix time in seconds."""
        self._secret = secret
        self._clock = clock
        self._directory = directory
        self.shares_kv = shares_kv
        self._salt_of = lru_cache(1024)(lambda account: secret.derive("kv", *(() if shares_kv else (account,))))
        self._admin_digest = key_digest(key) if key else None
        self._admin_id = secret.derive("key-id", key, size=6).hex() if key else ""
        self._required = required or bool(key)

    @property
    def needs_key(self) -> bool:
        return self._required

    def salt_of(self, account: str) -> bytes:
        """The salt of an account's cached KV."""
        check_account_name(account)
        return self._salt_of(account)

    def principal(self, account: str, key_id: str) -> Principal:
        """The principal of a queued job: its key was checked when it was submitted, and may have been revoked since."""
        record = self._directory.key(key_id) if self._directory is not None and key_id else None
        models = () if record is None else record.models
        return Principal(account=account, key_id=key_id, salt=self._salt_of(account), models=models)

    async def authenticate(self, headers: RawHeaders, account: str | None = None) -> Principal:
        """`account` is what the path names: a key acts for its own account only, an admin for every one."""
        try:
            return self.check(headers, account)
        except UnknownKey:
            if self._directory is None:
                raise
            await self._directory.catch_up()
            return self.check(headers, account)

    def check(self, headers: RawHeaders, account: str | None = None) -> Principal:
        """Authenticate by what this process already knows, without asking the store."""
        if account == OWN_ACCOUNT:
            account = None
        if account is not None:
            check_account_name(account)
        key = _presented(headers, self._required)
        if not self._required and not key.startswith(PREFIX):
            return self._admin("", account)
        if not key:
            raise Unauthorized(f"a valid API key is needed: {_HOW}")
        digest = key_digest(key)
        if self._admin_digest is not None and compare_digest(digest, self._admin_digest):
            return self._admin(self._admin_id, account)
        if key.startswith(TICKET_PREFIX) and is_operator_ticket(self._secret, key, self._clock()):
            return self._admin(OPERATOR, account)
        record = self._directory.key_of_digest(digest) if self._directory is not None else None
        if record is None:
            if is_well_formed(key):
                raise UnknownKey(f"a valid API key is needed: there is no such key here; {_HOW}")
            raise Unauthorized(f"a valid API key is needed: this is none, or a part of one; {_HOW}")
        self._check_record(record, digest)
        if record.role == "admin":
            return self._admin(record.id, account or record.account)
        if account is not None and account != record.account:
            raise Forbidden(f"this key belongs to account {record.account} and may not act for account {account}")
        salt = self._salt_of(record.account)
        return Principal(record.account, record.id, salt, record.role, record.models, record.apis)

    def _check_record(self, record: ApiKey, digest: bytes) -> None:
        assert self._directory is not None
        now_us = int(self._clock() * 1e6)
        if not compare_digest(digest, record.digest):
            rotated = record.previous_digest is not None and compare_digest(digest, record.previous_digest)
            if not rotated or now_us >= (record.previous_until_us or 0):
                raise Unauthorized("this API key was rotated and is no longer valid: use the new one")
        if record.revoked_us is not None:
            raise Unauthorized("this API key was revoked")
        if record.expires_us is not None and now_us >= record.expires_us:
            raise Unauthorized("this API key has expired")
        owner = self._directory.account(record.account)
        if owner is not None and owner.disabled_us is not None:
            raise Forbidden(f"account {record.account} is disabled")

    def _admin(self, key_id: str, account: str | None) -> Principal:
        name = account or LOCAL_ACCOUNT
        return Principal(name, key_id, self._salt_of(name), "admin")


def _presented(headers: RawHeaders, required: bool) -> str:
    """The key in the headers of OpenAI's, Cloudflare's (current and older) and Anthropic's clients; empty: none.

    Proxies differ in which of two keys they would use, so two are refused. Clients of a local server may send whatever
    they have.
    """
    names: list[bytes] = []
    keys: set[str] = set()
    given: list[tuple[bytes, bytes]] = []
    ours: list[tuple[bytes, bytes]] = []
    for header in headers:
        if header[0] == GATEWAY_AUTHORIZATION:
            ours.append(header)
        elif header[0] in _CREDENTIALS:
            given.append(header)
    for name, raw in ours or given:
        value = raw.decode("latin-1")
        if name in (b"authorization", GATEWAY_AUTHORIZATION):
            scheme, _, value = value.partition(" ")
            value = value if scheme.lower() == "bearer" else ""
        key = value.strip()
        names.append(name)
        if key and (required or key.startswith(PREFIX)):
            keys.add(key)
    if required and len(set(names)) < len(names):
        raise Unauthorized("a header with an API key was sent twice: send one")
    if len(keys) > 1:
        sent = " and ".join(sorted(name.decode() for name in set(names)))
        raise Unauthorized(f"{sent} have different API keys: send one")
    key = keys.pop() if keys else ""
    if len(key) > MAX_KEY_CHARS:
        raise Unauthorized(f"no API key has more than {MAX_KEY_CHARS} characters")
    return key
