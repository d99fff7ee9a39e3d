"""A provider's key as the store keeps it."""

import msgspec

EVERY_ACCOUNT = ""  # in place of an account: the key is used for all that have none of their own


class StoredProvider(msgspec.Struct, frozen=True, kw_only=True):
    account: str
    provider: str
    kind: str  # the API it speaks; empty: as its name tells
    url: str  # empty: as its name tells, or the configuration
    sealed: bytes | None  # the key, encrypted; None: removed
    created_us: int
    version: int  # of the directory, when it last changed

    def __repr__(self) -> str:
        return f"StoredProvider(account={self.account!r}, provider={self.provider!r}, url={self.url!r})"


PROVIDER_COLUMNS = ", ".join(StoredProvider.__struct_fields__)
