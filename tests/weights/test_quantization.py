"""Quantized checkpoints of the Hub: read as the numbers that their format defines, or refused by name."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.loader import WeightLoader
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.quantization import read_quantization
from emberline.weights.quantized_weight import QuantizedWeight
from emberline.weights.tensor_names import canonical
from emberline.weights.tensors import dequantize
from tests.models.small_moe_models import save_small_model
from tests.weights.quantized_folder import CONFIG, SCHEMES, compressed, int4, quantize_mxfp4, write_llama

Q = "model.layers.0.self_attn.q_proj."


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_those_of_the_format(tmp_path: Path, scheme: str) -> None:
    expected = write_llama(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    assert len(list(checkpoint.names)) == len(expected)
    for name, numbers in expected.items():
        weight = checkpoint.weight(canonical(name, checkpoint.config) or "")
        np.testing.assert_array_equal(weight.dense(), numbers.numpy())
        np.testing.assert_array_equal(weight.tensor(torch.float32).numpy(), numbers.numpy())
        assert isinstance(weight, QuantizedWeight) == name.endswith("_proj.weight")


def test_the_text_models_entry_counts(tmp_path: Path) -> None:
    write_llama(tmp_path, "int4 g32")
    config = json.loads((tmp_path / "config.json").read_text())
    inner = {key: value for key, value in config.items() if key != "model_type"}
    nested = {"model_type": "llama", "text_config": inner | {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert open_checkpoint(tmp_path).weight("blk.0.attn_q.weight").kind == "int4"


def test_int4_is_affine_too(tmp_path: Path) -> None:
    """For the kernels of CPUs, which know the formats of GGUF."""
    expected = write_llama(tmp_path, "int4 g128")
    affine = open_checkpoint(tmp_path).weight("blk.0.attn_q.weight").affine()
    assert affine is not None
    np.testing.assert_allclose(affine.dense(), expected[f"{Q}weight"].numpy(), atol=1e-6)


def test_codes_are_loaded_as_bytes(tmp_path: Path) -> None:
    write_llama(tmp_path, "int4 g32")
    weight = open_checkpoint(tmp_path).weight("blk.0.attn_q.weight")
    assert isinstance(weight, QuantizedWeight)
    target = torch.empty(128, 64, dtype=torch.uint8)
    loader = WeightLoader("cpu")
    loader.fill(weight.codes, target)
    assert loader.finish() == target.nbytes  # read as it is, not converted
    np.testing.assert_array_equal(target.numpy(), weight.raw)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slices_are_those_of_the_numbers(tmp_path: Path, scheme: str) -> None:
    write_llama(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.weight("blk.0.ffn_gate.weight")  # [256, 128]
    for rows in (0, 128), (128, 256), (40, 168):
        part = weight.slice(0, *rows)
        np.testing.assert_array_equal(part.dense(), weight.dense()[slice(*rows)])
        np.testing.assert_array_equal(part.slice(0, 8, 24).dense(), weight.dense()[slice(*rows)][8:24])
    down = checkpoint.weight("blk.0.ffn_down.weight")  # [128, 256]
    np.testing.assert_array_equal(down.slice(1, 128, 256).dense(), down.dense()[:, 128:])
    if scheme.startswith(("int4", "mxfp4", "fp8 block")):
        with pytest.raises(BadCheckpoint, match="divide a group"):
            down.slice(1, 8, 40)


def test_scales_count_in_the_fingerprint_and_the_size(tmp_path: Path) -> None:
    write_llama(tmp_path, "fp8 channel")
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.weight("blk.0.attn_q.weight")
    assert weight.nbytes == 128 * 128 + 128 * 4
    change(tmp_path, weight_scale=torch.ones(128, 1))
    assert open_checkpoint(tmp_path).fingerprint != checkpoint.fingerprint


def test_fp8_codes_have_their_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(dequantize("fp8", codes[None])[0], expected)


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Blocks [experts, rows, groups, 16] with gate and up on alternate rows."""
    save_small_model(tmp_path, "gpt_oss")
    stored, dense = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, dense[name] = quantize_mxfp4(stored.pop(name).transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    edit(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    checkpoint = open_checkpoint(tmp_path)
    gate_up = dense["model.layers.1.mlp.experts.gate_up_proj"][5]
    down = dense["model.layers.1.mlp.experts.down_proj"][5]
    for part, rows in ("gate", gate_up[0::2]), ("up", gate_up[1::2]), ("down", down):
        weight = checkpoint.weight(f"blk.1.ffn_{part}_exps.5.weight")
        assert isinstance(weight, QuantizedWeight)
        np.testing.assert_array_equal(weight.dense(), rows.numpy())
        codes = weight.codes.tensor(torch.uint8)
        assert codes.shape == (rows.shape[0], rows.shape[1] // 2)


# --- refusals ---------------------------------------------------------------------------------------------------------


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or remove tensors of the first layer's query projection, by suffix."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for suffix, tensor in tensors.items():
        stored.pop(f"{Q}{suffix}", None)
        if tensor is not None:
            stored[f"{Q}{suffix}"] = tensor
    save_file(stored, path)


BROKEN: list[tuple[str, dict[str, torch.Tensor | None], str]] = [
    ("int4 g32", {"weight_scale": None}, "has no scale"),
    ("fp8 channel", {"weight_scale": None}, "has no scale"),
    ("int4 g32", {"weight_scale": torch.ones(128, 1).bfloat16()}, r"group size of 32 implies \(128, 4\)"),
    ("int4 g128", {"weight_scale": torch.ones(128, 4).bfloat16()}, r"group size of 128 implies \(128, 1\)"),
    ("int4 g32", {"weight_scale": torch.full((128, 4), torch.inf).bfloat16()}, "not finite"),
    ("int4 g32", {"weight_shape": torch.tensor([128, 256])}, "the packed codes are of"),
    ("int4 g32", {"weight_zero_point": torch.zeros(16, 4, dtype=torch.int32)}, "zero points"),
    ("int4 g32", {"weight_packed": None}, "has no weight that it scales"),
    ("fp8 block", {"weight_scale": torch.ones(3, 7)}, "not one per tensor, per row or per block"),
    ("mxfp4", {"weight_scale": torch.ones(128, 8, dtype=torch.uint8)}, "group size of 32"),
]


@pytest.mark.parametrize(("scheme", "tensors", "message"), BROKEN)
def test_broken_tensors_are_refused(
    tmp_path: Path, scheme: str, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    write_llama(tmp_path, scheme)
    change(tmp_path, **tensors)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(tmp_path)


def test_quantized_tensors_need_a_configuration(tmp_path: Path) -> None:
    write_llama(tmp_path, "fp8 channel")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(BadCheckpoint, match="no quantization_config"):
        open_checkpoint(tmp_path)


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
WEIGHTS4 = int4(32)["config_groups"]["group_0"]["weights"]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "awq"}, "'awq' is not supported; supported are compressed-tensors, fp8, fbgemm_fp8, mxfp4"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    (compressed(INT8), "INT8 weights are not supported"),
    (compressed(WEIGHTS4, INT8), "INT4 weights with INT8 activations"),
    (compressed(WEIGHTS4 | {"symmetric": False}), "asymmetric"),
    (compressed(WEIGHTS4 | {"group_size": 16}), "groups of 16"),
    (compressed(FP8, INT8), "FP8 weights with INT8 activations"),
    (compressed(FP8 | {"strategy": "group"}), "per group"),
    (compressed({"num_bits": 4, "type": "float", "group_size": 16}), "NVFP4"),
    (compressed(WEIGHTS4, kv_cache_scheme=FP8), "quantized KV cache"),
    (compressed(WEIGHTS4, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    (compressed(WEIGHTS4, transform_config={"config_groups": {"u": {}}}), "rotated weights"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
]


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED)
def test_unsupported_schemes_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_llama(tmp_path, "int4 g32")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    method=st.sampled_from(["compressed-tensors", "fp8"]),
    fields=st.dictionaries(
        st.sampled_from(["config_groups", "weight_block_size", "fmt", "sparsity_config", "activation_scheme"]),
        json_values | st.dictionaries(st.just("g"), st.fixed_dictionaries({"weights": json_values}), max_size=1),
    ),
)
def test_any_configuration_is_read_or_refused(method: str, fields: dict[str, object]) -> None:
    with suppress(BadCheckpoint):
        read = read_quantization({"quantization_config": {"quant_method": method} | fields})
        assert read is not None
        assert read.method == method
        assert read.kinds


FP8 = {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@given(field=st.sampled_from(sorted(FP8)), value=json_values.filter(lambda value: value is not None))
def test_a_field_of_another_value_is_refused(field: str, value: object) -> None:
    """Not read as something else: the weights would be wrong."""
    config = {"quant_method": "fp8"} | FP8
    assert read_quantization({"quantization_config": config}) is not None
    if value not in (FP8[field], "static"):
        with pytest.raises(BadCheckpoint, match=r"FP8|activation scheme|fmt|activation_scheme"):
            read_quantization({"quantization_config": config | {field: value}})


@pytest.mark.parametrize("shape", [[128, 40], [0, 16], [1]])
def test_codes_that_are_not_as_large_as_their_shape_are_refused(tmp_path: Path, shape: list[int]) -> None:
    write_llama(tmp_path, "int4 g32")
    (path,) = tmp_path.glob("*.safetensors")
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[f"{Q}weight_packed"]["shape"] = shape
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])
    with pytest.raises(BadCheckpoint, match="does not take 8192 bytes"):
        open_checkpoint(tmp_path)
