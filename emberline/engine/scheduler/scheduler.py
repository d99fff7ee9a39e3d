"""The scheduler: requests in, plans out, results absorbed. Pure Python: no torch, no I/O, no clock of its own."""

import logging
from collections.abc import Iterable
from math import inf

import msgspec

from emberline.engine import token_rules
from emberline.engine.grammar import masks as masking
from emberline.engine.grammar.masks import GuideJobs
from emberline.engine.scheduler.admission import AdmissionPolicy
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import Guides, Masks, Sampled, StepPlan
from emberline.engine.scheduler.planner import StepPlanner
from emberline.engine.scheduler.prefill_policy import PrefillPolicy
from emberline.engine.scheduler.queues import BatchYielding, Queues, n_batch
from emberline.engine.scheduler.sequence import NO_SLOT, Sequence
from emberline.engine.transfer.coordinator import TransferCoordinator
from emberline.kv.cache import KVCache
from emberline.kv.transfer.notices import TransferPort
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, ErrorInfo, Internal
from emberline.protocol.events import FinishReason, TokenDelta, TokenLogprobs
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import pack

_log = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over one KVCache.

    Owns the sequences from `submit` to their terminal delta. Which tokens a step computes is the planner's decision.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        fingerprint: str,
        grammars: Guides | None = None,
        prefill: PrefillPolicy | None = None,
        transfers: TransferPort | None = None,
    ) -> None:
        assert limits.context_len <= cache.capacity, "a lone sequence must be able to reach the end of its context"
        self.limits = limits
        self.cache = cache
        self.n_submitted = 0
        self._fingerprint = fingerprint
        self._grammars = grammars  # None: grammars are ignored
        self._compiling: list[Sequence] = []  # those whose grammar is being compiled; they are waiting, too
        self._guides = GuideJobs(limits.eos_ids)
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._next_deadline_s = inf
        self._totals = EngineLoad(kv_total_blocks=cache.n_total)
        self._queues = Queues(limits.max_running)
        self._transfers = TransferCoordinator(cache, transfers, fingerprint)
        self._admission = AdmissionPolicy(cache, self._queues, self._transfers, self._totals)
        self._batch_class = BatchYielding()
        self._planner = StepPlanner(
            cache, limits, self._queues, self._admission, prefill or PrefillPolicy(), self._batch_class, self._totals
        )

    @property
    def busy(self) -> bool:
        return bool(self._by_number) or self._transfers.busy

    @property
    def blocked(self) -> bool:
        """Busy, but nothing can be computed before a grammar is compiled or a transfer advances."""
        if not self.busy or self._queues.running:
            return False
        n_compiling = sum(not seq.in_transfer for seq in self._compiling)
        return len(self._queues.waiting) == n_compiling and not self._admission.may_grant

    @property
    def wake_s(self) -> float:
        """While blocked: when a step is due even if no notice comes. While a grammar is compiled, now."""
        return 0.0 if self._compiling else min(self._next_deadline_s, self._transfers.wake_s)

    def load(self) -> EngineLoad:
        load, queues = msgspec.structs.replace(self._totals), self._queues
        load.running, load.running_batch = len(queues.running), n_batch(queues.running)
        load.waiting, load.waiting_batch = len(queues.waiting), n_batch(queues.waiting)
        load.waiting_tokens = queues.waiting_tokens + sum(seq.n_prefill for seq in queues.running)
        load.kv_used_blocks = self.cache.n_used
        self._transfers.report(load)
        return load

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accept a request, which from now on ends in exactly one terminal delta; or raise why not."""
        if request.id in self._by_id:
            raise BadInput(f"request id {request.id!r} is in use", param="id")
        self.limits.check(request)
        self._transfers.check(request)
        guided = request.grammar and self._grammars is not None and request.push is None
        pending = self._grammars.request(request.grammar) if guided and self._grammars is not None else None
        seq = Sequence(request, self.n_submitted, self.limits, self._fingerprint, self.cache.table(), now_s, pending)
        seq.arrival_step = self._totals.steps
        seq.limits_thinking = token_rules.limits_thinking(seq)
        self.n_submitted += 1
        self._by_id[request.id] = self._by_number[seq.number] = seq
        if seq.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, seq.deadline_s)
        if pending is not None:
            self._compiling.append(seq)
        self._transfers.begin(seq, now_s)
        if not seq.in_transfer:
            self._queues.enqueue(seq, self._totals.steps)

    def abort(self, request_id: str) -> TokenDelta | None:
        """The terminal delta, or None when there is no such request (any more)."""
        seq = self._by_id.get(request_id)
        return None if seq is None else self._end(seq, "cancelled")

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return [self._fail(seq, error) for seq in tuple(self._by_number.values())]

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for, which grammars need to know."""
        if self._grammars is not None:
            self._grammars.learn(vocabulary)

    # --- one step ---------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[TokenDelta]:
        """Before a plan: deadlines, progress of KV transfers and grammars. Ends sequences that failed."""
        self._admission.now_s = now_s
        self._batch_class.advance(self._queues, now_s)
        return self._expire(now_s) + self._poll_transfers(now_s) + self._poll_grammars()

    def plan(self) -> StepPlan:
        number = self.cache.fence.next_step()
        plan = self._planner.plan()
        plan.number = number
        return plan

    def needs_masks(self, plan: StepPlan) -> bool:
        """Whether a grammar restricts what the plan samples."""
        by_number = self._by_number
        return self._grammars is not None and any(
            by_number[row.number].guide is not None for row in plan.rows if row.samples
        )

    def masks(self, plan: StepPlan) -> Masks | None:
        """What the grammars of the plan's rows allow next; None when no row has one."""
        return masking.masks(plan, self._by_number)

    def launched(self, plan: StepPlan) -> None:
        """While the device is busy: hash the blocks that the plan computes, and the one behind them."""
        if plan.n_tokens == len(plan.rows):
            return
        for row in plan.rows:
            if len(row.token_ids) > 4 and (seq := self._by_number.get(row.number)) is not None:
                first, end = row.start // BLOCK_TOKENS, row.end // BLOCK_TOKENS
                seq.extend_keys(end + 1)
                self._admission.computes(plan, seq.keys[first:end])

    def absorb(self, plan: StepPlan, sampled: Iterable[Sampled]) -> list[TokenDelta]:
        """Take in the result of a step. Rows of sequences that ended meanwhile are ignored."""
        deltas: list[TokenDelta] = []
        guided: list[Sequence] = []
        self._admission.done(plan)
        self._planner.succeeded()
        samples, by_number = iter(sampled), self._by_number
        for row in plan.rows:
            sample = next(samples) if row.samples else None
            seq = by_number.get(row.number)
            if seq is None or seq.admission != row.admission:
                continue
            seq.n_sampling -= row.samples
            seq.suspicion = 0
            if sample is not None and sample.token_id < 0:
                self.cache.discard(seq.table)
                deltas.append(self._fail(seq, Internal("the model produced invalid numbers")))
                continue
            if (n_blocks := row.end // BLOCK_TOKENS) > seq.table.n_published:
                seq.extend_keys(n_blocks)
                self.cache.publish(seq.table, seq.keys, n_blocks)
            if sample is None:
                deltas += self._send_kv(seq, row.end) if seq.prefill_only else ()
            elif seq.guide is None:
                deltas.append(self._append(seq, *token_rules.take(seq, _entry(sample), self.limits.eos_ids)))
            else:
                self._guides.take(seq, _entry(sample))
                guided.append(seq)
        return deltas + self._take_guided(guided) if guided else deltas

    def retry(self, plan: StepPlan, error: EmberlineError) -> list[TokenDelta]:
        """The step could not be computed: its sequences are computed again; the one that it fails for ends."""
        self._admission.done(plan)
        found = [(self._by_number.get(row.number), row.admission) for row in plan.rows]
        failed = [seq for seq, admission in found if seq is not None and seq.admission == admission]
        offender = self._planner.retry(failed, only_these=len(failed) == len(found))
        return [] if offender is None else [self._fail(offender, error)]

    # --- before a plan ----------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> list[TokenDelta]:
        if now_s < self._next_deadline_s:
            return []
        timed = [(seq, seq.deadline_s) for seq in self._by_number.values() if seq.deadline_s is not None]
        self._next_deadline_s = min((deadline_s for _, deadline_s in timed if deadline_s > now_s), default=inf)
        return [
            self._fail(seq, DeadlineExceeded(f"the request did not finish within its {seq.request.deadline_s:g} s"))
            for seq, deadline_s in timed
            if deadline_s <= now_s
        ]

    def _poll_transfers(self, now_s: float) -> list[TokenDelta]:
        deltas = []
        update = self._transfers.poll(now_s)
        for seq, error in update.ended:
            if seq.number in self._by_number:
                deltas.append(self._end(seq, "stop") if error is None else self._fail(seq, error))
        for seq in update.granted:
            if seq.slot != NO_SLOT:
                self._transfers.outgoing.send(seq, seq.table.n_published)
        self._admission.grant_transfers(now_s)
        for seq in update.ready + self._transfers.take_ready():
            if seq.in_transfer and seq.number in self._by_number:
                seq.in_transfer = False
                seq.n_received = 0 if seq.prefill_only else BLOCK_TOKENS * seq.n_transferable
                self._queues.enqueue(seq, self._totals.steps)
        return deltas

    def _poll_grammars(self) -> list[TokenDelta]:
        """Bind grammars that are compiled now; take in tokens that no step has waited for."""
        deltas = []
        for seq in self._compiling:
            if seq.job is None and seq.pending_guide is not None and seq.pending_guide.ready:
                self._guides.bind(seq)
        for seq in self._guides.ended():
            if seq.pending_guide is None:
                deltas.append(self._take_job(seq))
                continue
            try:
                self._guides.result(seq)
            except EmberlineError as error:
                deltas.append(self._fail(seq, error))
            else:
                seq.pending_guide = None
                self._compiling.remove(seq)
        return deltas

    # --- after a step -----------------------------------------------------------------------------------------------

    def _take_guided(self, seqs: list[Sequence]) -> list[TokenDelta]:
        """What the grammars say to sampled tokens, as far as it is known in time for the next step."""
        self._guides.wait(seqs)
        deltas = [self._take_job(seq) for seq in seqs if seq.job is not None and seq.job.done]
        for seq in seqs:
            if seq.job is not None and seq.n_sampling:
                self._planner.preempt(seq)  # a step in flight samples for it without a mask: that is ignored
        return deltas

    def _take_job(self, seq: Sequence) -> TokenDelta:
        try:
            entries, finish = self._guides.result(seq)
        except EmberlineError as error:
            return self._fail(seq, error)
        if seq.slot == NO_SLOT:
            self._queues.waiting_tokens += len(entries)
        return self._append(seq, entries, finish)

    def _append(self, seq: Sequence, entries: list[TokenLogprobs], finish: FinishReason | None) -> TokenDelta:
        one = len(entries) == 1  # the common case, and quicker
        packed = entries[0].token_id.to_bytes(4, "little") if one else pack([entry.token_id for entry in entries])
        first = seq.n_output == seq.n_resumed
        if first:
            seq.first_token_step = self._totals.steps
        seq.ids += packed
        self._totals.output_tokens += len(entries)
        logprobs = entries if seq.request.sampling.logprobs is not None and entries else None
        if finish is not None:
            return self._end(seq, finish, packed, logprobs)
        if first:
            return TokenDelta(seq.id, packed, None, seq.usage(), logprobs, None, seq.waited_s)
        return TokenDelta(seq.id, packed, None, None, logprobs)

    def _send_kv(self, seq: Sequence, n_computed: int) -> list[TokenDelta]:
        """Send the computed blocks of a prefill-only sequence; with the last of them it gives up its slot."""
        self._transfers.outgoing.send(seq, seq.table.n_published)
        if n_computed == seq.n_tokens:
            self._admission.release(seq)
            seq.n_computed, seq.in_transfer = 0, True
        first = self._transfers.outgoing.is_first_report(seq)
        return [TokenDelta(seq.id, usage=seq.usage(), waited_s=seq.waited_s)] if first else []

    def _fail(self, seq: Sequence, error: EmberlineError) -> TokenDelta:
        return self._end(seq, "error", error=error.info())

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        token_ids: bytes = b"",
        logprobs: list[TokenLogprobs] | None = None,
        error: ErrorInfo | None = None,
    ) -> TokenDelta:
        """The only way out: everything the sequence held is given back, and its terminal delta is made."""
        del self._by_id[seq.id], self._by_number[seq.number]
        self._batch_class.ended(seq)
        self._guides.drop(seq)
        if seq.pending_guide is not None:
            self._compiling.remove(seq)
        if seq.slot != NO_SLOT:
            self._admission.release(seq)
        elif not seq.in_transfer:
            self._queues.dequeue(seq)
        self._transfers.leave(seq)
        return TokenDelta(seq.id, token_ids, finish, seq.usage(), logprobs, error)


def _entry(sample: Sampled) -> TokenLogprobs:
    return TokenLogprobs(sample.token_id, sample.logprob if sample.logprob is not None else 0.0, sample.top)
