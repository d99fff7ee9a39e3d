"""Rotary scaling, whatever its name, as divisors of the plain frequencies: `freq[i] = theta ** (-2i / dim) / d[i]`."""

import math

import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import BadCheckpoint, Fields

Divisors = tuple[float, ...]


def frequencies(theta: float, dim: int) -> NDArray[np.float64]:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def linear(factor: float, dim: int) -> Divisors:
    return (factor,) * (dim // 2)


def llama3(
    theta: float, dim: int, *, factor: float, low_factor: float, high_factor: float, original_len: float
) -> Divisors:
    """Llama 3's: long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = original_len * frequencies(theta, dim) / (2 * math.pi)  # of each frequency over the trained context
    blend = np.clip((turns - low_factor) / (high_factor - low_factor), 0, 1)
    return tuple((1 / ((1 - blend) / factor + blend)).tolist())


def yarn(theta: float, dim: int, *, factor: float, beta_fast: float, beta_slow: float, original_len: float) -> Divisors:
    """YaRN's: frequencies of fewer than `beta_slow` turns are stretched, of more than `beta_fast` kept."""
    if theta <= 1:
        raise BadCheckpoint(f"a rope base of {theta} cannot be scaled")

    def index(turns: float) -> float:
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(beta_fast)), 0), min(math.ceil(index(beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return tuple((1 / (ramp / factor + 1 - ramp)).tolist())


def yarn_scale(factor: float) -> float:
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def from_hf(fields: Fields, theta: float, dim: int, context_len: int) -> tuple[Divisors | None, float]:
    """Divisors and the scale of cos and sin, from config.json's `rope_scaling` or `rope_parameters`."""
    kind = fields.text("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None, 1.0
    factor = fields.positive("factor")
    original_len = fields.positive("original_max_position_embeddings", context_len)
    if kind == "linear":
        return linear(factor, dim), 1.0
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if high <= low:
            raise fields.wrong("high_freq_factor", "above low_freq_factor")
        return llama3(theta, dim, factor=factor, low_factor=low, high_factor=high, original_len=original_len), 1.0
    if kind == "yarn":
        if fields.has("mscale") or fields.has("mscale_all_dim") or not fields.flag("truncate", True):
            raise BadCheckpoint("yarn with mscale or without truncation is not read")
        fast, slow = fields.positive("beta_fast", 32), fields.positive("beta_slow", 1)
        divisors = yarn(theta, dim, factor=factor, beta_fast=fast, beta_slow=slow, original_len=original_len)
        return divisors, fields.positive("attention_factor", yarn_scale(factor))
    raise BadCheckpoint(f"rope scaling {kind!r} is not read; read are linear, llama3 and yarn")


def from_gguf(fields: Fields, theta: float, dim: int, context_len: int) -> tuple[Divisors | None, float]:
    """The same from GGUF metadata; Llama 3's comes as the tensor `rope_freqs.weight` instead."""
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.positive("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None, 1.0
    if kind == "linear":
        return linear(factor, dim), 1.0
    if kind == "yarn":
        original_len = fields.positive("rope.scaling.original_context_length", context_len)
        fast = fields.positive("rope.scaling.yarn_beta_fast", 32.0)
        slow = fields.positive("rope.scaling.yarn_beta_slow", 1.0)
        divisors = yarn(theta, dim, factor=factor, beta_fast=fast, beta_slow=slow, original_len=original_len)
        return divisors, fields.positive("rope.scaling.attn_factor", 1.0) * yarn_scale(factor)
    raise BadCheckpoint(f"rope scaling {kind!r} is not read; read are linear, yarn and rope_freqs.weight")
