"""The GPU runner. State is on the device by slot; a step uploads what changed, and nothing blocks.

launch:  changes -> packet -> inputs -> forward -> sample -> keep     queued, as one CUDA graph where possible
sample:  sampling, if it had to wait for masks; then tokens -> pinned host memory -> event
result:  sleeps until the event

A rank of a pipeline that does not sample has the launch alone: tokens come with the plans.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import DeviceLost, Masks, Row, RowScores, SampledToken, StepPlan, drawn_ids
from emberline.engine.core.prefill_policy import PrefillPolicy, StepWork
from emberline.engine.images.step_images import ImageRows
from emberline.engine.runners.cpu.torch_runner import Model, allocate_pool
from emberline.engine.runners.gpu.batch import (
    DecodeBuffers,
    MixedBuffers,
    MixedShape,
    SampledRows,
    SharedPrefix,
    StepBatch,
    VerifyShape,
    find_shared_prefix,
)
from emberline.engine.runners.gpu.draft_chain import ChainOfDrafts, ChainShape
from emberline.engine.runners.gpu.draft_model_chain import open_chain, pool_blocks
from emberline.engine.runners.gpu.graphs import CudaGraphs, StepKind
from emberline.engine.runners.gpu.shapes import (
    CHUNK_ROWS,
    MAX_GRAPH_TOKENS,
    MAX_VERIFY_ROWS,
    all_decode_rows,
    all_verify_shapes,
    decode_rows,
    graph_tokens,
    max_draws,
    table_width,
    verify_shape,
)
from emberline.engine.runners.gpu.slots import Penalized, Slots, SlotSampler, keep_tokens
from emberline.engine.runners.gpu.step_kernels import Kernels
from emberline.engine.runners.gpu.stream import StepOutputs, UrgentWait, device_event, fatal, sampled_tensors
from emberline.kernels.decode_inputs import MAX_ROW_TOKENS, PADDING
from emberline.kv.block_pool import NULL_BLOCK
from emberline.models.decoder import StepInputs
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel
from emberline.protocol.token_ids import pack

MIN_SHARING = 4  # decode rows from which on a shared prefix is searched
MIN_SAVED_BYTES = 1 << 30  # reads per step, below which cascade attention costs more than it saves; measured on an H200
TIMED_REPLAYS = 3  # of a step whose time is measured
STEPS_IN_FLIGHT = 2  # one is computed while the next is planned; a pipeline has one for each stage
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launched:
    batch: StepBatch
    outputs: StepOutputs
    work: StepWork | None  # None: its duration is not typical
    n_decodes: int  # draws of decode rows, padding included
    sample: Callable[[], None] | None  # still to be done, once the masks are there
    drafting: list[int]  # slots behind which a draft head drafts, in the order of the plan
    depth: int  # of its drafts; 0: none
    verifies: bool = False  # what the next step drafts depends on its result: the device waits for it to be read
    penalized: Penalized | None = None  # its rows that sample, where any has penalties


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

    def drafts(self) -> Sequence[bytes]:
        return () if isinstance(self._launched, Exception) else self._runner.read_drafts(self._launched)

    def scores(self) -> Sequence[RowScores]:
        scores = None if isinstance(self._launched, Exception) else self._launched.batch.scores
        return () if scores is None else scores.read()


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
        speculates: bool = False,
        head: GpuDraftHead | DraftModel | None = None,
        samples: bool = True,
        steps_in_flight: int = STEPS_IN_FLIGHT,
        images: ImageRows | None = None,
    ) -> None:
        """The KV groups of a draft head or model come last, with a block of each slot that the cache does not know.
        samples: not so ranks of a pipeline but one; steps_in_flight: that may be launched before the first is read.
        images: makes the rows of images; None: no request has any."""
        self._model, self._kernels, self._prefill, self._samples = model, kernels, prefill, samples
        self._images = images
        self._device = torch.device(device)
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)  # weights and workspace were created on another stream
            torch.cuda.set_stream(stream)  # the default one cannot be captured
        kv_groups = model.kv_groups if head is None else (*model.kv_groups, *head.kv_groups)
        sizes = pool_blocks(n_blocks, rows := limits.max_running, head)
        made = (allocate_pool(layout, n, self._device) for layout, n in zip(kv_groups, sizes))
        self._kv = list(made if pools is None else pools)  # given where other processes write them
        self._model_kv = self._kv[: len(model.kv_groups)]
        first = model.kv_groups[0]
        self._block_bytes = first.block_bytes if first.keeps_all and first.planes == 2 else 0  # 0: never cascade
        self.graph_tokens = graph_tokens(any(group.planes == 1 for group in model.kv_groups))
        groups = len(self._kv)
        self._verified = [VerifyShape(*shape) for shape in all_verify_shapes(rows)] if speculates else []
        n_draws = max_draws(rows) if speculates else rows + CHUNK_ROWS
        # Padding behind the drafts of a row reaches beyond its context.
        width = table_width(limits.context_len + (MAX_ROW_TOKENS if speculates else 0))
        self._max_rows, self._token_budget = rows, limits.token_budget
        self._slots = Slots(rows, groups, width, sampler, self._device, images)
        self._decode = DecodeBuffers(rows, groups, width, self._device, self._verified)
        self._mixed = MixedBuffers(limits.token_budget, rows, width, self._device)
        self._sampled = sampled_tensors(n_draws, self._device)
        self._outputs = [StepOutputs(n_draws, rows, self._device) for _ in range(steps_in_flight + 1)]
        self.draft_models = [head.decoder] if isinstance(head, DraftModel) else []
        self._chain: ChainOfDrafts | None = None
        if head is not None:
            most = max(limits.token_budget, MAX_GRAPH_TOKENS, n_draws)
            self._chain = open_chain(head, self._kv, n_blocks, self._slots, kernels, most)
        self._chains = CudaGraphs[ChainShape](self._device, graphs)
        self._n_launched = 0
        self._unobserved: _Launched | None = None  # a step that was read, whose duration is not known to the policy yet
        self._urgent = UrgentWait()
        self._graphs = CudaGraphs[StepKind](self._device, graphs)
        self._padded: dict[StepKind, StepKind] = {}  # kinds that are not captured, and the captured one to use instead
        self._typical = False  # the last step was replayed in its own shape: others like it take as long
        self._pads = graphs
        self._sharing: tuple[bytes, int] | None = None  # the rows last searched, and Slots.n_admitted then
        self._shared: SharedPrefix | None = None

    @property
    def pools(self) -> list[Tensor]:
        return self._kv

    @property
    def n_graphs(self) -> int:
        return len(self._graphs) + len(self._chains)

    # --- preparation ahead of requests --------------------------------------------------------------------------------

    def step_kinds(self) -> list[StepKind | ChainShape]:
        """Every kind of step that CUDA graphs are for, the most common first."""
        decodes = all_decode_rows(self._max_rows)
        mixed = MixedShape.all_padded(self._max_rows, self.graph_tokens, self._token_budget)
        sharing = [n for n in decodes if MIN_SHARING <= n <= 64] if self._block_bytes else []
        mixed_sharing = [shape for shape in mixed if 16 < shape.n_decodes <= 64] if self._block_bytes else []
        # A first prompt, decoding, all else.
        plain: list[int | VerifyShape | MixedShape] = [*mixed[:1], *decodes, *self._verified, *mixed[1:]]
        shared: list[int | MixedShape] = [*sharing, *mixed_sharing]
        chains = [] if self._chain is None else ChainShape.all(self._max_rows, self._chain.depths)
        return [*chains, *map(StepKind, plain), *(StepKind(shape, cascade=True) for shape in shared)]

    @torch.inference_mode()
    def capture(self, kind: StepKind | ChainShape) -> None:
        """Capture a step of padding rows. It reads weights, even before they are loaded, and writes the null block."""
        known = kind in self._chains if isinstance(kind, ChainShape) else kind in self._graphs
        if known or not self._graphs.has_room:
            return
        try:
            self._send_padding(kind)
            if isinstance(kind, ChainShape):
                self._chains.capture(kind, lambda: self._run_chain(kind))
            else:
                self._graphs.capture(kind, lambda: self._body(kind))
        except Exception as error:  # then steps are padded further, or run eagerly
            if isinstance(lost := fatal(error), DeviceLost):
                raise lost from error
            _log.warning("a step of shape %s could not be prepared: %s", kind, error)
        self._padded.clear()
        self._clear_null_block()

    @torch.inference_mode()
    def run_padding(self, kind: StepKind | ChainShape) -> None:
        """Run every kernel of such steps, those that sample behind a mask included, on padding rows."""
        self._send_padding(kind)
        if isinstance(kind, ChainShape):
            self._run_chain(kind)
            return
        logits = self._body(kind)
        if isinstance(kind.shape, VerifyShape):
            self._sample_drafts(logits, kind.shape, guided=True)
            return
        padding = torch.full((len(logits),), PADDING, dtype=torch.int32, device=self._device)
        self._sample(logits, padding, padding, guided=True)

    @torch.inference_mode()
    def run_eager_padding(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Run a step that is too large for a CUDA graph, of chunks given by start and tokens."""
        batch = StepBatch(chunks=[Row(0, self._slots.spare, at, bytes(4 * n), None, [0], False) for at, n in chunks])
        shape = MixedShape.exact(batch)
        longest = self._mixed.send(batch, shape, self._slots.spare)
        inputs = self._mixed.inputs(shape, self._slots.state, batch, longest)
        self._mixed_body(inputs, self._mixed.row_slots(shape), self._mixed.sampled_rows(shape, batch))
        self._clear_null_block()

    @torch.inference_mode()
    def time_padding(self, kind: StepKind) -> float | None:
        """Seconds that a captured step of padding rows takes, which reads weights and no cache; None: not captured."""
        if kind not in self._graphs:
            return None
        began, done = device_event(self._device), device_event(self._device)
        self._send_padding(kind)
        self._graphs.replay(kind)
        began.record()
        for _ in range(TIMED_REPLAYS):
            self._graphs.replay(kind)
        done.record()
        done.wait()
        seconds = done.seconds_since(began)
        self._clear_null_block()
        return None if seconds is None else seconds / TIMED_REPLAYS

    def _clear_null_block(self) -> None:
        for pool in self._kv:  # without weights what was computed may be NaN
            pool[NULL_BLOCK].zero_()

    def _send_padding(self, kind: StepKind | ChainShape) -> None:
        if isinstance(kind, ChainShape):
            assert self._chain is not None
            self._chain.send([], kind.n_rows)
        elif isinstance(kind.shape, int):
            self._decode.send(StepBatch().packet, kind.shape)
        elif isinstance(kind.shape, VerifyShape):
            self._decode.send(StepBatch().packet, *kind.shape, kind.shape.starts([]))
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
            self._unobserved = None  # its events will be those of another step
            return GpuStep(self, error)

    def _launch(self, plan: StepPlan) -> _Launched:
        outputs = self._outputs[self._n_launched % len(self._outputs)]
        self._n_launched += 1
        if self._images is not None:
            self._images.advance()
        outputs.began.record()
        slots = self._slots
        for admission in plan.admissions:
            slots.admit(admission)
        if self._chain is not None and plan.admissions:
            self._chain.forget([admission.slot for admission in plan.admissions])
        packet, penalized, verify = plan.columns.packet, None, None
        if not plan.others and slots.only_decode(packet[0]):
            slots.take(packet, upload=False)
            batch = StepBatch.of_columns(packet)
        else:
            batch, verify, penalized = self._take_rows(plan)
        drafting = batch.slots if plan.depth else []
        if plan.n_scored:
            batch.score(slots, self._device, len(self._sampled.token_ids))
        slots.upload()
        if verify is not None:
            n_decodes, sample = self._launch_verify(batch, *verify)
        else:
            n_decodes, sample = self._launch_mixed(batch) if batch.chunks else self._launch_decode(batch)
        verifies = bool(verify and plan.n_awaited)
        typical = self._typical or (bool(batch.chunks) and batch.n_tokens > self.graph_tokens)
        work = StepWork.of(batch.n_decodes, batch.chunks, 0 if verify is None else plan.n_drafts)
        if not self._samples:
            outputs.end(verifies)
        return _Launched(
            batch,
            outputs,
            work if typical and batch.scores is None and not batch.has_images else None,
            n_decodes,
            sample,
            drafting,
            plan.depth,
            verifies,
            penalized,
        )

    def _take_rows(self, plan: StepPlan) -> tuple[StepBatch, tuple[StepKind, StepKind] | None, Penalized | None]:
        """Take in the rows of a plan, whatever they are: a batch, how it verifies drafts, and rows with penalties."""
        slots, packet, others, counts = self._slots, plan.columns.packet, plan.others, False
        before = plan.before or [0] * len(others)
        if not slots.only_decode(packet[0]):
            packet, others, before = packet[:, :0], plan.rows, [0] * plan.n_rows
        known = slots.of(others)
        batch = StepBatch.of(packet, others, before, known, len(self._kv))
        verify = self._verify_kind(batch, plan) if plan.n_drafting else None
        if plan.n_drafting and verify is None:
            batch.leave_out_drafts()
        upload = bool(batch.chunks)
        if packet.shape[1]:
            slots.take(packet, upload=upload)
        for row, slot, passed in zip(others, known, slots.passed(others)):
            if row.blocks is not None:
                slots.grow(row, row.blocks, upload=upload or (verify is None and bool(row.draft_ids)))
            if row.passed != passed:
                slots.leave_window(row.slot, row.passed, upload=upload)
            if slot.ids is not None:
                slots.recount(row, slot)
                counts = True
            if row.banned != slot.banned:
                slots.ban(row, slot)
        if not (counts and self._samples):
            return batch, verify, None
        rows = [row for row in plan.rows if row.samples]
        return batch, verify, [(row, slot, slot.n_told) for row, slot in zip(rows, slots.of(rows))]

    def finish(self, launched: _Launched, masks: Masks | None) -> None:
        """Sample, if that had to wait for masks, and copy the tokens to the host."""
        batch = launched.batch
        with torch.inference_mode():
            if launched.sample is not None:
                self._slots.allow(batch.slots, None if masks is None else batch.own_masks(masks))
                self._slots.sampler.upload()
                launched.sample()
            if batch.scores is not None:
                batch.scores.fetch()
            n_rows = launched.n_decodes + len(batch.chunks)
            drafts = self._draft(launched) if launched.depth else None
            launched.outputs.fetch(self._sampled, n_rows, batch.logprobs is not None, drafts, launched.verifies)
        if self._unobserved is not None:
            self._observe(self._unobserved)
            self._unobserved = None

    def wait(self) -> None:
        """Wait until the device has done all that was launched. Raises DeviceLost if it cannot."""
        done = device_event(self._device)
        done.record()
        done.wait()

    def read(self, launched: _Launched) -> Sequence[SampledToken]:
        """Nothing where the rank does not sample, once it has computed its part."""
        outputs = launched.outputs
        indices = launched.batch.sample_indices(launched.n_decodes) if self._samples else []
        tokens = outputs.read(indices, launched.batch.logprobs, self._urgent if launched.verifies else None)
        if launched.verifies:
            self._unobserved = launched  # behind the next launch, which the device waits for
        else:
            self._observe(launched)
        if (left_out := launched.batch.left_out) is not None:
            none = SampledToken(-1)
            tokens = [each for token, n in zip(tokens, left_out) for each in (token, *[none] * n)]
        if launched.penalized is not None:
            keep_tokens(launched.penalized, drawn_ids(tokens))
        return tokens

    def _observe(self, launched: _Launched) -> None:
        """Tell the prefill policy how long a step took that was read."""
        outputs, work = launched.outputs, launched.work
        if self._prefill is None or work is None:
            return
        if (seconds := outputs.done.seconds_since(outputs.began)) is not None:
            self._prefill.observe(work, seconds)
            if self._images is not None and not work.n_tokens:
                self._images.observe(seconds)

    def read_drafts(self, launched: _Launched) -> list[bytes]:
        """Once the step was read."""
        found = launched.outputs.drafts(len(launched.drafting), launched.depth) if launched.depth else []
        return [pack(ids) if min(ids) >= 0 else b"" for ids in found]

    # --- decode -----------------------------------------------------------------------------------------------------

    def _launch_decode(self, batch: StepBatch) -> tuple[int, Callable[[], None] | None]:
        n_rows = decode_rows(batch.n_decodes, self._max_rows) if self._pads else batch.n_decodes
        wanted = StepKind(n_rows, self._find_shared(batch))
        kind = self._prepared(wanted)
        assert isinstance(kind.shape, int)
        self._decode.send(batch.packet, kind.shape)
        logits = self._run(kind, wanted)
        return batch.n_decodes, (lambda: self._sample_decode(logits, guided=True)) if batch.masked else None

    def _run(self, kind: StepKind, wanted: StepKind) -> Tensor:
        """Run the step from the uploaded buffers; it was padded from the wanted kind."""
        replayed = kind in self._graphs
        self._typical = replayed and kind == wanted
        return self._graphs.replay(kind) if replayed else self._body(kind)

    def _body(self, kind: StepKind) -> Tensor:
        shape, cascade = kind
        if isinstance(shape, int):
            return self._decode_body(shape, cascade)
        if isinstance(shape, VerifyShape):
            return self._verify_body(shape)
        shared = self._decode.shared(shape.n_decodes) if cascade else None
        inputs = self._mixed.inputs(shape, self._slots.state, None, 0, shared)
        return self._mixed_body(inputs, self._mixed.row_slots(shape), self._mixed.sampled_rows(shape, None))

    def _forward(self, inputs: StepInputs, slots: Tensor, drafts: bool = False) -> Tensor:
        """slots: of each row, or of each token where drafts are verified."""
        if inputs.rope_positions is None:
            inputs.rope_positions = self._rope_positions(inputs, slots, drafts)
        if self._chain is None:
            return self._model.forward(inputs, self._kv)
        return self._model.forward(inputs, self._model_kv, self._chain.reading(slots, drafts))

    def _rope_positions(self, inputs: StepInputs, slots: Tensor, drafts: bool) -> Tensor | None:
        """Positions under M-RoPE of tokens of replies, and of prompts without images. Returns None if the tokens' own
        positions rotate them."""
        deltas = self._slots.rope_deltas
        if deltas is None:
            return None
        positions = inputs.positions.clone()
        n_replies = len(slots) if drafts else min(inputs.shape.decode_rows, len(positions))
        positions[:n_replies] += deltas.index_select(0, slots[:n_replies].clamp(min=0))
        return positions

    def _decode_body(self, n_rows: int, cascade: bool) -> Tensor:
        self._kernels.prepare(self._decode.packet(n_rows), self._slots.state, self._decode.inputs)
        logits = self._forward(self._decode.step(n_rows, cascade), self._decode.inputs.slots[:n_rows])
        self._sample_decode(logits)
        return logits

    def _sample_decode(self, logits: Tensor, guided: bool = False) -> None:
        to, n_rows = self._decode.inputs, len(logits)
        self._sample(logits, to.slots[:n_rows], to.context_lens[:n_rows], guided)

    def _find_shared(self, batch: StepBatch) -> bool:
        """True if decode rows share a prefix worth cascade attention. Searched again only when other rows decode."""
        if not self._block_bytes or batch.n_decodes < MIN_SHARING:
            return False
        slots = batch.packet[0]
        key = slots.tobytes(), self._slots.n_admitted
        if key != self._sharing:
            self._sharing = key
            n_full = batch.packet[1] // 16
            tables = self._slots.tables[0, slots, : int(n_full.max(initial=1))]
            found = find_shared_prefix(tables, n_full)
            worth = found is not None and found.saved_blocks() * self._block_bytes >= MIN_SAVED_BYTES
            self._shared = found if worth else None
            if self._shared is not None:
                self._decode.send_shared(self._shared)
        return self._shared is not None

    # --- drafts -----------------------------------------------------------------------------------------------------

    def _verify_kind(self, batch: StepBatch, plan: StepPlan) -> tuple[StepKind, StepKind] | None:
        """The kind of step to run and the one wanted; None: drafts are left out. Beside chunks, and before a shape that
        holds them is captured."""
        n_rows = batch.n_decodes
        shape = verify_shape(n_rows, n_rows + plan.n_drafts, self._max_rows)
        if batch.chunks or shape is None or not self._verified:
            return None
        wanted = StepKind(VerifyShape(*shape))
        kind = self._prepared(wanted)
        return (kind, wanted) if kind in self._graphs or not self._graphs.enabled else None

    def _launch_verify(
        self, batch: StepBatch, kind: StepKind, wanted: StepKind
    ) -> tuple[int, Callable[[], None] | None]:
        shape = kind.shape
        assert isinstance(shape, VerifyShape)
        starts = shape.starts(batch.drafts)
        self._decode.send(batch.packet, *shape, starts, batch.drafts)
        logits = self._run(kind, wanted)
        batch.verify(starts)  # behind the launch, which the device waits for
        return batch.order[-1] + 1, (lambda: self._sample_drafts(logits, shape, guided=True)) if batch.masked else None

    def _verify_body(self, shape: VerifyShape) -> Tensor:
        n_rows, n_tokens = shape
        buffers = self._decode
        self._kernels.prepare(buffers.packet(n_rows, True), self._slots.state, buffers.inputs, buffers.drafts(shape))
        slots = buffers.inputs.slots[:n_tokens]
        logits = self._forward(buffers.step(n_rows, n_tokens=n_tokens), slots, drafts=True)
        self._sample_drafts(logits, shape)
        return logits

    def _sample_drafts(self, logits: Tensor, shape: VerifyShape, guided: bool = False) -> None:
        if not self._samples:
            return
        to, n, slots = self._decode.inputs, len(logits), self._slots
        sampled = self._sampled.first(n)
        self._kernels.sample(
            logits,
            slots.sampler,
            to.slots[:n],
            to.draw_positions[:n],
            sampled,
            guided,
            token_ids=to.token_ids,
            offsets=to.offsets,
        )
        self._kernels.accept(sampled.token_ids, to, slots.sampler, slots.state, shape.n_rows, guided)
        if self._chain is not None:
            self._chain.keep_accepted(to.starts[: shape.n_rows + 1], to.slots[:n], to.positions[:n])

    def _draft(self, launched: _Launched) -> Tensor | None:
        """Drafts of what follows the tokens that a step has drawn; not before a chain is captured."""
        n_rows = len(launched.drafting)
        if self._chain is None or not 0 < n_rows <= MAX_VERIFY_ROWS:
            launched.depth = 0
            return None
        kind = ChainShape.of(n_rows, launched.depth, self._max_rows, self._chain.depths)
        if self._chains.enabled and kind not in self._chains:
            held = (each for each in self._chains if each.n_rows >= n_rows)
            found = min(held, key=lambda each: (each.n_rows, abs(each.depth - kind.depth)), default=None)
            if found is None:
                launched.depth = 0
                return None
            kind = found
        launched.depth = min(launched.depth, kind.depth)
        self._chain.send(launched.drafting, kind.n_rows)
        drafts = self._chains.replay(kind) if kind in self._chains else self._run_chain(kind)
        return drafts[:n_rows]

    def _run_chain(self, shape: ChainShape) -> Tensor:
        assert self._chain is not None
        return self._chain.run(shape)

    # --- chunks -----------------------------------------------------------------------------------------------------

    def _launch_mixed(self, batch: StepBatch) -> tuple[int, Callable[[], None] | None]:
        shape, with_images = MixedShape.exact(batch), batch.with_images(self._slots) if self._images is not None else []
        if self._pads and batch.scores is None and not with_images:
            shape = MixedShape.of(batch, self._max_rows, self.graph_tokens, self._token_budget)
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
            inputs.scored, slots = None if batch.scores is None else batch.scores.tokens, self._mixed.row_slots(shape)
            if with_images and self._images is not None:
                batch.has_images = True
                inputs.rope_positions = self._rope_positions(inputs, slots, drafts=False)
                self._images.complete(inputs, with_images)
            logits, self._typical = self._mixed_body(inputs, slots, rows), False
        return shape.n_decodes, (lambda: self._sample(logits, *rows, guided=True)) if batch.masked else None

    def _mixed_body(self, inputs: StepInputs, row_slots: Tensor, rows: SampledRows) -> Tensor:
        logits = self._forward(inputs, row_slots)
        if len(rows.slots):
            self._sample(logits, *rows)
        return logits

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, guided: bool = False) -> None:
        """Slots with a grammar are sampled apart from the others, once their masks are there."""
        if not self._samples:
            return
        sampled = self._sampled.first(len(slots))
        self._kernels.sample(logits, self._slots.sampler, slots, positions, sampled, guided)
        self._kernels.keep(sampled.token_ids, slots, positions, self._slots.state)
