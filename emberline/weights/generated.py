"""Random weights for a configuration: a checkpoint of any size that takes no room on a drive, to measure and to plan.

The weights' bytes are windows of a few megabytes of random numbers, each at an offset of its own, so that a terabyte
costs no memory and is the same in every process with the same seed. Their distribution keeps activations of unit size
through all layers, and has no mean: hidden states of different tokens stay independent, so that random routers send
them to as many experts as uniform routing would. (4-bit codes of 0 to 15 have a mean of -0.5; through a gated
activation it adds to every dimension alike, layer by layer, until all tokens choose the same few experts.)
"""

import math
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from emberline.weights.checkpoint import Checkpoint
from emberline.weights.hf_config import read_config
from emberline.weights.model_config import BadCheckpoint, Fields, ModelConfig
from emberline.weights.quantization import Quantization, join_quantized, quantization_fields, read_quantization
from emberline.weights.tensor_names import module_name
from emberline.weights.tensor_shapes import expected_shapes
from emberline.weights.tensors import Bytes, CheckpointFiles, Shape, Weight

_POOL_BYTES = 16 << 20
_ROW_STEP = 130  # bytes between the windows of neighboring rows: far less than a row, and no multiple of a cache line


_BIASED = ("qwen2", "gpt_oss")  # architectures whose q, k and v have biases, which a configuration does not tell


def generate_checkpoint(document: dict[str, Any], seed: int) -> Checkpoint:
    """A checkpoint of the model and in the format that a config.json describes."""
    config, tensors = generate_tensors(document, seed)
    weights = join_quantized({tensor.name: tensor for tensor in tensors}, read_quantization(document))
    fingerprint = blake2b(b"generated %d " % seed + msgspec.json.encode(document), digest_size=16).hexdigest()
    return Checkpoint(CheckpointFiles(config, weights, lambda: None), fingerprint)


def generate_tensors(document: dict[str, Any], seed: int) -> tuple[ModelConfig, Iterator[Weight]]:
    """The tensors of that checkpoint's files, with canonical names; `tensor_names.hf_name` tells those in the files."""
    config = generated_config(document)
    file_format, pools = FileFormat.of(document, config), Pools(seed)
    shapes = expected_shapes(config)
    return config, (tensor for name, shape in shapes for tensor in _generate(name, shape, file_format, pools))


def generated_config(document: dict[str, Any]) -> ModelConfig:
    config = read_config(document, {})
    return msgspec.structs.replace(config, qkv_bias=True) if config.architecture in _BIASED else config


class FileFormat(NamedTuple):
    """Settings that the tensors of the checkpoint's files follow from."""

    document: dict[str, Any]
    config: ModelConfig
    quantization: Quantization | None

    @classmethod
    def of(cls, document: dict[str, Any], config: ModelConfig) -> "FileFormat":
        return cls(document, config, read_quantization(document))

    def scheme(self, name: str, shape: Shape) -> "Scheme | None":
        return scheme_of(module_name(name, self.config), self.document) if _is_matrix(name, shape) else None


def generate_weight(name: str, shape: Shape, file_format: FileFormat, pools: "Pools") -> Weight:
    """One weight of that checkpoint."""
    tensors = {tensor.name: tensor for tensor in _generate(name, shape, file_format, pools)}
    return join_quantized(tensors, file_format.quantization)[name]


def _generate(name: str, shape: Shape, file_format: FileFormat, pools: "Pools") -> Iterator[Weight]:
    """The tensors of a file: of a quantized matrix its codes and scales."""
    scheme = file_format.scheme(name, shape)
    if scheme is None:
        yield Weight(name, shape, "bf16", pools.window(name, shape, _deviation(name, shape)))
    else:
        yield from _quantized(name.removesuffix(".weight"), shape, scheme, pools)


def _is_matrix(name: str, shape: Shape) -> bool:
    """True if a quantized checkpoint may store the tensor as codes."""
    return len(shape) == 2 and not name.startswith("token_embd") and ".ffn_gate_inp." not in name


class Scheme(NamedTuple):
    """How a matrix is quantized."""

    kind: str  # "int4", "fp8" or "mxfp4"
    group: int = 32  # columns that share a scale, of INT4 and MXFP4
    per: str = "channel"  # of FP8: "tensor", "channel" or "block"


def scheme_of(module: str, document: dict[str, Any]) -> Scheme | None:
    """The scheme of a Hugging Face module by config.json, as its publisher applied it; None: it is not quantized.

    `read_quantization` has accepted the file.
    """
    fields = quantization_fields(document)
    if fields is None:
        return None
    found: Any = fields.values
    method = found["quant_method"]
    if method == "mxfp4":
        return Scheme("mxfp4") if ".experts." in module else None
    if method == "compressed-tensors":
        if any(_names(pattern, module) for pattern in _texts(fields, "ignore")):
            return None
        groups = (Fields(group, "a scheme of quantization_config") for group in found["config_groups"].values())
        named = (g for g in groups if any(_names(target, module) for target in _texts(g, "targets")))
        weights: Any = next((g.get("weights") for g in named), None)
        if weights is None:
            return None
        if weights.get("type") == "float" and weights["num_bits"] == 8:
            return Scheme("fp8", per=weights.get("strategy", "tensor"))
        return Scheme("mxfp4" if weights.get("type") == "float" else "int4", weights["group_size"])
    if any(part in module for part in (*_texts(fields, "modules_to_not_convert"), "lm_head")):
        return None
    return Scheme("fp8", per="block" if found.get("weight_block_size") else "channel")


def _names(pattern: str, module: str) -> bool:
    """True if a pattern of `targets` or `ignore` names a module: a class, an expression, or the module itself."""
    if pattern == "Linear":
        return True
    try:
        return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else pattern == module
    except re.error as error:
        raise BadCheckpoint(f"quantization_config: {pattern[:60]!r} is not a regular expression: {error}") from None


