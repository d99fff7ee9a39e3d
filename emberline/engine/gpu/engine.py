"""A model on a CUDA device and everything around it: kernels, sampler, runner, and how the memory is split."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from emberline.engine.gpu.memory import MemoryBudget, budget, state_bytes
from emberline.engine.gpu.runner import GpuRunner
from emberline.engine.gpu.shapes import CHUNK_ROWS, MAX_CAPTURED_TOKENS
from emberline.engine.gpu.slots import SamplerTable
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.prefill_budget import PrefillBudget
from emberline.kernels.gpu import decode_inputs as inputs
from emberline.kernels.gpu import sampler as sampling
from emberline.kernels.gpu.quantized_gemm import QuantizedMatrix
from emberline.kernels.gpu.sampler_table import SamplerTable as DeviceTable
from emberline.kernels.gpu.workspace import Workspace, WorkspaceSizes
from emberline.models.decoder import Decoder

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GpuEngine:
    """What has its memory before the KV cache takes the rest."""

    model: Decoder
    device: str
    sampler: SamplerTable
    memory: MemoryBudget
    pace: PrefillBudget

    @classmethod
    def open(cls, model: Decoder, limits: Limits, device: str, kv_bytes: int | None) -> "GpuEngine":
        """`limits` of the model; the cache may bound its context further."""
        weights = torch.cuda.memory_allocated(device)
        n_rows = limits.max_running + CHUNK_ROWS
        quantised = any(isinstance(matrix, QuantizedMatrix) for matrix in model.matrices)
        n_tokens = max(limits.token_budget, MAX_CAPTURED_TOKENS)
        sizes = WorkspaceSizes.of(model.config, n_tokens, n_rows, n_rows, quantised=quantised)
        workspace = Workspace.bytes(sizes)
        model.kernels.reserve(sizes)
        before = torch.cuda.memory_allocated(device)
        sampler = DeviceTable(limits.max_running, limits.vocab_size, device, max_rows=n_rows)
        state = state_bytes(limits, len(model.kv_groups)) + torch.cuda.memory_allocated(device) - before
        free, total = torch.cuda.mem_get_info(device)
        memory = budget(total, free, weights, workspace, state, torch.cuda.memory_reserved(device), kv_bytes)
        _log.info("%s", memory.table())
        return cls(model, device, sampler, memory, PrefillBudget())

    def runner(
        self, n_blocks: Sequence[int], limits: Limits, graphs: bool = True, pools: Sequence[torch.Tensor] | None = None
    ) -> GpuRunner:
        return GpuRunner(self.model, n_blocks, limits, self.device, _Kernels(), self.sampler, self.pace, graphs, pools)

    def chores(self, runner: GpuRunner) -> Callable[[], bool]:
        """What can be done ahead of requests, a little with every call: captures, libraries' plans. False: no more."""
        plans = self.model.kernels.rehearse(self.model.attentions, runner.pools)

        def chore() -> bool:
            with torch.inference_mode():
                more = runner.prepare() or next(plans, False)
            if not more:
                _log.info("every common step is prepared", extra={"graphs": runner.n_graphs})
            return more

        return chore


class _Kernels:
    """The Triton kernels as the runner calls them."""

    prepare = staticmethod(inputs.prepare)
    keep = staticmethod(inputs.keep)
    draw = staticmethod(sampling.sample_batch)


def load_attention(device: str) -> threading.Thread:
    """cuDNN's attention takes a second, once: better now than when the first long prompt comes."""

    def load() -> None:
        try:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                small = torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16, device=device)
                torch.ops.aten._scaled_dot_product_cudnn_attention(small, small, small, None, True, 0.0, True, False)
                stream.synchronize()
        except RuntimeError as error:  # whoever needs it will say so again
            _log.warning("cuDNN's attention could not be loaded: %s", error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread
