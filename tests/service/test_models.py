"""Names are looked up in one place, and a target is made only of a model that the caller may use."""

from collections import Counter

import msgspec
import pytest

from emberline.accounts.stored_provider import EVERY_ACCOUNT
from emberline.catalog.aliases import Aliases, configured_table
from emberline.catalog.model_card import CogSource, ModelCard, PathSource, pushed_id
from emberline.catalog.model_files import ModelFiles
from emberline.cluster.served_models import Served, ServedModels
from emberline.config import ProviderConfig
from emberline.protocol.errors import Conflict, Forbidden, ModelNotFound
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import Principal
from emberline.service.models import Models
from emberline.text.text_model import TextModel
from emberline.upstream.models import UpstreamModels
from emberline.upstream.providers.directory import ProviderDirectory

OLD, NEW = "@cf/test/old", "@cf/test/new"
ANYONE = Principal("alice")


def card(model_id: str) -> ModelCard:
    name = model_id.rpartition("/")[2]
    return ModelCard(
        id=model_id, aliases=(name,), description="", author="", context_window=64, source=PathSource(""), created_at=""
    )


def models_of(**aliases: dict[str, int]) -> Models:
    served = ServedModels()
    served.offer([ModelFiles(card(OLD), "/old"), ModelFiles(card(NEW), "/new")])
    return Models(served, UpstreamModels(()), Aliases(configured_table(aliases)))


def test_the_words_of_a_predictor_are_shown_to_operators_alone() -> None:
    served, own = ServedModels(), card("@me/own")
    models = Models(served, UpstreamModels(()), Aliases(configured_table({})))
    predictor = msgspec.structs.replace(own, source=CogSource(version=1, digest="", input={}, output={}))
    served.problems = {own.id: "the predictor failed: cannot read 'a secret of a client'"}
    assert models.problem(predictor, Principal("op", role="admin")) == served.problems[own.id]
    assert models.problem(predictor, ANYONE) == "the predictor failed"
    assert models.problem(own, ANYONE) == served.problems[own.id], "an engine's words have no input"
    assert models.problem(card(OLD), ANYONE) == ""


def test_models_named_at_start_are_told_from_those_loaded_on_demand(text_model: TextModel) -> None:
    served = ServedModels([Served(card(OLD), text_model)])
    models = Models(served, UpstreamModels(()), Aliases(configured_table({})))
    served.offer([ModelFiles(card(OLD), "/old"), ModelFiles(card(NEW), "/new")])
    assert [each.id for each in models.cards() if models.is_named_at_start(each.id)] == [OLD]


def test_an_accounts_own_models() -> None:
    served = ServedModels()

    def pushed(account: str, version: int) -> ModelFiles:
        found = card(pushed_id(account, "thing"))
        source = CogSource(version=version, digest="", input={}, output={}, account=account)
        return ModelFiles(msgspec.structs.replace(found, source=source, aliases=()), f"/{version}")

    served.offer([pushed("alice", 1), pushed("bob", 2), ModelFiles(card(OLD), "/old")])
    models = Models(served, UpstreamModels(()), Aliases(configured_table({"best": {"@accounts/alice/thing": 1}})))

    def version(name: str, account: str | None) -> int:
        predictor = models.find(name, account).predictor
        return 0 if predictor is None else predictor.version

    for name in ("@me/thing", "@ME/Thing"):
        assert version(name, "alice") == 1
        assert version(name, "bob") == 2
        with pytest.raises(ModelNotFound, match=f"there are {OLD}$"):
            models.find(name, "carol")
    assert version("@accounts/alice/thing", "alice") == version("best", "alice") == 1
    assert version("@accounts/alice/thing", None) == 1, "the operator sees all"
    for hidden in ("@accounts/alice/thing", "best", "thing"):
        for account in ("bob", "Alice", EVERY_ACCOUNT):
            with pytest.raises(ModelNotFound, match=f"no model {hidden} here"):
                models.find(hidden, account)
    served.offer([pushed("alice", 1), pushed("", 3)])
    assert [version("@me/thing", account) for account in ("alice", "bob", None)] == [1, 3, 3]
    models.check_scope(models.find("@me/thing", "alice"), Principal("alice", models=("@me/*",)))
    served.problems = {"@accounts/alice/thing": "the predictor failed: why"}
    own = models.find("@me/thing", "alice")
    assert models.problem(own, Principal("alice")) == "the predictor failed: why"


def test_names() -> None:
    models = models_of(best={"new": 1}, team={"best": 1})
    for name in (NEW, NEW.upper(), "new", "best", "TEAM"):
        assert models.find(name, "alice").id == NEW
    assert models.is_alias("Team")
    assert not models.is_alias("new")
    with pytest.raises(ModelNotFound, match=f"no model other here; there are {OLD}, {NEW}"):
        models.find("other", "alice")
    with pytest.raises(Conflict):
        models.check_alias(OLD, {"new": 1})
    with pytest.raises(ModelNotFound):
        models.check_alias("more", {"other": 1})


def test_an_alias_of_several_models_is_divided_between_callers() -> None:
    models = models_of(best={"old": 60, "new": 40})
    found = {caller: models.find("best", "alice", caller).id for caller in map(str, range(200))}
    assert found == {caller: models.find("best", "alice", caller).id for caller in found}
    assert 60 <= Counter(found.values())[NEW] <= 100
    assert models.find("best", "alice").id == OLD


def test_a_target_is_made_only_of_a_model_in_the_callers_scope() -> None:
    models = models_of(best={"new": 1})
    for scope in ((), (NEW,), ("new",), ("best",), ("@cf/test/*",)):
        target = models.target(models.find("best", "alice"), Principal("alice", models=scope))
        assert (target.card.id, target.where, target.is_upstream) == (NEW, "engine", False)
    with pytest.raises(Forbidden, match=f"this key may not use {NEW}; it may use old"):
        models.target(models.find("best", "alice"), Principal("alice", models=("old",)))


async def test_a_key_that_the_client_sends_along_opens_its_own_provider_alone() -> None:
    configs = [ProviderConfig(name="xai", key="sk-xai"), ProviderConfig(name="groq", key="sk-groq")]
    models = Models(ServedModels(), UpstreamModels((), providers=ProviderDirectory(configs)), Aliases())
    xai, other = models.find("xai/grok", "alice"), models.find("groq/llama", "alice")
    for named in ("xai", "grok"):
        target = models.target(xai, ANYONE, OwnKey(named, "sk-own"))
        assert (target.where, target.remote, target.provider_access.key) == ("provider", "grok", "sk-own")
        assert models.target(other, ANYONE, OwnKey(named, "sk-own")).provider_access.key == "sk-groq"
    assert models.target(xai, ANYONE).provider_access.key == "sk-xai"


async def test_a_model_whose_provider_has_no_key_is_in_scope_but_only_a_key_makes_it_a_target() -> None:
    """A cached reply needs the scope alone: a client that brings its provider's key along finds its own replies."""
    models = Models(
        ServedModels(), UpstreamModels((), providers=ProviderDirectory([ProviderConfig(name="xai")])), Aliases()
    )
    card = models.find("xai/grok", "alice")
    models.check_scope(card, ANYONE)
    assert models.target(card, ANYONE, OwnKey("xai", "sk-own")).provider_access.key == "sk-own"
    with pytest.raises(Forbidden):
        models.target(card, ANYONE)
