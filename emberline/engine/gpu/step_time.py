"""How long a step takes, by roofline: what it reads over the bandwidth, or what it computes over the arithmetic.

The efficiencies were measured on an H200; see docs/design/gpu-kernels.md.
"""

from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

from torch import Tensor

from emberline.engine.gpu.hardware import Gpu
from emberline.kernels.backend import Attention, FeedForward, LatentAttention, MoE
from emberline.kernels.gpu.fp8_gemm import FP8Matrix
from emberline.models.decoder import Decoder
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup

MEMORY_EFFICIENCY = 0.93  # of weights that matrix products read
KV_EFFICIENCY = 0.75  # of the cache that decode attention reads
MATMUL_EFFICIENCY = 0.80
ATTENTION_EFFICIENCY = 0.72
LAUNCH_S = 1.2e-6  # between kernels of a CUDA graph
KERNELS = 4  # of a block


@dataclass(frozen=True, slots=True)
class Step:
    """`rows` sequences, each with `tokens` new ones after `context` others."""

    rows: int
    tokens: int
    context: int = 0

    @property
    def n_tokens(self) -> int:
        return self.rows * self.tokens


def step_seconds(model: Decoder, gpu: Gpu, step: Step) -> float:
    """Seconds of a step with the model's layers and head."""
    blocks = 0.0
    for layer in model.layers:
        group = model.kv_groups[layer.attention.kv_group]
        blocks += _attention_seconds(layer.attention, group, gpu, step) + _feed_forward_seconds(
            layer.feed_forward, gpu, step
        )
    return blocks + _matmul_seconds(Matrices.of(model.head), step.rows, gpu)


@dataclass(frozen=True, slots=True)
class Matrices:
    """Weights that are multiplied together: how many, and the bytes that they take."""

    n_weights: float
    n_bytes: float
    n_fp8: float = 0  # of the weights: those that multiply FP8 activations

    @classmethod
    def of(cls, *matrices: Any) -> "Matrices":
        fp8 = [each for each in matrices if isinstance(each, FP8Matrix) and each.quantize_input]
        n_weights, n_fp8 = (sum(prod(matrix.shape) for matrix in some) for some in (matrices, fp8))
        return cls(n_weights, sum(map(tensor_bytes, matrices)), n_fp8)

    def part(self, share: float) -> "Matrices":
        return Matrices(share * self.n_weights, share * self.n_bytes, share * self.n_fp8)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors inside a dataclass, storage that several share counted once."""
    return sum(_storages(value).values())


def _storages(value: Any) -> dict[int, int]:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    if isinstance(value, list | tuple):
        inner = list(value)
    elif is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    else:
        return {}
    found: dict[int, int] = {}
    for each in inner:
        found |= _storages(each)
    return found


def _attention_seconds(block: Attention, group: KVGroup, gpu: Gpu, step: Step) -> float:
    products = _matmul_seconds(Matrices.of(*block.matrices), step.n_tokens, gpu)
    seen = min(step.context + step.tokens / 2, group.window or 1 << 62)  # by a token, on average
    cache_bytes = step.rows * min(step.context + step.tokens, group.window or 1 << 62) * token_bytes(group)
    flops = 2 * step.n_tokens * seen * _attention_width(block)
    over_cache = max(
        cache_bytes / (gpu.bandwidth_tb_s * 1e12 * KV_EFFICIENCY),
        flops / (gpu.bf16_tflops * 1e12 * ATTENTION_EFFICIENCY),
    )
    return products + over_cache + KERNELS * LAUNCH_S


def token_bytes(group: KVGroup) -> float:
    """Of a token's cache in one of the group's layers."""
    return group.block_bytes / BLOCK_TOKENS / len(group.layers)


def _attention_width(block: Attention) -> int:
    """Multiplications of a query token with a key and a value."""
    if isinstance(block, LatentAttention):
        return block.heads * (block.nope_dim + block.rope_dim + block.v_dim)
    return block.heads * 2 * block.head_dim


def _feed_forward_seconds(block: FeedForward, gpu: Gpu, step: Step) -> float:
    if not isinstance(block, MoE):
        return _matmul_seconds(Matrices.of(*block.matrices), step.n_tokens, gpu) + KERNELS * LAUNCH_S
    chosen = block.routing.top_k / block.router.shape[0]  # share of the experts, by one token
    share = 1 - (1 - chosen) ** step.n_tokens  # by any
    per_expert = step.n_tokens * chosen / share  # tokens of one that is chosen
    seconds = _matmul_seconds(Matrices.of(block.gate_up, block.down).part(share), per_expert, gpu)
    if block.shared is not None:
        seconds += _matmul_seconds(Matrices.of(*block.shared.matrices), step.n_tokens, gpu)
    return seconds + 2 * KERNELS * LAUNCH_S


def _matmul_seconds(matrices: Matrices, n_tokens: float, gpu: Gpu) -> float:
    per_tflops = (matrices.n_weights - matrices.n_fp8) / gpu.bf16_tflops + matrices.n_fp8 / gpu.fp8_tflops
    return max(
        matrices.n_bytes / (gpu.bandwidth_tb_s * 1e12 * MEMORY_EFFICIENCY),
        2 * n_tokens * per_tflops / (1e12 * MATMUL_EFFICIENCY),
    )
