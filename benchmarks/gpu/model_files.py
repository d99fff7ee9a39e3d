"""Models of random weights (speed does not depend on the values), and the drive's bandwidth."""

import json
import math
import mmap
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE_BYTES = 16 << 20  # per O_DIRECT read
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "initializer_range": 0.02,
}
QWEN_CODER: dict[str, Any] = {  # Qwen2.5-Coder-1.5B-Instruct
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
}


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's tensors, in layer order."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (mlp, hidden),
            f"{layer}.mlp.up_proj.weight": (mlp, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write(folder: Path, config: dict[str, Any], device: str = "cuda") -> int:
    """Write config.json and one safetensors file of random bf16, unless present; returns the weights' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return write_tensors(folder / "model.safetensors", tensors(config), device)


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], device: str = "cuda") -> int:
    """Write a safetensors file of random bf16, unless present; returns its tensors' bytes. Vectors are about 1, but
    for biases."""
    import torch

    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        n_bytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if path.exists() and path.stat().st_size == 8 + len(text) + offset:
        return offset
    generator = torch.Generator(device).manual_seed(0)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            numbers = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
            if len(shape) == 1 and not name.endswith("bias"):
                numbers.add_(1)
            file.write(memoryview(numbers.cpu().view(torch.int16).numpy()).cast("B"))
    return offset


SMOLLM2_135M: dict[str, int] = {
    "block_count": 30,
    "context_length": 8192,
    "embedding_length": 576,
    "feed_forward_length": 1536,
    "attention.head_count": 9,
    "attention.head_count_kv": 3,
}
_U32, _F32, _TEXT, _ARRAY = 4, 6, 8, 9  # types of GGUF metadata
_Q4_1, _Q4_1_BYTES = 3, 20  # type of a tensor, and its bytes per 32 weights


def write_gguf(path: Path, shape: dict[str, int] = SMOLLM2_135M, vocab: int = 49152) -> None:
    """Write a Llama of random weights as a GGUF file, unless present: matrices as Q4_1, as in the default model."""
    import numpy as np

    if path.exists():
        return
    hidden, mlp, heads = shape["embedding_length"], shape["feed_forward_length"], shape["attention.head_count"]
    kv = hidden // heads * shape["attention.head_count_kv"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for n in range(shape["block_count"]):
        rows = {"attn_q": hidden, "attn_k": kv, "attn_v": kv, "attn_output": hidden, "ffn_gate": mlp, "ffn_up": mlp}
        shapes |= {f"blk.{n}.{name}.weight": (size, hidden) for name, size in rows.items()}
        shapes |= {f"blk.{n}.ffn_down.weight": (hidden, mlp)}
        shapes |= {f"blk.{n}.{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [text("general.architecture") + struct.pack("<I", _TEXT) + text("llama")]
    pairs += [text(f"llama.{key}") + struct.pack("<II", _U32, value) for key, value in shape.items()]
    pairs += [text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _F32, 1e-5)]
    pairs += [text("llama.rope.freq_base") + struct.pack("<If", _F32, 100_000.0)]
    pairs += [text("tokenizer.ggml.eos_token_id") + struct.pack("<II", _U32, 2)]
    tokens = b"".join(text(f"t{n}") for n in range(vocab))
    pairs += [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", _ARRAY, _TEXT, vocab) + tokens]
    random = np.random.default_rng(0)
    infos, data = b"", b""
    for name, size in shapes.items():
        kind = _Q4_1 if len(size) == 2 else 0
        infos += text(name) + struct.pack(f"<I{len(size)}QIQ", len(size), *reversed(size), kind, len(data))
        if kind:
            blocks = random.integers(0, 256, (math.prod(size) // 32, _Q4_1_BYTES), np.uint8)
            blocks[:, :4] = np.array([0.04 / 15, -0.02], np.float16).view(np.uint8)  # scale and offset
            data += blocks.tobytes()
        else:
            data += np.ones(size, np.float32).tobytes()
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + infos
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def drop_from_page_cache(folder: Path) -> None:
    """Evict the weights from the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def direct_rate(path: Path, n_bytes: int = 4 << 30, threads: int = 12) -> float:
    """Read bandwidth of the drive in bytes per second, with O_DIRECT on several threads."""
    n_bytes = min(n_bytes, path.stat().st_size) // PIECE_BYTES * PIECE_BYTES
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(offset: int) -> None:
        buffer = mmap.mmap(-1, PIECE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # aligned, as direct reads must be
        buffer.madvise(mmap.MADV_HUGEPAGE)  # page faults would limit the rate
        os.preadv(descriptor, [buffer], offset)
        buffer.close()

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, n_bytes, PIECE_BYTES)))
        return n_bytes / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
