"""Quantized checkpoints of the Hub: which formats `quantization_config` names, and their tensors joined to weights.

A quantized matrix is several tensors of a file: its codes and their scales. Which matrices are quantized is read off
the tensors, how they are off the configuration, and the two must agree.

    compressed-tensors  weight_packed (INT4, two codes a byte; MXFP4) or weight (FP8), weight_scale, weight_shape
    fp8, fbgemm_fp8     weight, weight_scale or (blocks of 128 x 128) weight_scale_inv
    mxfp4               blocks, scales (GPT-OSS's experts)
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from emberline.weights.model_config import BadCheckpoint, Fields
from emberline.weights.quantized_weight import BLOCK, QuantizedWeight
from emberline.weights.readahead import will_need
from emberline.weights.tensors import Weight, dequantize

METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")
INT4_GROUPS = (32, 64, 128)
_MXFP4_GROUP = 32
_CODES = {"weight_packed", "weight", "blocks"}  # suffixes of a name
_SCALES = {"weight_scale", "weight_scale_inv", "scales"}
_LOOKED_AT = _SCALES | {"weight_shape"}  # whose first row is read when a checkpoint is opened
# Of static activation scales: activations are scaled dynamically, which is finer.
_DROPPED = {"weight_shape", "input_scale", "input_scale_ub"}
_UNSUPPORTED = {
    "weight_zero_point": "asymmetric INT4 (zero points)",
    "weight_g_idx": "activation reordering (g_idx)",
    "weight_global_scale": "NVFP4",
    "qweight": "AWQ or GPTQ packing",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a checkpoint's matrices, as its configuration states it."""

    method: str
    kinds: frozenset[str]  # of "int4", "fp8", "mxfp4"
    groups: frozenset[int] = frozenset()  # of INT4
    quantize_input: bool = False  # FP8 activations


def quantization_fields(document: dict[str, object]) -> Fields | None:
    """`quantization_config` of config.json, where the text model's own entry counts; None: nothing is quantized."""
    inner = document.get("text_config")
    found = (inner.get("quantization_config") if isinstance(inner, dict) else None) or document.get(
        "quantization_config"
    )
    if not found:
        return None
    if not isinstance(found, dict):
        raise BadCheckpoint("config.json: 'quantization_config' is not an object")
    return Fields(found, "quantization_config")


