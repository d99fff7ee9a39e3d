"""API keys: how one is made, recognized and kept. A key is shown once; the store has its SHA-256 only."""

import secrets
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from hashlib import sha256
from typing import Literal

import msgspec

from emberline.accounts.account import Limits

PREFIX = "ember_"
MAX_KEY_CHARS = 512  # of any key that a client sends
RANDOM_BYTES = 32
_CHECKSUM_BYTES = 4
_KEY_CHARS = len(PREFIX) + (RANDOM_BYTES + _CHECKSUM_BYTES) * 4 // 3

Role = Literal["user", "admin"]


class ApiKey(Limits, frozen=True, kw_only=True):
    """The record of a key. It belongs to one account; an admin key may act for every account.

    `models` and `apis` are what it may use; empty: everything. A model is an id or an alias, or ends in `*`.
    """

    id: str
    account: str
    name: str = ""
    role: Role = "user"
    models: tuple[str, ...] = ()
    apis: tuple[str, ...] = ()
    digest: bytes
    hint: str  # the key's last characters, to recognize it
    previous_digest: bytes | None = None  # before the last rotation; valid until previous_until_us
    previous_until_us: int | None = None
    created_us: int
    expires_us: int | None = None
    revoked_us: int | None = None
    version: int = 0  # of the directory, when it last changed

    def __repr__(self) -> str:
        return f"ApiKey(id={self.id!r}, account={self.account!r}, role={self.role!r})"


KEY_COLUMNS = ", ".join(ApiKey.__struct_fields__)


class NewKey(msgspec.Struct, frozen=True):
    """A key in clear, which exists only until its owner has received it."""

    text: str

    @property
    def digest(self) -> bytes:
        return key_digest(self.text)

    @property
    def hint(self) -> str:
        return self.text[-4:]

    def __repr__(self) -> str:
        return f"NewKey(…{self.hint})"


def new_key() -> NewKey:
    raw = secrets.token_bytes(RANDOM_BYTES)
    return NewKey(PREFIX + urlsafe_b64encode(raw + _checksum(raw)).decode())


def new_key_id() -> str:
    return f"key_{secrets.token_hex(8)}"


def key_digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_well_formed(key: str) -> bool:
    """True if the checksum holds: a key that was cut or mistyped is recognized without a look-up."""
    if len(key) != _KEY_CHARS or not key.startswith(PREFIX):
        return False
    try:
        raw = urlsafe_b64decode(key[len(PREFIX) :])
    except (Error, ValueError):
        return False
    return raw[RANDOM_BYTES:] == _checksum(raw[:RANDOM_BYTES])


def _checksum(raw: bytes) -> bytes:
    return zlib.crc32(PREFIX.encode() + raw).to_bytes(_CHECKSUM_BYTES, "big")
