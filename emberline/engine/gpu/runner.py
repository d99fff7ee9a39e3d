"""Carries out plans on an accelerator. State lives there by slot; a step ships what changed, and nothing waits.

launch:  changes -> packet -> inputs -> forward -> draw -> keep     queued, as one captured graph where it decodes
sample:  what of this had to wait for masks; then tokens -> pinned host memory -> mark
result:  sleeps until the mark
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from emberline.engine.gpu.batch import Batch, DecodeBuffers, Draws, MixedBuffers, MixedShape
from emberline.engine.gpu.graphs import Graphs
from emberline.engine.gpu.outputs import Draw, Outputs, drawn_on
from emberline.engine.gpu.shapes import CHUNK_ROWS, MAX_CAPTURED_TOKENS, all_decode_rows, decode_rows, table_width
from emberline.engine.gpu.slots import SamplerTable, Slots
from emberline.engine.scheduler import shared_prefix
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import DeviceLost, Masks, StepPlan
from emberline.engine.scheduler.prefill_budget import PrefillBudget, Work
from emberline.engine.torch_runner import Model, allocate_pool
from emberline.kernels.decode_inputs import DecodeInputs, SlotState
from emberline.kv.block_pool import NULL_BLOCK
from emberline.models.decoder import StepInputs

MIN_SHARING = 4  # rows, for a look at what they share to be worth it
MAX_IN_FLIGHT = 3  # steps whose outputs are kept apart
_log = logging.getLogger(__name__)
_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_EXECUTION_FAILED")


class Kernels(Protocol):
    """The launches around a forward pass. `kernels.inputs` and `kernels.sampling` are their plain forms."""

    def prepare(self, packet: Tensor, state: SlotState, to: DecodeInputs) -> None: ...
    def keep(self, tokens: Tensor, slots: Tensor, state: SlotState) -> None: ...
    def draw(self, logits: Tensor, table: Any, slots: Tensor, positions: Tensor, out: Any) -> None: ...


@dataclass(slots=True)
class _Launched:
    batch: Batch
    outputs: Outputs
    work: Work | None  # None: its time is not worth knowing
    n_decodes: int  # places that rows that decode have among the draws, some perhaps nobody's
    draw: Callable[[], None] | None  # still to be done, when the masks are there


class StepKind(NamedTuple):
    """What a captured step depends on."""

    shape: int | MixedShape  # an int: rows of a step that only decodes
    cascade: bool = False  # a prefix that rows share is read once
    draws: bool = True  # else it waits for masks


class GpuStep:
    """A step in the device's queue."""

    def __init__(self, runner: "GpuRunner", launched: _Launched | Exception) -> None:
        self._runner = runner
        self._launched = launched

    def sample(self, masks: Masks | None = None) -> None:
        if isinstance(self._launched, Exception):
            return
        try:
            self._runner.finish(self._launched, masks)
        except Exception as error:
            self._launched = error

    def result(self) -> Sequence[Draw]:
        if isinstance(self._launched, Exception):
            raise fatal(self._launched)
        return self._runner.read(self._launched)


