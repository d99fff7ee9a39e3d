"""The runner for CPUs: a step's plan becomes arrays, the model computes, the sampler samples.

It imports no torch: the C kernels take numpy arrays. `torch_runner` serves backends and draft heads that need tensors.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Admission, Masks, Row, RowScores, Sampled, StepPlan
from emberline.engine.core.prefill_policy import PrefillPolicy, StepWork
from emberline.engine.runners.prompt_scores import ScoredPrompt, ScoredRow, StepScores
from emberline.kernels.sampling import SamplerRow, sample
from emberline.kv.block_pool import NULL_BLOCK, blocks_of
from emberline.kv.host_memory import HostMemory, Pages, private_pages, shared_pages
from emberline.models.decoder import StepInputs
from emberline.protocol.block_hash import KVGroup

Draft = Callable[[Sequence[Sampled], Sequence[SamplerRow]], Sequence[bytes]]


class Model(Protocol):
    """Part of `models.decoder.Decoder` that a runner needs."""

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    def forward(self, step: StepInputs, kv: list[Any]) -> Any: ...


class ComputedStep:
    """A step whose forward pass is done: here a launch is synchronous."""

    def __init__(
        self,
        logits: Any,  # float32 [rows, vocab]
        rows: list[SamplerRow],
        error: Exception | None = None,
        draft: Draft | None = None,
        scores: Sequence[RowScores] = (),
    ) -> None:
        self._logits = logits
        self._rows = rows
        self._error = error
        self._draft = draft
        self._scores = scores
        self._sampled: Sequence[Sampled] = []
        self._drafts: Sequence[bytes] = ()

    def sample(self, masks: Masks | None = None) -> None:
        if self._logits is None:
            return
        try:
            for index, bits in zip(masks.rows, masks.bits) if masks is not None else ():
                self._rows[index].allowed = bits
            self._sampled = sample(self._logits, self._rows)
            if self._draft is not None:
                self._drafts = self._draft(self._sampled, self._rows)
        except Exception as error:
            self._error = error

    def result(self) -> Sequence[Sampled]:
        if self._error is not None:
            raise self._error
        return self._sampled

    def drafts(self) -> Sequence[bytes]:
        return self._drafts

    def scores(self) -> Sequence[RowScores]:
        return self._scores


@dataclass(slots=True)
class _Slot:
    """State of the sequence in a slot."""

    sampler: SamplerRow
    n_prompt: int
    passed: list[int]
    ids: bytearray | None  # prompt and output, kept only for penalties
    scored: ScoredPrompt | None  # None: its prompt is not scored


class CpuRunner:
    """Owns the KV pools and the step buffers. Buffers are reused: a step's inputs are valid until the next launch."""

    memory: HostMemory | None = None  # memory of the pools; other processes may write it if it is shared
    head: Any = None  # what drafts here; see `torch_runner`

    def __init__(
        self,
        model: Model,
        n_blocks: Sequence[int],
        limits: Limits,
        prefill: PrefillPolicy | None = None,
        shared: bool = False,
        cpu_share: AbstractContextManager[None] | None = None,
    ) -> None:
        """shared: keep the pools in memory that other processes may write."""
        self._model = model
        rows, tokens, width = limits.max_running, limits.token_budget, blocks_of(limits.context_len)
        self._cpu_share = cpu_share or nullcontext()
        self._prefill = prefill or PrefillPolicy()
        self._kv = self._open_pools(n_blocks, shared)
        self._slots: list[_Slot | None] = [None] * rows
        self._tables = [np.zeros((rows, width), np.int32) for _ in n_blocks]  # by slot
        self._step_tables = [np.zeros(rows * width, np.int32) for _ in n_blocks]  # by row of the step
        self._counting = np.arange(limits.context_len, dtype=np.int32)
        self._token_ids, self._positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        self._query_starts, self._context_lens = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)

    def _open_pools(self, n_blocks: Sequence[int], shared: bool) -> list[Any]:
        """Allocate the pool of each KV group."""
        return self._host_pools(self._model.kv_groups, n_blocks, shared, pool_in)

    def _host_pools(
        self,
        groups: Sequence[KVGroup],
        n_blocks: Sequence[int],
        shared: bool,
        view: Callable[[Pages, KVGroup, int], Any],
    ) -> list[Any]:
        pages = [host_pages(layout, n, shared) for layout, n in zip(groups, n_blocks)]
        self.memory = HostMemory(
            [memoryview(each.buffer) for each in pages],
            [layout.block_bytes for layout in groups],
            [each.descriptor for each in pages if shared],
        )
        return [view(each, layout, n) for each, layout, n in zip(pages, groups, n_blocks)]

    def _array(self, values: NDArray[Any]) -> Any:
        """Convert a part of a step's inputs to what the model takes."""
        return values

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[Any, Draft | None]:
        """Compute the logits, and the function that drafts once tokens are sampled. Returns None if nothing drafts."""
        return self._model.forward(inputs, self._kv), None

    def launch(self, plan: StepPlan) -> ComputedStep:
        try:
            for admission in plan.admissions:
                self._admit(admission)
            inputs, samplers = self._inputs(plan)
            scores = StepScores(self._scored_rows(plan)) if plan.n_scored else None
            inputs.scored = None if scores is None else scores.tokens
            began_s = time.perf_counter()
            with self._cpu_share:
                logits, draft = self._forward(plan, inputs)
            if scores is None:
                self._prefill.observe(_work(plan), time.perf_counter() - began_s)
            return ComputedStep(logits, samplers, draft=draft, scores=() if scores is None else scores.read())
        except Exception as error:
            return ComputedStep(None, [], error)

    def _admit(self, admission: Admission) -> None:
        request, row = admission.request, sampler_row(admission)
        self._slots[admission.slot] = _Slot(
            row,
            n_prompt=len(request.prompt_ids) // 4,
            passed=[0] * len(self._tables),
            ids=None if row.prompt_ids is None else bytearray(request.prompt_ids + admission.output_ids),
            scored=ScoredPrompt.of(request),
        )
        for table, blocks in zip(self._tables, admission.blocks):
            table[admission.slot] = NULL_BLOCK
            table[admission.slot, : len(blocks)] = blocks

    def _scored_rows(self, plan: StepPlan) -> list[ScoredRow]:
        """The rows of a plan whose tokens are scored."""
        found, first = list[ScoredRow](), 0
        for row in plan.rows:
            if row.n_scored:
                slot = self._slots[row.slot]
                assert slot is not None, "a row needs an admission first"
                assert slot.scored is not None, "the request asks for it"
                found.append(ScoredRow(row, first, slot.scored))
            first += row.stop - row.start
        return found

    def _inputs(self, plan: StepPlan) -> tuple[StepInputs, list[SamplerRow]]:
        samplers: list[SamplerRow] = []
        sample_tokens: list[int] = []
        n = longest = 0
        rows = plan.rows
        for r, row in enumerate(rows):
            slot = self._slots[row.slot]
            assert slot is not None, "a row needs an admission first"
            end, n_drafts = row.end, row.n_drafts
            context_len = end + n_drafts
            self._update_tables(row, slot, context_len)
            if slot.ids is not None:
                del slot.ids[4 * row.start :]  # drafts that were accepted stay
                slot.ids += row.token_ids
            stop = n + context_len - row.start
            self._token_ids[n:stop] = np.frombuffer(row.token_ids + row.draft_ids, "<u4")
            self._positions[n:stop] = self._counting[row.start : context_len]
            self._context_lens[r] = context_len
            self._query_starts[r + 1] = n = stop
            longest = max(longest, context_len)
            if row.samples:
                sample_tokens += range(n - 1 - n_drafts, n)
                samplers.append(self._sampler(row, slot, end))
                if n_drafts:
                    samplers += self._draft_samplers(row, slot)
        n_rows, width = len(rows), blocks_of(longest)
        inputs = StepInputs(
            token_ids=self._array(self._token_ids[:n]),
            positions=self._array(self._positions[:n]),
            query_starts=self._array(self._query_starts[: n_rows + 1]),
            context_lens=self._array(self._context_lens[:n_rows]),
            block_tables=self._block_tables([row.slot for row in rows], width),
            sample_tokens=self._array(np.array(sample_tokens, np.int64)),
        )
        return inputs, samplers

    def _update_tables(self, row: Row, slot: _Slot, end: int) -> None:
        if row.blocks is not None:
            stop = blocks_of(end)
            for table, blocks in zip(self._tables, row.blocks):
                table[row.slot, stop - len(blocks) : stop] = blocks
        if row.passed != slot.passed:
            for table, n_passed in zip(self._tables, row.passed):
                table[row.slot, :n_passed] = NULL_BLOCK
            slot.passed = row.passed

    def _sampler(self, row: Row, slot: _Slot, end: int) -> SamplerRow:
        sampler = slot.sampler
        sampler.position = end
        sampler.banned = row.banned
        sampler.allowed = None
        if slot.ids is not None:
            sampler.output_ids = np.frombuffer(bytes(slot.ids[4 * slot.n_prompt :]), "<u4")
        return sampler

    def _draft_samplers(self, row: Row, slot: _Slot) -> list[SamplerRow]:
        """Return the sampler rows of the draws after each draft, as if all drafts up to it had been sampled."""
        samplers = [replace(slot.sampler, position=row.end + n) for n in range(1, row.n_drafts + 1)]
        if slot.ids is not None:
            slot.ids += row.draft_ids
            output_ids = np.frombuffer(bytes(slot.ids[4 * slot.n_prompt :]), "<u4")
            for sampler in samplers:
                sampler.output_ids = output_ids[: sampler.position - slot.n_prompt]
        return samplers

    def _block_tables(self, slots: list[int], width: int) -> list[Any]:
        tables = []
        for table, buffer, _ in zip(self._tables, self._step_tables, self._kv):  # without the draft head's or model's
            rows = buffer[: len(slots) * width].reshape(len(slots), width)
            table[:, :width].take(slots, axis=0, out=rows, mode="clip")
            tables.append(self._array(rows))
        return tables


