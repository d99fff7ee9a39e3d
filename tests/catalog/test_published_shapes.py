"""Published shapes are read as a checkpoint's own config.json would be, and imply the published sizes."""

from math import prod

import msgspec
import pytest

from emberline.catalog.published_shapes import PublishedShape, find_shape, published_shapes
from emberline.weights.hf_config import read_config
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
    "llama-4-scout": 107.8,
    "mixtral-8x7b": 46.7,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
}


def config_of(shape: PublishedShape) -> ModelConfig:
    """Without the quantization, which is the reader's of weights."""
    document = {key: value for key, value in shape.config.items() if key != "quantization_config"}
    if isinstance(inner := document.get("text_config"), dict):
        document["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    config = read_config(document, {})
    biased = config.architecture in ("gpt_oss", "qwen2")
    return msgspec.structs.replace(config, qkv_bias=biased)


@pytest.mark.parametrize("alias", PARAMETERS)
def test_parameters_are_the_published_ones(alias: str) -> None:
    shape = find_shape(alias)
    assert shape is not None
    n_parameters = sum(prod(tensor) for _, tensor in expected_shapes(config_of(shape)))
    assert n_parameters / 1e9 == pytest.approx(PARAMETERS[alias], rel=0.003)


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