class GpuRunner:
    """Owns the KV pools, the slots and the fixed buffers. Everything is queued on one stream, in the plans' order."""

    def __init__(
        self,
        model: Model,
        n_blocks: Sequence[int],
        limits: Limits,
        device: str,
        kernels: Kernels,
        sampler: SamplerTable,
        pace: PrefillBudget | None = None,
        graphs: bool = True,
        pools: Sequence[Tensor] | None = None,
    ) -> None:
        self._model, self._kernels, self._pace = model, kernels, pace
        self._device = torch.device(device)
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)  # weights and workspace were made on another stream
            torch.cuda.set_stream(stream)  # the default one cannot be captured
        made = (allocate_pool(layout, n, self._device) for layout, n in zip(model.kv_groups, n_blocks))
        self._kv = list(made if pools is None else pools)  # given where other processes are to write them
        self._block_bytes = model.kv_groups[0].block_bytes if model.kv_groups[0].window is None else 0
        rows, groups = limits.max_running, len(self._kv)
        width = table_width(limits.context_len)
        self._max_rows = rows
        self._slots = Slots(rows, groups, width, sampler, self._device)
        self._decode = DecodeBuffers(rows, groups, width, self._device)
        self._mixed = MixedBuffers(limits.token_budget, rows, width, self._device)
        self._drawn = drawn_on(rows + CHUNK_ROWS, self._device)
        self._outputs = [Outputs(rows + CHUNK_ROWS, self._device) for _ in range(MAX_IN_FLIGHT)]
        self._n_launched = 0
        self._graphs = Graphs(self._device, graphs)
        self._pads = graphs
        self._to_prepare = self._common_steps() if graphs and self._device.type == "cuda" else []
        self._sharing: tuple[list[int], int] | None = None  # the rows that were last looked at, and when
        self._shared: shared_prefix.SharedPrefix | None = None

    @property
    def pools(self) -> list[Tensor]:
        return self._kv

    @property
    def n_graphs(self) -> int:
        return len(self._graphs)

    # --- ahead of requests ------------------------------------------------------------------------------------------

    def _common_steps(self) -> list[StepKind]:
        """What is worth capturing before it is asked for, the most common last."""
        decodes, mixed = all_decode_rows(self._max_rows), MixedShape.all_padded(self._max_rows)
        sharing = [n for n in decodes if MIN_SHARING <= n <= 64] if self._block_bytes else []
        beside = [shape for shape in mixed if 16 < shape.n_decodes <= 64] if self._block_bytes else []
        plain: list[int | MixedShape] = [*mixed[:1], *decodes, *mixed[1:]]  # a first prompt, a reply, all else
        shared: list[int | MixedShape] = [*sharing, *beside]
        return [*map(StepKind, plain), *(StepKind(shape, cascade=True) for shape in shared)][::-1]

    def prepare(self) -> bool:
        """Run and capture one more step, of nobody's rows; call it when there is nothing else to do. False: all done.

        It reads weights and writes to the null block, no more; so it may be called before the weights are there.
        """
        while self._to_prepare and self._graphs.wants_more:
            kind = self._to_prepare.pop()
            if kind in self._graphs:
                continue
            try:
                self._rehearse(kind)
            except Exception as error:  # then it is captured when somebody needs it, or not
                if isinstance(lost := fatal(error), DeviceLost):
                    raise lost from error
                _log.warning("a step of shape %s could not be prepared: %s", kind, error)
            return True
        return False

    @torch.inference_mode()
    def _rehearse(self, kind: StepKind) -> None:
        if isinstance(kind.shape, int):
            self._decode.send([], kind.shape)
        else:
            self._mixed.send(Batch(), kind.shape, self._slots.spare)
        self._run(kind)
        for pool in self._kv:  # without weights, what it left there may not even be numbers
            pool[NULL_BLOCK].zero_()

    # --- a step -----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> GpuStep:
        try:
            with torch.inference_mode():
                return GpuStep(self, self._launch(plan))
        except Exception as error:
            return GpuStep(self, error)

    def _launch(self, plan: StepPlan) -> _Launched:
        outputs = self._outputs[self._n_launched % len(self._outputs)]
        self._n_launched += 1
        outputs.began.record()
        slots = self._slots
        for admission in plan.admissions:
            slots.admit(admission)
        batch = Batch.of(plan, slots)
        tell = bool(batch.chunks)
        for row, slot in zip(plan.rows, slots.of(plan.rows)):  # for most of them nothing is new but a token
            if row.blocks is not None:
                slots.grow(row, row.blocks, tell=tell)
            if row.passed != slot.passed:
                slots.leave(row, slot, tell=tell)
            if slot.ids is not None:
                slots.recount(row, slot)
            if row.banned != slot.banned:
                slots.ban(row, slot)
        slots.ship()
        n_decodes, draw = self._launch_mixed(batch) if batch.chunks else self._launch_decode(batch)
        typical = self._graphs.replayed or (bool(batch.chunks) and batch.n_tokens > MAX_CAPTURED_TOKENS)
        return _Launched(batch, outputs, _work(batch) if typical else None, n_decodes, draw)

    def finish(self, launched: _Launched, masks: Masks | None) -> None:
        """The draws, where they had to wait, and their way to the host."""
        batch = launched.batch
        with torch.inference_mode():
            if launched.draw is not None:
                self._slots.allow(batch.slots, masks)
                self._slots.sampler.upload()
                launched.draw()
            n_rows = launched.n_decodes + len(batch.chunks)
            launched.outputs.fetch(self._drawn, n_rows, batch.logprobs is not None)

    def read(self, launched: _Launched) -> list[Draw]:
        outputs = launched.outputs
        draws = outputs.read(launched.batch.places(launched.n_decodes), launched.batch.logprobs)
        if (
            self._pace is not None
            and launched.work is not None
            and (seconds := outputs.done.seconds_since(outputs.began)) is not None
        ):
            self._pace.observe(launched.work, seconds)
        return draws

    # --- decode -----------------------------------------------------------------------------------------------------

    def _launch_decode(self, batch: Batch) -> tuple[int, Callable[[], None] | None]:
        n_rows = decode_rows(len(batch.decodes), self._max_rows) if self._pads else len(batch.decodes)
        self._decode.send(batch.decodes, n_rows)
        kind = StepKind(n_rows, self._look_for_shared(batch), not batch.masked)
        logits = self._run(kind)
        return len(batch.decodes), None if kind.draws else lambda: self._draw_decode(logits)

    def _run(self, kind: StepKind) -> Tensor:
        """From what was sent: as it was captured, or will be."""
        return self._graphs.run(kind, lambda: self._body(kind))

    def _body(self, kind: StepKind) -> Tensor:
        shape, cascade, draws = kind
        if isinstance(shape, int):
            return self._decode_body(shape, cascade, draws)
        shared = self._decode.shared(shape.n_decodes) if cascade else None
        inputs = self._mixed.inputs(shape, self._slots.state, None, 0, shared)
        return self._mixed_body(inputs, self._mixed.draws(shape, None), draws)

    def _decode_body(self, n_rows: int, cascade: bool, draws: bool) -> Tensor:
        self._kernels.prepare(self._decode.packet(n_rows), self._slots.state, self._decode.inputs)
        logits = self._model.forward(self._decode.step(n_rows, cascade), self._kv)
        if draws:
            self._draw_decode(logits)
        return logits

    def _draw_decode(self, logits: Tensor) -> None:
        to, n_rows = self._decode.inputs, len(logits)
        self._draw(logits, to.slots[:n_rows], to.context_lens[:n_rows])

    def _look_for_shared(self, batch: Batch) -> bool:
        """Whether enough is shared to be read once; looked at anew only when other rows decode."""
        if not self._block_bytes or len(batch.decodes) < MIN_SHARING:
            return False
        slots = [row.slot for row in batch.decodes]
        key = slots, self._slots.n_admitted
        if key != self._sharing:
            self._sharing = key
            n_full = np.array([row.start // 16 for row in batch.decodes], np.int32)
            tables = self._slots.tables[0, slots, : int(n_full.max(initial=1))]
            found = shared_prefix.find(tables, n_full)
            worth = found is not None and found.saved_blocks() * self._block_bytes >= shared_prefix.MIN_SAVED_BYTES
            self._shared = found if worth else None
            if self._shared is not None:
                self._decode.send_shared(self._shared)
        return self._shared is not None

    # --- chunks -----------------------------------------------------------------------------------------------------

    def _launch_mixed(self, batch: Batch) -> tuple[int, Callable[[], None] | None]:
        shape = MixedShape.of(batch, self._max_rows) if self._pads else MixedShape.exact(batch)
        longest = self._mixed.send(batch, shape, self._slots.spare)

        def who() -> Draws:
            return self._mixed.draws(shape, None if shape.padded else batch)

        if shape.padded:
            logits = self._run(StepKind(shape, self._look_for_shared(batch), not batch.masked))
        else:
            inputs = self._mixed.inputs(shape, self._slots.state, batch, longest)
            logits = self._mixed_body(inputs, who(), bool(batch.n_draws) and not batch.masked)
        return shape.n_decodes, (lambda: self._draw(logits, *who())) if batch.masked else None

    def _mixed_body(self, inputs: StepInputs, who: Draws, draws: bool) -> Tensor:
        logits = self._model.forward(inputs, self._kv)
        if draws:
            self._draw(logits, *who)
        return logits

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        drawn = self._drawn.first(len(slots))
        self._kernels.draw(logits, self._slots.sampler, slots, positions, drawn)
        self._kernels.keep(drawn.token_ids, slots, self._slots.state)


def _work(batch: Batch) -> Work:
    work = Work(len(batch.decodes))
    for row in batch.chunks:
        work.add(row.end - row.start, row.end)
    return work


def fatal(error: Exception) -> Exception:
    """An error of the device itself comes back as DeviceLost; memory that ran out is the step's alone."""
    text = str(error)
    of_device = isinstance(error, RuntimeError) and any(mark in text for mark in _DEVICE_ERRORS)
    if not of_device or "out of memory" in text:
        return error
    lost = DeviceLost(text)
    lost.__cause__ = error
    return lost
