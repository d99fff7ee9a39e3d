"""With which key a provider is called for one request, and where."""

from dataclasses import dataclass, field

from emberline.upstream.http_client import ConnectionPool


@dataclass(frozen=True, slots=True)
class Access:
    key: str = field(repr=False)
    pool: ConnectionPool | None = None  # to the account's own URL; None: to the provider's

    @property
    def is_own_url(self) -> bool:
        """What fails there says nothing about the provider that other accounts use."""
        return self.pool is not None
