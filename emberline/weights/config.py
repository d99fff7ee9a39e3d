"""What a model is, in numbers: one form for GGUF metadata and for a Hugging Face config.json."""

import msgspec

# Bounds of what a file may claim, far beyond any model: they keep a lying file from costing memory.
MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_size: int
    context_len: int
    norm_eps: float
    rope_theta: float
    # Per frequency of the layers without a window (of all, when local_rope_theta is None): linear, llama3 and yarn
    # scaling all reduce to this.
    rope_divisors: tuple[float, ...] | None = None
    rope_scale: float = 1.0  # multiplies cos and sin (yarn's attention factor)
    windows: tuple[int | None, ...] = ()  # per layer; () means every layer sees everything
    local_rope_theta: float | None = None  # of the windowed layers, when it differs (Gemma 3)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    activation: str = "silu"  # or "gelu_tanh"
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma's norms after attention and after the MLP
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
