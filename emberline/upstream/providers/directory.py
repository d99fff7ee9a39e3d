"""The providers of this process: found by model id, called with whose key, and the cards of their models."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol, get_args

from emberline.balancer.endpoint import Kind
from emberline.catalog.model_card import ModelCard, PathSource
from emberline.config import ConfigError, ProviderConfig
from emberline.net.egress_policy import EgressPolicy, parse_target
from emberline.net.http_client import ConnectionPool
from emberline.protocol.errors import Forbidden, ModelNotFound, NotFound
from emberline.protocol.provider import OwnKey, ProviderKey
from emberline.protocol.request import Principal
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.attempt import list_models
from emberline.upstream.providers.client import ProviderClient, api_of
from emberline.upstream.providers.registry import ALIASES, Provider, known, provider, task_of
from emberline.upstream.servers.client import DEFAULT_CONTEXT

MAX_ID_CHARS = 256
MAX_CARDS = 4096
MAX_POOLS = 1024  # of addresses that accounts chose
PROVIDER = "provider"  # in place of an architecture, in the cards of providers' models
NOWHERE = "http://provider.invalid"  # of a provider that has no address but those of its accounts
_created_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


class StoredKeys(Protocol):
    """The keys of providers in the store."""

    def find(self, account: str, provider: str) -> ProviderKey | None:
        """The account's own, or else the one of all accounts."""

    def has(self, provider: str, account: str | None) -> bool:
        """True if the account may use a stored key of this provider. `account` None: if any account may."""

    async def catch_up(self) -> None:
        """See what other processes have stored."""


