"""GGUF files as checkpoints: the configuration, and tensors in canonical form."""

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.model_config import BadCheckpoint
from tests.weights.tiny_gguf import tiny_gguf, tiny_tensors

F32 = gguf.GGMLQuantizationType.F32


def permuted(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the Q and K of a llama model."""
    halves = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def gemma3(path: Path, **options: Any) -> Path:
    extra = {
        f"blk.{i}.{name}": np.ones(64, np.float32)
        for i in (0, 1)
        for name in ("post_attention_norm.weight", "post_ffw_norm.weight")
    }
    extra |= {f"blk.{i}.attn_{p}_norm.weight": np.ones(16, np.float32) for i in (0, 1) for p in "qk"}
    return tiny_gguf(path, arch="gemma3", tensors=extra, metadata={"gemma3.attention.sliding_window": 8}, **options)


def test_reads_the_configuration(tmp_path: Path) -> None:
    config = open_checkpoint(tiny_gguf(tmp_path / "m.gguf")).config
    assert (config.architecture, config.n_layers, config.n_heads, config.n_kv_heads) == ("llama", 2, 4, 2)
    assert (config.hidden_size, config.head_dim, config.mlp_size, config.vocab_size) == (64, 16, 96, 32)
    assert config.context_len == 128
    assert config.tie_embeddings
    assert config.eos_ids == (30, 31)  # the declared one, and the one recognized by its text
    assert config.norm_eps == pytest.approx(1e-5)


def test_eos_tokens_beyond_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 32, "tokenizer.ggml.eom_token_id": (1 << 31) - 1}
    assert open_checkpoint(tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).config.eos_ids == (30, 31)


@pytest.mark.parametrize("kind", [F32, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0])
def test_llama_q_and_k_are_unpermuted(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    original = tiny_tensors()
    heads = {"attn_q": 4, "attn_k": 2}
    stored = {
        f"blk.{i}.{part}.weight": permuted(original[f"blk.{i}.{part}.weight"], n)
        for i in (0, 1)
        for part, n in heads.items()
    }
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors=stored, kind=kind))
    for name, array in original.items():
        expected = gguf.dequantize(gguf.quantize(array, kind), kind) if array.ndim == 2 else array
        np.testing.assert_array_equal(checkpoint.weight(name).dense(), expected)


def test_llama_biases_are_unpermuted(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = {"attn_q": (64, 4), "attn_k": (32, 2), "attn_v": (32, None)}
    bias = {
        f"blk.{i}.{part}.bias": random.standard_normal(n).astype(np.float32)
        for i in (0, 1)
        for part, (n, _) in rows.items()
    }
    stored = {
        name: permuted(value, heads) if (heads := rows[name.split(".")[2]][1]) else value
        for name, value in bias.items()
    }
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors=stored))
    assert checkpoint.config.qkv_bias
    for name, value in bias.items():
        np.testing.assert_array_equal(checkpoint.weight(name).dense(), value)


def test_qwen_rows_are_not_permuted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", arch="qwen2", kind=F32))
    np.testing.assert_array_equal(
        checkpoint.weight("blk.0.attn_q.weight").dense(), tiny_tensors()["blk.0.attn_q.weight"]
    )


def test_gemma3_windows_and_scales(tmp_path: Path) -> None:
    config = open_checkpoint(gemma3(tmp_path / "m.gguf")).config
    assert config.windows == (8, 8)
    assert config.local_rope_theta == 10_000
    assert config.embedding_scale == 8.0
    assert config.post_norms
    assert config.qk_norm
    assert config.activation == "gelu_tanh"


def test_rope_freqs_become_divisors(tmp_path: Path) -> None:
    freqs = np.linspace(1, 8, 8, dtype=np.float32)
    config = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": freqs})).config
    assert config.rope_divisors == tuple(freqs.tolist())


def test_linear_rope_scaling_becomes_divisors(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert open_checkpoint(tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).config.rope_divisors == (4.0,) * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba'"),
        ({"arch": "deepseek2"}, "'deepseek2' is not read from GGUF"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "'blk.1.ffn_up.weight' is missing"),
        ({"drop": ("token_embd.weight",)}, "'token_embd.weight' is missing"),
        ({"tensors": {"blk.0.attn_norm.weight": np.ones(63, np.float32)}}, "shape"),
        ({"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "no place"),
        ({"tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "not above zero"),
        ({"tensors": {"rope_freqs.weight": np.ones(5, np.float32)}}, "rope_freqs"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts model is not read from GGUF"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "partial rotary"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"metadata": {"split.count": 3}}, "split"),
        ({"metadata": {"llama.attention.key_length": 2**31 - 1}}, "key_length"),
    ],
)
def test_unsupported_model_is_rejected_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(tiny_gguf(tmp_path / "m.gguf", **options))


def test_fingerprint_depends_on_content_not_path(tmp_path: Path) -> None:
    one = open_checkpoint(tiny_gguf(tmp_path / "one.gguf")).fingerprint
    assert open_checkpoint(tiny_gguf(tmp_path / "two.gguf")).fingerprint == one
    other = tiny_tensors()["blk.1.ffn_up.weight"] * 1.01
    changed = tiny_gguf(tmp_path / "three.gguf", tensors={"blk.1.ffn_up.weight": other})
    assert open_checkpoint(changed).fingerprint != one
    longer = tiny_gguf(
        tmp_path / "four.gguf", metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    )
    assert open_checkpoint(longer).fingerprint != one


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="No such file"):
        open_checkpoint(tmp_path / "none.gguf")


def test_default_model_opens_fast_and_matches_the_reference(smollm2: Path) -> None:
    start = time.process_time()
    checkpoint = open_checkpoint(smollm2)
    for name in checkpoint.names:
        checkpoint.weight(name).affine()
    assert time.process_time() - start < 2.0  # 0.4 s measured
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_v.weight", "output_norm.weight"):
        weight = checkpoint.weight(name)
        reference = gguf.dequantize(weight.raw, gguf.GGMLQuantizationType[weight.kind.upper()])
        np.testing.assert_array_equal(weight.dense(), reference.reshape(weight.shape))
    assert checkpoint.config.context_len == 8192
    assert checkpoint.config.eos_ids == (0, 2)