def read_quantization(document: dict[str, object]) -> Quantization | None:
    fields = quantization_fields(document)
    if fields is None:
        return None
    method = fields.text("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "fp8":
        return _fp8(fields)
    if method == "fbgemm_fp8":
        return Quantization(method, frozenset({"fp8"}), quantize_input=True)
    if method == "mxfp4":
        return Quantization(method, frozenset({"mxfp4"}))
    raise BadCheckpoint(f"quantization method {method!r} is not supported; supported are {', '.join(METHODS)}")


def _fp8(fields: Fields) -> Quantization:
    if fields.text("fmt", "e4m3") != "e4m3":
        raise BadCheckpoint(f"FP8 format {fields.text('fmt')!r} is not supported; e4m3 is")
    block = fields.get("weight_block_size", [BLOCK, BLOCK])
    if block != [BLOCK, BLOCK]:
        raise BadCheckpoint(f"FP8 blocks of {block} are not supported; [{BLOCK}, {BLOCK}] are")
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise BadCheckpoint(f"activation scheme {scheme!r} is not supported; supported are dynamic and static")
    return Quantization("fp8", frozenset({"fp8"}), quantize_input=True)


def _compressed_tensors(fields: Fields) -> Quantization:
    for key, what in ("kv_cache_scheme", "a quantized KV cache"), ("transform_config", "rotated weights"):
        if fields.get(key, None):
            raise BadCheckpoint(f"quantization_config: {what} ({key}) is not supported")
    sparsity = fields.get("sparsity_config", {})
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise BadCheckpoint(f"quantization_config: sparsity {sparsity.get('format')!r} is not supported")
    config_groups = fields.get("config_groups")
    if not isinstance(config_groups, dict) or not config_groups:
        raise fields.wrong("config_groups", "an object of schemes")
    kinds, groups, quantize_input = set(), set(), False
    for name, group in config_groups.items():
        if not isinstance(group, dict):
            raise fields.wrong("config_groups", "an object of schemes")
        kind, size, input_too = _scheme(str(name), Fields(group, f"quantization_config of {str(name)[:40]!r}"))
        kinds.add(kind)
        quantize_input |= input_too
        if kind == "int4":
            groups.add(size)
    return Quantization("compressed-tensors", frozenset(kinds), frozenset(groups), quantize_input)


def _scheme(name: str, fields: Fields) -> tuple[str, int, bool]:
    """Kind, group size and whether activations are quantized, of one entry of `config_groups`."""
    weights, inputs = fields.get("weights"), fields.get("input_activations", None)
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise fields.wrong("weights", "an object")
    if fields.get("output_activations", None):
        raise BadCheckpoint(f"{fields.where}: quantized outputs are not supported")
    w = Fields(weights, f"the weights of {name[:40]!r}")
    bits, kind = w.whole("num_bits", most=32), w.text("type", "int")
    what = f"{kind.upper()}{bits}"
    if (bits, kind) == (8, "float"):
        _check_fp8(w)
        if inputs is not None and (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
            raise BadCheckpoint(f"{fields.where}: FP8 weights with {_name_of(inputs)} activations are not supported")
        return "fp8", 0, inputs is not None
    if inputs is not None and (bits, kind) != (4, "float"):
        raise BadCheckpoint(f"{fields.where}: {what} weights with {_name_of(inputs)} activations are not supported")
    size = w.whole("group_size", 0, least=-1) if w.has("group_size") else 0
    if (bits, kind) == (4, "float"):
        if size != _MXFP4_GROUP or inputs is not None:
            raise BadCheckpoint(f"{fields.where}: FLOAT4 in groups of {size} (NVFP4) is not supported; MXFP4 is")
        return "mxfp4", size, False
    if (bits, kind) != (4, "int"):
        raise BadCheckpoint(f"{fields.where}: {what} weights are not supported; supported are INT4, FP8 and MXFP4")
    if not w.flag("symmetric", True):
        raise BadCheckpoint(f"{fields.where}: asymmetric INT4 (zero points) is not supported; symmetric is")
    if size not in INT4_GROUPS:
        raise BadCheckpoint(f"{fields.where}: INT4 groups of {size} are not supported; {_listed(INT4_GROUPS)} are")
    return "int4", size, False


def _check_fp8(weights: Fields) -> None:
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise BadCheckpoint(f"FP8 scales per {strategy} are not supported; supported are tensor, channel and block")
    block = weights.get("block_structure", [BLOCK, BLOCK])
    if strategy == "block" and block != [BLOCK, BLOCK]:
        raise BadCheckpoint(f"FP8 blocks of {block} are not supported; [{BLOCK}, {BLOCK}] are")


def _name_of(scheme: dict[str, object]) -> str:
    return f"{str(scheme.get('type', 'int')).upper()}{scheme.get('num_bits', '')}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


# --- tensors to weights -----------------------------------------------------------------------------------------------


def join_quantized(found: dict[str, Weight], quantization: Quantization | None) -> dict[str, Weight]:
    """Weights by name, `X.weight` in place of the tensors `X.weight_packed`, `X.weight_scale` and so on."""
    modules: dict[str, dict[str, Weight]] = {}
    for name, tensor in found.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    will_need(
        (part.location.path, part.location.offset, part.raw[:1].nbytes)
        for parts in modules.values()
        for suffix, part in parts.items()
        if part.location is not None and suffix in _LOOKED_AT
    )
    joined: dict[str, Weight] = {}
    for module, parts in modules.items():
        for weight in _join(module, parts, quantization):
            joined[weight.name] = weight
    return joined


def _join(module: str, parts: dict[str, Weight], quantization: Quantization | None) -> Iterator[Weight]:
    for suffix, what in _UNSUPPORTED.items():
        if suffix in parts:
            raise BadCheckpoint(f"tensor '{module}.{suffix}': {what} is not supported")
    scale_name = next((suffix for suffix in parts if suffix in _SCALES), None)
    quantized = next((s for s in parts if s in _CODES and (s != "weight" or parts[s].kind == "fp8")), None)
    for suffix, tensor in parts.items():
        if suffix not in _SCALES | _DROPPED and suffix != quantized:
            yield tensor
    if quantized is None:
        if scale_name is not None:
            raise BadCheckpoint(f"tensor '{module}.{scale_name}' has no weight that it scales")
        return
    codes = parts[quantized]
    if quantization is None:
        raise BadCheckpoint(f"tensor {codes.name!r} is quantized, but config.json has no quantization_config")
    if scale_name is None:
        raise BadCheckpoint(f"tensor {codes.name!r} has no scale ('{module}.weight_scale' is missing)")
    yield _quantized(f"{module}.weight", codes, parts[scale_name], parts.get("weight_shape"), quantization)


def _quantized(
    name: str, codes: Weight, scale: Weight, stated: Weight | None, quantization: Quantization
) -> QuantizedWeight:
    kind = codes.kind
    if kind != "fp8":
        kind = "mxfp4" if scale.kind == "u8" else "int4"
    if kind not in quantization.kinds:
        kinds = ", ".join(sorted(quantization.kinds))
        raise BadCheckpoint(f"tensor {codes.name!r} is {kind}, but quantization_config speaks of {kinds}")
    rows, per_row = codes.shape[0], math.prod(codes.shape[1:])
    shape = (rows, per_row if kind == "fp8" else 2 * per_row)
    if stated is not None:
        shape = _stated_shape(stated, shape)
    raw = codes.raw.reshape(len(codes.raw), -1)
    codes = replace(codes, raw=raw, shape=(rows, per_row))
    scale = replace(scale, raw=scale.raw.reshape(len(scale.raw), -1))
    group = _scale_columns(name, kind, shape, scale, quantization)
    weight = QuantizedWeight(
        name,
        shape,
        kind,
        raw,
        codes.order,
        location=codes.location,
        scale=scale,
        group=group,
        quantize_input=quantization.quantize_input,
    )
    # Of a terabyte of weights the scales alone take minutes to read: a sample tells a file that was written wrong.
    if scale.kind in ("f32", "f16", "bf16") and not np.isfinite(dequantize(scale.kind, scale.raw[:1])).all():
        raise BadCheckpoint(f"the scale of {name!r} has values that are not finite")
    return weight


def _stated_shape(stated: Weight, packed: tuple[int, int]) -> tuple[int, int]:
    numbers = np.ascontiguousarray(stated.raw).reshape(-1)
    shape = tuple(numbers.view("<i8" if numbers.nbytes == 16 else "<i4").tolist()) if numbers.nbytes in (8, 16) else ()
    if shape != packed:
        raise BadCheckpoint(f"tensor {stated.name!r} says {shape}, but the packed codes are of {packed}")
    return packed


def _scale_columns(name: str, kind: str, shape: tuple[int, int], scale: Weight, quantization: Quantization) -> int:
    """Columns that share a scale; 0 for FP8 with a scale per row or per tensor. Raises where the scale does not fit."""
    rows, cols = shape
    n_scales = math.prod(scale.shape)
    if kind == "fp8":
        if n_scales == 1 or (n_scales == rows and len(scale.shape) <= 2 and scale.shape[0] == rows):
            return 0
        blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
        if scale.shape != blocks:
            raise BadCheckpoint(
                f"the scale of {name!r} has shape {scale.shape}, not one per tensor, per row or per block {blocks}"
            )
        return BLOCK
    groups = frozenset({_MXFP4_GROUP}) if kind == "mxfp4" else quantization.groups
    wanted = {(rows, cols // group) for group in groups if cols % group == 0}
    if scale.shape not in wanted:
        expected = (
            f"{_listed(groups)} implies {', '.join(map(str, sorted(wanted)))}"
            if wanted
            else (f"{_listed(groups)} does not divide {cols} columns")
        )
        raise BadCheckpoint(f"the scale of {name!r} has shape {scale.shape}, but a group size of {expected}")
    return cols // scale.shape[1]
