"""The plan of one step: decoding sequences first, then prompts in chunks, by rank."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import islice
from math import inf

import numpy as np

from emberline.engine.core import token_rules
from emberline.engine.core.admission import AdmissionPolicy
from emberline.engine.core.feature import Draft, Speculation
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Columns, Row, StepPlan
from emberline.engine.core.prefill_policy import (
    MAX_DRAFTS,
    NO_TARGET,
    DecodingSequences,
    PrefillBurst,
    PrefillPolicy,
    StepWork,
)
from emberline.engine.core.queues import (
    BATCH_DECODE_S,
    BatchYielding,
    PreemptionPolicy,
    Queues,
    Selection,
    by_rank,
    n_batch,
)
from emberline.engine.core.rows import Cell, Rows
from emberline.engine.core.sequence import NO_SLOT, Flag, Sequence
from emberline.kv.cache import KVCache
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import Priority

MAX_RETRY_TOKENS = 1024  # of a step that retries; on a GPU it fits a CUDA graph, which allocates nothing
LONG_QUEUE = 16_384  # waiting tokens beyond which the latency target is relaxed in favor of throughput
ROOMY_SHARE = 4  # draft tokens for each row of a step, from which on a row may have twice its share
_NO_DRAFTS = Flag.SLOW | Flag.PREFILL_ONLY | Flag.NO_DRAFTS | Flag.SUSPECT  # flags of sequences that draft nothing
# Flags of sequences whose draws the host must know.
_NOT_ON_DEVICE = Flag.GUIDED | Flag.MASKED | Flag.BANS | Flag.THINKING
_NOT_AHEAD = Flag.AWAITS_LAST | Flag.SLOW  # flags of sequences whose last token must be known first
_BATCH = Priority.BATCH  # asked of every row: a lookup in a class takes longer than all else that is


class StepPlanner:
    """Asks the policies: how large a chunk is, which waiting sequence is admitted, which running one gives way."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        queues: Queues,
        admission: AdmissionPolicy,
        prefill: PrefillPolicy,
        batch_class: BatchYielding,
        totals: EngineLoad,
        speculation: Speculation | None = None,
        micro_batches: int = 1,
    ) -> None:
        """micro_batches: steps in flight that have different sequences, one for each stage of a pipeline."""
        self._speculation = speculation
        self._micro_batches = micro_batches
        self._n_in_flight = 0  # steps
        self._cache = cache
        self._limits = limits
        self._queues = queues
        self._admission = admission
        self._prefill = prefill
        self._batch_class = batch_class
        self._preemption = PreemptionPolicy()
        self._totals = totals
        self._decoding = DecodingSequences()
        self._burst = PrefillBurst(limits.work)
        self._backlog = 0  # prompt tokens to compute, of running and waiting sequences
        self._n_suspects = 0  # sequences in the step being planned that it may fail for
        self._max_suspects = inf
        self._most_drafts = 0  # of the step being planned
        self._runs_ahead = False  # all drafts of it are the device's own
        self._n_columns = 0  # plain rows before the row being planned
        self._none_passed = [0] * len(cache.groups)

    def plan(self, number: int) -> StepPlan:
        """The next step, of the given number. It may have no rows."""
        plan, queues, speculation = StepPlan(number=number), self._queues, self._speculation
        if speculation is not None:
            plan.depth = speculation.begin_step(len(queues.running))
            self._runs_ahead = speculation.runs_ahead
        if queues.waiting:
            self._batch_class.promote(queues, self._totals.steps)
            self._displace()
        paused = self._batch_class.pauses(queues)
        most_decodes = self._prefill.n_decodes(BATCH_DECODE_S) if self._batch_class.is_limited and not paused else inf
        resting = self._batch_class.resting(queues, most_decodes) if most_decodes < inf else ()
        running, rows, n_last = tuple(queues.running), queues.rows, n_batch(queues.running) if paused or resting else 0
        rows.find(queues.order, ~Flag.PLAIN)
        if n_last:
            rows.plain[-n_last:], rows.n_plain = False, 0
        most_rows = self._micro_batch_rows(rows) if self._micro_batches > 1 else inf
        drafts: Mapping[int, Draft] = {}
        if speculation is not None:
            self._most_drafts = self._count_most_drafts(rows)
            if self._most_drafts and speculation.drafts and not rows.common_flags & Flag.NO_DRAFTS:
                may_draft = self._all_that_may_draft(rows, running)
                drafts = speculation.draft(may_draft) if len(may_draft) else {}
        prefills, decoding = list[Sequence](), list[int]()
        self._n_suspects = 0
        for place, n_columns in self._settle(rows, running, drafts):
            seq, self._n_columns = running[place], n_columns
            if rows.plain[place]:
                self._grow(seq)
            elif seq.slot == NO_SLOT or (paused and place >= len(running) - n_last):
                continue  # preempted for one before it, or yields
            elif seq.n_due > 1 and not self._is_short(plan, seq):
                prefills.append(seq)
            else:
                decoding.append(place)
                if seq.number not in resting:
                    self._plan_decode(plan, seq, drafts.get(seq.number), most_rows)
        plan.columns = Columns(rows.plan(number))
        plan.n_tokens += rows.n_plain
        self._n_columns = rows.n_plain
        if prefills or queues.waiting:
            decoding = sorted([*decoding, *np.flatnonzero(rows.plain).tolist()])
            self._plan_prefills(plan, prefills, [running[place] for place in decoding])
        if plan.n_rows:
            self._totals.steps += 1
            self._n_in_flight += 1
        return plan

    def _plan_decode(self, plan: StepPlan, seq: Sequence, draft: Draft | None, most_rows: float) -> None:
        """Plan the next row of a sequence that decodes and is not plain, unless it has to wait."""
        if seq.n_drafting and not (self._most_drafts and self._can_draft_ahead(seq)):
            return
        if most_rows < inf and (seq.n_sampling or len(plan.others) + self._n_columns >= most_rows):
            return  # it is in another micro-batch, or will be in the next one
        if (not seq.n_sampling or _can_run_ahead(seq)) and not (seq.suspicion and self._holds_back(seq)):
            n_due = seq.n_due
            draft_ids = b"" if draft is None else self._take_draft(plan, seq, n_due, draft)
            self._add_row(plan, seq, n_due, n_due, draft_ids)

    def _settle(self, rows: Rows, running: Many[Sequence], drafts: Mapping[int, Draft]) -> list[tuple[int, int]]:
        """Decide which rows are planned all at once. Returns the places of those that are not, or need a block, and how
        many of those that are planned at once come before each."""
        if drafts:
            rows.plain[[place for place, seq in enumerate(running) if seq.number in drafts]] = False
        found = rows.settle()
        if not found:
            return found
        places, n_wanted = [place for place, _ in found], 0  # blocks that these rows may need
        for place, n_due in zip(places, rows.n_dues[places].tolist()):
            if n_due == 1 or n_due == running[place].n_appended + 1:
                n_wanted += (n_due + MAX_DRAFTS) // BLOCK_TOKENS + 2
        if n_wanted > min(group.pool.n_free for group in self._cache.groups):
            rows.plain[:] = False  # some sequence may have to give way, which depends on those planned before
            return rows.settle()
        if rows.n_plain == len(running) and not self._cache.windowed:
            rows.all_grown(places, self._cache.grow_all([running[place].table for place in places]))
            return []
        return found

    def _grow(self, seq: Sequence) -> None:
        """Give a plain row the block that it needs."""
        start = seq.n_computed
        blocks = self._cache.grow(seq.table, start, start + 1)
        assert blocks is not None, "the pool has room for all plain rows"
        self._queues.grown(seq)
        self._queues.rows.grown(self._n_columns, blocks)

    def _micro_batch_rows(self, rows: Rows) -> int:
        """Decoding sequences of the next micro-batch: an equal part of all, and not so many of those that are in none
        that too few are left for the others. Only these are plain."""
        free, n_left = rows.ranked(Cell.N_SAMPLING) == 0, max(1, self._micro_batches - self._n_in_flight)
        most = min(-(-len(free) // self._micro_batches), -(-int(np.count_nonzero(free)) // n_left))
        odd = free & ~rows.plain & ((rows.n_dues == 1) | (rows.ranked(Cell.FLAGS) & Flag.GUIDED != 0))
        rows.plain &= free & (not odd.any())  # else it depends on these rows how many may follow them
        rows.plain &= rows.plain.cumsum() <= most
        return most

    def _displace(self) -> None:
        """Let waiting sequences of a better class take the place of running ones of a worse class."""
        while (pair := self._preemption.displaced(self._queues)) is not None:
            first, last = pair
            if self._queues.free_slots and self._admission.fits(first):
                return
            self.preempt(last)

    def _plan_prefills(self, plan: StepPlan, prefills: list[Sequence], decoding: list[Sequence]) -> None:
        """Spend the rest of the token budget on prompts by rank, whether they are running or still waiting."""
        queues, full = self._queues, bool(plan.n_preempted)
        if queues.waiting and queues.free_slots and not full:
            waiting = islice(queues.admissible(), 2 * self._limits.max_running)
            prefills = sorted([*prefills, *waiting], key=by_rank)
        if not prefills:
            return
        self._decoding = DecodingSequences()
        for seq in decoding:
            self._decoding.add(seq)
        self._burst.prompts(self._totals.steps)
        self._backlog = queues.waiting_tokens + sum(seq.n_prefill for seq in prefills if seq.slot != NO_SLOT)
        work = StepWork(self._decoding.n, n_drafts=plan.n_drafts)
        budget = self._limits.token_budget
        if any(seq.suspicion == 2 for seq in prefills):
            budget = min(budget, max(MAX_RETRY_TOKENS, plan.n_tokens + BLOCK_TOKENS))
        limit = self._prefill.step_limit(plan.n_tokens, budget, lambda most: self._n_untargeted(plan, prefills, most))
        last_row = len(plan.others) + limit.n_prompts
        for seq in prefills:
            if (full and seq.slot == NO_SLOT) or self._holds_back(seq):
                continue
            left = self._chunk(work, seq, limit.n_tokens - plan.n_tokens)
            if left <= 0 or len(plan.others) >= last_row:
                return
            if seq.slot == NO_SLOT:
                full = bool(plan.n_preempted) or not self._admission.try_admit(plan, seq)
                if seq.slot == NO_SLOT:
                    continue
            start, n = seq.n_computed, seq.n_tokens - seq.n_computed
            if n > left:
                n = self._prefill.align(work, start, left)
            if seq.flags & Flag.IMAGES and (n := self._admission.chunk(plan, seq, n)) <= 0:
                continue
            if self._add_row(plan, seq, n, seq.n_due):
                work.add(n, seq.n_computed)
                keys = seq.keys[start // BLOCK_TOKENS : seq.n_computed // BLOCK_TOKENS]
                self._admission.computes(plan, keys)

    def _chunk(self, work: StepWork, seq: Sequence, left: int) -> int:
        """Tokens that the step may compute of the sequence's prompt, of those that its budget has left."""
        if left <= 0:
            return 0
        limit_s = self._batch_class.prefill_limit_s(seq)
        return self._prefill.chunk(work, seq.n_computed, left, self._slack(seq), limit_s)

    def _n_untargeted(self, plan: StepPlan, prefills: list[Sequence], most: float) -> int:
        """Tokens of the step's prompts, at most so many, that no latency target applies to."""
        n, slots = 0, len(self._queues.free_slots)
        for seq in prefills:
            slots -= seq.slot == NO_SLOT
            if slots < 0 or most <= 0 or plan.n_tokens + n >= self._limits.token_budget:
                break
            if self._slack(seq) >= NO_TARGET:
                most -= 1
                n += seq.n_tokens - self._admission.n_known(seq)
        return n

    def _slack(self, seq: Sequence) -> float:
        """Multiple of the latency target that a step may take for the sequence's prompt.

        The target protects decoding sequences from prompts that come after them. Prompts that arrived together, and
        those of one burst while many of them wait, are computed in full steps: the first replies wait for the last
        prompts, and all are done sooner. Not so a prompt that takes many steps, nor one that waited because of its
        class.
        """
        if self._decoding.first_step == inf:
            return inf
        many_wait = self._backlog >= self._limits.token_budget // 2
        if self._decoding.came_after(seq, self._burst.first_step if many_wait else seq.arrival_step):
            waiting = seq.slot == NO_SLOT
            uncached = seq.n_tokens - self._admission.n_known(seq) if waiting else seq.n_uncached
            if uncached <= self._limits.token_budget:
                return inf
        return max(1.0, self._queues.waiting_tokens / LONG_QUEUE)

    def _is_short(self, plan: StepPlan, seq: Sequence) -> bool:
        """True if the sequence decodes, and has a few tokens more than the sampled one: those its grammar forced."""
        n_more = seq.n_due - 1
        room = self._limits.token_budget - plan.n_tokens + len(plan.others) - len(self._queues.running)
        return seq.n_output > 1 and seq.n_appended == n_more <= room and self._prefill.drafts_beside_prompts

    def _count_most_drafts(self, rows: Rows) -> int:
        """Draft tokens that the step may have."""
        queues, prefill = self._queues, self._prefill
        if not prefill.drafts_beside_prompts and ((queues.waiting and queues.free_slots) or (rows.n_dues > 1).any()):
            return 0
        return prefill.most_drafts(len(queues.running))

    def _all_that_may_draft(self, rows: Rows, running: Many[Sequence]) -> Selection:
        """Sequences whose next row may have drafts: known before the rows of the step are."""
        slots, may_draft = rows.slots, rows.plain
        n_last = n_batch(self._queues.running) if self._batch_class.is_limited else 0
        if n_last or self._micro_batches > 1 or rows.n_plain < len(slots):
            may_draft = may_draft.copy()
            may_draft[len(slots) - n_last :] = False
            for place in np.flatnonzero(~may_draft).tolist():
                may_draft[place] = self._may_draft(running[place])
            slots = slots[may_draft]
        if rows.flags & Flag.NO_DRAFTS:
            slots = slots[rows.by_slot[Cell.FLAGS][slots] & Flag.NO_DRAFTS == 0]
        return self._queues.select(slots, rows.flags)

    def _may_draft(self, seq: Sequence) -> bool:
        """True if the sequence's next row may have drafts; asked of those that are not plain, or of the batch class."""
        if seq.n_due not in (1, seq.n_appended + 1) or seq.flags & _NO_DRAFTS:
            return False
        if (seq.n_drafting or (seq.n_sampling and self._runs_ahead)) and not self._can_draft_ahead(seq):
            return False
        return seq.effective_class != _BATCH or not self._batch_class.is_limited

    def _take_draft(self, plan: StepPlan, seq: Sequence, n_due: int, draft: Draft) -> bytes:
        """The drafts that the sequence's next row, of n_due tokens, verifies."""
        n_sampling = seq.n_sampling
        n_rows = len(self._queues.running) - len(plan.others) - self._n_columns  # this one and those after it
        # Its share of those that are left; where these are many, twice as many, as long as one is left for each row.
        left = self._most_drafts - plan.n_drafts
        share = -(-left // n_rows) if n_rows > 1 else left
        most = min(
            MAX_DRAFTS,
            share if share < ROOMY_SHARE else 2 * share,
            left - max(1, n_rows) + 1,
            seq.n_output_left - n_sampling - seq.n_drafting - 1,
            self._limits.token_budget - plan.n_tokens - self._n_columns - (n_due - 1) - n_rows,
        )
        if seq.limits_thinking and (limit := seq.request.thinking_limit) is not None:
            most = min(most, limit.most - seq.n_output - n_sampling - 1)
        draft_ids = draft.take(most) if most > 0 else b""
        return token_rules.evenly_banned(seq, draft_ids) if draft_ids and seq.flags & Flag.BANS else draft_ids

    def _can_draft_ahead(self, seq: Sequence) -> bool:
        """True if a row may have a position that only the device knows: what it samples depends on nothing else."""
        return self._runs_ahead and not (seq.flags & _NOT_ON_DEVICE or seq.suspicion)

    def _add_row(self, plan: StepPlan, seq: Sequence, n: int, n_due: int, draft_ids: bytes = b"") -> bool:
        """Plan the next n of a running sequence's n_due tokens. False: it was preempted itself, or has to wait."""
        n_ahead, n_sampling, n_drafts = seq.n_drafting, seq.n_sampling, len(draft_ids) >> 2
        lowest = seq.n_computed  # position of the first token, if no draft in flight is accepted: its window counts
        start, end = lowest + n_ahead, lowest + n_ahead + n
        if n_ahead and end + n_drafts - lowest > self._limits.token_budget:
            return False
        blocks = self._cache.grow(seq.table, lowest, end + n_drafts)
        if blocks is None and n_drafts:
            draft_ids, n_drafts = b"", 0
            blocks = self._cache.grow(seq.table, lowest, end)
        if blocks is None and n_ahead:
            return False
        while blocks is None:
            victim = self._preemption.victim(self._queues.running, plan.number)
            if victim is not seq or not self._admission.reclaim(seq):
                plan.n_preempted += 1
                self.preempt(victim)
                if victim is seq:
                    return False
            blocks = self._cache.grow(seq.table, lowest, end)
        flags = seq.flags
        samples = n == n_due and not (flags and flags & Flag.PREFILL_ONLY)
        follows = n_sampling > 0
        plan.before.append(self._n_columns)
        plan.others.append(
            Row(  # by position: keywords take as long as all else
                seq.number,
                seq.slot,
                start,
                b"" if follows else bytes(seq.ids[4 * start : 4 * end]),
                blocks or None,
                [held.n_passed for held in seq.table.groups] if self._cache.windowed else self._none_passed,
                samples,
                token_rules.banned(seq) if flags and flags & Flag.BANS else (),
                seq.admission,
                follows,
                draft_ids,
                n_ahead,
            )
        )
        if blocks or self._cache.windowed:
            self._queues.grown(seq)
        plan.n_tokens += n + n_drafts
        if n_drafts:
            plan.n_drafts += n_drafts
            plan.n_drafting += 1
            # A pipeline's next step has other sequences.
            plan.n_awaited += self._micro_batches == 1 and not self._can_draft_ahead(seq)
            seq.n_drafting = n_ahead + n_drafts
        seq.n_computed = lowest + n
        seq.n_sampling = n_sampling + samples
        seq.planned_step = plan.number
        self._n_suspects += seq.suspicion > 0
        if start < seq.n_prompt:
            self._totals.prompt_tokens += min(end, seq.n_prompt) - start
        return True

    def retry(self, failed: list[Sequence], only_these: bool) -> Sequence | None:
        """The step with these running sequences failed: they are preempted and computed again, in smaller steps.

        Each of them is suspect that no step has succeeded with yet, or all are. A step then has at most half as many
        suspects as the last one that failed, and twice as many again after every one that succeeds. Returns the only
        suspect of the step if it has been retried already: it is the reason, and is left to the caller. Not so unless
        the step had `only_these` sequences: others of it have failed in a step before, which it was launched behind.
        """
        self._n_in_flight -= 1
        suspects = [seq for seq in failed if seq.suspicion] or failed
        lone = suspects[0] if len(suspects) == 1 and only_these else None
        offender = lone if lone is not None and lone.suspicion == 2 else None
        for seq in suspects:
            seq.set_flag(Flag.FAILED, True)
        for seq in failed:
            if seq is not offender:
                self.preempt(seq)
        self._max_suspects = max(1, len(suspects) // 2)
        return offender

    def succeeded(self) -> None:
        """A step was absorbed."""
        self._n_in_flight -= 1
        if self._max_suspects < inf:
            doubled = 2 * self._max_suspects
            self._max_suspects = doubled if doubled < self._limits.max_running else inf

    def _holds_back(self, seq: Sequence) -> bool:
        return seq.suspicion > 0 and self._n_suspects >= self._max_suspects

    def preempt(self, seq: Sequence) -> None:
        """Back to waiting, in its old rank. Its full blocks stay cached until others need the room."""
        self._admission.release(seq)
        self._totals.preemptions += 1
        self._admission.enqueue(seq)


def _can_run_ahead(seq: Sequence) -> bool:
    """True if the sequence's next token can be computed before the one in front of it was absorbed.

    Not when that one decides whether the next would complete a bad word, or its grammar takes long to say what may
    follow; not when the thinking limit is reached with it, and may insert other tokens; nor when it is the last for
    sure. An end token shows one step late, and what was computed behind it is thrown away.
    """
    if seq.flags:
        if seq.flags & _NOT_AHEAD:
            return False
        limit = seq.request.thinking_limit if seq.flags & Flag.THINKING else None
        if limit is not None and seq.n_output + seq.n_sampling >= limit.most:
            return False
    return seq.n_sampling + seq.n_drafting < seq.n_output_left
