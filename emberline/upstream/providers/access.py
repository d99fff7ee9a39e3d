"""The key with which a provider is called for one request, and the address."""

from dataclasses import dataclass, field

from emberline.net.http_client import ConnectionPool
from emberline.upstream.dialects.dialect import ProviderAPI


@dataclass(frozen=True, slots=True)
class Access:
    """Key and connections with which a provider is called for one request."""

    key: str = field(repr=False)
    # Connections and API of a stored key with an address of its own; None: those of the provider.
    pool: ConnectionPool | None = None
    api: ProviderAPI | None = None
    traits: str = ""  # which fields are taken there, as `upstream_request` knows them
    slots: str = ""  # `RouteRequest.slots`
    is_own_url: bool = False  # the address is an account's: its failures say nothing about the provider
