"""RoPE scaling against transformers: theta ** (-2i / dim) / divisor is its inverse frequency."""

from typing import Any

import numpy as np
import pytest

from emberline.weights.model_config import BadCheckpoint, Fields, rope_frequencies, rope_from_gguf, rope_from_hf
from tests.lazy_modules import transformers

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with explicit parameters": {
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 4096,
    },
    "llama 4's": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "deepseek's yarn": {
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 4096,
    },
    "kimi's yarn": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "gpt-oss's yarn": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "dim"), [(500_000.0, 64), (1_000_000.0, 128), (10_000.0, 16)])
def test_divisors_match_transformers(name: str, theta: float, dim: int) -> None:
    scaling = SCALINGS[name]
    kind = str(scaling.get("rope_type", scaling.get("type")))
    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=131_072,
        rope_parameters=scaling | {"rope_theta": theta, "rope_type": kind},
    )
    inverse, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    divisors, scale = rope_from_hf(Fields(scaling, "rope"), theta, dim, 131_072)
    assert divisors is not None
    np.testing.assert_allclose(rope_frequencies(theta, dim) / np.array(divisors), inverse.numpy(), rtol=2e-6)
    assert scale == pytest.approx(factor)


def test_gguf_metadata_gives_the_same_scaling() -> None:
    fields = Fields(
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768}, "gguf"
    )
    expected = rope_from_hf(Fields(SCALINGS["yarn"], "rope"), 1e6, 128, 131_072)
    assert rope_from_gguf(fields, 1e6, 128, 131_072) == expected


def test_without_scaling_there_are_no_divisors() -> None:
    fields = Fields({"rope_type": "default", "rope_theta": 1e4}, "rope")
    assert rope_from_hf(fields, 1e4, 64, 4096) == (None, 1.0)
    assert rope_from_gguf(Fields({}, "gguf"), 1e4, 64, 4096) == (None, 1.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "two"},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0},
        {"rope_type": "yarn", "factor": 2.0, "mscale": -1.0, "mscale_all_dim": 1.0},
        {"rope_type": 3},
    ],
)
def test_unsupported_scaling_is_rejected(scaling: dict[str, object]) -> None:
    with pytest.raises(BadCheckpoint):
        rope_from_hf(Fields(scaling, "rope"), 1e4, 64, 4096)
