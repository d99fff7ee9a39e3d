"""What a model takes of a GPU and what is left for its KV cache, before anything is loaded.

The plan builds the engine's own model on torch's meta device, whose tensors have sizes and no memory: it counts what
the engine allocates because it is the same code.
"""

import msgspec

from emberline.engine.gpu.engine import StepMemory
from emberline.engine.gpu.hardware import GIB, Gpu
from emberline.engine.gpu.memory_budget import device_memory_budget
from emberline.engine.gpu.step_time import Step, step_seconds, tensor_bytes, token_bytes
from emberline.engine.scheduler.limits import Limits
from emberline.kv.block_pool import split_bytes
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder

DECODE_BATCHES = (1, 8, 32, 64, 256)
PREFILL_TOKENS = 8192


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one GPU, and what they allow."""

    gpu: str
    memory_bytes: int  # the model's share of them
    context_bytes: int  # of the driver and the CUDA context
    weights_bytes: int
    workspace_bytes: int
    state_bytes: int  # tables and buffers by slot, including the sampler
    reserve_bytes: int  # CUDA graphs, libraries, results of attention
    kv_bytes: int
    kv_bytes_per_token: float
    kv_tokens: int  # of all sequences together
    context_len: int  # of one sequence
    decode_step_ms: dict[str, float]  # by sequences, each at `decode_context` tokens
    decode_context: int
    prefill_8192_s: float


def plan_capacity(
    model: Decoder,
    gpu: Gpu,
    limits: Limits,
    kv_bytes: int | None = None,
    decode_context: int = 4096,
    memory_share: float = 1.0,
) -> CapacityPlan:
    """Raises BadInput for a model that does not fit, saying by how much."""
    step = StepMemory.of(model, limits)
    weights = tensor_bytes([model.layers, model.matrices])
    context_bytes = int(gpu.context_gib * GIB)
    free = gpu.memory - context_bytes - weights
    budget = device_memory_budget(
        gpu.memory, free, weights, step.workspace, step.state, step.reserve, weights, kv_bytes, memory_share
    )
    n_blocks = split_bytes(model.kv_groups, budget.kv, limits.token_budget, limits.max_running)
    cache = KVCache(model.kv_groups, n_blocks, chunk=limits.token_budget)
    return CapacityPlan(
        gpu=gpu.name,
        memory_bytes=int(memory_share * gpu.memory),
        context_bytes=context_bytes,
        weights_bytes=weights,
        workspace_bytes=step.workspace,
        state_bytes=step.state,
        reserve_bytes=step.reserve,
        kv_bytes=sum(n * group.block_bytes for n, group in zip(n_blocks, model.kv_groups, strict=True)),
        kv_bytes_per_token=sum(token_bytes(group) * len(group.layers) for group in model.kv_groups),
        kv_tokens=cache.n_tokens,
        context_len=min(limits.context_len, cache.capacity),
        decode_step_ms={
            str(rows): 1e3 * step_seconds(model, gpu, Step(rows, 1, decode_context)) for rows in DECODE_BATCHES
        },
        decode_context=decode_context,
        prefill_8192_s=step_seconds(model, gpu, Step(1, PREFILL_TOKENS)),
    )
