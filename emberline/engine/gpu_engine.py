"""A model on a CUDA device and everything around it: kernels, sampler, runner, and how the memory is split."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from emberline.engine.gpu_memory import MemoryBudget, budget, state_bytes
from emberline.engine.gpu_runner import GpuRunner
from emberline.engine.gpu_shapes import CHUNK_ROWS, MAX_CAPTURED_TOKENS
from emberline.engine.gpu_slots import SamplerTable
from emberline.engine.limits import Limits
from emberline.engine.pace import Pace
from emberline.kernels.gpu import inputs, sampling
from emberline.kernels.gpu.quantised import QuantisedMatrix
from emberline.kernels.gpu.sampler_table import SamplerTable as DeviceTable
from emberline.kernels.gpu.workspace import Sizes, Workspace
from emberline.models import Model

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GpuEngine:
    """What has its memory before the KV cache takes the rest."""

    model: Model
    device: str
    sampler: SamplerTable
    memory: MemoryBudget
    pace: Pace

    @classmethod
    def open(cls, model: Model, limits: Limits, device: str, kv_bytes: int | None) -> "GpuEngine":
        """`limits` of the model; the cache may bound its context further."""
        weights = torch.cuda.memory_allocated(device)
        n_rows = limits.max_running + CHUNK_ROWS
        quantised = any(isinstance(matrix, QuantisedMatrix) for matrix in model.matrices)
        n_tokens = max(limits.token_budget, MAX_CAPTURED_TOKENS)
        sizes = Sizes.of(model.config, n_tokens, n_rows, n_rows, quantised=quantised)
        workspace = Workspace.bytes(sizes)
        model.kernels.reserve(sizes)
        before = torch.cuda.memory_allocated(device)
        sampler = DeviceTable(limits.max_running, limits.vocab_size, device, max_rows=n_rows)
        state = state_bytes(limits, len(model.kv_groups)) + torch.cuda.memory_allocated(device) - before
        free, total = torch.cuda.mem_get_info(device)
        memory = budget(total, free, weights, workspace, state, torch.cuda.memory_reserved(device), kv_bytes)
        _log.info("%s", memory.table())
        return cls(model, device, sampler, memory, Pace())

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
    draw = staticmethod(sampling.draw)
