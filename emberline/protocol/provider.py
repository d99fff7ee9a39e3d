"""A provider's key, opened for one request."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProviderKey:
    key: str = field(repr=False)
    kind: str = ""  # the API that it is for; empty: as the provider's name tells
    url: str = ""  # where it is used; empty: at the provider's own address
    is_own: bool = False  # an account's: its URL was chosen by a tenant, not by the operator
