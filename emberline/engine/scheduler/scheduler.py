"""Which tokens of which sequences the next step computes. Pure Python: no torch, no I/O, no clock of its own."""

import logging
from collections.abc import Iterable
from itertools import islice
from math import inf

import msgspec

from emberline.engine import token_rules
from emberline.engine.grammar import masks as masking
from emberline.engine.scheduler.admission import AdmissionPolicy
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import Guides, Masks, Row, Sampled, StepPlan
from emberline.engine.scheduler.prefill_policy import (
    NO_TARGET,
    DecodingSequences,
    PrefillPolicy,
    StepWork,
    TokenBudget,
)
from emberline.engine.scheduler.queues import BatchYielding, PreemptionPolicy, Queues, by_rank, n_batch
from emberline.engine.scheduler.sequence import NO_SLOT, Sequence
from emberline.engine.transfer.coordinator import TransferCoordinator
from emberline.kv.cache import KVCache
from emberline.kv.transfer.notices import TransferPort
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, ErrorInfo, Internal
from emberline.protocol.events import FinishReason, TokenDelta, TokenLogprobs
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest, Priority
from emberline.protocol.token_ids import pack

LONG_QUEUE = 16_384  # waiting tokens beyond which the latency target is relaxed in favor of throughput

_log = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over one KVCache.

    The tokens of a step go to decoding sequences first, one each, then to prompts in chunks, by rank: priority class,
    then arrival. Policies decide how large a chunk is, which waiting sequence is admitted, and which running one gives
    way when slots or blocks run out.
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
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._next_deadline_s = inf
        self._decoding = DecodingSequences()
        self._none_passed = [0] * len(cache.groups)
        self._totals = EngineLoad(kv_total_blocks=cache.n_total)
        self._queues = Queues(limits.max_running)
        self._transfers = TransferCoordinator(cache, transfers, fingerprint)
        self._admission = AdmissionPolicy(cache, self._queues, self._transfers, self._totals)
        self._prefill = prefill or TokenBudget()
        self._preemption = PreemptionPolicy()
        self._batch_class = BatchYielding()

    @property
    def busy(self) -> bool:
        return bool(self._by_number) or self._transfers.busy

    @property
    def blocked(self) -> bool:
        """Busy, but nothing can be computed before a grammar is compiled or a transfer advances."""
        n_compiling = sum(not seq.in_transfer for seq in self._compiling)
        return self.busy and not self._queues.running and len(self._queues.waiting) == n_compiling

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
        """Before a plan: deadlines, progress of KV transfers, compiled grammars. Ends sequences that failed."""
        return self._expire(now_s) + self._poll_transfers(now_s) + self._bind_grammars()

    def plan(self) -> StepPlan:
        plan, queues = StepPlan(), self._queues
        self._batch_class.promote(queues, self._by_number.values(), self._totals.steps)
        self._displace()
        paused = self._batch_class.pauses(queues)
        prefills = []
        self._decoding = DecodingSequences()
        for seq in tuple(queues.running):
            if seq.slot == NO_SLOT or (paused and seq.effective_class == Priority.BATCH):
                continue  # preempted for one before it, or yields
            n_due = seq.n_due
            if not n_due:
                continue  # a prefill-only sequence that is planned to its end
            if n_due > 1:
                prefills.append(seq)
                continue
            self._decoding.add(seq)
            if not seq.n_sampling or _can_run_ahead(seq):
                self._add_row(plan, seq, 1)
        self._plan_prefills(plan, prefills)
        if plan.rows:
            self._totals.steps += 1
        return plan

    def needs_masks(self, plan: StepPlan) -> bool:
        """Whether a grammar restricts what the plan samples."""
        by_number = self._by_number
        return self._grammars is not None and any(
            by_number[row.number].guide is not None for row in plan.rows if row.samples
        )

    def masks(self, plan: StepPlan) -> Masks | None:
        """What the grammars of the plan's rows allow next; None when no row has one."""
        return masking.masks(plan, self._by_number, self.limits.eos_ids)

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
        deltas = []
        self._admission.done(plan)
        samples, by_number = iter(sampled), self._by_number
        for row in plan.rows:
            sample = next(samples) if row.samples else None
            seq = by_number.get(row.number)
            if seq is None or seq.admission != row.admission:
                continue
            seq.n_sampling -= row.samples
            if seq.failure is not None:
                deltas.append(self._fail(seq, seq.failure))
                continue
            if sample is not None and sample.token_id < 0:
                self.cache.discard(seq.table)
                deltas.append(self._fail(seq, Internal("the model produced invalid numbers")))
                continue
            if (n_blocks := row.end // BLOCK_TOKENS) > seq.table.n_published:
                seq.extend_keys(n_blocks)
                self.cache.publish(seq.table, seq.keys, n_blocks)
            if sample is not None:
                deltas.append(self._take_sample(seq, sample))
            elif seq.prefill_only:
                deltas += self._send_kv(seq, row.end)
        return deltas

    def fail(self, plan: StepPlan, error: EmberlineError) -> list[TokenDelta]:
        """The step could not be computed: its requests end with the error, all others go on."""
        self._admission.done(plan)
        found = [seq for row in plan.rows if (seq := self._by_number.get(row.number)) is not None]
        return [self._fail(seq, error) for seq in found]

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

    def _bind_grammars(self) -> list[TokenDelta]:
        """Take the grammars that are compiled now. Sequences whose grammar failed end."""
        deltas = []
        for seq in [seq for seq in self._compiling if seq.pending_guide is not None and seq.pending_guide.ready]:
            assert seq.pending_guide is not None
            try:
                token_rules.bind(seq, seq.pending_guide.guide())
            except EmberlineError as error:
                deltas.append(self._fail(seq, error))
            except Exception:
                _log.exception("a grammar cannot be followed", extra={"request_id": seq.id})
                deltas.append(self._fail(seq, Internal(masking.GRAMMAR_FAILED)))
            else:
                seq.pending_guide = None
                self._compiling.remove(seq)
        return deltas

    # --- planning ---------------------------------------------------------------------------------------------------

    def _displace(self) -> None:
        """Let waiting sequences of a better class take the place of running ones of a worse class."""
        while (pair := self._preemption.displaced(self._queues)) is not None:
            first, last = pair
            if self._queues.free_slots and self._admission.fits(first, self._admission.match(first)):
                return
            self._preempt(last)

    def _plan_prefills(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Spend the rest of the token budget on prompts by rank, whether they are running or still waiting."""
        queues, full = self._queues, bool(plan.n_preempted)
        if queues.waiting and queues.free_slots and not full:
            waiting = islice(queues.admissible(), 2 * self.limits.max_running)
            prefills = sorted([*prefills, *waiting], key=by_rank)
        work = StepWork(self._decoding.n)
        budget = self._prefill.step_tokens(
            plan.n_tokens, self.limits.token_budget, lambda: self._n_untargeted(plan, prefills)
        )
        for seq in prefills:
            if full and seq.slot == NO_SLOT:
                continue
            left = self._chunk(work, seq, budget - plan.n_tokens)
            if left <= 0:
                return
            if seq.slot == NO_SLOT:
                full = bool(plan.n_preempted) or not self._admission.try_admit(plan, seq)
                if seq.slot == NO_SLOT:
                    continue
            start, n = seq.n_computed, seq.n_tokens - seq.n_computed
            if n > left:
                n = self._prefill.align(work, start, left)
            if self._add_row(plan, seq, n):
                work.add(n, seq.n_computed)
                keys = seq.keys[start // BLOCK_TOKENS : seq.n_computed // BLOCK_TOKENS]
                self._admission.computes(plan, keys)

    def _chunk(self, work: StepWork, seq: Sequence, left: int) -> int:
        """Tokens that the step may compute of the sequence's prompt, of those that its budget has left."""
        if left <= 0:
            return 0
        limit_s = self._batch_class.prefill_limit_s(seq, self._totals.steps)
        return self._prefill.chunk(work, seq.n_computed, left, self._slack(seq), limit_s)

    def _n_untargeted(self, plan: StepPlan, prefills: list[Sequence]) -> int:
        """Tokens of the step's prompts that no latency target applies to."""
        n, slots = 0, len(self._queues.free_slots)
        for seq in prefills:
            slots -= seq.slot == NO_SLOT
            if slots < 0 or plan.n_tokens + n >= self.limits.token_budget:
                break
            if self._slack(seq) >= NO_TARGET:
                n += seq.n_tokens - self._admission.n_known(seq)
        return n

    def _slack(self, seq: Sequence) -> float:
        """Multiple of the latency target that a step may take for the sequence's prompt.

        The target protects decoding sequences from prompts that come after them. Prompts that arrived together are
        computed in full steps: the first replies wait for the last prompts, and all are done sooner. Not so a prompt
        that takes many steps, nor one that waited because of its class.
        """
        if self._decoding.first_step == inf:
            return inf
        if self._decoding.came_after(seq):
            waiting = seq.slot == NO_SLOT
            uncached = seq.n_tokens - self._admission.n_known(seq) if waiting else seq.n_uncached
            if uncached <= self.limits.token_budget:
                return inf
        return max(1.0, self._queues.waiting_tokens / LONG_QUEUE)

    def _add_row(self, plan: StepPlan, seq: Sequence, n: int) -> bool:
        """Plan the next n tokens of a running sequence. False: it was preempted itself."""
        start, end = seq.n_computed, seq.n_computed + n
        while (blocks := self.cache.grow(seq.table, start, end)) is None:
            victim = self._preemption.victim(self._queues.running, self._totals.steps)
            plan.n_preempted += 1
            self._preempt(victim)
            if victim is seq:
                return False
        samples = n == seq.n_due and not seq.prefill_only
        follows = seq.n_sampling > 0
        plan.rows.append(
            Row(
                number=seq.number,
                slot=seq.slot,
                start=start,
                token_ids=b"" if follows else bytes(memoryview(seq.ids)[4 * start : 4 * end]),
                blocks=blocks or None,
                passed=[held.n_passed for held in seq.table.groups] if self.cache.windowed else self._none_passed,
                samples=samples,
                banned=token_rules.banned(seq) if seq.request.sampling.min_tokens else (),
                admission=seq.admission,
                follows=follows,
            )
        )
        plan.n_tokens += n
        seq.n_computed = end
        seq.n_sampling += samples
        seq.planned_step = self._totals.steps
        if start < seq.n_prompt:
            self._totals.prompt_tokens += min(end, seq.n_prompt) - start
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to waiting, in its old rank. Its full blocks stay cached until others need the room."""
        self._leave_slot(seq)
        seq.n_computed = seq.n_sampling = 0
        self._totals.preemptions += 1
        self._queues.enqueue(seq, self._totals.steps)

    # --- after a step -----------------------------------------------------------------------------------------------

    def _take_sample(self, seq: Sequence, sample: Sampled) -> TokenDelta:
        logprob = sample.logprob if sample.logprob is not None else 0.0
        entry = TokenLogprobs(sample.token_id, logprob, sample.top)
        try:
            entries, finish = token_rules.take(seq, entry, self.limits.eos_ids)
            return self._append(seq, entries, finish)
        except Exception as error:
            if seq.guide is None:
                raise
            return self._fail(seq, masking.guide_failed(seq, error))

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
        return TokenDelta(seq.id, packed, None, seq.usage() if first else None, logprobs)

    def _send_kv(self, seq: Sequence, n_computed: int) -> list[TokenDelta]:
        """Send the computed blocks of a prefill-only sequence; with the last of them it gives up its slot."""
        self._transfers.outgoing.send(seq, seq.table.n_published)
        if n_computed == seq.n_tokens:
            self._leave_slot(seq)
            seq.n_computed, seq.in_transfer = 0, True
        first = self._transfers.outgoing.is_first_report(seq)
        return [TokenDelta(seq.id, usage=seq.usage())] if first else []

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
        self._batch_class.ended(seq, self._totals.steps)
        if seq.pending_guide is not None:
            self._compiling.remove(seq)
        if seq.slot != NO_SLOT:
            self._leave_slot(seq)
        elif not seq.in_transfer:
            self._queues.dequeue(seq)
        self._transfers.leave(seq)
        return TokenDelta(seq.id, token_ids, finish, seq.usage(), logprobs, error)

    def _leave_slot(self, seq: Sequence) -> None:
        self.cache.release(seq.table)
        self._queues.vacate(seq)


def _can_run_ahead(seq: Sequence) -> bool:
    """Whether its next token can be computed before the one in front of it was absorbed.

    Not while the thinking limit may insert other tokens; nor when that one is the last for sure. An end token shows
    one step late, and what was computed behind it is thrown away.
    """
    return not seq.limits_thinking and seq.n_sampling < seq.n_output_left
