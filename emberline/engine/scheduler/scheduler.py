"""Who computes what in the next step. Pure Python: no torch, no I/O, no clock of its own."""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from math import inf
from operator import attrgetter

import msgspec

from emberline.engine import token_rules as drawing
from emberline.engine.gpu.shapes import TILE
from emberline.engine.grammar import masks as masking
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import Admission, Guides, Masks, Row, Sampled, StepPlan
from emberline.engine.scheduler.prefill_budget import OVERLOAD, PrefillBudget, Streams, Work
from emberline.engine.scheduler.sequence import WAITING, Sequence
from emberline.engine.transfer.coordinator import TransferCoordinator
from emberline.kv.cache import KVCache
from emberline.kv.transfer.notices import Transfers
from emberline.protocol import block_hash as blockhash
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, DeadlineExceeded, EmberlineError, ErrorInfo, Internal, Unavailable
from emberline.protocol.events import FinishReason, TokenDelta, TokenLogprobs
from emberline.protocol.frames import EngineLoad, Vocabulary
from emberline.protocol.request import EngineRequest, Priority
from emberline.protocol.token_ids import pack

POLITE_S = 0.02  # of prompts in a step with nothing but queued work: a request that arrives now waits for its end
QUIET_STEPS = 512  # without another's request: then queued work need not be polite
PAUSED_STEPS = 16  # in a row that queued work lets pass for the prompts of others
STARVED_STEPS = 1000  # that queued work waits for a place; then it is treated as others are

KEYS_AT_ONCE = 16  # of a prompt's blocks that are hashed for a look at the cache
LONG_QUEUE = 16_384  # waiting tokens, beyond which streams give some of their pace for throughput

