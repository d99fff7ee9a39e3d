"""A model's configuration in one form for GGUF metadata and Hugging Face's config.json, and RoPE scaling."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

# Limits on what a file may claim, far beyond any model: they keep a malformed file from costing memory.
MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096
MAX_WHOLE = 1 << 31
_REQUIRED = object()


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA): keys and values are expanded from one cached latent for each token."""

    q_lora: int | None  # rank of the query projection; None: it is one matrix
    kv_lora: int  # numbers of the latent
    nope: int  # dimensions of a query head without RoPE
    rope: int  # with RoPE; the key's are shared by all heads and cached behind the latent
    v_dim: int  # of a value head


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts: the feed-forward block of some layers. The others have a dense MLP of `mlp_size`."""

    layers: tuple[int, ...]  # ascending
    experts: int
    top_k: int  # experts of a token
    width: int  # of an expert's MLP
    shared_width: int = 0  # of the MLP that every token takes as well; 0: there is none
    scoring: str = "softmax"  # or "sigmoid"
    normalize: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # and then multiplied by this
    n_groups: int = 1  # the experts are taken from the best `top_groups` of so many groups
    top_groups: int = 1
    correction_bias: bool = False  # added to the scores for the choice of experts, not to their weights
    weight_on_input: bool = False  # an expert's weight multiplies its input instead of its output
    biases: bool = False  # of the router and the experts
    activation: str = "silu"  # or "gelu_tanh"; "swiglu_clamped": GPT-OSS's

    @property
    def first_expert(self) -> int:
        """Index of the first expert of a rank that has some of them (`rank_checkpoint`). The router knows all."""
        return 0


class QueryTemperature(msgspec.Struct, frozen=True):
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + 1) / floor_tokens))."""

    scale: float
    floor_tokens: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str  # a key of `models.registry.ARCHITECTURES`
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
    # Per frequency, for the layers with full attention (for all layers, when local_rope_theta is None). Linear, llama3
    # and yarn scaling all reduce to such divisors.
    rope_divisors: tuple[float, ...] | None = None
    rope_scale: float = 1.0  # multiplies cos and sin (yarn's attention factor)
    mrope_sections: tuple[int, ...] = ()  # frequencies of time, height and width under interleaved M-RoPE; (): none
    rope_interleaved: bool = False  # the checkpoint pairs dimensions 2i and 2i + 1; its rows are reordered when read
    nope_layers: tuple[int, ...] = ()  # layers without RoPE
    windows: tuple[int | None, ...] = ()  # sliding window per layer; () means full attention in every layer
    chunks: tuple[int | None, ...] = ()  # per layer: attention within chunks of so many tokens; (): in none
    local_rope_theta: float | None = None  # of the sliding-window layers, where it differs (Gemma 3)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    activation: str = "silu"  # or "gelu_tanh"
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output matrix
    qk_norm: bool = False
    qk_l2_norm: bool = False  # a norm of q and k without weights, behind RoPE, in the layers with RoPE (Llama 4)
    query_temperature: QueryTemperature | None = None  # in the layers without RoPE (Llama 4)
    sinks: bool = False  # a learned logit per head in the softmax's denominator (GPT-OSS)
    latent: LatentConfig | None = None  # None: grouped-query attention
    moe: MoEConfig | None = None  # None: a dense MLP in every layer
    post_norms: bool = False  # Gemma's norms after attention and after the MLP
    n_mtp_layers: int = 0  # multi-token prediction layers behind the others in the file, which are not read
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def moe_layers(self) -> frozenset[int]:
        return frozenset() if self.moe is None else frozenset(self.moe.layers)


class BadCheckpoint(ValueError):
    """A model file or folder that cannot be read; the message names what is wrong with it."""


