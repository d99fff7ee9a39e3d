"""Random weights for a configuration: a checkpoint of any size that takes no room on a drive, to measure and to plan.

The weights' bytes are windows of a few megabytes of random numbers, each at an offset of its own, so that a terabyte
costs no memory and is the same in every process with the same seed. Their distribution keeps activations of unit size
through all layers, and routers choose all experts alike.
"""

import math
from collections.abc import Iterator
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided

from emberline.weights.checkpoint import Checkpoint
from emberline.weights.model_config import ModelConfig
from emberline.weights.tensor_shapes import expected_shapes
from emberline.weights.tensors import Bytes, CheckpointFiles, Shape, Weight

_POOL_BYTES = 16 << 20
_ROW_STEP = 130  # bytes between the windows of neighboring rows: far less than a row, and no multiple of a cache line


_BIASED = ("qwen2", "gpt_oss")  # architectures whose q, k and v have biases, which a configuration does not tell


def generate_checkpoint(config: ModelConfig, seed: int) -> Checkpoint:
    """A checkpoint of this configuration."""
    if config.architecture in _BIASED:
        config = msgspec.structs.replace(config, qkv_bias=True)
    weights = {weight.name: weight for weight in _generate(config, _Pools(seed))}
    fingerprint = blake2b(b"generated %d " % seed + msgspec.json.encode(config), digest_size=16).hexdigest()
    return Checkpoint(CheckpointFiles(config, weights, lambda: None), fingerprint)


def _generate(config: ModelConfig, pools: "_Pools") -> Iterator[Weight]:
    for name, shape in expected_shapes(config):
        yield Weight(name, shape, "bf16", pools.window(name, shape, _deviation(name, shape)))


def _deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a tensor's numbers; 0: they are one, for norms, or zero, for biases."""
    if len(shape) == 1:
        return 0.0
    return 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5


class _Pools:
    """Random bytes to take windows of, one pool for each distribution."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[float | str, Bytes] = {}

    def window(self, name: str, shape: Shape, deviation: float) -> Bytes:
        """Bytes of bf16 numbers, [rows, row_bytes]; a vector is n rows of one number."""
        rows, row_bytes = shape[0], 2 * math.prod(shape[1:])
        if not deviation:
            value = np.float32(0.0 if name.endswith("bias") else 1.0).view(np.uint32) >> 16
            return np.full((rows, row_bytes // 2), value, np.uint16).view(np.uint8)
        return self._strided(name, self._normal(deviation), rows, row_bytes)

    def _normal(self, deviation: float) -> Bytes:
        if deviation not in self._pools:
            numbers = np.random.default_rng(self._seed).normal(0, deviation, _POOL_BYTES // 2).astype(np.float32)
            self._pools[deviation] = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return self._pools[deviation]

    def _strided(self, name: str, pool: Bytes, rows: int, row_bytes: int) -> Bytes:
        start = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=4).digest()) & ~1
        last = len(pool) - row_bytes  # where the last window may begin
        assert last >= 0, f"a row of {row_bytes} bytes is longer than the pool"
        step = min(_ROW_STEP, last // max(1, rows - 1) & ~1)
        start %= last - step * (rows - 1) + 1
        return as_strided(pool[start & ~1 :], (rows, row_bytes), (step, 1), writeable=False)
