"""Tensors as a file has them → as models read them: one per expert and matrix, and rows in RoPE's canonical order."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.tensors import FileLocation, Weight

_TRANSPOSED = frozenset({"llama4", "gpt_oss"})  # their fused experts are [experts, in, out]
_ALTERNATING = frozenset({"gpt_oss"})  # its gate and up are on alternate rows
_FUSED_SUFFIXES = frozenset({"weight", "bias", "blocks", "scales"})  # the last two of MXFP4, whose rows are outputs

Order = NDArray[np.intp]


def arrange(weight: Weight, config: ModelConfig) -> Iterator[Weight]:
    """The canonical weights that a tensor of the file holds: usually itself."""
    prefix, _, part = weight.name.rpartition(".ffn_")
    fused, _, suffix = part.partition(".")
    if config.moe is not None and fused in ("gate_up_exps", "down_exps") and suffix in _FUSED_SUFFIXES:
        yield from _experts(weight, config, f"{prefix}.ffn_", fused, suffix)
        return
    rotated = config.rope_interleaved and "scale" not in weight.name  # a quantized weight's scales follow its rows
    order = _rope_order(weight, config) if rotated else None
    yield weight if order is None else replace(weight, order=order)


def _experts(weight: Weight, config: ModelConfig, prefix: str, fused: str, suffix: str) -> Iterator[Weight]:
    assert config.moe is not None
    experts, *inner = weight.shape
    if experts != config.moe.experts or len(inner) != (1 if suffix == "bias" else 2):
        raise BadCheckpoint(f"tensor {weight.name!r} of shape {weight.shape} is not of {config.moe.experts} experts")
    transposed = suffix == "weight" and config.architecture in _TRANSPOSED
    if fused == "gate_up_exps":
        n_rows = inner[-1] if transposed else inner[0]
        alternating = config.architecture in _ALTERNATING
        halves = {
            "gate_exps": np.arange(0, n_rows, 2) if alternating else np.arange(n_rows // 2),
            "up_exps": np.arange(1, n_rows, 2) if alternating else np.arange(n_rows // 2, n_rows),
        }
    else:
        halves = {fused: np.arange(0)}
    for expert in range(experts):
        whole = _one_expert(weight, expert, inner, transposed)
        for name, order in halves.items():
            part = _rows(whole, order, contiguous=not transposed and fused == "gate_up_exps") if len(order) else whole
            yield replace(part, name=f"{prefix}{name}.{expert}.{suffix}")


def _one_expert(weight: Weight, expert: int, inner: list[int], transposed: bool) -> Weight:
    raw = weight.raw[expert].reshape(inner[0], -1)
    location = weight.location and FileLocation(weight.location.path, weight.location.offset + expert * raw.nbytes)
    shape = (inner[1], inner[0]) if transposed else tuple(inner)
    return replace(weight, shape=shape, raw=raw, location=location, transposed=transposed)


def _rows(weight: Weight, order: Order, *, contiguous: bool) -> Weight:
    """Some rows of a weight; neighbors are a part of the file of their own."""
    shape = (len(order), *weight.shape[1:])
    if contiguous and order[-1] - order[0] == len(order) - 1:
        raw = weight.raw[order[0] : order[-1] + 1]
        start = int(order[0]) * weight.raw[0].nbytes
        location = weight.location and FileLocation(weight.location.path, weight.location.offset + start)
        return replace(weight, shape=shape, raw=raw, location=location)
    return replace(weight, shape=shape, order=order)


def _rope_order(weight: Weight, config: ModelConfig) -> Order | None:
    """The order of rows that turns pairs (2i, 2i + 1) into pairs (i, i + dim / 2); None: no row is rotated."""
    part, dim = weight.name.split(".")[-2], config.rope_dim
    n_rows = weight.shape[0]
    period = {"attn_q": config.head_dim, "attn_q_b": config.head_dim}.get(part)
    if part == "attn_kv_a_mqa":
        period = n_rows
    elif part == "attn_k" and config.latent is None:
        period = config.head_dim
    if period is None or n_rows % period or period < dim:
        return None  # not rotated, or of a wrong shape, which `check_tensors` rejects
    head = np.arange(period)
    head[period - dim :] = head[period - dim :].reshape(-1, 2).T.reshape(-1)
    return (np.arange(0, n_rows, period)[:, None] + head).reshape(-1)