_log = logging.getLogger(__name__)
_by_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching over one KVCache.

    A step's tokens go to sequences that need one more token (decode) first, then to those that need many, by rank:
    class, then arrival. When blocks run out, the running sequence of the last rank gives back what it holds and waits
    to be computed again. The first in rank therefore always advances, and so every sequence ends.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        fingerprint: str,
        grammars: Guides | None = None,
        pace: PrefillBudget | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        assert limits.context_len <= cache.capacity, "a lone sequence must be able to reach the end of its context"
        self.limits = limits
        self._cache = cache
        self._fingerprint = fingerprint
        self._traffic = None if transfers is None else TransferCoordinator(cache, transfers, fingerprint)
        self._grammars = grammars  # None: grammars are ignored
        self._pending: list[Sequence] = []  # those whose grammars are being compiled; they wait, too
        self._running: list[Sequence] = []  # by rank
        self._waiting: list[Sequence] = []  # by rank
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._free_slots = list(reversed(range(limits.max_running)))
        self._n_arrived = self._n_admitted = 0
        self._pace = pace
        self._computing: dict[int, set[bytes]] = {}  # content keys of blocks that a plan in flight computes, by plan
        self._next_deadline_s = float("inf")
        self._asked_step = -QUIET_STEPS  # when a request that is not queued work was last here
        self._n_paused = 0  # steps in a row that queued work let pass
        self._streams = Streams()
        self._none_passed = [0] * len(cache.groups)
        self._refused = (-1, -1)  # (number, n_releases) of the sequence that did not fit, and when
        self._totals = EngineLoad(kv_total_blocks=cache.n_total)

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def n_arrived(self) -> int:
        """Requests so far."""
        return self._n_arrived

    @property
    def busy(self) -> bool:
        return bool(self._by_number) or (self._traffic is not None and self._traffic.busy)

    @property
    def held_up(self) -> bool:
        """Nothing can be computed before a grammar is compiled, or KV has come or gone."""
        return self.busy and not self._running and len(self._waiting) == sum(not seq.away for seq in self._pending)

    @property
    def next_s(self) -> float:
        """When something is to be done even if nobody brings news; while a grammar is compiled, now."""
        if self._pending:
            return 0.0
        return min(self._next_deadline_s, float("inf") if self._traffic is None else self._traffic.next_s)

    def load(self) -> EngineLoad:
        load = msgspec.structs.replace(self._totals)
        load.running, load.waiting = len(self._running), len(self._waiting)
        load.waiting_batch = _n_batch(self._waiting)
        load.running_batch = _n_batch(self._running)
        load.waiting_tokens += sum(seq.n_prefill for seq in self._running)  # decoding ones: none
        load.kv_used_blocks = self._cache.n_used
        if self._traffic is not None:
            self._traffic.report(load)
        return load

    # --- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accept a request, which from now on ends in exactly one terminal delta; or raise why not."""
        if request.id in self._by_id:
            raise BadInput(f"request id {request.id!r} is in use", param="id")
        self.limits.check(request)
        travels = request.push is not None or bool(request.awaits)
        if travels:
            self._check_transfer(request)
        grammars = self._grammars if request.push is None else None
        pending = grammars.request(request.grammar) if request.grammar and grammars else None
        seq = Sequence(request, self._n_arrived, self.limits, self._fingerprint, self._cache.table(), now_s, pending)
        seq.came_step = self._totals.steps
        seq.thinks = drawing.still_thinks(seq)
        self._n_arrived += 1
        self._by_id[request.id] = self._by_number[seq.number] = seq
        if seq.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, seq.deadline_s)
        if pending is not None:
            self._pending.append(seq)
        if travels and self._traffic is not None:
            self._traffic.begin(seq, now_s)
        if not seq.away:
            self._enqueue(seq)

    def _check_transfer(self, request: EngineRequest) -> None:
        if self._traffic is None:
            raise Unavailable("this engine moves no KV to or from others", param="transfer")
        if request.push is not None and request.awaits:
            raise BadInput("a request pushes its KV or awaits it, not both", param="awaits")
        if request.awaits:
            self._traffic.arrivals.check(request.awaits)

    def hear(self, now_s: float) -> list[TokenDelta]:
        """What became of KV that travels."""
        if self._traffic is None:
            return []
        deltas = []
        turn = self._traffic.hear(now_s)
        for seq, error in turn.end:
            if seq.number in self._by_number:
                info = None if error is None else error.info()
                deltas.append(self._end(seq, "stop" if error is None else "error", error=info))
        for seq in turn.advance:
            if seq.slot != WAITING:
                self._traffic.pushes.hand_over(seq, seq.table.n_published)
        self._make_room(self._traffic, now_s)
        for seq in turn.queue + self._traffic.ready():
            if seq.away and seq.number in self._by_number:
                self._come_back(seq)
        return deltas

    def _come_back(self, seq: Sequence) -> None:
        seq.away = False
        seq.n_arrived = 0 if seq.pushes else BLOCK_TOKENS * seq.n_pushable
        self._enqueue(seq)

    def _make_room(self, traffic: TransferCoordinator, now_s: float) -> None:
        """Reserve blocks for prompts that others offer, by rank; not before one that waits here and goes first."""
        for seq in traffic.arrivals.waiting_for_room():
            first = self._waiting[0] if self._waiting else None
            if first is not None and first.rank < seq.rank and self._refused == (first.number, self._cache.n_releases):
                return
            blockhash.extend(seq.keys, seq.root, seq.ids)
            if not traffic.grant(seq, [n + 1 for n in self._spare()], now_s):
                return

    def learn(self, vocabulary: Vocabulary) -> None:
        if self._grammars is not None:
            self._grammars.learn(vocabulary)

    def settle(self) -> list[TokenDelta]:
        """Take the grammars that are compiled now. Sequences whose grammar failed end."""
        if not self._pending:
            return []
        deltas = []
        for seq in [seq for seq in self._pending if seq.pending is not None and seq.pending.ready]:
            assert seq.pending is not None
            try:
                drawing.bind(seq, seq.pending.guide())
            except EmberlineError as error:
                deltas.append(self._end(seq, "error", error=error.info()))
            except Exception:
                _log.exception("a grammar cannot be followed", extra={"request_id": seq.id})
                deltas.append(self._end(seq, "error", error=Internal(masking.GRAMMAR_FAILED).info()))
            else:
                seq.pending = None
                self._pending.remove(seq)
        return deltas

    def abort(self, request_id: str) -> TokenDelta | None:
        """The terminal delta, or None when there is no such request (any more)."""
        seq = self._by_id.get(request_id)
        return None if seq is None else self._end(seq, "cancelled")

    def abort_all(self, error: EmberlineError) -> list[TokenDelta]:
        return [self._end(seq, "error", error=error.info()) for seq in tuple(self._by_number.values())]

    def expire(self, now_s: float) -> list[TokenDelta]:
        """End what has passed its deadline."""
        if now_s < self._next_deadline_s:
            return []
        timed = [seq for seq in self._by_number.values() if seq.deadline_s is not None]
        late = [seq for seq in timed if seq.deadline_s is not None and seq.deadline_s <= now_s]
        deltas = []
        for seq in late:
            error = DeadlineExceeded(f"the request did not finish within its {seq.request.deadline_s:g} s")
            deltas.append(self._end(seq, "error", error=error.info()))
        left = [seq.deadline_s for seq in timed if seq.deadline_s is not None and seq.deadline_s > now_s]
        self._next_deadline_s = min(left, default=float("inf"))
        return deltas

    # --- one step ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        plan = StepPlan()
        self._promote()
        self._displace()
        paused = self._pauses()
        prefills = []
        self._streams = Streams()
        for seq in tuple(self._running):
            if seq.slot == WAITING or (paused and seq.urgency == Priority.BATCH):
                continue  # made room for one before it, or lets prompts of others pass
            n_due = seq.n_due
            if not n_due:
                continue  # all of it is planned, and nothing is drawn
            if n_due > 1:
                prefills.append(seq)
                continue
            self._streams.add(seq)
            if not seq.n_drawing or self._may_follow(seq):
                self._add_row(plan, seq, 1)
        self._plan_prefills(plan, prefills)
        if plan.rows:
            self._totals.steps += 1
        return plan

    def guides(self, plan: StepPlan) -> bool:
        """Whether a grammar has a say in what the plan draws."""
        by_number = self._by_number
        return self._grammars is not None and any(
            by_number[row.number].guide is not None for row in plan.rows if row.samples
        )

    def masks(self, plan: StepPlan) -> Masks | None:
        """What the grammars of the plan's rows allow next; None when no row has one."""
        return masking.masks(plan, self._by_number, self.limits.eos_ids)

    def launched(self, plan: StepPlan) -> None:
        """While the device is busy: hash what the plan computes, and the block behind it."""
        if plan.n_tokens == len(plan.rows):
            return
        computing = self._computing[id(plan)]
        for row in plan.rows:
            if len(row.token_ids) > 4 and (seq := self._by_number.get(row.number)) is not None:
                first, behind = row.start // BLOCK_TOKENS, row.end // BLOCK_TOKENS
                blockhash.extend(seq.keys, seq.root, seq.ids, behind + 1)
                computing.update(seq.keys[first:behind])

    def absorb(self, plan: StepPlan, sampled: Iterable[Sampled]) -> list[TokenDelta]:
        """Take in what a step computed. Rows of sequences that ended meanwhile are ignored."""
        deltas = []
        self._computing.pop(id(plan), None)
        draws, by_number = iter(sampled), self._by_number
        for row in plan.rows:
            drawn = next(draws) if row.samples else None
            seq = by_number.get(row.number)
            if seq is None or seq.admission != row.admission:
                continue
            seq.n_drawing -= row.samples
            if seq.failure is not None:
                deltas.append(self._end(seq, "error", error=seq.failure.info()))
                continue
            if drawn is not None and drawn.token_id < 0:
                self._cache.discard(seq.table)
                deltas.append(self._end(seq, "error", error=Internal("the model produced invalid numbers").info()))
                continue
            if (n_blocks := row.end // BLOCK_TOKENS) > seq.table.n_published:
                self._publish(seq, n_blocks)
            if drawn is not None:
                deltas.append(self._draw(seq, drawn))
            elif seq.pushes:
                deltas += self._push(seq, row.end)
        return deltas

    def _push(self, seq: Sequence, n_computed: int) -> list[TokenDelta]:
        """Hand over what is computed; with the last of it the sequence gives up its slot."""
        assert self._traffic is not None
        pushes = self._traffic.pushes
        pushes.hand_over(seq, seq.table.n_published)
        if n_computed == seq.n_tokens:
            self._leave_slot(seq)
            seq.n_computed, seq.away = 0, True
        return [TokenDelta(seq.id, usage=seq.usage())] if pushes.first_news(seq) else []

    def fail(self, plan: StepPlan, error: EmberlineError) -> list[TokenDelta]:
        """The step could not be computed: its requests end with the error, all others go on."""
        self._computing.pop(id(plan), None)
        hit = [seq for row in plan.rows if (seq := self._by_number.get(row.number)) is not None]
        return [self._end(seq, "error", error=error.info()) for seq in hit]

    # --- planning ---------------------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Queued work that found no place for long is ranked with the others, one sequence at a time: none starves."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.urgency != Priority.BATCH:
            return
        first = self._waiting[bisect_left(self._waiting, (Priority.BATCH, -1), key=_by_rank)]
        if self._totals.steps - first.waits_since < STARVED_STEPS:
            return
        if any(seq.promoted for seq in self._by_number.values()):
            return
        self._waiting.remove(first)
        first.urgency = Priority.DEFAULT
        insort(self._waiting, first, key=_by_rank)

    def _pauses(self) -> bool:
        """Whether queued work sits this step out, because a prompt of better class is to be computed in it."""
        if not self._running or self._running[-1].urgency != Priority.BATCH:
            self._n_paused = 0
            return False
        able = (seq for seq in self._waiting if seq.pending is None)
        others = [seq for seq in self._running if seq.urgency != Priority.BATCH and seq.n_due > 1]
        urgent = bool(others) or next((seq.urgency != Priority.BATCH for seq in able), False)
        self._n_paused = self._n_paused + 1 if urgent and self._n_paused < PAUSED_STEPS else 0
        return self._n_paused > 0

    def _displace(self) -> None:
        """Let waiting sequences of a better class take the place of running ones of a worse class."""
        while self._running:
            first = next((seq for seq in self._waiting if seq.pending is None), None)
            last = self._running[-1]
            if first is None or first.urgency >= last.urgency:
                return
            if self._free_slots and self._fits(first, self._match(first)):
                return
            self._preempt(last)

    def _plan_prefills(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Spend what is left of the budget by rank, whether a sequence has begun or is still waiting."""
        full = bool(plan.n_preempted)
        if self._waiting and self._free_slots and not full:
            able = (seq for seq in self._waiting if seq.pending is None)
            prefills = sorted([*prefills, *islice(able, 2 * self.limits.max_running)], key=_by_rank)
        computing = self._computing[id(plan)] = set()
        work = Work(self._streams.n)
        room = self._room(plan, prefills)
        for seq in prefills:
            if full and seq.slot == WAITING:
                continue
            left = self._left(room - plan.n_tokens, work, seq)
            if left <= 0:
                return
            if seq.slot == WAITING:
                full = bool(plan.n_preempted) or not self._try_admit(plan, seq)
                if seq.slot == WAITING:
                    continue
            start, n = seq.n_computed, seq.n_tokens - seq.n_computed
            if n > left:
                n = left if self._pace is None else self._pace.cut(work, start, left)
            if self._add_row(plan, seq, n):
                work.add(n, seq.n_computed)
                computing.update(seq.keys[start // BLOCK_TOKENS : seq.n_computed // BLOCK_TOKENS])

    def _room(self, plan: StepPlan, prefills: list[Sequence]) -> int:
        """Tokens that the step may have in all, one tile of prompts at least; more bounds those that keep a pace."""
        budget = self.limits.token_budget
        if self._pace is None:
            return budget
        wanted, slots = 0, len(self._free_slots)
        for seq in prefills:
            slots -= seq.slot == WAITING
            if slots < 0 or plan.n_tokens + wanted >= budget:
                break
            if self._slack(seq) >= OVERLOAD:
                wanted += seq.n_tokens - self._n_known(seq)
        if not wanted:
            return budget
        return min(budget, max(self._pace.room(plan.n_tokens + wanted, budget), plan.n_tokens + TILE))

    def _n_known(self, seq: Sequence) -> int:
        """Tokens that need not be computed any more."""
        return self._match(seq) * BLOCK_TOKENS if seq.slot == WAITING else seq.n_computed

    def _left(self, left: int, work: Work, seq: Sequence) -> int:
        """Tokens that the step may still take of the sequence's prompt, of those that it has left."""
        if self._pace is None or left <= 0:
            return left
        if seq.urgency == Priority.BATCH and self._totals.steps - self._asked_step < QUIET_STEPS:
            left = self._pace.within(POLITE_S, work, seq.n_computed, left)
        return self._pace.chunk(work, seq.n_computed, left, self._slack(seq)) if left > 0 else 0

    def _slack(self, seq: Sequence) -> float:
        """How many times the streams' pace its prompt may make a step last.

        Streams are promised their pace against what comes after them. Prompts that came together are computed in full
        steps: the first replies wait for the last prompts, and all are done sooner. Not for one that takes many steps,
        nor for one that had been waiting because its class is worse.
        """
        if self._streams.since == inf:
            return inf
        if self._streams.came_after(seq):
            fresh = seq.n_tokens - self._n_known(seq) if seq.slot == WAITING else seq.n_fresh
            if fresh <= self.limits.token_budget:
                return inf
        return max(1.0, self._totals.waiting_tokens / LONG_QUEUE)

    def _may_follow(self, seq: Sequence) -> bool:
        """Whether its next token can be computed before the one in front of it was looked at.

        Not while thinking may be cut off, for other tokens would follow then; nor when that one is the last for sure.
        An end token shows a step late, and what was computed behind it is thrown away.
        """
        return not seq.thinks and seq.n_drawing < seq.room

    def _try_admit(self, plan: StepPlan, seq: Sequence) -> bool:
        """Give a waiting sequence a slot and its cached prefix. False: no room, so nobody behind it may pass either."""
        if not self._free_slots or self._refused == (seq.number, self._cache.n_releases):
            return False
        if self._gives_way(seq):
            return False
        n_hit = self._match(seq)
        if n_hit < seq.most_cached and any(seq.keys[n_hit] in keys for keys in self._computing.values()):
            return True  # its next block is being computed for another: one step later it is a hit
        if not self._fits(seq, n_hit):
            self._refused = (seq.number, self._cache.n_releases)
            return False
        self._dequeue(seq)
        self._take_hit(seq, n_hit)
        if seq.away:
            return True
        insort(self._running, seq, key=_by_rank)
        seq.slot = self._free_slots.pop()
        seq.admission = self._n_admitted
        self._n_admitted += 1
        output = bytes(memoryview(seq.ids)[4 * seq.n_prompt :])
        blocks = [list(held.blocks) for held in seq.table.groups]
        plan.admissions.append(Admission(seq.slot, seq.request, seq.seed, output, blocks))
        return True

    def _gives_way(self, seq: Sequence) -> bool:
        """Whether one that is offered KV and finds no room for it goes before this one."""
        if self._traffic is None:
            return False
        return any(other.rank < seq.rank for other in self._traffic.arrivals.waiting_for_room())

    def _take_hit(self, seq: Sequence, n_hit: int) -> None:
        """Give a sequence its cached prefix. One that pushes and has all of it needs no slot: it is away again."""
        self._cache.take_hit(seq.table, seq.keys, n_hit)
        seq.n_computed = n_hit * BLOCK_TOKENS
        if seq.cached_by_tier is None:
            came = 0
            if seq.n_arrived and self._traffic is not None:
                came = min(BLOCK_TOKENS * self._traffic.arrivals.n_landed(seq), seq.n_computed)
            own = min(seq.n_computed, seq.n_prompt) - came
            seq.cached_by_tier = {"device": own, "pushed": came} if came else {"device": own}
            self._totals.cached_tokens += own
        if self._traffic is None:
            return
        if seq.n_arrived:
            self._traffic.arrivals.leave(seq)  # its own table holds what came
            seq.n_arrived = 0
        if seq.pushes:
            self._traffic.pushes.offer(seq)
            self._traffic.pushes.hand_over(seq, n_hit)
            if n_hit == seq.n_pushable:
                self._cache.release(seq.table)
                seq.n_computed, seq.away = 0, True

    def _match(self, seq: Sequence) -> int:
        """Keys are made as far as the cache has their blocks, and a few more: a fresh prompt's can wait."""
        keys, most = seq.keys, seq.most_cached
        while len(keys) < most and (not keys or self._cache.may_go_on(keys[-1])):
            blockhash.extend(keys, seq.root, seq.ids, len(keys) + KEYS_AT_ONCE)
        return self._cache.match(seq.keys, seq.most_cached)

    def _fits(self, seq: Sequence, n_hit: int) -> bool:
        """Beside what running sequences still need for the tokens they have, and one block more for each."""
        return self._cache.fits(seq.keys, n_hit, seq.n_tokens, self._spare())

    def _spare(self) -> list[int]:
        spare = [len(self._running)] * len(self._cache.groups)
        for other in self._running:
            if other.n_tokens - other.n_computed > 1:
                owed = self._cache.owed(other.table, other.n_tokens)
                spare = [n + more for n, more in zip(spare, owed)]
        return spare

    def _add_row(self, plan: StepPlan, seq: Sequence, n: int) -> bool:
        """Plan the next n tokens of a running sequence. False: it had to give way itself."""
        start, end = seq.n_computed, seq.n_computed + n
        while (blocks := self._cache.grow(seq.table, start, end)) is None:
            victim = next(other for other in reversed(self._running) if other.planned_step != self._totals.steps)
            plan.n_preempted += 1
            self._preempt(victim)
            if victim is seq:
                return False
        samples = n == seq.n_due and not seq.pushes
        follows = seq.n_drawing > 0
        plan.rows.append(
            Row(
                number=seq.number,
                slot=seq.slot,
                start=start,
                token_ids=b"" if follows else bytes(memoryview(seq.ids)[4 * start : 4 * end]),
                blocks=blocks or None,
                passed=[held.n_passed for held in seq.table.groups] if self._cache.windowed else self._none_passed,
                samples=samples,
                banned=self._banned(seq) if seq.request.sampling.min_tokens else (),
                admission=seq.admission,
                follows=follows,
            )
        )
        plan.n_tokens += n
        seq.n_computed = end
        seq.n_drawing += samples
        seq.planned_step = self._totals.steps
        if start < seq.n_prompt:
            self._totals.prompt_tokens += min(end, seq.n_prompt) - start
        return True

    def _banned(self, seq: Sequence) -> tuple[int, ...]:
        if seq.guide is not None:  # its mask says when it may end
            return ()
        return tuple(seq.stop_ids) if seq.n_output + seq.n_drawing < seq.request.sampling.min_tokens else ()

    def _preempt(self, seq: Sequence) -> None:
        """Back to waiting, in its old rank. Its full blocks stay cached until others need the room."""
        self._leave_slot(seq)
        seq.n_computed = seq.n_drawing = 0
        self._totals.preemptions += 1
        self._enqueue(seq)

    # --- after a step -----------------------------------------------------------------------------------------------

    def _publish(self, seq: Sequence, n_blocks: int) -> None:
        blockhash.extend(seq.keys, seq.root, seq.ids, n_blocks)
        self._cache.publish(seq.table, seq.keys, n_blocks)

    def _draw(self, seq: Sequence, drawn: Sampled) -> TokenDelta:
        logprob = drawn.logprob if drawn.logprob is not None else 0.0
        entry = TokenLogprobs(drawn.token_id, logprob, drawn.top)
        try:
            entries, finish = drawing.draw(seq, entry, self.limits.eos_ids)
            return self._append(seq, entries, finish)
        except Exception as error:
            if seq.guide is None:
                raise
            return self._end(seq, "error", error=masking.guide_failed(seq, error).info())

    def _append(self, seq: Sequence, entries: list[TokenLogprobs], finish: FinishReason | None) -> TokenDelta:
        one = len(entries) == 1  # mostly; and then this is quicker
        packed = entries[0].token_id.to_bytes(4, "little") if one else pack([entry.token_id for entry in entries])
        first = seq.n_output == seq.n_given
        if first:
            seq.began_step = self._totals.steps
        seq.ids += packed
        self._totals.output_tokens += len(entries)
        logprobs = entries if seq.request.sampling.logprobs is not None and entries else None
        if finish is not None:
            return self._end(seq, finish, packed, logprobs)
        return TokenDelta(seq.request.id, packed, None, seq.usage() if first else None, logprobs)

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        token_ids: bytes = b"",
        logprobs: list[TokenLogprobs] | None = None,
        error: ErrorInfo | None = None,
    ) -> TokenDelta:
        """The one way out: everything the sequence held is given back, and its terminal delta is made."""
        del self._by_id[seq.request.id], self._by_number[seq.number]
        if seq.request.priority != Priority.BATCH:
            self._asked_step = self._totals.steps
        if seq.pending is not None:
            self._pending.remove(seq)
        if seq.slot != WAITING:
            self._leave_slot(seq)
        elif not seq.away:
            self._dequeue(seq)
        if self._traffic is not None:
            self._traffic.leave(seq)
        return TokenDelta(seq.request.id, token_ids, finish, seq.usage(), logprobs, error)

    def _leave_slot(self, seq: Sequence) -> None:
        self._cache.release(seq.table)
        self._running.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = WAITING
        seq.admission = -1  # what steps in flight still bring of it is not wanted

    def _enqueue(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=_by_rank)
        seq.waits_since = self._totals.steps
        self._totals.waiting_tokens += seq.n_tokens - seq.n_arrived

    def _dequeue(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        self._totals.waiting_tokens -= seq.n_tokens - seq.n_arrived


def _n_batch(by_rank: list[Sequence]) -> int:
    """Those that are queued work, which come last."""
    return len(by_rank) - bisect_left(by_rank, (Priority.BATCH, -1), key=_by_rank)
