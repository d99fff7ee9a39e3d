"""KV cache tiers as the scheduler sees them: what is saved, which sequences wait for a fetch, and which may not."""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import takewhile
from math import inf

from emberline.engine.core.feature import Brought, Core, Feature, NewBlocks
from emberline.engine.core.sequence import Hold, Sequence
from emberline.engine.tiers.fetching import TierFetches, TierMatch
from emberline.engine.tiers.saving import BlockSaver
from emberline.engine.tiers.step_budget import StepBudget
from emberline.kv.tiers.fetch_policy import ComputeQueue
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.messages import BlocksFetched, Notice, Saved
from emberline.protocol.frames import EngineLoad

MAX_FETCHES = 2  # of a sequence, between two admissions
MAX_TRIES = 64  # steps in which there was room for a fetch, but steps in flight could still write it
LOOK_UP_S = 0.02  # for remote tiers to say what they hold
MIN_LOOK_UP_BLOCKS = 8  # that are not in the device pool: for fewer no remote tier is asked


class Verdict(Enum):
    """How a waiting sequence gets the blocks that the device pool lacks."""

    COMPUTE = auto()
    FETCH = auto()
    WAIT = auto()  # ask again at the next step


@dataclass(slots=True)
class _Waiting:
    """A sequence that has waited since it was last admitted."""

    fetches_left: int = MAX_FETCHES
    decided_hit: int = -1  # blocks that the device pool had, or was to get, when a fetch was last considered


@dataclass(slots=True)
class _Undecided:
    """A waiting sequence for which it is not decided whether to fetch."""

    seq: Sequence
    n_tries: int = 0
    asked_s: float = inf  # when remote tiers were asked what they hold
    answered: bool = False
    match: TierMatch | None = None  # what was looked up so far


