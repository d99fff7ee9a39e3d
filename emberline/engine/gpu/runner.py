"""The GPU runner. State is on the device by slot; a step uploads what changed, and nothing blocks.

launch:  changes -> packet -> inputs -> forward -> sample -> keep     queued, as one CUDA graph where possible
sample:  sampling, if it had to wait for masks; then tokens -> pinned host memory -> event
result:  sleeps until the event
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from emberline.engine.gpu.batch import (
    DecodeBuffers,
    MixedBuffers,
    MixedShape,
    SampledRows,
    SharedPrefix,
    StepBatch,
    find_shared_prefix,
)
from emberline.engine.gpu.graphs import CudaGraphs
from emberline.engine.gpu.shapes import CHUNK_ROWS, all_decode_rows, decode_rows, graph_tokens, table_width
from emberline.engine.gpu.slots import Slots, SlotSampler
from emberline.engine.gpu.stream import SampledToken, StepOutputs, device_event, sampled_tensors
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import DeviceLost, Masks, Row, StepPlan
from emberline.engine.scheduler.prefill_policy import PrefillPolicy, StepWork
from emberline.engine.torch_runner import Model, allocate_pool
from emberline.kernels.decode_inputs import PADDING, DecodeInputs, SlotState
from emberline.kv.block_pool import NULL_BLOCK
from emberline.models.decoder import StepInputs

MIN_SHARING = 4  # decode rows from which on a shared prefix is searched
MIN_SAVED_BYTES = 1 << 30  # reads per step, below which cascade attention costs more than it saves; measured on an H200
MAX_IN_FLIGHT = 3  # steps with output buffers of their own
_log = logging.getLogger(__name__)
_DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_EXECUTION_FAILED")


class Kernels(Protocol):
    """The launches around a forward pass. `kernels.decode_inputs` and `kernels.sampling` are their references."""

    def prepare(self, packet: Tensor, state: SlotState, to: DecodeInputs) -> None: ...
    def keep(self, tokens: Tensor, slots: Tensor, state: SlotState) -> None: ...
    def sample(
        self, logits: Tensor, table: Any, slots: Tensor, positions: Tensor, out: Any, guided: bool = False
    ) -> None: ...


@dataclass(slots=True)
class _Launched:
    batch: StepBatch
    outputs: StepOutputs
    work: StepWork | None  # None: its duration is not typical
    n_decodes: int  # decode rows among the samples, padding included
    sample: Callable[[], None] | None  # still to be done, once the masks are there


class StepKind(NamedTuple):
    """The key of a CUDA graph."""

    shape: int | MixedShape  # int: rows of a step that only decodes
    cascade: bool = False  # cascade attention over a shared prefix

    def holds(self, other: "StepKind") -> bool:
        """Whether a step of the other kind can be padded to this one. Cascade attention is never required."""
        mine, theirs = self.shape, other.shape
        if isinstance(mine, int) or isinstance(theirs, int):
            fits = isinstance(mine, int) and isinstance(theirs, int) and mine >= theirs
        else:
            fits = all(size >= needed for size, needed in zip(mine, theirs))
        return fits and self.cascade <= other.cascade

    @property
    def cost(self) -> tuple[int, int, bool]:
        """Orders the kinds that hold a step."""
        if isinstance(self.shape, int):
            return self.shape, 0, not self.cascade
        return self.shape.n_tokens, self.shape.n_decodes, not self.cascade


class GpuStep:
    """A step in the device's stream."""

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

    def result(self) -> Sequence[SampledToken]:
        if isinstance(self._launched, Exception):
            self._runner.wait()  # what was launched of it may write to blocks that others get once it has failed
            raise fatal(self._launched)
        return self._runner.read(self._launched)


