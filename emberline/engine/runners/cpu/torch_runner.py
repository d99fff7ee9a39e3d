"""The runner of backends and draft heads in torch: the reference on a CPU, and any GPU without Triton."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Admission, Sampled, StepPlan
from emberline.engine.core.prefill_policy import PrefillPolicy
from emberline.engine.images.step_images import ImageRow, ImageRows, SlotImages
from emberline.engine.runners.cpu.draft_model_runner import DraftModelRunner
from emberline.engine.runners.cpu.head_runner import HeadRunner
from emberline.engine.runners.cpu.runner import CpuRunner, Draft, host_pages, pool_shape
from emberline.kernels.sampling import SamplerRow
from emberline.kv.host_memory import Pages
from emberline.models.decoder import StepInputs, Taps
from emberline.models.draft_head import DraftHead, DraftsElsewhere
from emberline.models.draft_model import DraftModel
from emberline.protocol.block_hash import KVGroup


class Model(Protocol):
    @property
    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    def forward(self, step: StepInputs, kv: list[Tensor], taps: Taps | None = None) -> Tensor: ...

    def forward_tapped(
        self, step: StepInputs, kv: list[Tensor], taps: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]: ...


class TorchRunner(CpuRunner):
    """A runner whose models and draft heads take and return tensors."""

    def __init__(
        self,
        model: Model,
        n_blocks: Sequence[int],
        limits: Limits,
        device: str = "cpu",
        prefill: PrefillPolicy | None = None,
        shared: bool = False,
        cpu_share: AbstractContextManager[None] | None = None,
        head: DraftHead | DraftModel | DraftsElsewhere | None = None,
        images: ImageRows | None = None,
    ) -> None:
        """head: a draft head or model, whose KV groups follow the model's own in `n_blocks`. images: makes the rows of
        images; None: no request has any."""
        self._images = images
        self._slot_images: list[SlotImages | None] = [None] * limits.max_running
        self._device, self._torch_model = torch.device(device), model
        self._groups, n_own, rows = model.kv_groups, len(model.kv_groups), limits.max_running
        if head is not None:
            self._groups = (*self._groups, *head.kv_groups)
            scratch = rows if isinstance(head, DraftModel) else 0  # blocks that the cache does not know of
            n_blocks = [*n_blocks[:n_own], *(n + scratch for n in n_blocks[n_own:])]
        super().__init__(model, n_blocks, limits, prefill, shared, cpu_share)
        self._kv, own = self._kv[:n_own], self._kv[n_own:]
        self.head: HeadRunner | DraftModelRunner | None = None
        self._taps = () if head is None or isinstance(head, DraftModel) else head.taps
        if isinstance(head, DraftModel):
            self.head = DraftModelRunner(head, own, rows)
        elif isinstance(head, DraftHead):
            self.head = HeadRunner(head, own[0], limits.vocab_size, rows)

    def _open_pools(self, n_blocks: Sequence[int], shared: bool) -> list[Any]:
        if self._device.type == "cpu":
            return self._host_pools(self._groups, n_blocks, shared, tensor_in)
        return [allocate_pool(layout, n, self._device) for layout, n in zip(self._groups, n_blocks)]

    def _array(self, values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        if self._images is not None:
            self._slot_images[admission.slot] = self._images.of(admission.request)

    def _inputs(self, plan: StepPlan) -> tuple[StepInputs, list[SamplerRow]]:
        inputs, samplers = super()._inputs(plan)
        if self._images is not None:
            found, first = list[ImageRow](), 0
            for row in plan.rows:
                images = self._slot_images[row.slot]
                if images is not None and images.concern(row.start):
                    found.append(ImageRow(row.start, row.stop, first, images))
                first += row.stop - row.start
            if found:
                self._images.complete(inputs, found)
        return inputs, samplers

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, Draft | None]:
        states: list[Tensor] = []
        if self._taps:
            logits, states = self._torch_model.forward_tapped(inputs, self._kv, self._taps)
        else:
            logits = self._torch_model.forward(inputs, self._kv)
        return logits, None if self.head is None else partial(self._draft, plan, states)

    def _draft(
        self, plan: StepPlan, states: list[Tensor], sampled: Sequence[Sampled], samplers: Sequence[SamplerRow]
    ) -> Sequence[bytes]:
        assert self.head is not None
        with self._cpu_share:
            return self.head.draft(plan, states, self._tables[len(self._kv) :], sampled, samplers)


def allocate_pool(layout: KVGroup, n_blocks: int, device: torch.device) -> Tensor:
    """Zeroed blocks, each contiguous over layers. On the CPU a block takes memory once it is written."""
    if device.type == "cpu":
        return tensor_in(host_pages(layout, n_blocks, shared=False), layout, n_blocks)
    return torch.zeros(pool_shape(layout, n_blocks), dtype=getattr(torch, layout.dtype), device=device)


def tensor_in(pages: Pages, layout: KVGroup, n_blocks: int) -> Tensor:
    shape, dtype = pool_shape(layout, n_blocks), getattr(torch, layout.dtype)
    return torch.frombuffer(pages.buffer, dtype=dtype).view(shape) if layout.layers else torch.empty(shape, dtype=dtype)
