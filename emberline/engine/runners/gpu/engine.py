"""A model on a CUDA device with what it needs: kernels, sampler, runner, and the memory budget."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.images.step_images import ImageRows
from emberline.engine.runners.gpu.memory_budget import DeviceMemoryBudget, device_memory_budget
from emberline.engine.runners.gpu.rank_memory import StepMemory, bound_context, weight_bytes
from emberline.engine.runners.gpu.runner import STEPS_IN_FLIGHT, GpuRunner
from emberline.engine.runners.gpu.shapes import GPU_SHAPES, most_drafts
from emberline.engine.runners.gpu.slots import SlotSampler
from emberline.kernels.gpu import decode_inputs as inputs
from emberline.kernels.gpu import draft_chain as chain
from emberline.kernels.gpu import sampler as sampling
from emberline.kernels.gpu.sampler_table import SamplerTable
from emberline.models.decoder import Decoder
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GpuEngine:
    """Parts of the engine that are allocated before the KV cache takes the rest of the memory."""

    model: Decoder
    device: str
    sampler: SlotSampler
    memory: DeviceMemoryBudget
    prefill: LatencyTarget
    speculates: bool = False  # steps may verify drafts
    head: GpuDraftHead | DraftModel | None = None
    images: ImageRows | None = None  # None: no request has any

    @classmethod
    def open(
        cls,
        model: Decoder,
        limits: Limits,
        device: str,
        kv_bytes: int | None,
        memory_share: float = 1.0,
        speculates: bool = False,
        head: GpuDraftHead | DraftModel | None = None,
        images: ImageRows | None = None,
    ) -> "GpuEngine":
        """`limits` of the model; the KV cache may reduce its context further. `memory_share`: of the device."""
        image_bytes = 0 if images is None else images.cache.measured_bytes()
        weights = torch.cuda.memory_allocated(device)
        limits = bound_context(limits, model, torch.cuda.mem_get_info(device)[0])
        step = StepMemory.of(model, limits, speculates, head)
        model.kernels.reserve(step.sizes)
        if isinstance(head, DraftModel):
            head.decoder.kernels.reserve(step.draft_sizes)
        sampler = SamplerTable(limits.max_running, limits.vocab_size, device, max_rows=step.sizes.max_samples)
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_reserved(device)
        memory = device_memory_budget(
            total,
            free,
            weights,
            step.workspace,
            step.state,
            step.reserve + step.collectives + image_bytes,
            allocated,
            kv_bytes,
            memory_share,
        )
        _log.info("%s", memory.table())
        drafts, n_stages = partial(most_drafts, max_rows=limits.max_running), model.shard.layout.pp
        prefill = LatencyTarget(GPU_SHAPES, most_drafts=drafts, n_stages=n_stages)
        return cls(model, device, sampler, memory, prefill, speculates, head, images)

    @property
    def steps_in_flight(self) -> int:
        """Number of steps in flight: in a pipeline one for each stage, of other sequences, so that all stages compute
        concurrently."""
        return max(STEPS_IN_FLIGHT, self.model.shard.layout.pp)

    def runner(
        self, n_blocks: Sequence[int], limits: Limits, graphs: bool = True, pools: Sequence[torch.Tensor] | None = None
    ) -> GpuRunner:
        layout, position = self.model.shard.layout, self.model.shard.position
        return GpuRunner(
            self.model,
            n_blocks,
            limits,
            self.device,
            _Kernels(),
            self.sampler,
            self.prefill,
            graphs,
            pools,
            self.speculates,
            self.head,
            samples=layout.pp == 1 or layout.rank(position) == layout.sampling_rank,
            steps_in_flight=self.steps_in_flight,
            images=self.images,
        )


class _Kernels:
    """The Triton kernels as the runner calls them."""

    prepare = staticmethod(inputs.prepare)
    keep = staticmethod(inputs.keep)
    accept = staticmethod(inputs.accept)
    sample = staticmethod(sampling.sample_batch)
    carry = staticmethod(chain.carry)
    keep_accepted = staticmethod(chain.keep_accepted)
    begin_chain = staticmethod(chain.begin_chain)
    draw_drafts = staticmethod(chain.draw_drafts)


def check_fits(model: Decoder, limits: Limits, device: str, kv_bytes: int | None, memory_share: float = 1.0) -> None:
    """Raise BadInput, saying by how much, if the device cannot hold the model, whose tensors may be without memory."""
    weights = weight_bytes(model)
    free, total = torch.cuda.mem_get_info(device)
    step = StepMemory.of(model, bound_context(limits, model, total - weights), speculates=True)
    allocated = torch.cuda.memory_reserved(device)
    device_memory_budget(
        total,
        free,
        weights,
        step.workspace,
        step.state,
        step.reserve + step.collectives,
        allocated,
        kv_bytes,
        memory_share,
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
