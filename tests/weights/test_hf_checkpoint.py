"""Hugging Face folders, as transformers writes them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import BadCheckpoint
from tests.examples import n_examples
from tests.lazy_modules import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
}


def save(folder: Path, family: str, shard: str = "1GB", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A small random model of that family; returns its tensors."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard)
    return dict(model.state_dict())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save(tmp_path, "llama")
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_canonical_names(tmp_path: Path, family: str) -> None:
    tensors = save(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    gemma = family == "gemma3_text"
    expected = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.2.attn_output.weight": "model.layers.2.self_attn.o_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.ffn_norm.weight": f"model.layers.0.{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight",
    }
    if gemma:
        expected["blk.0.post_attention_norm.weight"] = "model.layers.0.post_attention_layernorm.weight"
        expected["blk.0.post_ffw_norm.weight"] = "model.layers.0.post_feedforward_layernorm.weight"
    for ours, theirs in expected.items():
        plus_one = gemma and ours.endswith("norm.weight")
        np.testing.assert_array_equal(checkpoint.weight(ours).dense(), tensors[theirs].numpy() + np.float32(plus_one))
    tied = checkpoint.config.tie_embeddings
    assert len(list(checkpoint.names)) == len([name for name in tensors if not (tied and name == "lm_head.weight")])


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_the_configuration(tmp_path: Path, family: str) -> None:
    save(tmp_path, family)
    config = open_checkpoint(tmp_path).config
    assert config.architecture == family.removesuffix("_text")
    assert (config.n_layers, config.n_heads, config.n_kv_heads) == (3, 4, 2)
    assert config.head_dim == (8 if family == "qwen2" else 16)
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family in ("qwen3", "gemma3_text"))
    assert config.tie_embeddings == (family in ("qwen2", "gemma3_text"))
    windows = {"mistral": (24,) * 3, "qwen3": (None, 16, 16), "gemma3_text": (20, None, 20)}
    assert config.windows == windows.get(family, ())


def test_gemma3_scales(tmp_path: Path) -> None:
    save(tmp_path, "gemma3_text")
    config = open_checkpoint(tmp_path).config
    assert config.attention_scale == 1 / 8
    assert config.embedding_scale == 32**0.5
    assert (config.rope_theta, config.local_rope_theta) == (1_000_000, 10_000)
    assert (config.activation, config.post_norms) == ("gelu_tanh", True)


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    save(tmp_path / "one", "llama")
    save(tmp_path / "many", "llama", shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert one.fingerprint == many.fingerprint
    for name in one.names:
        np.testing.assert_array_equal(one.weight(name).dense(), many.weight(name).dense())


def test_missing_shards_are_named(tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="20KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 4
    (tmp_path / shards[1]).unlink()
    with pytest.raises(BadCheckpoint, match=f"1 of the {len(shards)} files that .* names are not in .*: {shards[1]};"):
        open_checkpoint(tmp_path)
    for name in shards[2:]:
        (tmp_path / name).unlink()
    with pytest.raises(BadCheckpoint, match=f"{len(shards) - 1} of the .*, …; download them again"):
        open_checkpoint(tmp_path)


def test_bfloat16_reaches_torch_unchanged(tmp_path: Path) -> None:
    tensors = save(tmp_path, "llama", dtype=torch.bfloat16)
    weight = open_checkpoint(tmp_path).weight("blk.0.attn_q.weight")
    assert weight.kind == "bf16"
    assert torch.equal(weight.tensor(torch.bfloat16), tensors["model.layers.0.self_attn.q_proj.weight"])


def test_multimodal_gemma3_loads_its_text_model(tmp_path: Path) -> None:
    tensors = save(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    nested = {f"language_model.{name}": t.clone() for name, t in tensors.items() if name != "lm_head.weight"}
    nested["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(4, 3, 2, 2)
    nested["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(4, 4)
    save_file(nested, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.architecture == "gemma3"
    assert checkpoint.config.windows == (20, None, 20)


def test_gemma3_defaults_of_omitted_fields() -> None:
    document: dict[str, object] = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = read_config(document, {"eos_token_id": [1, 106]})
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.rope_divisors == (8.0,) * 128
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.eos_ids == (1, 106)


def test_eos_tokens_of_both_config_files(llama: Path) -> None:
    edit(llama / "config.json", eos_token_id=2)
    (llama / "generation_config.json").write_text('{"eos_token_id": [5, 7, 1000000]}')  # the last is out of range
    assert open_checkpoint(llama).config.eos_ids == (2, 5, 7)


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "a/../b.safetensors", "model.bin", 3, "x\n.safetensors"]
)
def test_index_must_not_escape_the_folder(llama: Path, name: object) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(BadCheckpoint, match="not a safetensors file of this folder"):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_hidden_layers": 4}, "is missing|cannot make"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"intermediate_size": 47}, "shape"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": 3}, "rope"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_invalid_configuration_is_rejected_by_field(llama: Path, changes: dict[str, object], message: str) -> None:
    edit(llama / "config.json", **changes)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(llama)


def test_unexpected_tensor_is_rejected(tmp_path: Path) -> None:
    tensors = save(tmp_path, "llama")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"blk\.0\.attn_output\.bias"):
        open_checkpoint(tmp_path)


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_deeply_nested_json_is_rejected(llama: Path) -> None:
    (llama / "config.json").write_text("[" * 100_000)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_checkpoint(llama)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 50) + b"{}"])
def test_malformed_safetensors_are_rejected(llama: Path, content: bytes) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        open_checkpoint(llama)


@settings(max_examples=n_examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 4000), patch=st.binary(min_size=1, max_size=6), cut=st.integers(0, 50))
def test_mutated_safetensors_open_or_are_rejected(llama: Path, at: int, patch: bytes, cut: int) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    content = bytearray(whole)
    content[at : at + len(patch)] = patch
    path.write_bytes(content[: len(content) - cut])
    try:
        open_checkpoint(llama).close()
    except BadCheckpoint:
        pass
    finally:
        path.write_bytes(whole)
