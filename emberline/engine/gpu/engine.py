"""A model on a CUDA device with what it needs: kernels, sampler, runner, and the memory budget."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from emberline.engine.gpu.memory_budget import (
    DeviceMemoryBudget,
    device_memory_budget,
    reserve_bytes,
    runner_state_bytes,
)
from emberline.engine.gpu.runner import GpuRunner
from emberline.engine.gpu.shapes import CHUNK_ROWS, GPU_SHAPES, MAX_GRAPH_TOKENS
from emberline.engine.gpu.slots import SlotSampler
from emberline.engine.gpu.step_time import tensor_bytes
from emberline.engine.scheduler.latency_target import LatencyTarget
from emberline.engine.scheduler.limits import Limits
from emberline.kernels.backend import LatentAttention, MoE
from emberline.kernels.gpu import decode_inputs as inputs
from emberline.kernels.gpu import sampler as sampling
from emberline.kernels.gpu.matmul import workspace_needs
from emberline.kernels.gpu.sampler_table import SamplerTable
from emberline.kernels.gpu.workspace import Workspace, WorkspaceSizes
from emberline.models.decoder import Decoder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that steps take beside weights and KV cache, known before anything is allocated."""

    sizes: WorkspaceSizes
    workspace: int
    state: int  # tables and buffers by slot, including the sampler
    reserve: int  # allocated later: CUDA graphs, libraries, results of attention

    @classmethod
    def of(cls, model: Decoder, limits: Limits) -> "StepMemory":
        n_rows, n_groups = limits.max_running + CHUNK_ROWS, len(model.kv_groups)
        n_tokens = max(limits.token_budget, MAX_GRAPH_TOKENS)
        sizes = WorkspaceSizes.of(model, n_tokens, n_rows, n_rows, **workspace_needs(model.matrices))
        state = runner_state_bytes(limits, n_groups) + SamplerTable.bytes(limits.max_running, limits.vocab_size)
        result = max(2 * attn.output_dim + 4 * attn.heads for attn in model.attentions)  # bf16; float32 log-sum-exp
        latent = sum(isinstance(attn, LatentAttention) for attn in model.attentions)
        experts = sum(isinstance(block, MoE) for block in model.feed_forwards)
        dense_layers = len(model.layers) + 0.6 * (latent + experts)  # each has about five launches more
        return cls(sizes, Workspace.bytes(sizes), state, reserve_bytes(limits, n_groups, result, dense_layers))


@dataclass(slots=True)
class GpuEngine:
    """What is allocated before the KV cache takes the rest of the memory."""

    model: Decoder
    device: str
    sampler: SlotSampler
    memory: DeviceMemoryBudget
    prefill: LatencyTarget

    @classmethod
    def open(
        cls, model: Decoder, limits: Limits, device: str, kv_bytes: int | None, memory_share: float = 1.0
    ) -> "GpuEngine":
        """`limits` of the model; the KV cache may reduce its context further. `memory_share`: of the device."""
        weights = torch.cuda.memory_allocated(device)
        step = StepMemory.of(model, limits)
        model.kernels.reserve(step.sizes)
        sampler = SamplerTable(limits.max_running, limits.vocab_size, device, max_rows=step.sizes.max_rows)
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_reserved(device)
        memory = device_memory_budget(
            total, free, weights, step.workspace, step.state, step.reserve, allocated, kv_bytes, memory_share
        )
        _log.info("%s", memory.table())
        return cls(model, device, sampler, memory, LatencyTarget(GPU_SHAPES))

    def runner(
        self, n_blocks: Sequence[int], limits: Limits, graphs: bool = True, pools: Sequence[torch.Tensor] | None = None
    ) -> GpuRunner:
        return GpuRunner(
            self.model, n_blocks, limits, self.device, _Kernels(), self.sampler, self.prefill, graphs, pools
        )


class _Kernels:
    """The Triton kernels as the runner calls them."""

    prepare = staticmethod(inputs.prepare)
    keep = staticmethod(inputs.keep)
    sample = staticmethod(sampling.sample_batch)


def check_fits(model: Decoder, limits: Limits, device: str, kv_bytes: int | None, memory_share: float = 1.0) -> None:
    """Raise BadInput, saying by how much, if the device cannot hold the model, whose tensors may be without memory."""
    step, weights = StepMemory.of(model, limits), tensor_bytes([model.layers, model.matrices])
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_reserved(device)
    device_memory_budget(
        total, free, weights, step.workspace, step.state, step.reserve, allocated, kv_bytes, memory_share
    )


def load_attention(device: str) -> threading.Thread:
    """Load cuDNN's attention, which takes a second, before the first long prompt needs it."""

    def load() -> None:
        try:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                small = torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16, device=device)
                torch.ops.aten._scaled_dot_product_cudnn_attention(small, small, small, None, True, 0.0, True, False)
                stream.synchronize()
        except RuntimeError as error:  # its first use will fail again
            _log.warning("cuDNN's attention could not be loaded: %s", error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread
