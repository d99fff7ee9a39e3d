"""The scheduler: requests in, plans out, results absorbed. Pure Python: no torch, no I/O, no clock of its own."""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from math import inf
from operator import itemgetter
from struct import unpack
from typing import TypeVar

import msgspec

from emberline.engine.core import token_rules
from emberline.engine.core.admission import AdmissionPolicy
from emberline.engine.core.feature import Draws, Feature, Moments, Speculation
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Masks, Row, RowScores, Sampled, StepPlan, drawn_ids, merged_masks, n_accepted
from emberline.engine.core.planner import StepPlanner
from emberline.engine.core.prefill_policy import PrefillPolicy
from emberline.engine.core.queues import BatchYielding, Queues, n_batch
from emberline.engine.core.rank import OrderBox
from emberline.engine.core.sequence import NO_SLOT, Flag, Hold, Sequence, SequenceSnapshot
from emberline.kv.cache import KVCache
from emberline.kv.retention import Conversation
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, ErrorInfo, Internal, Unavailable
from emberline.protocol.events import (
    DraftUsage,
    FinishReason,
    PromptLogprobs,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import pack

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Feature)


class Scheduler:
    """Continuous batching over one KVCache.

    Owns the sequences from `submit` to their terminal delta. Which tokens a step computes is the planner's decision.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        fingerprint: str,
        features: Iterable[Feature] = (),
        prefill: PrefillPolicy | None = None,
        micro_batches: int = 1,
        planner: type[StepPlanner] = StepPlanner,
    ) -> None:
        assert limits.context_len <= cache.capacity, "a lone sequence must be able to reach the end of its context"
        self.limits = limits
        self.cache = cache
        self.n_submitted = 0
        self.fingerprint = fingerprint
        self.features = tuple(features)
        self._moments = Moments(self.features)
        self._transfers_kv = any(feature.transfers_kv for feature in self.features)
        self._deltas: list[TokenDelta] = []  # of the step so far
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._ended: OrderedDict[str, Conversation] = OrderedDict()  # of the last requests, which may have called tools
        self._absorbed: list[Sequence] = []  # that had rows in steps absorbed since `catch_up`
        self._next_deadline_s = inf
        self._totals = EngineLoad(kv_total_blocks=cache.n_total)
        self.orders = OrderBox()
        self.order = self.orders.add
        self.queues = Queues(limits.max_running, cache)
        self.admission = AdmissionPolicy(cache, self.queues, self._totals, limits.work, self._moments)
        self._batch_class = BatchYielding(limits.work)
        self.speculation = next((each for each in self.features if isinstance(each, Speculation)), None)
        self._planner = planner(
            cache,
            limits,
            self.queues,
            self.admission,
            prefill or PrefillPolicy(),
            self._batch_class,
            self._totals,
            self.speculation,
            micro_batches,
        )
        for feature in self.features:
            feature.attach(self)

    def feature(self, kind: type[F]) -> F:
        """The feature of this class. Raises LookupError if the engine does not have it."""
        for feature in self.features:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"this engine has no {kind.__name__}")

    @property
    def busy(self) -> bool:
        """True if there are sequences, or a feature still has work."""
        return bool(self._by_number) or any(busy() for busy in self._moments.busy)

    @property
    def blocked(self) -> bool:
        """True if it is busy, but nothing can be computed before a grammar is compiled or a transfer advances."""
        if not self.busy or self.queues.running or self.has_work:
            return False
        return all(seq.holds & Hold.GRAMMAR for seq in self.queues.waiting)

    @property
    def has_notices(self) -> bool:
        """True if a feature has notices to handle."""
        return any(has_notices() for has_notices in self._moments.has_notices)

    @property
    def has_work(self) -> bool:
        """True if the next step has something to do for a feature, though there may be nothing to compute."""
        return any(has_work() for has_work in self._moments.has_work)

    @property
    def wake_s(self) -> float:
        """While blocked: when a step is due even if no notice comes."""
        return min([self._next_deadline_s, *(wake_s() for wake_s in self._moments.wake_s)])

    @property
    def report_s(self) -> float:
        """Time at which a load report is due though no step was made; inf if nothing has changed."""
        return min((report_s() for report_s in self._moments.report_s), default=inf)

    @property
    def runs_jobs_alone(self) -> bool:
        """True if all running sequences are of batch class."""
        running = self.queues.running
        return bool(running) and n_batch(running) == len(running)

    def snapshot(self) -> list[SequenceSnapshot]:
        """Every sequence as plain data: running ones first, then waiting ones, each by rank."""
        listed = [*self.queues.running, *self.queues.waiting]
        others = [seq for seq in self._by_number.values() if seq.is_parked]
        return [seq.snapshot() for seq in [*listed, *others]]

    def load(self) -> EngineLoad:
        load, queues = msgspec.structs.replace(self._totals), self.queues
        load.running, load.running_batch = len(queues.running), n_batch(queues.running)
        load.waiting, load.waiting_batch = len(queues.waiting), n_batch(queues.waiting)
        load.waiting_tokens = queues.waiting_tokens + queues.prefill_tokens
        load.kv_used_blocks = self.cache.n_used
        for report in self._moments.report:
            report(load)
        return load

    def purge(self, owner: bytes | None, session: bytes) -> int:
        """Forget what the device pool has cached of an owner, of one of its sessions, or (None) of all. Returns the
        number of blocks. Sequences that run keep their blocks, which are not found by others any more.

        Features forget all that they remember of the owner: they do not tell sessions apart."""
        for purged in self._moments.purged:
            purged(owner)
        return self.cache.purge(owner, session)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accept a request, which from now on ends in exactly one terminal delta; or raise why not."""
        if request.id in self._by_id:
            raise BadInput(f"request id {request.id!r} is in use", param="id")
        self.limits.check(request)
        if (request.push is not None or request.awaits) and not self._transfers_kv:
            raise Unavailable("this engine does not transfer KV", param="transfer")
        for check in self._moments.check:
            check(request)
        seq = Sequence(
            request, self.n_submitted, self.limits, self.fingerprint, self.cache.table(), self.queues.rows, now_s
        )
        seq.arrival_step = self._totals.steps
        seq.set_flag(Flag.THINKING, token_rules.limits_thinking(seq))
        self.n_submitted += 1
        self._by_id[request.id] = self._by_number[seq.number] = seq
        if seq.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, seq.deadline_s)
        for enter in self._moments.enter:
            enter(seq, now_s)
        if not seq.is_parked:
            self.admission.enqueue(seq)

    def abort(self, request_id: str) -> TokenDelta | None:
        """The terminal delta, or None when there is no such request (any more)."""
        seq = self._by_id.get(request_id)
        return None if seq is None else self._end(seq, "cancelled")

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return [self._fail(seq, error) for seq in tuple(self._by_number.values())]

    def called_tools(self, request_id: str) -> None:
        """The reply of a sequence that has ended was tool calls. Unknown ids are of no conversation that is kept."""
        if (conversation := self._ended.pop(request_id, None)) is not None:
            self.cache.retention.ended_with_tool_calls(conversation)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tell features what tokens stand for."""
        for learn in self._moments.learn:
            learn(vocabulary)

    # --- one step ---------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, device_waits: bool = False) -> list[TokenDelta]:
        """Before a plan: end sequences that are late, and let features advance. device_waits: what the plan does not
        depend on is left to `catch_up`."""
        self.admission.now_s = self.cache.retention.now_s = now_s
        self._batch_class.advance(self.queues, now_s)
        if now_s >= self._next_deadline_s:
            self._expire(now_s)
        for advance in self._moments.advance:
            advance(now_s, device_waits)
        return self._take_deltas()

    def set_prefill_rate(self, tokens_per_s: float) -> None:
        """Set the measured rate of prefill in prompt tokens per second."""
        self.admission.tokens_per_s = tokens_per_s

    def plan(self) -> StepPlan:
        self.admission.look_up()
        for before_plan in self._moments.before_plan:
            before_plan()
        plan = self._planner.plan(self.cache.fence.next_step())
        if plan.others or plan.depth:  # columns are complete
            for planned in self._moments.planned:
                planned(plan)
        return plan

    def masks(self, plan: StepPlan) -> Masks | None:
        """Masks of the plan's draws, after its launch. Returns None if no draw has one."""
        return merged_masks([found for masks in self._moments.masks if (found := masks(plan)) is not None])

    def launched(self, plan: StepPlan) -> None:
        """While the device is busy: hash the blocks that the plan computes, and the one behind them."""
        if plan.n_tokens - plan.n_drafts == plan.n_rows:
            return
        for row in plan.others:
            if len(row.token_ids) > 4 and (seq := self._by_number.get(row.number)) is not None:
                first, end = row.start // BLOCK_TOKENS, row.end // BLOCK_TOKENS
                seq.extend_keys(end + 1)
                self.admission.computes(plan, seq.keys[first:end])

    def absorb(self, plan: StepPlan, sampled: Many[Sampled]) -> list[TokenDelta]:
        """Take in the result of a step, as far as the next plan depends on it: `catch_up` does the rest. Rows of
        sequences that ended meanwhile are ignored."""
        self.admission.done(plan)
        self._planner.succeeded()
        guided: Draws = []
        for row, first in self._absorb_columns(plan, sampled):
            self._absorb_row(row, sampled, first, guided)
        if guided:
            for absorb in self._moments.absorb:
                absorb(guided)
        return self._take_deltas()

    def _absorb_columns(self, plan: StepPlan, sampled: Many[Sampled]) -> Iterable[tuple[Row, int]]:
        """Take in the draws of rows that were planned as columns. Returns the rows to take in one by one, and the index
        of the first draw of each."""
        queues, drawn, n = self.queues, drawn_ids(sampled), len(plan.columns)
        firsts, columns = plan.first_draws() if plan.others else ([], range(n))
        if not n:
            return zip(plan.others, firsts)
        ids = [drawn[at] for at in columns] if plan.others else drawn
        stops = None
        if not queues.stop_ids.keys().isdisjoint(ids):
            stops = bytes(map(queues.stop_ids.__contains__, ids))
        packed, (left, full) = queues.rows.take_in(plan.columns.cells, ids, stops, ~Flag.NO_DRAFTS)
        slots, tokens = plan.columns.slots, list(unpack("4s" * n, packed))
        self._absorbed += [queues.by_slot[slots[place]] for place in full]
        for place in reversed(left):
            del slots[place], tokens[place]
        self._deltas += map(TokenDelta, map(queues.request_ids.__getitem__, slots), tokens)
        self._totals.output_tokens += len(slots)
        if not left:
            return zip(plan.others, firsts)
        rows = zip(left, plan.columns.rows(left), (columns[place] for place in left))
        found = [(place + 0.5, row, first) for place, row, first in rows]
        found += zip(plan.before, plan.others, firsts)
        return [(row, first) for _, row, first in sorted(found, key=itemgetter(0))]

    def _absorb_row(self, row: Row, sampled: Many[Sampled], first: int, guided: Draws) -> None:
        """Take in the draws of one row; those of a guided sequence join `guided`."""
        seq = self.sequence_of(row)
        if seq is None:
            return
        if seq.flags & Flag.SUSPECT:
            seq.set_flag(Flag.SUSPECT, False)
        self._absorbed.append(seq)
        if not row.samples:
            seq.n_done = row.end
            self.admission.publish(seq)
            if not seq.samples:
                for computed in self._moments.computed:
                    computed(seq, row.end)
            return
        seq.n_sampling -= 1
        draws = sampled[first : first + row.n_draws]
        drawn = drawn_ids(draws)
        if drawn[0] < 0:
            seq.n_done = 0
            for discarded in self._moments.discarded:
                discarded(seq)
            self.cache.discard(seq.table)
            self.fail(seq, Internal("the model produced invalid numbers"))
            return
        seq.n_done = seq.n_tokens if row.n_ahead else row.end
        if len(row.token_ids) > 4:  # of a prompt: others may wait for its blocks
            self.admission.publish(seq)
        n = self._verify(seq, row.draft_ids, drawn) if row.draft_ids else 0
        if not seq.flags and seq.n_tokens + n + 1 < seq.most_tokens and seq.stop_ids.isdisjoint(drawn[: n + 1]):
            self._deltas.append(self._append(seq, drawn[: n + 1], (), None, n))  # the common case: all joins the output
        elif seq.flags & Flag.GUIDED:
            guided.append((seq, list(draws[: n + 1])))
        else:
            entries, finish, n = token_rules.take_run(seq, list(draws[: n + 1]))
            self._deltas.append(self._append(seq, [entry.token_id for entry in entries], entries, finish, n))

    def catch_up(self) -> None:
        """At the end of a step, while the device computes the next one: what no plan has to wait for. Full blocks of
        replies are published, as far as steps have computed them that were absorbed."""
        self.admission.publish(*dict.fromkeys(self._absorbed))
        self._absorbed.clear()
        for catch_up in self._moments.catch_up:
            catch_up()

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """An absorbed step took so long, from the end of the one before it."""
        if self.speculation is not None:
            self.speculation.measured(plan, seconds)

    def take_drafts(self, plan: StepPlan, sampled: Many[Sampled], drafts: Iterable[bytes]) -> None:
        """Before `absorb`: what a draft head proposes behind the last token that each sampling row has drawn."""
        drafts = list(drafts)
        plan.depth = max((len(ids) >> 2 for ids in drafts), default=0)  # a runner may have left out its head
        if self.speculation is not None:
            self.speculation.take_drafts(plan, sampled, drafts)

    def take_scores(self, plan: StepPlan, scores: Many[RowScores]) -> None:
        """Before `absorb`: log-probabilities of prompt tokens, for the features that asked for them."""
        for scored in self._moments.scored:
            scored(plan, scores)

    def retry(self, plan: StepPlan, error: EmberlineError) -> list[TokenDelta]:
        """The step could not be computed: its sequences are computed again; the one that it fails for ends."""
        self.admission.done(plan)
        failed = [seq for row in plan.rows if (seq := self.sequence_of(row)) is not None]
        offender = self._planner.retry(failed, only_these=len(failed) == plan.n_rows)
        if offender is not None:
            self.fail(offender, error)
        return self._take_deltas()

    # --- before a plan ----------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        """End the sequences whose deadline is over."""
        timed = [(seq, seq.deadline_s) for seq in self._by_number.values() if seq.deadline_s is not None]
        self._next_deadline_s = min((deadline_s for _, deadline_s in timed if deadline_s > now_s), default=inf)
        for seq, deadline_s in timed:
            if deadline_s <= now_s:
                error = DeadlineExceeded(f"the request did not finish within its {seq.request.deadline_s:g} s")
                self.fail(seq, error)

    # --- after a step -----------------------------------------------------------------------------------------------

    def _verify(self, seq: Sequence, draft_ids: bytes, drawn: list[int]) -> int:
        """How many of a row's drafts count, given its draws."""
        n_drafts, n = len(drawn) - 1, n_accepted(drawn, draft_ids)
        seq.n_drafting -= n_drafts
        if self.speculation is not None:
            self.speculation.verified(seq, n_drafts, n)
        return n

    # --- for features -----------------------------------------------------------------------------------------------

    def has(self, seq: Sequence) -> bool:
        """True if the sequence has not ended."""
        return seq.number in self._by_number

    def sequence_of(self, row: Row) -> Sequence | None:
        """The sequence of a planned row. Returns None if it has left its slot since."""
        seq = self.queues.by_slot.get(row.slot)
        return seq if seq is not None and seq.admission == row.admission else None

    def park(self, seq: Sequence, hold: int) -> None:
        """Take a running or waiting sequence out of its queue, with its slot and blocks, until `unpark`."""
        seq.holds |= hold
        if seq.slot == NO_SLOT:
            self.queues.dequeue(seq)
        else:
            self.admission.release(seq)

    def unpark(self, seq: Sequence, hold: int) -> None:
        """Let a parked sequence wait again."""
        seq.holds &= ~hold
        self.admission.enqueue(seq)

    def tell_usage(self, seq: Sequence) -> None:
        """Tell the client what was cached of a sequence that does not sample."""
        self._deltas.append(TokenDelta(seq.id, usage=self._usage(seq), waited_s=seq.waited_s))

    def tell_prompt(self, seq: Sequence, logprobs: PromptLogprobs) -> None:
        """Tell the client the log-probabilities of the next tokens of its prompt."""
        self._deltas.append(TokenDelta(seq.id, prompt_logprobs=logprobs))

    def end(self, seq: Sequence, finish: FinishReason) -> None:
        """End a sequence without more tokens."""
        self._deltas.append(self._end(seq, finish))

    def append(self, seq: Sequence, entries: Many[Sampled], finish: FinishReason | None, n_accepted: int) -> None:
        """Add tokens to the output of a sequence, and end it if `finish` says why. n_accepted: drafts among them."""
        if seq.slot == NO_SLOT:  # preempted meanwhile: what was computed is given up
            self.queues.waiting_tokens += len(entries)
            n_accepted = 0
        self._absorbed.append(seq)
        self._deltas.append(self._append(seq, [entry.token_id for entry in entries], entries, finish, n_accepted))

    def fail(self, seq: Sequence, error: EmberlineError) -> None:
        """End a sequence with an error."""
        self._deltas.append(self._fail(seq, error))

    def preempt(self, seq: Sequence) -> None:
        """Take the slot of a running sequence, which waits again; ignore what steps in flight sample for it."""
        self._planner.preempt(seq)

    def _take_deltas(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _append(
        self,
        seq: Sequence,
        ids: list[int],
        entries: Many[Sampled],
        finish: FinishReason | None,
        n_accepted: int,
    ) -> TokenDelta:
        """Add tokens to the output. entries: the same tokens as they were drawn, where their probabilities are wanted.
        n_accepted: drafts among them, whose KV is in the table."""
        packed = pack(ids)
        first = seq.flags & Flag.NEW != 0
        if first:
            seq.first_token_step = self._totals.steps
            seq.set_flag(Flag.NEW, False)
        seq.extend(packed)
        if n_accepted:
            seq.n_computed += n_accepted
            seq.n_done += n_accepted
        self._totals.output_tokens += len(ids)
        logprobs = [_entry(entry) for entry in entries] if entries and seq.flags & Flag.LOGPROBS else None
        if finish is not None:
            return self._end(seq, finish, packed, logprobs)
        if first:
            return TokenDelta(seq.id, packed, None, self._usage(seq), logprobs, None, seq.waited_s)
        usage = self._usage(seq) if seq.flags and seq.flags & Flag.DRAFT_REPORTS else None
        return TokenDelta(seq.request.id, packed, None, usage, logprobs)

    def _usage(self, seq: Sequence, partial: bool = False) -> Usage:
        """Token counts of a sequence, with those of drafts if its request asks for them."""
        if not seq.flags & Flag.DRAFT_REPORTS:
            return seq.usage(partial=partial)
        return seq.usage(DraftUsage(0, 0) if self.speculation is None else self.speculation.usage(seq), partial)

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
        self.admission.publish(seq)
        del self._by_id[seq.id], self._by_number[seq.number]
        self._batch_class.ended(seq)
        self._end_turn(seq)
        if seq.slot != NO_SLOT:
            self.admission.release(seq)
        elif not seq.is_parked:
            self.queues.dequeue(seq)
        usage = self._usage(seq, partial=finish in ("cancelled", "error"))
        for leave in self._moments.leave:
            leave(seq)
        return TokenDelta(seq.id, token_ids, finish, usage, logprobs, error)

    def _end_turn(self, seq: Sequence) -> None:
        """Tell retention, before the blocks of the sequence are released."""
        request, conversation = seq.request, seq.table.conversation
        if conversation is None:
            return
        keys = seq.keys[: max(seq.table.n_published, seq.n_prompt // BLOCK_TOKENS)]
        self.cache.retention.end(conversation, keys, request.cache_ttl_s, request.session_final)
        self._ended[seq.id] = conversation
        if len(self._ended) > self.limits.work.ended_requests:
            self._ended.popitem(last=False)


def _entry(sample: Sampled) -> TokenLogprobs:
    return TokenLogprobs(sample.token_id, sample.logprob if sample.logprob is not None else 0.0, sample.top)
