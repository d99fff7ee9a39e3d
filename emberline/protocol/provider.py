"""Keys of providers, opened for one request."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ProviderKey:
    """A stored key."""

    key: str = field(repr=False)
    kind: str = ""  # the API that it is for; empty: as the provider's name tells
    url: str = ""  # where it is used; empty: at the provider's own address
    is_own: bool = False  # an account's: its URL was chosen by a tenant, not by the operator


class OwnKey(NamedTuple):
    """A provider's key that a client sends along with its request. It goes to that provider alone, and is not kept."""

    provider: str  # by any of its names
    key: str
