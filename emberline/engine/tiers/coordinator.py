"""KV cache tiers as the scheduler sees them: what is saved, which sequences wait for a fetch, and which may not."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from emberline.engine.core.sequence import Sequence
from emberline.engine.tiers.fetching import TierFetches, TierMatch
from emberline.engine.tiers.saving import BlockSaver
from emberline.engine.tiers.step_budget import StepBudget
from emberline.kv.cache import BlockTable, KVCache
from emberline.kv.tiers.fetch_policy import ComputeQueue
from emberline.kv.tiers.messages import BlocksCopied, BlocksFetched, Notice, TierPort
from emberline.protocol.frames import EngineLoad

MAX_FETCHES = 2  # of a sequence, between two admissions
MAX_TRIES = 64  # steps in which there was room for a fetch, but steps in flight could still write it
LOOK_UP_S = 0.02  # for remote tiers to say what they hold
MIN_LOOK_UP_BLOCKS = 8  # that are not in the device pool: for fewer no remote tier is asked


class Verdict(Enum):
    COMPUTE = auto()  # what the device pool lacks
    FETCH = auto()  # the sequence is being fetched now
    WAIT = auto()  # ask again at the next step


@dataclass(slots=True)
class _Undecided:
    seq: Sequence
    n_tries: int = 0
    asked_s: float = inf  # when remote tiers were asked what they hold
    answered: bool = False
    match: TierMatch | None = None  # what was looked up so far


class TierCoordinator:
    """Owns the sequences that are `fetching`: neither waiting nor running."""

    def __init__(self, cache: KVCache, port: TierPort) -> None:
        self._port = port
        self._saver = BlockSaver(cache, port)
        self._budget = StepBudget()
        self._fetches = TierFetches(cache, port, self._budget)
        self._notices: deque[Notice] = deque()  # that the last step had no time for
        self._undecided: dict[int, _Undecided] = {}  # waiting sequences, by number
        self._looks_up = False  # the last step had no time to look up all that it began to
        port.follow(cache.retention)

    @property
    def wake_s(self) -> float:
        return self._fetches.wake_s

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do for fetches, though no notice has come."""
        return self._looks_up or bool(self._notices) or self._fetches.has_work

    @property
    def busy(self) -> bool:
        """Whether some sequence waits for tiers, so that the next plan depends on what they have done. They may save
        blocks in any case."""
        return bool(self._undecided or self._fetches) or self.has_work

    def undecided(self) -> list[Sequence]:
        """Waiting sequences for which it is not decided whether to fetch, by rank."""
        return sorted((each.seq for each in self._undecided.values()), key=lambda seq: seq.rank)

    def waits(self, seq: Sequence, n_hit: int) -> bool:
        """Whether `consider` must be asked before the sequence is admitted, with n_hit blocks in the device pool."""
        if n_hit < seq.decided_hit and seq.fetches_left and seq.number not in self._undecided:
            self.enqueued(seq)  # some were evicted since
        return seq.number in self._undecided

    def enqueued(self, seq: Sequence) -> None:
        """The sequence has begun to wait."""
        self._undecided[seq.number] = _Undecided(seq)

    def preempted(self, seq: Sequence) -> None:
        seq.fetches_left = MAX_FETCHES
        self.enqueued(seq)

    def is_fetching(self, key: bytes) -> bool:
        return self._fetches.is_fetching(key)

    def decide_to_compute(self, seq: Sequence, n_hit: int) -> None:
        self._undecided.pop(seq.number, None)
        seq.decided_hit = n_hit

    def consider(self, seq: Sequence, n_hit: int, reserved: list[int], compute: ComputeQueue, now_s: float) -> Verdict:
        """Fetch what the device pool lacks of a waiting sequence, or not; there is room for it."""
        state = self._undecided[seq.number]
        if self._port.remote and not state.answered and seq.max_cached - n_hit >= MIN_LOOK_UP_BLOCKS:
            if state.asked_s == inf:
                state.asked_s = now_s
                self._port.look_up(seq.number, self._fetches.ids(seq, n_hit))
            if now_s < state.asked_s + LOOK_UP_S:
                return Verdict.WAIT
        match = state.match
        if match is None or match.n_hit != n_hit:
            match = state.match = self._fetches.match(seq, n_hit)
        if not match.complete:
            self._fetches.look_up(seq, match)
            if not match.complete:
                self._looks_up = True
                return Verdict.WAIT
        chosen = self._fetches.choose(seq, match, compute)
        if chosen is not None:
            if self._fetches.begin(seq, match, chosen, reserved, now_s):
                del self._undecided[seq.number]
                seq.decided_hit, seq.fetching = match.n_blocks, True
                seq.fetches_left -= 1
                return Verdict.FETCH
            state.match = None  # what there is may change until there is room
            state.n_tries += 1
            if state.n_tries < MAX_TRIES:
                return Verdict.WAIT
        self.decide_to_compute(seq, n_hit)
        return Verdict.COMPUTE

    def poll(
        self, now_s: float, compute: Callable[[Sequence], ComputeQueue], reserved: Callable[[], list[int]]
    ) -> list[Sequence]:
        """Sequences whose fetch has ended: they wait again. `reserved`: blocks of each group to leave to others."""
        self._budget.begin_step(now_s)
        self._looks_up = False
        self._fetches.give_back()
        ended = self._fetches.go_on(reserved)
        self._notices += self._port.notices()
        while self._notices and self._budget.publications:
            notice = self._notices.popleft()
            if isinstance(notice, BlocksCopied):
                self._saver.copied(notice)
            elif isinstance(notice, BlocksFetched):
                if (seq := self._fetches.fetched(self._with_next(notice))) is not None:
                    ended.append(seq)
            elif (state := self._undecided.get(notice.number)) is not None:
                state.answered = True
        self._fetches.look_up_arrived()
        if now_s >= self._fetches.wake_s:
            for seq in self._fetches.late(now_s, compute):
                seq.fetches_left = 0
                ended.append(seq)
        for seq in ended:
            seq.fetching = False
            self.enqueued(seq)
        return ended

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

    def take_fetched(self, seq: Sequence) -> BlockTable | None:
        """What was fetched for a sequence that is admitted now; its references are the caller's."""
        return self._fetches.take_fetched(seq)

    def published(self, seq: Sequence, first: int, end: int) -> None:
        self._saver.published(seq, first, end)

    def admitted(self, seq: Sequence, n_hit: int) -> None:
        """The sequence has found n_hit blocks in the device pool."""
        self._undecided.pop(seq.number, None)
        seq.decided_hit = -1
        if n_hit:
            self._port.used(seq.keys[:n_hit], seq.table.conversation)

    def discarded(self, seq: Sequence) -> None:
        """The content of the sequence's blocks is invalid."""
        self._port.remove(seq.keys[: seq.table.n_published])

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended."""
        if seq.request.session_final and (session := seq.session_digest):
            conversation = seq.table.conversation
            self._port.retire(seq.root_key, session, 0 if conversation is None else conversation.n_shared)
        self._undecided.pop(seq.number, None)
        self._fetches.leave(seq)

    def report(self, load: EngineLoad) -> None:
        load.fetching, load.fetching_tokens = len(self._fetches), self._fetches.n_tokens
        load.tiers = self._port.stats()
