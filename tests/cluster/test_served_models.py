"""Models by name; tokenizers of models that are loaded on demand are read once, when they are needed."""

import asyncio
import threading

import msgspec
import pytest

from emberline.catalog.model_files import ModelFiles
from emberline.cluster.served_models import Served, ServedModels
from emberline.protocol.errors import BadInput, MalformedModelId, ModelNotFound
from emberline.text.text_model import TextModel
from tests.service.conftest import MODEL, offer


@pytest.fixture
def named(text_model: TextModel) -> Served:
    return offer(text_model)


def files(named: Served, name: str, path: str = "/m") -> ModelFiles:
    return ModelFiles(msgspec.structs.replace(named.card, id=f"@cf/test/{name}", aliases=(name, "bytes")), path)


class Loader:
    def __init__(self, named: Served) -> None:
        self.loaded: list[str] = []
        self.error: Exception | None = None
        self._text = named.text

    def __call__(self, model: ModelFiles) -> Served:
        assert threading.current_thread() is not threading.main_thread()
        self.loaded.append(model.card.id)
        if self.error is not None:
            raise self.error
        return Served(model.card, self._text)


async def test_a_model_on_demand_is_read_once_for_all_that_ask(named: Served) -> None:
    load = Loader(named)
    models = ServedModels([named], load)
    models.offer([files(named, "other")])
    assert [card.id for card in models.cards()] == [MODEL, "@cf/test/other"]
    assert models.resolve("BYTES").id == MODEL, "a model that was named at start keeps its names"
    found = await asyncio.gather(*(models.get(models.resolve("Other")) for _ in range(8)))
    assert {served.card.id for served in found} == {"@cf/test/other"}
    assert load.loaded == ["@cf/test/other"]
    assert await models.get(models.resolve(MODEL)) is named


def test_ids_take_precedence_over_the_aliases_of_other_models(named: Served) -> None:
    models = ServedModels()
    second = files(named, "second")
    claims = msgspec.structs.replace(files(named, "first").card, aliases=("first", second.card.id))
    models.offer([ModelFiles(claims, "/m"), second])
    assert models.resolve(second.card.id).id == second.card.id


async def test_a_failed_read_is_everybodys_error_and_tried_again(named: Served) -> None:
    load = Loader(named)
    models = ServedModels([], load)
    models.offer([files(named, "other")])
    load.error = BadInput("no tokenizer")
    other = models.resolve("other")
    for result in await asyncio.gather(models.get(other), models.get(other), return_exceptions=True):
        assert isinstance(result, BadInput)
    load.error = None
    assert (await models.get(other)).card.id == "@cf/test/other"
    assert len(load.loaded) == 2


async def test_models_come_and_go(named: Served) -> None:
    load = Loader(named)
    models = ServedModels([named], load)
    models.offer([files(named, "a"), files(named, "b")])
    await models.get(models.resolve("a"))
    removed = models.resolve("b")
    models.offer([files(named, "a", "/elsewhere"), ModelFiles(named.card, "/m")])
    assert [card.id for card in models.cards()] == [MODEL, "@cf/test/a"]
    await models.get(models.resolve("a"))
    assert load.loaded == ["@cf/test/a", "@cf/test/a"], "its files have changed"
    models.offer([])
    assert [card.id for card in models.cards()] == [MODEL]
    with pytest.raises(ModelNotFound, match=f"no model b here; there are {MODEL}"):
        models.resolve("b")
    with pytest.raises(ModelNotFound, match="no model @cf/test/b here"):
        await models.get(removed)


async def test_what_is_not_here_is_told_apart(named: Served) -> None:
    models = ServedModels([named])
    with pytest.raises(ModelNotFound, match="run `emberline pull gemma-3-270m`"):
        models.resolve("gemma-3-270m")
    for name in ("../x", "x" * 1_000_000, "", "a b"):
        with pytest.raises(MalformedModelId) as caught:
            models.resolve(name)
        assert len(caught.value.message) < 400
