"""The models that this process can serve, found by name. Nothing else looks up the name of a model."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from emberline.accounts.stored_provider import EVERY_ACCOUNT
from emberline.catalog.aliases import Aliases, AliasTable
from emberline.catalog.model_card import PUSHED, ModelCard, with_aliases
from emberline.cluster.served_models import ServedModels
from emberline.protocol.errors import Conflict
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import Principal
from emberline.upstream.models import UpstreamModels
from emberline.upstream.target import Target


class ModelLookup(Protocol):
    """`Models` as the APIs and the gateway use it; tests replace it with a fake."""

    def cards(self) -> Sequence[ModelCard]: ...

    def find(self, name: str, account: str | None, caller: str = "") -> ModelCard: ...

    def target(self, card: ModelCard, principal: Principal, own_key: OwnKey | None = None) -> Target: ...

    def check_scope(self, card: ModelCard, principal: Principal) -> None: ...

    def is_upstream(self, card: ModelCard) -> bool: ...

    def is_named_at_start(self, model_id: str) -> bool: ...

    def state(self, model_id: str) -> str: ...

    def problem(self, card: ModelCard, principal: Principal) -> str: ...

    @property
    def aliases(self) -> AliasTable:
        """The operator's aliases."""

    @property
    def upstream(self) -> UpstreamModels:
        """The models on upstream servers."""


class Models:
    """The models of our engines, of upstream servers and of providers, under their ids and aliases.

    A model of ours takes precedence over one of another server with the same name.
    """

    def __init__(self, served: ServedModels, upstream: UpstreamModels, aliases: Aliases) -> None:
        self._served = served
        self.upstream = upstream
        self._aliases = aliases

    @property
    def aliases(self) -> AliasTable:
        """The operator's aliases."""
        return self._aliases.table

    def cards(self) -> list[ModelCard]:
        """All models, with the aliases that the operator has given them."""
        cards = [*self._served.cards(), *self.upstream.cards()]
        table = self._aliases.table
        return [with_aliases(card, table.names_of(card)) for card in cards] if table.aliases else cards

    def find(self, name: str, account: str | None, caller: str = "") -> ModelCard:
        """The model with this id or alias, in any case of letters, among those that the account can see.

        Models of providers are seen by the accounts that have the provider. `account` None: the operator, who sees all.
        An alias of several models stands for the same one in all requests of a caller, and for the one of the largest
        weight without a caller. Raises ModelNotFound or MalformedModelId, which say what to do about it.
        """
        table, found = self._aliases.table, name
        if name.lower() in table.aliases and not self.is_id(name, account):
            found = table.pick(name, caller, lambda target: self._find(target, account) is not None)
        if (card := self._served.find(found, account) or self.upstream.find(found, account)) is not None:
            return card
        shown = found if self._served.find(found) is None else name  # no alias tells of another account's model
        raise self._served.not_found(shown, self.upstream.providers.hint(name), account)

    def target(self, card: ModelCard, principal: Principal, own_key: OwnKey | None = None) -> Target:
        """The model as a request of the principal uses it; `own_key` is a provider's key that the request brings along.

        Raises Forbidden if the principal's key may not use the model, or if there is no key for its provider.
        """
        if principal.models:
            self.check_scope(card, principal)
        if self._served.card(card.id) is not None:
            return Target(card)
        return self.upstream.target(card, principal, own_key)

    def check_scope(self, card: ModelCard, principal: Principal) -> None:
        """Raise Forbidden if the principal's key may not use the model."""
        principal.check_model(card.id, (*card.aliases, *self._aliases.table.names_of(card)))

    def is_upstream(self, card: ModelCard) -> bool:
        """True if another server computes the model, not an engine worker of ours."""
        return self._served.card(card.id) is None

    def is_named_at_start(self, model_id: str) -> bool:
        """True if the operator named the model when the server was started. False for a model that is loaded when a
        request asks for it, and for one of another server."""
        return model_id in self._served.named_at_start

    def state(self, model_id: str) -> str:
        """State of a model that is loaded and unloaded here: on_disk, loading, loaded, unloading or failed.

        Returns `provider` if upstream servers have the model, and an empty text if it is always loaded."""
        on_upstream = self._served.card(model_id) is None and self.upstream.find(model_id, None) is not None
        return self._served.states.get(model_id) or ("provider" if on_upstream else "")

    def problem(self, card: ModelCard, principal: Principal) -> str:
        """Why a model could not be loaded, its worker ended or its predictions fail; empty if nothing is known to be
        wrong. A predictor's own words, which can repeat an input, are for operators and its own account alone."""
        problem = self._served.problems.get(card.id, "")
        if card.predictor is None or principal.is_admin or card.predictor.account == principal.account:
            return problem
        return problem.partition(": ")[0]

    def is_alias(self, name: str) -> bool:
        """True if the name is an alias, so that the model which it stands for may depend on the caller."""
        return name.lower() in self._aliases.table.aliases

    def is_id(self, name: str, account: str | None) -> bool:
        """True if the name is the id of a model that the account can see, which no alias replaces."""
        own = self._served.find(name, account)
        if own is not None and own.id.lower() != name.lower():
            return name.lower() in own.aliases and name.lower().startswith(PUSHED)
        return (own is not None and own.id.lower() == name.lower()) or self.upstream.find(name, account) is not None

    def check_alias(self, name: str, targets: Mapping[str, int]) -> None:
        """Raise Conflict if the name is a model's id, and ModelNotFound if a target is neither a model nor an alias.

        Accounts' own providers keep no name from the operator: such an account goes on with its own model."""
        if self.is_id(name, EVERY_ACCOUNT):
            raise Conflict(f"{name} is the id of a model: choose another name", param="name")
        for target in targets:
            if not self.is_alias(target):
                self.find(target, None)

    def _find(self, name: str, account: str | None) -> ModelCard | None:
        return self._served.find(name, account) or self.upstream.find(name, account)
