"""GGUF files of small models with a vision tower, as llama.cpp's converter writes them."""

from pathlib import Path

import gguf
import numpy as np

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.vision_config import TowerConfig, read_tower_config
from emberline.weights.vision_tensors import read_vision_tensors

KINDS = {  # projector and architecture of llama.cpp, and the image token
    "smolvlm": ("idefics3", "llama", "<image>"),
    "gemma3": ("gemma3", "gemma3", "<image_soft_token>"),
    "mistral3": ("pixtral", "llama", "[IMG]"),
    "qwen3_vl": ("qwen3vl_merger", "qwen3vl", "<|image_pad|>"),
}


def write_gguf_pair(folder: Path, out: Path, family: str) -> Path:
    """Write the model of a folder and its mmproj file into `out`. Returns the model's path."""
    checkpoint, config = open_checkpoint(folder), read_tower_config(folder)
    assert config is not None
    kind, architecture, token = KINDS[family]
    text, token_id = checkpoint.config, config.processor.image_token_id
    out.mkdir()
    writer = gguf.GGUFWriter(out / "m.gguf", architecture)
    writer.add_block_count(text.n_layers)
    writer.add_context_length(text.context_len)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.mlp_size)
    writer.add_head_count(text.n_heads)
    writer.add_head_count_kv(text.n_kv_heads)
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_layer_norm_rms_eps(text.norm_eps)
    writer.add_rope_freq_base(text.rope_theta)
    writer.add_token_list([token if n == token_id else f"t{n}" for n in range(text.vocab_size)])
    if text.mrope_sections:
        writer.add_array(f"{architecture}.rope.dimension_sections", [*text.mrope_sections, 0])
    heads = {"attn_q": text.n_heads, "attn_k": text.n_kv_heads} if architecture == "llama" else {}
    for name in checkpoint.names:
        array = checkpoint.weight(name).dense()
        if (n := heads.get(name.split(".")[-2])) is not None:
            array = np.ascontiguousarray(array.reshape(n, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_vision_tensors(folder, config.processor.family)
    write_mmproj(out / "mmproj.gguf", kind, config, {name: weight.dense() for name, weight in tensors.items()})
    return out / "m.gguf"


def converted(config: TowerConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of the tensors."""
    found = dict(tensors)
    if config.processor.family == "siglip":
        found["mm.soft_emb_norm.weight"] = tensors["mm.soft_emb_norm.weight"] + np.float32(1)
        for name in [name for name in tensors if ".ffn_up." in name]:  # as older converters did
            other = name.replace("_up.", "_down.")
            found[name], found[other] = tensors[other], tensors[name]
    if config.processor.family == "pixtral":
        for name in [name for name in tensors if name.endswith(("attn_q.weight", "attn_k.weight"))]:
            heads = tensors[name].reshape(config.n_heads, 2, config.head_dim // 2, config.width)
            found[name] = heads.swapaxes(1, 2).reshape(config.width, config.width)
        found["v.token_embd.img_break"] = np.zeros(config.hidden, np.float32)
    if config.processor.family == "qwen3_vl":
        frames = found.pop("v.patch_embd.weight")
        found |= {"v.patch_embd.weight": frames[:, :, 0], "v.patch_embd.weight.1": frames[:, :, 1]}
        for n in reversed(range(len(config.deepstack))):
            for name in [name for name in found if name.startswith(f"v.deepstack.{n}.")]:
                found[name.replace(f".{n}.", f".{config.deepstack[n]}.", 1)] = found.pop(name)
    return found


def write_mmproj(path: Path, kind: str, config: TowerConfig, tensors: dict[str, np.ndarray]) -> None:
    writer, processor = gguf.GGUFWriter(path, "clip"), config.processor
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_silu" if config.activation == "silu" else "clip.use_gelu", True)
    prefix = "clip.vision."
    for key, number in {
        "image_size": processor.tile or processor.longest_edge or 96,
        "patch_size": processor.patch,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_size,
        "block_count": config.n_layers,
        "attention.head_count": config.n_heads,
        "projection_dim": config.hidden,
        "spatial_merge_size": processor.merge,
        "projector.scale_factor": processor.merge,
        "preproc_image_size": processor.longest_edge or 96,
    }.items():
        writer.add_uint32(prefix + key, number)
    writer.add_float32(f"{prefix}attention.layer_norm_epsilon", config.norm_eps)
    writer.add_array(f"{prefix}image_mean", list(processor.mean))
    writer.add_array(f"{prefix}image_std", list(processor.std))
    if config.deepstack:
        flags = [layer in config.deepstack for layer in range(config.n_layers)]
        writer.add_array(f"{prefix}is_deepstack_layers", flags)
    for name, array in converted(config, tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