def _texts(fields: Fields, key: str) -> list[str]:
    """A list of texts, empty where it is absent."""
    found = fields.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise fields.wrong(key, "a list of texts")
    return found


def _quantized(module: str, shape: Shape, scheme: Scheme, pools: "Pools") -> Iterator[Weight]:
    """Codes that are random bytes, with scales that give their values the deviation of other weights."""
    rows, cols = shape
    deviation = cols**-0.5
    if scheme.kind == "fp8":
        yield Weight(f"{module}.weight", shape, "fp8", pools.fp8(module, rows, cols))
        blocks = (-(-rows // 128), -(-cols // 128))
        scales = {"tensor": (1,), "channel": (rows, 1), "block": blocks}[scheme.per]
        name = f"{module}.weight_scale_inv" if scheme.per == "block" else f"{module}.weight_scale"
        yield Weight(name, scales, "f32", pools.constant(scales, deviation, np.float32))
        return
    codes = pools.codes(module, rows, cols // 2)
    yield Weight(f"{module}.weight_packed", (rows, cols // 2), "u8", codes)
    scales = (rows, cols // scheme.group)
    if scheme.kind == "int4":  # codes of 1 to 15 less 8: a deviation of 4.3
        yield Weight(f"{module}.weight_scale", scales, "bf16", pools.constant(scales, deviation / 4.3, np.uint16))
    else:  # of MXFP4's values the deviation is 3
        exponent = 127 + round(math.log2(deviation / 3))
        yield Weight(f"{module}.weight_scale", scales, "u8", np.broadcast_to(np.uint8(exponent), scales))


def _deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a tensor's numbers; 0: they are one, for norms, or zero, for biases."""
    if len(shape) == 1:
        return 0.0
    return 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5


class Pools:
    """Random bytes to take windows of, one pool for each distribution."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: NDArray[np.float64] | None = None  # of unit deviation, scaled for each pool
        self._pools: dict[float | str, Bytes] = {}

    def window(self, name: str, shape: Shape, deviation: float) -> Bytes:
        """Bytes of bf16 numbers, [rows, row_bytes]; a vector is n rows of one number."""
        rows, row_bytes = shape[0], 2 * math.prod(shape[1:])
        if not deviation:
            value = np.float32(0.0 if name.endswith("bias") else 1.0).view(np.uint32) >> 16
            return np.full((rows, row_bytes // 2), value, np.uint16).view(np.uint8)
        return self._strided(name, self._normal(deviation), rows, row_bytes)

    def codes(self, name: str, rows: int, row_bytes: int) -> Bytes:
        """Two codes of 4 bits a byte, none of them 0: as many values above zero as below, of INT4 and of MXFP4."""
        if "codes" not in self._pools:
            low, high = np.random.default_rng(self._seed).integers(1, 16, (2, _POOL_BYTES), np.uint8)
            self._pools["codes"] = low | high << np.uint8(4)
        return self._strided(name, self._pools["codes"], rows, row_bytes)

    def fp8(self, name: str, rows: int, cols: int) -> Bytes:
        """Codes of e4m3 for numbers of unit deviation."""
        if "fp8" not in self._pools:
            import torch

            numbers = torch.from_numpy(np.random.default_rng(self._seed).standard_normal(_POOL_BYTES, np.float32))
            self._pools["fp8"] = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return self._strided(name, self._pools["fp8"], rows, cols)

    def constant(self, shape: Shape, value: float, dtype: type[np.generic]) -> Bytes:
        """Bytes [rows, row_bytes] of one number, as float32 or (np.uint16) as bfloat16."""
        number = np.float32(value).view(np.uint32)
        one = np.array([number if dtype is np.float32 else number >> 16]).astype(
            np.uint32 if dtype is np.float32 else np.uint16
        )
        row = np.repeat(one, math.prod(shape[1:])).view(np.uint8)
        return np.broadcast_to(row, (shape[0], len(row)))

    def _normal(self, deviation: float) -> Bytes:
        if deviation not in self._pools:
            if self._numbers is None:
                self._numbers = np.random.default_rng(self._seed).standard_normal(_POOL_BYTES // 2)
            numbers = (self._numbers * deviation).astype(np.float32)
            self._pools[deviation] = numbers.view(np.uint16)[1::2].copy().view(np.uint8)  # bf16: the upper half
        return self._pools[deviation]

    def _strided(self, name: str, pool: Bytes, rows: int, row_bytes: int) -> Bytes:
        start = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=4).digest()) & ~1
        last = len(pool) - row_bytes  # where the last window may begin
        assert last >= 0, f"a row of {row_bytes} bytes is longer than the pool"
        step = min(_ROW_STEP, last // max(1, rows - 1) & ~1)
        start %= last - step * (rows - 1) + 1
        return as_strided(pool[start & ~1 :], (rows, row_bytes), (step, 1), writeable=False)


class ZeroPools(Pools):
    """Zeros in place of random bytes, at no cost: for what asks for sizes only."""

    def _strided(self, name: str, pool: Bytes, rows: int, row_bytes: int) -> Bytes:
        return np.broadcast_to(np.uint8(0), (rows, row_bytes))

    def _normal(self, deviation: float) -> Bytes:
        return _NOTHING

    def codes(self, name: str, rows: int, row_bytes: int) -> Bytes:
        return self._strided(name, _NOTHING, rows, row_bytes)

    def fp8(self, name: str, rows: int, cols: int) -> Bytes:
        return self._strided(name, _NOTHING, rows, cols)


_NOTHING = np.empty(0, np.uint8)