class GpuRunner:
    """Owns the KV pools, the slots and the fixed buffers. Everything is queued on one stream, in plan order."""

    def __init__(
        self,
        model: Model,
        n_blocks: Sequence[int],
        limits: Limits,
        device: str,
        kernels: Kernels,
        sampler: SlotSampler,
        prefill: PrefillPolicy | None = None,
        graphs: bool = True,
        pools: Sequence[Tensor] | None = None,
    ) -> None:
        self._model, self._kernels, self._prefill = model, kernels, prefill
        self._device = torch.device(device)
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)  # weights and workspace were created on another stream
            torch.cuda.set_stream(stream)  # the default one cannot be captured
        made = (allocate_pool(layout, n, self._device) for layout, n in zip(model.kv_groups, n_blocks))
        self._kv = list(made if pools is None else pools)  # given where other processes write them
        first = model.kv_groups[0]
        self._block_bytes = first.block_bytes if first.window is None and first.planes == 2 else 0  # 0: never cascade
        self.graph_tokens = graph_tokens(any(group.planes == 1 for group in model.kv_groups))
        rows, groups = limits.max_running, len(self._kv)
        width = table_width(limits.context_len)
        self._max_rows = rows
        self._slots = Slots(rows, groups, width, sampler, self._device)
        self._decode = DecodeBuffers(rows, groups, width, self._device)
        self._mixed = MixedBuffers(limits.token_budget, rows, width, self._device)
        self._sampled = sampled_tensors(rows + CHUNK_ROWS, self._device)
        self._outputs = [StepOutputs(rows + CHUNK_ROWS, self._device) for _ in range(MAX_IN_FLIGHT)]
        self._n_launched = 0
        self._graphs = CudaGraphs[StepKind](self._device, graphs)
        self._padded: dict[StepKind, StepKind] = {}  # kinds that are not captured, and the captured one to use instead
        self._typical = False  # the last step was replayed in its own shape: others like it take as long
        self._pads = graphs
        self._sharing: tuple[list[int], int] | None = None  # the rows last searched, and Slots.n_admitted then
        self._shared: SharedPrefix | None = None

    @property
    def pools(self) -> list[Tensor]:
        return self._kv

    @property
    def n_graphs(self) -> int:
        return len(self._graphs)

    # --- preparation ahead of requests --------------------------------------------------------------------------------

    def step_kinds(self) -> list[StepKind]:
        """Every kind of step that CUDA graphs are for, the most common first."""
        decodes, mixed = all_decode_rows(self._max_rows), MixedShape.all_padded(self._max_rows, self.graph_tokens)
        sharing = [n for n in decodes if MIN_SHARING <= n <= 64] if self._block_bytes else []
        mixed_sharing = [shape for shape in mixed if 16 < shape.n_decodes <= 64] if self._block_bytes else []
        plain: list[int | MixedShape] = [*mixed[:1], *decodes, *mixed[1:]]  # a first prompt, decoding, all else
        shared: list[int | MixedShape] = [*sharing, *mixed_sharing]
        return [*map(StepKind, plain), *(StepKind(shape, cascade=True) for shape in shared)]

    @torch.inference_mode()
    def capture(self, kind: StepKind) -> None:
        """Capture a step of padding rows. It reads weights, even before they are loaded, and writes the null block."""
        if kind in self._graphs or not self._graphs.has_room:
            return
        try:
            self._send_padding(kind)
            self._graphs.capture(kind, lambda: self._body(kind))
        except Exception as error:  # then steps are padded further, or run eagerly
            if isinstance(lost := fatal(error), DeviceLost):
                raise lost from error
            _log.warning("a step of shape %s could not be prepared: %s", kind, error)
        self._padded.clear()
        self._clear_null_block()

    @torch.inference_mode()
    def run_padding(self, kind: StepKind) -> None:
        """Run every kernel of such steps, those that sample behind a mask included, on padding rows."""
        self._send_padding(kind)
        logits = self._body(kind)
        padding = torch.full((len(logits),), PADDING, dtype=torch.int32, device=self._device)
        self._sample(logits, padding, padding, guided=True)

    @torch.inference_mode()
    def run_eager_padding(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Run a step that is too large for a CUDA graph, of chunks given by start and tokens."""
        batch = StepBatch(chunks=[Row(0, self._slots.spare, at, bytes(4 * n), None, [0], False) for at, n in chunks])
        shape = MixedShape.exact(batch)
        longest = self._mixed.send(batch, shape, self._slots.spare)
        inputs = self._mixed.inputs(shape, self._slots.state, batch, longest)
        self._mixed_body(inputs, self._mixed.sampled_rows(shape, batch))
        self._clear_null_block()

    def _clear_null_block(self) -> None:
        for pool in self._kv:  # without weights what was computed may be NaN
            pool[NULL_BLOCK].zero_()

    def _send_padding(self, kind: StepKind) -> None:
        if isinstance(kind.shape, int):
            self._decode.send([], kind.shape)
        else:
            self._mixed.send(StepBatch(), kind.shape, self._slots.spare)

    def _prepared(self, kind: StepKind) -> StepKind:
        """The kind itself, or the smallest captured one that holds it: nothing is captured while requests wait."""
        if not self._graphs.enabled or kind in self._graphs:
            return kind
        if kind not in self._padded:
            holding = (each for each in self._graphs if each.holds(kind))
            self._padded[kind] = min(holding, key=lambda each: each.cost, default=kind)
        return self._padded[kind]

    # --- a step -----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> GpuStep:
        try:
            with torch.inference_mode():
                return GpuStep(self, self._launch(plan))
        except Exception as error:
            self._slots.forget(plan.rows)
            return GpuStep(self, error)

    def _launch(self, plan: StepPlan) -> _Launched:
        outputs = self._outputs[self._n_launched % len(self._outputs)]
        self._n_launched += 1
        outputs.began.record()
        slots = self._slots
        for admission in plan.admissions:
            slots.admit(admission)
        batch = StepBatch.of(plan, slots)
        upload = bool(batch.chunks)
        for row, slot in zip(plan.rows, slots.of(plan.rows)):  # most of them have nothing new but a token
            if row.blocks is not None:
                slots.grow(row, row.blocks, upload=upload)
            if row.passed != slot.passed:
                slots.leave_window(row, slot, upload=upload)
            if slot.ids is not None:
                slots.recount(row, slot)
            if row.banned != slot.banned:
                slots.ban(row, slot)
        slots.upload()
        n_decodes, sample = self._launch_mixed(batch) if batch.chunks else self._launch_decode(batch)
        typical = self._typical or (bool(batch.chunks) and batch.n_tokens > self.graph_tokens)
        return _Launched(
            batch, outputs, StepWork.of(len(batch.decodes), batch.chunks) if typical else None, n_decodes, sample
        )

    def finish(self, launched: _Launched, masks: Masks | None) -> None:
        """Sample, if that had to wait for masks, and copy the tokens to the host."""
        batch = launched.batch
        with torch.inference_mode():
            if launched.sample is not None:
                self._slots.allow(batch.slots, masks)
                self._slots.sampler.upload()
                launched.sample()
            n_rows = launched.n_decodes + len(batch.chunks)
            launched.outputs.fetch(self._sampled, n_rows, batch.logprobs is not None)

    def wait(self) -> None:
        """Until the device has done all that was launched; raises DeviceLost if it cannot."""
        done = device_event(self._device)
        done.record()
        done.wait()

    def read(self, launched: _Launched) -> list[SampledToken]:
        outputs = launched.outputs
        tokens = outputs.read(launched.batch.sample_indices(launched.n_decodes), launched.batch.logprobs)
        if (
            self._prefill is not None
            and launched.work is not None
            and (seconds := outputs.done.seconds_since(outputs.began)) is not None
        ):
            self._prefill.observe(launched.work, seconds)
        return tokens

    # --- decode -----------------------------------------------------------------------------------------------------

    def _launch_decode(self, batch: StepBatch) -> tuple[int, Callable[[], None] | None]:
        n_rows = decode_rows(len(batch.decodes), self._max_rows) if self._pads else len(batch.decodes)
        wanted = StepKind(n_rows, self._find_shared(batch))
        kind = self._prepared(wanted)
        assert isinstance(kind.shape, int)
        self._decode.send(batch.decodes, kind.shape)
        logits = self._run(kind, wanted)
        return len(batch.decodes), (lambda: self._sample_decode(logits, guided=True)) if batch.masked else None

    def _run(self, kind: StepKind, wanted: StepKind) -> Tensor:
        """Run the step from the uploaded buffers; it was padded from the wanted kind."""
        replayed = kind in self._graphs
        self._typical = replayed and kind == wanted
        return self._graphs.replay(kind) if replayed else self._body(kind)

    def _body(self, kind: StepKind) -> Tensor:
        shape, cascade = kind
        if isinstance(shape, int):
            return self._decode_body(shape, cascade)
        shared = self._decode.shared(shape.n_decodes) if cascade else None
        inputs = self._mixed.inputs(shape, self._slots.state, None, 0, shared)
        return self._mixed_body(inputs, self._mixed.sampled_rows(shape, None))

    def _decode_body(self, n_rows: int, cascade: bool) -> Tensor:
        self._kernels.prepare(self._decode.packet(n_rows), self._slots.state, self._decode.inputs)
        logits = self._model.forward(self._decode.step(n_rows, cascade), self._kv)
        self._sample_decode(logits)
        return logits

    def _sample_decode(self, logits: Tensor, guided: bool = False) -> None:
        to, n_rows = self._decode.inputs, len(logits)
        self._sample(logits, to.slots[:n_rows], to.context_lens[:n_rows], guided)

    def _find_shared(self, batch: StepBatch) -> bool:
        """Whether decode rows share a prefix worth cascade attention; searched again only when other rows decode."""
        if not self._block_bytes or len(batch.decodes) < MIN_SHARING:
            return False
        slots = [row.slot for row in batch.decodes]
        key = slots, self._slots.n_admitted
        if key != self._sharing:
            self._sharing = key
            n_full = np.array([row.start // 16 for row in batch.decodes], np.int32)
            tables = self._slots.tables[0, slots, : int(n_full.max(initial=1))]
            found = find_shared_prefix(tables, n_full)
            worth = found is not None and found.saved_blocks() * self._block_bytes >= MIN_SAVED_BYTES
            self._shared = found if worth else None
            if self._shared is not None:
                self._decode.send_shared(self._shared)
        return self._shared is not None

    # --- chunks -----------------------------------------------------------------------------------------------------

    def _launch_mixed(self, batch: StepBatch) -> tuple[int, Callable[[], None] | None]:
        shape = MixedShape.exact(batch)
        if self._pads:
            shape = MixedShape.of(batch, self._max_rows, self.graph_tokens)
        if shape.padded:
            wanted = StepKind(shape, self._find_shared(batch))
            kind = self._prepared(wanted)
            assert isinstance(kind.shape, MixedShape)
            shape = kind.shape
            self._mixed.send(batch, shape, self._slots.spare)
            logits, rows = self._run(kind, wanted), self._mixed.sampled_rows(shape, None)
        else:
            longest = self._mixed.send(batch, shape, self._slots.spare)
            inputs = self._mixed.inputs(shape, self._slots.state, batch, longest)
            rows = self._mixed.sampled_rows(shape, batch)
            logits, self._typical = self._mixed_body(inputs, rows), False
        return shape.n_decodes, (lambda: self._sample(logits, *rows, guided=True)) if batch.masked else None

    def _mixed_body(self, inputs: StepInputs, rows: SampledRows) -> Tensor:
        logits = self._model.forward(inputs, self._kv)
        if len(rows.slots):
            self._sample(logits, *rows)
        return logits

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, guided: bool = False) -> None:
        """Slots with a grammar are sampled apart from the others, once their masks are there."""
        sampled = self._sampled.first(len(slots))
        self._kernels.sample(logits, self._slots.sampler, slots, positions, sampled, guided)
        self._kernels.keep(sampled.token_ids, slots, self._slots.state)


def fatal(error: Exception) -> Exception:
    """DeviceLost for an error of the device itself; running out of memory concerns the step alone."""
    text = str(error)
    of_device = isinstance(error, RuntimeError) and any(each in text for each in _DEVICE_ERRORS)
    if not of_device or "out of memory" in text:
        return error
    lost = DeviceLost(text)
    lost.__cause__ = error
    return lost