class Tiering(Feature):
    """Owns the sequences with `Hold.FETCH`: neither waiting nor running."""

    name = "tiers"

    def __init__(self, port: GroupTiers) -> None:
        self._port = port
        self.executor, self.sources = port.own, port.own.changes
        self._budget = StepBudget()
        self._notices: deque[Notice] = deque()  # that the last step had no time for
        self._waiting: dict[int, _Waiting] = {}  # by sequence number; fetching ones, too
        self._undecided: dict[int, _Undecided] = {}  # by sequence number
        self._looks_up = False  # the last step had no time to look up all that it began to
        self._polls_late = False  # `catch_up` handles the notices of this step
        self._no_room = (-1, -1)  # (number, cache.n_releases) of the sequence whose fetch did not fit, and when

    def attach(self, core: Core) -> None:
        """Keep the scheduler, whose cache is saved and fetched into."""
        super().attach(core)
        self.saver = BlockSaver(core.cache, self._port)
        self.fetches = TierFetches(core.cache, self._port, self._budget)
        self._port.order = partial(core.order, self.name)
        self._port.own.follow(core.cache.retention)

    # --- a sequence --------------------------------------------------------------------------------------------------

    def queued(self, seq: Sequence) -> None:
        """Consider a fetch for a sequence that has begun to wait."""
        if seq.number not in self._waiting:
            self._waiting[seq.number] = _Waiting()
        self._undecided[seq.number] = _Undecided(seq)
        self.saver.urgent = True  # a preempted sequence has given up its blocks

    def admits(self, seq: Sequence, n_hit: int) -> bool:
        """True if nothing is to be fetched for the sequence, with n_hit blocks in the device pool."""
        waiting = self._waiting[seq.number]
        if n_hit < waiting.decided_hit and waiting.fetches_left and seq.number not in self._undecided:
            self._undecided[seq.number] = _Undecided(seq)  # some were evicted since
        return seq.number not in self._undecided or self._decide(seq, n_hit)

    def bring(self, seq: Sequence) -> Brought | None:
        """Fetched blocks."""
        blocks, table = self.fetches.take_fetched(seq)
        return Brought(blocks, cached=True, table=table) if blocks or table is not None else None

    def admitted(self, seq: Sequence, n_hit: int) -> None:
        """Tell the tiers which blocks are in use."""
        self._waiting.pop(seq.number, None)
        self._undecided.pop(seq.number, None)
        if n_hit:
            self._port.own.used(seq.keys[:n_hit], seq.table.conversation)

    def published(self, new: Many[NewBlocks]) -> None:
        """Save new blocks at the end of the step, or before the next plan."""
        self.saver.published(new)

    def discarded(self, seq: Sequence) -> None:
        """Remove invalid blocks from the tiers."""
        self._port.remove(seq.keys[: seq.table.n_published])

    def leave(self, seq: Sequence) -> None:
        """End the fetch of a sequence, and tell the tiers if its session is over."""
        if seq.request.session_final and (session := seq.session_digest):
            conversation = seq.table.conversation
            self._port.own.retire(seq.root_key, session, 0 if conversation is None else conversation.n_shared)
        self._waiting.pop(seq.number, None)
        self._undecided.pop(seq.number, None)
        self.saver.urgent = True
        self.fetches.leave(seq)

    # --- a step ------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, device_waits: bool) -> None:
        """Handle notices now, unless the device waits and no sequence depends on them."""
        self._polls_late = device_waits and not (self._undecided or self.fetches or self.has_work())
        if not self._polls_late:
            self._poll(now_s)

    def before_plan(self) -> None:
        """Begin to fetch the cached prefixes of waiting sequences, in rank order, as far as they fit."""
        if self.saver.urgent:
            self.saver.dispatch()
        if not self._undecided:
            return
        admission, n_releases = self.core.admission, self.core.cache.n_releases
        undecided = sorted((each.seq for each in self._undecided.values()), key=lambda seq: seq.rank)
        for seq in undecided[: self.core.limits.work.decisions]:
            if self._no_room == (seq.number, n_releases) or admission.was_refused(seq):
                return
            if admission.would_overtake(seq):
                return
            if not seq.holds & (Hold.JOB | Hold.LOOK_UP):
                self._decide(seq, admission.match(seq).n_blocks)

    def catch_up(self) -> None:
        """Hand over the blocks of the step to be saved."""
        if self._polls_late:
            self._polls_late = False
            self._poll(self.core.admission.now_s)
        self.saver.step_ends()

    def _decide(self, seq: Sequence, n_hit: int) -> bool:
        """Fetch what the device pool lacks of a waiting sequence? True: no, it may be admitted."""
        waiting, admission = self._waiting[seq.number], self.core.admission
        if n_hit >= seq.max_cached or not waiting.fetches_left:
            self._decide_to_compute(seq, n_hit)
            return True
        key = seq.keys[n_hit]
        if self.fetches.is_fetching(key) or admission.is_computing(key):
            return False
        if not admission.fits(seq):
            self._no_room = (seq.number, self.core.cache.n_releases)
            return False
        seq.extend_keys(seq.max_cached)
        verdict = self._consider(seq, n_hit)
        if verdict is Verdict.FETCH:
            self.core.park(seq, Hold.FETCH)
        return verdict is Verdict.COMPUTE

    def _decide_to_compute(self, seq: Sequence, n_hit: int) -> None:
        self._undecided.pop(seq.number, None)
        self._waiting[seq.number].decided_hit = n_hit

    def _consider(self, seq: Sequence, n_hit: int) -> Verdict:
        """Begin to fetch what the device pool lacks of a waiting sequence, or not; there is room for it."""
        state, now_s = self._undecided[seq.number], self.core.admission.now_s
        if self._port.own.remote and not state.answered and seq.max_cached - n_hit >= MIN_LOOK_UP_BLOCKS:
            if state.asked_s == inf:
                state.asked_s = now_s
                self._port.own.look_up(seq.number, seq.keys[n_hit : seq.max_cached])
            if now_s < state.asked_s + LOOK_UP_S:
                return Verdict.WAIT
        match = state.match
        if match is None or match.n_hit != n_hit:
            match = state.match = self.fetches.match(seq, n_hit)
        if not match.complete:
            self.fetches.look_up(seq, match)
            if not match.complete:
                self._looks_up = True
                return Verdict.WAIT
        chosen = self.fetches.choose(seq, match, self._compute_queue(seq))
        if chosen is not None:
            if self.fetches.begin(seq, match, chosen, self.core.admission.reserved_for_running(), now_s):
                del self._undecided[seq.number]
                waiting = self._waiting[seq.number]
                waiting.decided_hit = match.n_blocks
                waiting.fetches_left -= 1
                return Verdict.FETCH
            state.match = None  # what there is may change until there is room
            state.n_tries += 1
            if state.n_tries < MAX_TRIES:
                return Verdict.WAIT
        self._decide_to_compute(seq, n_hit)
        return Verdict.COMPUTE

    def _compute_queue(self, seq: Sequence) -> ComputeQueue:
        """The work ahead of a sequence if its prompt is computed."""
        queues = self.core.queues
        n_before = queues.prefill_tokens
        n_before += sum(other.n_tokens for other in takewhile(lambda other: other.rank < seq.rank, queues.waiting))
        shares = len(queues.waiting) + len(queues.running) > 1
        return ComputeQueue(self.core.admission.tokens_per_s, n_before, shares)

    def _poll(self, now_s: float) -> None:
        """Handle notices. Sequences whose fetch has ended wait again."""
        self._budget.begin_step(now_s)
        self._notices += self._port.notices()
        if not (self.fetches or self.has_work()):
            return
        self._looks_up = False
        self.fetches.give_back()
        ended = self.fetches.go_on(self.core.admission.reserved_for_running)
        while self._notices and self._budget.publications:
            notice = self._notices.popleft()
            if isinstance(notice, Saved):
                self.saver.saved(notice.number)
            elif isinstance(notice, BlocksFetched):
                if (seq := self.fetches.fetched(self._with_next(notice))) is not None:
                    ended.append(seq)
            elif (state := self._undecided.get(notice.number)) is not None:
                state.answered = True
        self.fetches.look_up_arrived()
        if now_s >= self.fetches.wake_s:
            for seq in self.fetches.late(now_s, self._compute_queue):
                self._waiting[seq.number].fetches_left = 0
                ended.append(seq)
        for seq in ended:
            self.core.unpark(seq, Hold.FETCH)

    def _with_next(self, notice: BlocksFetched) -> BlocksFetched:
        """A notice together with those that follow and are of the same fetch, as far as this step may publish their
        blocks; the next one takes the others."""
        notices, fetched, missing = self._notices, list(notice.fetched), list(notice.missing)
        while notices and isinstance(more := notices[0], BlocksFetched):
            if (more.number, more.tier) != (notice.number, notice.tier):
                break
            fetched += more.fetched
            missing += more.missing
            notices.popleft()
        n = self._budget.publish(len(fetched))
        if n == len(fetched):
            return BlocksFetched(notice.number, fetched, missing, notice.tier)
        notices.appendleft(BlocksFetched(notice.number, fetched[n:], missing, notice.tier))
        return BlocksFetched(notice.number, fetched[:n], (), notice.tier)

    # --- what the engine's owner asks --------------------------------------------------------------------------------

    def has_notices(self) -> bool:
        """True if a rank's tiers have reported something."""
        return self._port.has_notices

    def has_work(self) -> bool:
        """True if the next step has something to do for fetches, though no notice has come."""
        return self._looks_up or bool(self._notices) or self.fetches.has_work

    def wake_s(self) -> float:
        """Deadline of the next fetch."""
        return self.fetches.wake_s

    def report(self, load: EngineLoad) -> None:
        """Add fetches and tiers to a load report."""
        load.fetching, load.fetching_tokens = len(self.fetches), self.fetches.n_tokens
        load.tiers = self._port.own.stats()
        for tier in load.tiers if self.fetches.recomputed else ():
            tier.extra["recomputed"] = self.fetches.recomputed[tier.name]

    def report_s(self) -> float:
        """Time at which the statistics of tiers are to be reported again."""
        return self._port.own.report_s
