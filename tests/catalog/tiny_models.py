"""A one-layer model for tests, as a GGUF and as a Hugging Face folder."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

VOCAB, HIDDEN, MLP = 64, 32, 64
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (MLP, HIDDEN),
    "blk.0.ffn_up.weight": (MLP, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, MLP),
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def gguf_bytes(folder: Path, seed: int = 0, sampling: dict[str, float] | None = None) -> bytes:
    path = folder / f"made-{seed}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in (sampling or {}).items():
        writer.add_float32(f"general.sampling.{name}", value)
    random = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    path.unlink()
    return content


def folder_files() -> dict[str, bytes]:
    """The files of a hub repository, among them some that must never be fetched."""
    header: dict[str, object] = {}
    data = b""
    for name, shape in SHAPES.items():
        stem = name.removesuffix(".weight").removeprefix("blk.0.")
        key = f"{'model.layers.0.' if name.startswith('blk') else ''}{HF_NAMES[stem]}.weight"
        content = np.full(shape, 0.5, "<f4").tobytes()
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(content))}
        data += content
    encoded = json.dumps(header).encode()
    return {
        "model.safetensors": struct.pack("<Q", len(encoded)) + encoded + data,
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle" * 1000,
        "modeling_tiny.py": b"raise SystemExit",
        "onnx/model.safetensors": b"other",
        "README.md": b"# tiny",
    }
