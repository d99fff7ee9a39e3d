"""With which key a provider is called for one request, and where."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from emberline.net.http_client import ConnectionPool
from emberline.upstream.dialects.dialect import ProviderAPI
from emberline.upstream.providers.registry import ALIASES


@dataclass(frozen=True, slots=True)
class Access:
    key: str = field(repr=False)
    # Of a stored key with an address of its own; None: the provider's.
    pool: ConnectionPool | None = None
    api: ProviderAPI | None = None
    traits: str = ""  # which fields are taken there, as `upstream.request` knows them
    slots: str = ""  # `RouteRequest.slots`
    is_own_url: bool = False  # an account's: what fails there says nothing about the provider that others use


RequestKey = AbstractContextManager[None]
_own: ContextVar[tuple[str, str]] = ContextVar("own provider key", default=("", ""))  # provider and key


@contextmanager
def request_key(provider: str, key: str) -> Iterator[None]:
    """Requests inside are sent to this provider, by any of its names, with the caller's own key. An empty one: with the
    stored ones."""
    token = _own.set((ALIASES.get(provider, provider), key))
    try:
        yield
    finally:
        _own.reset(token)


def own_key(provider: str) -> str:
    """The key that the current request brings for the provider; empty: none."""
    name, key = _own.get()
    return key if name == ALIASES.get(provider, provider) else ""