def sampler_row(admission: Admission) -> SamplerRow:
    """Sampling parameters of a sequence; its tokens only where a penalty needs them."""
    request, sampling = admission.request, admission.request.sampling
    penalized = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return SamplerRow(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
        seed=admission.seed,
        prompt_ids=np.frombuffer(request.prompt_ids, "<u4") if penalized else None,
        output_ids=np.frombuffer(admission.output_ids, "<u4") if penalized else None,
        logprobs=sampling.logprobs,
        guided=request.masked,
    )


def _work(plan: StepPlan) -> StepWork:
    chunks = [row for row in plan.others if row.end - row.start > 1]
    return StepWork.of(plan.n_rows - len(chunks), chunks, plan.n_drafts)


def host_pages(layout: KVGroup, n_blocks: int, shared: bool) -> Pages:
    n_bytes = n_blocks * layout.block_bytes or 1  # of a group whose layers another stage has
    return shared_pages(n_bytes) if shared else private_pages(n_bytes)


def pool_in(pages: Pages, layout: KVGroup, n_blocks: int) -> NDArray[Any]:
    return np.frombuffer(pages.buffer, np.dtype(layout.dtype)).reshape(pool_shape(layout, n_blocks))


def pool_shape(layout: KVGroup, n_blocks: int) -> tuple[int, ...]:
    return n_blocks, *layout.block_shape
