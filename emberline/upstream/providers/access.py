"""With which key a provider is called for one request, and where."""

from dataclasses import dataclass, field

from emberline.upstream.http_client import ConnectionPool
from emberline.upstream.providers.api import ProviderAPI


@dataclass(frozen=True, slots=True)
class Access:
    key: str = field(repr=False)
    # Of a stored key with an address of its own; None: the provider's.
    pool: ConnectionPool | None = None
    api: ProviderAPI | None = None
    traits: str = ""  # which fields are taken there, as `upstream.request` knows them
    is_own_url: bool = False  # an account's: what fails there says nothing about the provider that others use
