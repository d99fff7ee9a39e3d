"""Who asks."""

import msgspec


class Principal(msgspec.Struct, frozen=True):
    """The caller of a request, after authentication. The account is the tenant: it salts caches and owns sessions."""

    account: str
    key_id: str = ""  # empty in local mode
    salt: bytes = b""  # 16 bytes derived from the root secret and the account
