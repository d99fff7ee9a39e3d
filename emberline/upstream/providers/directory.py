"""Which provider a model id names, with whose key it is called, and the cards of providers' models."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from emberline.catalog.model_card import ModelCard, PathSource
from emberline.config import ProviderConfig
from emberline.protocol.errors import Forbidden
from emberline.protocol.request import Principal
from emberline.upstream.client import DEFAULT_CONTEXT
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.registry import ALIASES, known, provider

MAX_ID_CHARS = 256
MAX_CARDS = 4096
_created_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


class ProviderDirectory:
    """The providers of this process, by name."""

    def __init__(
        self, configs: Sequence[ProviderConfig] = (), describe: Callable[[ModelCard], ModelCard] = lambda card: card
    ) -> None:
        """`describe` adds to a card what the operator knows of the model. ConfigError says what is wrong with one."""
        self._describe = describe
        self._cards: dict[str, ModelCard] = {}  # by id; clients name models at will, so it is bounded
        self.clients: dict[str, ProviderClient] = {
            config.name: ProviderClient(provider(config), config.key or "") for config in configs
        }

    def find(self, model_id: str) -> ModelCard | None:
        """The card of `name/model`; None where no such provider is configured."""
        card = self._cards.get(model_id)
        if card is None:
            client, model = self._split(model_id)
            if client is None:
                return None
            if len(self._cards) >= MAX_CARDS:
                self._cards.clear()
            card = self._cards[model_id] = self._describe(_card(client, model))
        return card

    def cards(self) -> list[ModelCard]:
        """Of the models that are known by name."""
        listed = ((client, model) for client in self.clients.values() for model in client.provider.models)
        return [self._describe(_card(client, model)) for client, model in listed]

    def client_of(self, card: ModelCard) -> ProviderClient | None:
        """None: the card is no provider's."""
        return self.clients.get(card.id.partition("/")[0]) if card.architecture == PROVIDER else None

    def access(self, client: ProviderClient, principal: Principal) -> Access:
        """The account's own key, or the configured one. Forbidden where there is none."""
        access = client.access
        if not access.key and client.provider.needs_key:
            raise Forbidden(
                f"there is no key for provider {client.name}: add one with `emberline provider add {client.name}`",
                param="model",
            )
        return access

    def hint(self, model_id: str) -> str:
        """What to do about a model that is not found, where its name begins with that of a provider."""
        name = model_id.partition("/")[0].lower()
        if "/" not in model_id or known(name) is None:
            return ""
        return f"; to use provider {name}, add a [[providers]] table with its key to the configuration"

    def _split(self, model_id: str) -> tuple[ProviderClient | None, str]:
        name, separator, model = model_id.partition("/")
        name = name.lower()
        client = self.clients.get(name) or self.clients.get(ALIASES.get(name, ""))
        valid = separator and model and len(model_id) <= MAX_ID_CHARS and model.isprintable() and " " not in model
        return (client, model) if client is not None and valid else (None, "")


PROVIDER = "provider"  # in place of an architecture, in the cards of providers' models


def remote_name(card: ModelCard) -> str:
    """As the provider calls the model."""
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
        architecture=PROVIDER,
        fingerprint=f"{name}:{model}",
    )
