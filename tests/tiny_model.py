"""A Llama of two layers with random weights and a byte tokenizer, for tests whose subject is not what a model says.

A worker with it starts in half the time of one with SmolLM2, and a step takes a hundredth.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY = 32, 4, 2, 16, 64, 2, 260
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": WIDTH, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 257, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def write_tiny_model(folder: Path) -> Path:
    """Write the model's files into an existing folder; returns the folder."""
    torch.manual_seed(4)
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    norms = ["model.norm.weight"]
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
        shapes |= {f"{layer}.self_attn.{name}.weight": (size, HIDDEN) for name, size in rows.items()}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{layer}.mlp.{name}.weight": (WIDTH, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDTH)}
    tensors = {name: (0.4 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    save_file(tensors | {name: torch.ones(HIDDEN).bfloat16() for name in norms}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