class ProviderDirectory:
    """The providers of this process, by name: those that are configured, and those that have a stored key."""

    def __init__(
        self,
        configs: Sequence[ProviderConfig] = (),
        describe: Callable[[ModelCard], ModelCard] = lambda card: card,
        keys: StoredKeys | None = None,
        egress: EgressPolicy | None = None,
    ) -> None:
        """`describe` adds to a card what the operator knows of the model; `egress` says what accounts' own addresses
        may reach. ConfigError says what is wrong with a configuration."""
        self.on_new: list[Callable[[ProviderClient], None]] = []  # called with a provider that has got its first key
        self.clients: dict[str, ProviderClient] = {
            config.name: ProviderClient(provider(config), config.key or "") for config in configs
        }
        self.on_gone: list[Callable[[ProviderClient], object]] = []  # called with one whose last key was removed
        self._unnamed: set[str] = set()  # providers that no key named at the last sweep
        self._describe = describe
        self._keys = keys
        self._egress = egress or EgressPolicy(setting="[accounts] provider_networks")
        # By id, with the provider's client. Clients name models at will, so it is bounded.
        self._cards: dict[str, tuple[ProviderClient, ModelCard]] = {}
        self._pools: dict[tuple[str, bool], ConnectionPool] = {}  # by URL, and whether an account chose it

    def find(self, model_id: str, account: str | None) -> ModelCard | None:
        """The card of `name/model`. Returns None if the account has no such provider.

        The providers of an account: those that are configured, and those that it or all accounts have a stored key
        of. The answer for any other is the same whether another account has it or nobody. `account` None: the
        operator, who sees the providers of every account."""
        known = self._cards.get(model_id)
        if known is not None and known[0].is_configured:
            return known[1]
        client, model = self._split(model_id, account)
        if client is None:
            return None
        if known is None:
            if len(self._cards) >= MAX_CARDS:
                self._cards.clear()
            known = self._cards[model_id] = client, self._describe(_card(client, model))
        return known[1]

    async def ensure(self, model_id: str) -> None:
        """Know the provider of a model that another process has resolved."""
        if "/" in model_id and self.find(model_id, None) is None and self._keys is not None:
            await self._keys.catch_up()
            self.find(model_id, None)

    def sweep(self, is_used: Callable[[ProviderClient], bool]) -> list[ProviderClient]:
        """Remove the providers that no stored key has named since the last sweep, unless `is_used`.

        Returns their clients, for the caller to close. A key that is replaced, by its removal and a new one, leaves its
        provider in place.
        """
        unnamed = {
            name for name, client in self.clients.items() if not client.is_configured and not self._has(name, None)
        }
        unused = [name for name in unnamed & self._unnamed if not is_used(self.clients[name])]
        gone = [self.clients.pop(name) for name in unused]
        self._unnamed = unnamed & self.clients.keys()
        for model_id in [model_id for model_id, (client, _) in self._cards.items() if client in gone]:
            del self._cards[model_id]
        for client in gone:
            for tell in self.on_gone:
                tell(client)
        return gone

    def _has(self, name: str, account: str | None) -> bool:
        return self._keys is not None and self._keys.has(name, account)

    def cards(self) -> list[ModelCard]:
        """Cards of the models that are known by name."""
        listed = ((client, model) for client in self.clients.values() for model in client.provider.models)
        return [self._describe(_card(client, model)) for client, model in listed]

    def lists(self, model_id: str) -> bool:
        """True if `cards` has a card of this id. Makes no card."""
        name, _, model = model_id.partition("/")
        client = self.clients.get(name)
        return client is not None and model in client.provider.models

    def client_of(self, card: ModelCard) -> ProviderClient | None:
        """The client of the card's provider. Returns None if the card is no provider's.

        Raises ModelNotFound if the provider was removed after the request had found its card.
        """
        if card.architecture != PROVIDER:
            return None
        name = card.id.partition("/")[0]
        if (client := self.clients.get(name)) is None:
            raise ModelNotFound(f"provider {name} was removed: add its key again", param="model")
        return client

    def access(self, client: ProviderClient, principal: Principal, own_key: OwnKey | None = None) -> Access:
        """The key that the request brings, the account's own, the stored one of all accounts, or the configured one.

        Raises Forbidden if there is none, and ModelNotFound if the provider is another account's."""
        name = client.provider.name
        own = "" if own_key is None or _known_name(own_key.provider) != _known_name(name) else own_key.key
        stored = None if own or self._keys is None else self._keys.find(principal.account, name)
        if stored is not None:
            return self._stored_access(client, stored)
        if client.provider.url == NOWHERE:
            raise ModelNotFound(f"this account has no provider {name}", param="model")
        if own:
            return Access(own)
        if not client.access.key and client.provider.needs_key:
            raise Forbidden(
                f"there is no key for provider {name}: add one with `emberline provider add {name}`",
                param="model",
            )
        return client.access

    def hint(self, model_id: str) -> str:
        """Advice about a model that is not found, if its name begins with that of a provider."""
        name = model_id.partition("/")[0].lower()
        if "/" not in model_id or known(name) is None:
            return ""
        return f"; to use provider {name}, add its key: `emberline provider add {name}`, or a [[providers]] table"

    async def test(self, name: str, principal: Principal) -> list[str]:
        """The models that the provider lists, asked with the key that this account's requests would use."""
        client = self._client(name.lower(), principal.account)
        if client is None:
            raise NotFound(f"there is no provider {name[:32]}{self.hint(name + '/')}", param="name")
        access = self.access(client, principal)
        return await list_models(client, access)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _stored_access(self, client: ProviderClient, stored: ProviderKey) -> Access:
        url = stored.url or (_known_url(client.provider.name) if client.provider.url == NOWHERE else "")
        if not url:
            if client.provider.url == NOWHERE:
                raise Forbidden(
                    f"provider {client.provider.name} needs a url: add its key again, with one", param="model"
                )
            return Access(stored.key)
        kind: Kind = stored.kind if stored.kind in get_args(Kind) else client.provider.kind  # type: ignore[assignment]
        if kind == "any-llm":  # the package connects by itself: nothing would check where to
            raise Forbidden(
                f"provider {client.provider.name} takes no url: add its key again, without one", param="model"
            )
        here = client.provider._replace(kind=kind, url=url)
        pool = self._pool(here, stored.is_own)
        traits = client.provider.traits if kind == client.provider.kind else kind
        return Access(stored.key, pool, api_of(here), traits, url if stored.is_own else "", stored.is_own)

    def _pool(self, provider: Provider, is_own: bool) -> ConnectionPool:
        pool = self._pools.get((provider.url, is_own))
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                for key in [key for key, pool in self._pools.items() if not pool.n_connections]:
                    del self._pools[key]
            resolve = self._resolver(provider.url) if is_own else None
            pool = ConnectionPool(provider.address, read_timeout_s=provider.timeout_s, resolve=resolve)
            self._pools[provider.url, is_own] = pool
        return pool

    def _resolver(self, url: str) -> Callable[[], Awaitable[Sequence[str]]]:
        """For every connection anew: a name that was public yesterday may not be today."""
        target, egress = parse_target(url), self._egress
        return lambda: egress.addresses(target)

    def _split(self, model_id: str, account: str | None) -> tuple[ProviderClient | None, str]:
        name, separator, model = model_id.partition("/")
        valid = separator and model and len(model_id) <= MAX_ID_CHARS and model.isprintable() and " " not in model
        client = self._client(name.lower(), account) if valid else None
        return (client, model) if client is not None else (None, "")

    def _client(self, name: str, account: str | None) -> ProviderClient | None:
        for each in (name, ALIASES.get(name, "")):
            client = self.clients.get(each)
            if client is not None and client.is_configured:
                return client
            if each and self._has(each, account):
                return client or self._add(each)
        return None

    def _add(self, name: str) -> ProviderClient:
        """A provider that only stored keys name. One that is known by a local address, as Ollama, is the operator's to
        offer: accounts reach it by a key of all accounts, or where `provider_networks` lets them."""
        try:
            made = provider(ProviderConfig(name=name))
            if not made.address.tls:
                made = made._replace(url=NOWHERE)
        except ConfigError:  # its name tells nothing: each account has its own address
            made = Provider(name, "openai", NOWHERE, needs_key=False)
        client = ProviderClient(made, is_configured=False)
        for tell in self.on_new:
            tell(client)
        self.clients[name] = client
        return client


def _known_name(name: str) -> str:
    return ALIASES.get(name, name)


def _known_url(name: str) -> str:
    found = known(name)
    return "" if found is None else found.url


def remote_name(card: ModelCard) -> str:
    """The provider's name of the model."""
    return card.id.partition("/")[2]


def _card(client: ProviderClient, model: str) -> ModelCard:
    name = client.provider.name
    return ModelCard(
        id=f"{name}/{model}",
        description=f"Served by provider {name}.",
        author=name,
        context_window=DEFAULT_CONTEXT,
        source=PathSource(""),
        created_at=_created_at,
        task=task_of(model),
        architecture=PROVIDER,
        fingerprint=f"{name}:{model}",
    )
