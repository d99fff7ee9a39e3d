"""A small GGUF file written by the reference library."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    metadata: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_0,
    first_token: str = "t0",
    arrays: dict[str, list[int]] | None = None,
) -> Path:
    """Two layers of width 64 with 4 query and 2 KV heads; matrices quantized to `kind`, the rest float32."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([first_token, *(f"t{i}" for i in range(1, 30)), "<|im_end|>", "<|endoftext|>"])
    writer.add_token_types([1] * 30 + [3, 3])
    writer.add_eos_token_id(31)
    for key, value in (metadata or {}).items():
        kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(key, value, kinds[type(value)])
    for key, numbers in (arrays or {}).items():
        writer.add_array(key, numbers)
    for name, array in (tiny_tensors() | (tensors or {})).items():
        if name in drop:
            continue
        if array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32, 64), "output_norm.weight": (64,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (64,),
            f"blk.{layer}.attn_q.weight": (64, 64),
            f"blk.{layer}.attn_k.weight": (32, 64),
            f"blk.{layer}.attn_v.weight": (32, 64),
            f"blk.{layer}.attn_output.weight": (64, 64),
            f"blk.{layer}.ffn_norm.weight": (64,),
            f"blk.{layer}.ffn_gate.weight": (96, 64),
            f"blk.{layer}.ffn_up.weight": (96, 64),
            f"blk.{layer}.ffn_down.weight": (64, 96),
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
