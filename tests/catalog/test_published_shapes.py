"""Published shapes are read as a checkpoint's own config.json would be, and imply the published sizes."""

from math import prod
from pathlib import Path

import msgspec
import pytest

from emberline.catalog import hub
from emberline.catalog.model_card import BUILT_IN, HubSource
from emberline.catalog.model_store import ModelStore
from emberline.catalog.published_shapes import PublishedShape, find_shape, published_shapes
from emberline.catalog.pull import pull
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.model_config import ModelConfig
from emberline.weights.tensor_shapes import expected_shapes

# Parameters in billions as published, embeddings included. Kimi K2.5's are of the text model.
PARAMETERS = {
    "deepseek-v3": 671,
    "glm-4.7-flash": 29.9,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "kimi-k2.5": 1026,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.6,
    "llama-4-scout": 107.8,
    "mixtral-8x7b": 46.7,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7,
    "qwen2.5-coder-32b": 32.76,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwq-32b": 32.76,
}


def config_of(shape: PublishedShape) -> ModelConfig:
    """With the biases, which a configuration does not tell."""
    config = shape.read()
    return msgspec.structs.replace(config, qkv_bias=config.architecture in ("gpt_oss", "qwen2"))


@pytest.mark.parametrize("alias", PARAMETERS)
def test_parameters_are_the_published_ones(alias: str) -> None:
    shape = find_shape(alias)
    assert shape is not None
    n_parameters = sum(prod(tensor) for _, tensor in expected_shapes(config_of(shape)))
    assert n_parameters / 1e9 == pytest.approx(PARAMETERS[alias], rel=0.003)
    assert shape.card.n_parameters == pytest.approx(n_parameters, rel=0.001)


def test_names_are_unique() -> None:
    names = [name for shape in published_shapes() for name in (shape.id, shape.repo.lower(), *shape.aliases)]
    assert len(names) == len(set(names))
    assert find_shape("hf:Qwen/Qwen3-30B-A3B") is find_shape("@HF/qwen/qwen3-30b-a3b") is not None
    assert find_shape("nothing") is None


@pytest.mark.parametrize(
    ("alias", "numbers"), [("kimi-k2.5", 61 * 576), ("glm-4.7-flash", 47 * 576), ("deepseek-v3", 61 * 576)]
)
def test_latent_cache_of_a_token(alias: str, numbers: int) -> None:
    shape = find_shape(alias)
    assert shape is not None
    config = config_of(shape)
    assert config.latent is not None
    assert config.n_layers * (config.latent.kv_lora + config.latent.rope) == numbers


def test_a_known_model_is_pulled_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HubSource] = []

    def refuse(source: HubSource, *_: object) -> None:
        asked.append(source)
        raise BadInput("no network here")

    monkeypatch.setattr(hub, "fetch", refuse)
    store = ModelStore(tmp_path)
    with pytest.raises(ModelNotFound, match="run `emberline pull @cf/openai/gpt-oss-20b`"):
        store.resolve("@cf/openai/gpt-oss-20b")
    with pytest.raises(BadInput, match="no network here"):
        pull("@cf/openai/gpt-oss-20b", store)
    assert asked == [HubSource("openai/gpt-oss-20b")]
    shape = find_shape("gpt-oss-20b")
    assert shape is not None
    assert (shape.card.id, shape.card.author, shape.card.context_window) == (
        "@cf/openai/gpt-oss-20b",
        "openai",
        131_072,
    )


def test_no_built_in_model_has_the_name_of_a_shape() -> None:
    names = {name for card in BUILT_IN for name in (card.id, *card.aliases)}
    assert names.isdisjoint(name for shape in published_shapes() for name in (shape.id, *shape.aliases))
