"""What a model is, in numbers: one form for GGUF metadata and for a Hugging Face config.json."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

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


class BadCheckpoint(ValueError):
    """A model file or folder that cannot be read; the message names what is wrong with it."""


MAX_WHOLE = 1 << 31  # no size in a model's description is beyond this
_REQUIRED = object()


class Fields:
    """A mapping whose values are checked as they are read; None counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def under(self, prefix: str) -> "Fields":
        """The keys that begin with `prefix`, without it."""
        inner = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return Fields(inner, f"{self.where} under {prefix!r}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: object = _REQUIRED) -> object:
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise BadCheckpoint(f"{self.where} lacks {key!r}")
        return default if value is None else value

    def wrong(self, key: str, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.where}: {key!r} is {str(self.values.get(key))[:60]!r}, not {wanted}")

    def whole(self, key: str, default: object = _REQUIRED, *, least: int = 1, most: int = MAX_WHOLE) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) and (value == value[0]).all():
            value = value[0].item()  # GGUF allows one number per layer; the same everywhere is one number
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_id(self, key: str) -> int | None:
        return self.whole(key, least=0) if self.has(key) else None

    def positive(self, key: str, default: object = _REQUIRED) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above zero")
        return float(value)

    def text(self, key: str, default: object = _REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value
