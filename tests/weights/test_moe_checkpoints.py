"""Checkpoints of mixture-of-experts models: every tensor under its canonical name, with the file's numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import BadCheckpoint
from tests.models.small_moe_models import MODELS, save_small_model

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, folder in made.items():
        save_small_model(folder, kind)
    return made


def dense(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    weight = checkpoint.weight(name)
    plain = weight.tensor(torch.float32)
    assert np.array_equal(plain.numpy(), weight.dense())
    return plain


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_of_the_file_is_read(folders: dict[str, Path], kind: str) -> None:
    checkpoint = open_checkpoint(folders[kind])
    n_numbers = sum(np.prod(checkpoint.weight(name).shape) for name in checkpoint.names)
    assert n_numbers == sum(tensor.numel() for tensor in load_file(folders[kind] / FILE).values())


@pytest.mark.parametrize(
    ("kind", "gate", "up", "down"),
    [
        (
            "qwen3_moe",
            "mlp.experts.5.gate_proj.weight",
            "mlp.experts.5.up_proj.weight",
            "mlp.experts.5.down_proj.weight",
        ),
        ("mixtral", *(f"block_sparse_moe.experts.3.{name}.weight" for name in ("w1", "w3", "w2"))),
    ],
)
def test_experts_in_tensors_of_their_own(folders: dict[str, Path], kind: str, gate: str, up: str, down: str) -> None:
    file, checkpoint = load_file(folders[kind] / FILE), open_checkpoint(folders[kind])
    number = gate.split(".")[2]
    for part, key in ("gate", gate), ("up", up), ("down", down):
        assert torch.equal(dense(checkpoint, f"blk.2.ffn_{part}_exps.{number}.weight"), file[f"model.layers.2.{key}"])


def test_fused_transposed_experts_of_llama4(folders: dict[str, Path]) -> None:
    file, checkpoint = load_file(folders["llama4_text"] / FILE), open_checkpoint(folders["llama4_text"])
    gate, up = file["model.layers.1.feed_forward.experts.gate_up_proj"][2].T.chunk(2)
    assert torch.equal(dense(checkpoint, "blk.1.ffn_gate_exps.2.weight"), gate)
    assert torch.equal(dense(checkpoint, "blk.1.ffn_up_exps.2.weight"), up)
    down = file["model.layers.1.feed_forward.experts.down_proj"][2].T
    assert torch.equal(dense(checkpoint, "blk.1.ffn_down_exps.2.weight"), down)


def test_fused_alternating_experts_of_gpt_oss(folders: dict[str, Path]) -> None:
    file, checkpoint = load_file(folders["gpt_oss"] / FILE), open_checkpoint(folders["gpt_oss"])
    layer = "model.layers.3.mlp.experts."
    assert torch.equal(dense(checkpoint, "blk.3.ffn_gate_exps.6.weight"), file[layer + "gate_up_proj"][6].T[::2])
    assert torch.equal(dense(checkpoint, "blk.3.ffn_up_exps.6.weight"), file[layer + "gate_up_proj"][6].T[1::2])
    assert torch.equal(dense(checkpoint, "blk.3.ffn_up_exps.6.bias"), file[layer + "gate_up_proj_bias"][6][1::2])
    assert torch.equal(dense(checkpoint, "blk.3.ffn_down_exps.6.bias"), file[layer + "down_proj_bias"][6])


def test_fused_experts_as_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    """One tensor [experts, out, in] for all experts of a layer reads like tensors of their own."""
    source = folders["qwen3_moe"]
    file = load_file(source / FILE)
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([file.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        file |= {
            prefix + "gate_up_proj": torch.cat([gate, up], 1).contiguous(),
            prefix + "down_proj": down.contiguous(),
        }
    save_file(file, tmp_path / FILE)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    fused, single = open_checkpoint(tmp_path), open_checkpoint(source)
    assert set(fused.names) == set(single.names)
    for name in single.names:
        assert torch.equal(dense(fused, name), dense(single, name))
        path, offset = fused.weight(name).location or pytest.fail(name)
        raw = path.read_bytes()[offset : offset + fused.weight(name).raw.nbytes]
        assert raw == fused.weight(name).raw.tobytes()


@pytest.mark.parametrize(
    ("kind", "name", "key", "period", "dim"),
    [
        ("deepseek_v3", "attn_q_b", "self_attn.q_b_proj", 24, 8),
        ("deepseek_v3", "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", 40, 8),
        ("llama4_text", "attn_k", "self_attn.k_proj", 16, 16),
    ],
)
def test_interleaved_rows_are_reordered(
    folders: dict[str, Path], kind: str, name: str, key: str, period: int, dim: int
) -> None:
    file, checkpoint = load_file(folders[kind] / FILE), open_checkpoint(folders[kind])
    plain, half = period - dim, dim // 2
    found = dense(checkpoint, f"blk.1.{name}.weight").view(-1, period, 64 if name != "attn_q_b" else 24)
    stored = file[f"model.layers.1.{key}.weight"].view(found.shape)
    assert torch.equal(found[:, :plain], stored[:, :plain])
    assert torch.equal(found[:, plain : plain + half], stored[:, plain::2])
    assert torch.equal(found[:, plain + half :], stored[:, plain + 1 :: 2])


def test_prediction_layers_and_vision_tensors_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """As Kimi K2.5's file has them: the text model nested, a vision tower and projector, a layer behind the last."""
    source = folders["deepseek_v3"]
    file = {f"language_model.{key}": tensor for key, tensor in load_file(source / FILE).items()}
    for key in ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"):
        file[key] = torch.zeros(2, 2)
    file["language_model.model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(file, tmp_path / FILE)
    inner = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": inner}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.architecture == "kimi_k2"
    assert set(checkpoint.names) == set(open_checkpoint(source).names)


def changed(folders: dict[str, Path], kind: str, **changes: Any) -> dict[str, object]:
    return json.loads((folders[kind] / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek_v3", {"n_group": 3}, "8 experts do not divide into 3 groups"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "fewer than two each"),
        ("deepseek_v3", {"topk_group": 5}, "cannot take 5 of 4 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "cannot take 5 of 4 experts"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax', not 'sigmoid'"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is '7', not an even number"),
        ("deepseek_v3", {"n_routed_experts": 1 << 20}, "'n_routed_experts'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types'"),
        ("llama4_text", {"moe_layers": [9]}, "do not fit 4 layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "'swiglu_limit' is '5.0', not 7.0"),
    ],
)
def test_impossible_configurations_are_named(
    folders: dict[str, Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadCheckpoint) as raised:
        read_config(changed(folders, kind, **changes), {})
    assert message in str(raised.value)


def test_missing_expert_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    file = load_file(folders["qwen3_moe"] / FILE)
    del file["model.layers.2.mlp.experts.7.up_proj.weight"]
    save_file(file, tmp_path / FILE)
    (tmp_path / "config.json").write_text((folders["qwen3_moe"] / "config.json").read_text())
    with pytest.raises(BadCheckpoint, match=r"'blk\.2\.ffn_up_exps\.7\.weight' is missing"):
        open_checkpoint(tmp_path)


def test_wrong_number_of_fused_experts_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes((folders["gpt_oss"] / FILE).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(changed(folders, "gpt_oss", num_local_experts=16)))
    with pytest.raises(BadCheckpoint, match="is not of 16 experts"):
        open_checkpoint(tmp_path)