class Fields:
    """A mapping whose values are type-checked as they are read; None counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where  # named in errors

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

    def wrong(self, key: str, expected: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.where}: {key!r} is {str(self.values.get(key))[:60]!r}, not {expected}")

    def whole(self, key: str, default: object = _REQUIRED, *, least: int = 1, most: int = MAX_WHOLE) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) and (value == value[0]).all():
            value = value[0].item()  # GGUF allows one number per layer; the same in every layer is one number
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

    def whole_numbers(self, key: str, *, most: int = MAX_WHOLE) -> tuple[int, ...] | None:
        """A list of whole numbers from 0 on; None where it is absent."""
        if not self.has(key):
            return None
        values = self.get(key)
        if not isinstance(values, list) or len(values) > MAX_LAYERS:
            raise self.wrong(key, "a list of whole numbers")
        return tuple(Fields({key: value}, self.where).whole(key, least=0, most=most) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value


# --- RoPE scaling: every method as divisors of the plain frequencies, freq[i] = theta ** (-2i / dim) / divisors[i] ----

Divisors = tuple[float, ...]


def rope_frequencies(theta: float, dim: int) -> NDArray[np.float64]:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _llama3(
    theta: float, dim: int, *, factor: float, low_factor: float, high_factor: float, original_len: float
) -> Divisors:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    turns = original_len * rope_frequencies(theta, dim) / (2 * math.pi)  # of each frequency over the trained context
    if high_factor == low_factor:  # Llama 4: nothing lies between
        blend = (turns >= low_factor).astype(np.float64)
    else:
        blend = np.clip((turns - low_factor) / (high_factor - low_factor), 0, 1)
    return tuple((1 / ((1 - blend) / factor + blend)).tolist())


def _yarn(
    theta: float, dim: int, *, factor: float, fast: float, slow: float, original_len: float, truncate: bool = True
) -> Divisors:
    """Frequencies with fewer than `slow` turns are divided by `factor`, those with more than `fast` kept.

    `truncate`: the ramp between them begins and ends at whole indices.
    """
    if theta <= 1:
        raise BadCheckpoint(f"yarn cannot scale a rope theta of {theta}")

    def index(turns: float) -> float:
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(fast), index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return tuple((1 / (ramp / factor + 1 - ramp)).tolist())


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Factor of q and of k by which yarn scales attention logits."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_from_hf(fields: Fields, theta: float, dim: int, context_len: int) -> tuple[Divisors | None, float]:
    """Divisors, and the scale of cos and sin, from config.json's `rope_scaling` or `rope_parameters`."""
    kind = fields.text("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None, 1.0
    factor = fields.positive("factor")
    original_len = fields.positive("original_max_position_embeddings", context_len)
    if kind == "linear":
        return (factor,) * (dim // 2), 1.0
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if high < low:
            raise fields.wrong("high_freq_factor", "low_freq_factor or above")
        return _llama3(theta, dim, factor=factor, low_factor=low, high_factor=high, original_len=original_len), 1.0
    if kind == "yarn":
        fast, slow = fields.positive("beta_fast", 32), fields.positive("beta_slow", 1)
        truncate = fields.flag("truncate", True)
        divisors = _yarn(theta, dim, factor=factor, fast=fast, slow=slow, original_len=original_len, truncate=truncate)
        scale = yarn_scale(factor)
        if fields.has("mscale") and fields.has("mscale_all_dim"):
            scale = yarn_scale(factor, fields.positive("mscale"))
            scale /= yarn_scale(factor, fields.positive("mscale_all_dim"))
        return divisors, fields.positive("attention_factor", scale)
    raise BadCheckpoint(f"rope scaling {kind!r} is not supported; supported are linear, llama3 and yarn")


def rope_from_gguf(fields: Fields, theta: float, dim: int, context_len: int) -> tuple[Divisors | None, float]:
    """The same from GGUF metadata, where Llama 3's scaling is the tensor `rope_freqs.weight` instead."""
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.positive("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None, 1.0
    if kind == "linear":
        return (factor,) * (dim // 2), 1.0
    if kind == "yarn":
        original_len = fields.positive("rope.scaling.original_context_length", context_len)
        fast = fields.positive("rope.scaling.yarn_beta_fast", 32.0)
        slow = fields.positive("rope.scaling.yarn_beta_slow", 1.0)
        divisors = _yarn(theta, dim, factor=factor, fast=fast, slow=slow, original_len=original_len)
        return divisors, fields.positive("rope.scaling.attn_factor", 1.0) * yarn_scale(factor)
    raise BadCheckpoint(f"rope scaling {kind!r} is not supported; supported are linear, yarn and rope_freqs.weight")
