"""Small checkpoints in the quantized formats of the Hub, written as their tools write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
IGNORE = ["lm_head", "re:.*norm.*"]


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORE,
        "kv_cache_scheme": None,
        **more,
    }


def int4(group: int) -> dict[str, Any]:
    return compressed(
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False},
        format="pack-quantized",
    )


def fp8(strategy: str, inputs: bool = True) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return compressed(weights, dynamic if inputs else None, format="float-quantized")


SCHEMES: dict[str, dict[str, Any]] = {
    "int4 g32": int4(32),
    "int4 g128": int4(128),
    "fp8 tensor": fp8("tensor"),
    "fp8 channel": fp8("channel"),
    "fp8 block": fp8("block"),
    "fp8 weights only": fp8("channel", inputs=False),
    "deepseek": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "mxfp4": compressed(
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        format="mxfp4-pack-quantized",
    ),
}
MXFP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantize(scheme: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a quantized weight by their suffix, and the numbers they stand for, float32."""
    if scheme.startswith("int4"):
        return quantize_int4(weight, int(scheme.removeprefix("int4 g")))
    if scheme == "mxfp4":
        blocks, scales, dense = quantize_mxfp4(weight)
        return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, dense
    rows, cols = weight.shape
    if scheme in ("fp8 block", "deepseek"):
        padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
        padded[:rows, :cols] = weight
        scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    elif scheme == "fp8 tensor":
        scale = weight.abs().amax() / 448
        each = scale.expand(rows, cols)
    else:
        scale = weight.abs().amax(1, keepdim=True) / 448
        each = scale.expand(rows, cols)
    codes = (weight / each).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if scheme == "deepseek" else "weight_scale"
    return {"weight": codes, name: scale.float()}, codes.float() * each


def quantize_int4(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    grouped = weight.unflatten(1, (-1, group))
    scale = (grouped.abs().amax(2) / 7.5).bfloat16()
    codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
    nibbles = (codes + 8).long().flatten(1)
    words = sum(nibbles[:, i::8] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    return parts, (codes * scale.float()[..., None]).flatten(1)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks uint8 [..., cols / 32, 16], exponents uint8 [..., cols / 32], and the numbers."""
    grouped = weight.unflatten(-1, (-1, 32))
    exponent = (grouped.abs().amax(-1) / 6).log2().ceil().clamp(-126, 127)
    scaled = grouped / torch.exp2(exponent)[..., None]
    codes = (scaled[..., None] - MXFP4_VALUES).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8), (MXFP4_VALUES[codes] * torch.exp2(exponent)[..., None]).flatten(-2)


def llama_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    hidden, mlp, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for n in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{n}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (128, hidden),
            f"{prefix}self_attn.k_proj.weight": (64, hidden),
            f"{prefix}self_attn.v_proj.weight": (64, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, 128),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
        }
    return {
        name: (torch.randn(shape) * 0.1 + (len(shape) == 1)).to(dtype) for name, shape in shapes.items()
    }  # norms are around one


def write_llama(folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write a checkpoint of that scheme; returns the numbers of every tensor by its plain name."""
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in llama_tensors().items():
        if not name.endswith("_proj.weight"):
            stored[name], dense[name] = tensor, tensor.float()
            continue
        parts, dense[name] = quantize(scheme, tensor.float())
        stored |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
    write_folder(folder, CONFIG | {"quantization_config": SCHEMES[scheme]}, stored)
    return dense


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
