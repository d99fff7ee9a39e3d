"""Admission of waiting sequences: a slot, a cached prefix, and blocks for the rest of the prompt."""

from itertools import takewhile
from math import inf

from emberline.engine.core.limits import WorkLimits
from emberline.engine.core.plan import Admission, StepPlan
from emberline.engine.core.queues import Queues
from emberline.engine.core.sequence import NO_SLOT, Hold, Sequence
from emberline.engine.tiers.coordinator import TierCoordinator, Verdict
from emberline.engine.transfer.coordinator import TransferCoordinator
from emberline.kv.cache import KVCache, PrefixHit
from emberline.kv.tiers.fetch_policy import ComputeQueue
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad


class AdmissionPolicy:
    """In rank order, without overtaking: a sequence that does not fit stops all behind it, so none starves.

    It must fit with all its tokens, besides what running sequences still need and one block more for each of them.
    A sequence whose next block is being computed for another one waits a step, and finds that block in the cache.
    """

    def __init__(
        self,
        cache: KVCache,
        queues: Queues,
        transfers: TransferCoordinator,
        totals: EngineLoad,
        tiers: TierCoordinator | None,
        limits: WorkLimits,
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._transfers = transfers
        self._totals = totals
        self._tiers = tiers
        self._limits = limits
        self.now_s = 0.0  # of the step that is planned
        self.tokens_per_s = 0.0  # of prompts, as measured; 0: unknown
        self._computing: dict[int, set[bytes]] = {}  # content keys of blocks that a plan in flight computes, by plan
        self._refused = (-1, -1)  # (number, cache.n_releases) of the sequence that did not fit, and when
        self._no_room = (-1, -1)  # the same of the sequence whose KV was to be fetched
        self._n_releases = -1  # cache.n_releases when transfers were last granted; -1: with steps in flight

    def look_up(self) -> None:
        """Before a plan: find out what the cache has of sequences that have begun to wait, in rank order. Those with a
        long prefix take several steps while others run, and cannot be admitted before."""
        left = self._limits.look_ups if self._queues.running else inf
        for seq in self._queues.waiting:
            if not seq.holds & Hold.LOOK_UP:
                continue
            if left <= 0:
                return
            n_asked = seq.hit.asked[1]
            limit = int(min(seq.max_cached, n_asked + left))
            n_hit = self._match(seq, limit).n_blocks
            if n_hit < limit or limit == seq.max_cached:
                seq.holds &= ~Hold.LOOK_UP
            left -= max(1, n_hit - n_asked)

    def match(self, seq: Sequence) -> PrefixHit:
        """What the cache has of the sequence."""
        return self._match(seq, seq.max_cached)

    def _match(self, seq: Sequence, most: int) -> PrefixHit:
        """Of its first blocks. Keys are computed as far as those in the cache reach, and a few more."""
        keys = seq.keys
        while len(keys) < most and (not keys or self._cache.may_go_on(keys[-1])):
            seq.extend_keys(len(keys) + self._limits.keys_at_once)
        return self._cache.match(keys, most, seq.hit)

    def n_known(self, seq: Sequence) -> int:
        """Tokens that need not be computed any more."""
        return self.match(seq).n_blocks * BLOCK_TOKENS if seq.slot == NO_SLOT else seq.n_computed

    def fits(self, seq: Sequence) -> bool:
        return self._cache.fits(seq.keys, self.match(seq), seq.n_tokens, self._reserved())

    def try_admit(self, plan: StepPlan, seq: Sequence) -> bool:
        """Give a waiting sequence a slot, if it fits and need not wait a step. False: none behind it may pass."""
        if not self._queues.free_slots or self._refused == (seq.number, self._cache.n_releases):
            return False
        if any(other.rank < seq.rank for other in self._transfers.incoming.ungranted()):
            return False
        n_hit = self.match(seq).n_blocks
        if n_hit < seq.max_cached and any(seq.keys[n_hit] in keys for keys in self._computing.values()):
            return True
        if not self.fits(seq):
            self._refused = (seq.number, self._cache.n_releases)
            return False
        if self._tiers is not None and self._tiers.waits(seq, n_hit) and not self._decide(self._tiers, seq, n_hit):
            return True
        self._queues.dequeue(seq)
        self._take_hit(seq)
        if not seq.in_transfer:
            self._queues.run(seq)
            output = bytes(memoryview(seq.ids)[4 * seq.n_prompt :])
            blocks = [list(held.blocks) for held in seq.table.groups]
            plan.admissions.append(Admission(seq.slot, seq.request, seq.seed, output, blocks))
        return True

    def publish(self, seq: Sequence) -> None:
        """Add the full blocks of what is done of the sequence to the prefix index."""
        first, n_blocks = seq.table.n_published, seq.n_done // BLOCK_TOKENS
        if n_blocks > first:
            seq.extend_keys(n_blocks)
            self._cache.publish(seq.table, seq.keys, n_blocks)
            if self._tiers is not None:
                self._tiers.published(seq, first, n_blocks)

    def release(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks back; its full blocks stay cached until others need the room."""
        self.publish(seq)
        seq.vacated()
        seq.n_done = 0
        self._cache.release(seq.table)
        self._queues.vacate(seq)

    def preempted(self, seq: Sequence) -> None:
        """It waits again. What is evicted of it meanwhile may come from a tier."""
        if self._tiers is not None:
            self._tiers.preempted(seq)

    def grant_transfers(self, now_s: float) -> None:
        """Reserve blocks for offered prompts, in rank order; not ahead of a waiting sequence that does not fit."""
        self._n_releases = -1 if self._cache.fence.in_flight else self._cache.n_releases
        for seq in self._transfers.incoming.ungranted():
            first = self._queues.waiting[0] if self._queues.waiting else None
            if first is not None and first.rank < seq.rank and self._refused == (first.number, self._cache.n_releases):
                return
            seq.extend_keys()
            if not self._transfers.incoming.grant(seq, self.reserved_for_running(), now_s):
                return

    def prefetch(self) -> None:
        """Begin to fetch the cached prefixes of waiting sequences from tiers, in rank order, as far as they fit."""
        if self._tiers is None or not (undecided := self._tiers.undecided()):
            return
        first, n_releases = self._queues.waiting[0], self._cache.n_releases
        for seq in undecided[: self._limits.decisions]:
            if (seq.number, n_releases) in (self._no_room, self._refused):
                return
            if first.rank < seq.rank and self._refused == (first.number, n_releases):
                return
            if not seq.holds & (Hold.JOB | Hold.LOOK_UP):
                self._decide(self._tiers, seq, self.match(seq).n_blocks)

    def _decide(self, tiers: TierCoordinator, seq: Sequence, n_hit: int) -> bool:
        """Fetch what the device pool lacks of a waiting sequence? True: no, it may be admitted."""
        if n_hit >= seq.max_cached or not seq.fetches_left:
            tiers.decide_to_compute(seq, n_hit)
            return True
        key = seq.keys[n_hit]
        if tiers.is_fetching(key) or any(key in keys for keys in self._computing.values()):
            return False
        if not self.fits(seq):
            self._no_room = (seq.number, self._cache.n_releases)
            return False
        seq.extend_keys(seq.max_cached)
        verdict = tiers.consider(seq, n_hit, self.reserved_for_running(), self.compute_queue(seq), self.now_s)
        if verdict is Verdict.FETCH:
            self._queues.dequeue(seq)
        return verdict is Verdict.COMPUTE

    def compute_queue(self, seq: Sequence) -> ComputeQueue:
        """What the sequence has to expect if its prompt is computed."""
        queues = self._queues
        n_before = sum(other.n_prefill for other in queues.running)
        n_before += sum(other.n_tokens for other in takewhile(lambda other: other.rank < seq.rank, queues.waiting))
        return ComputeQueue(self.tokens_per_s, n_before, len(queues.waiting) + len(queues.running) > 1)

    @property
    def may_grant(self) -> bool:
        """Whether offered prompts wait for blocks, and some may have become free for them since the last attempt."""
        return self._n_releases != self._cache.n_releases and bool(self._transfers.incoming.ungranted())

    def computes(self, plan: StepPlan, keys: list[bytes]) -> None:
        """The plan computes the blocks with these keys, from now until it is `done`."""
        self._computing.setdefault(id(plan), set()).update(keys)

    def done(self, plan: StepPlan) -> None:
        self._computing.pop(id(plan), None)

    def _take_hit(self, seq: Sequence) -> None:
        """Give a sequence its cached prefix. A prefill-only one that has all of it needs no slot."""
        hit = self.match(seq)
        n_hit = hit.n_blocks
        if seq.table.conversation is None:
            n_found = n_hit - sum((seq.fetched or {}).values())  # fetched blocks may well be its own
            begin = self._cache.retention.begin
            seq.table.conversation = begin(seq.root_key, seq.session_digest, seq.keys, max(0, n_found))
        fetched = None if self._tiers is None else self._tiers.take_fetched(seq)
        self._cache.take_hit(seq.table, seq.keys, hit, fetched)
        seq.n_computed = n_hit * BLOCK_TOKENS
        if seq.cached_by_tier is None:
            seq.waited_s = max(0.0, self.now_s - seq.arrived_s)
            received = 0
            if seq.n_received:
                received = min(BLOCK_TOKENS * self._transfers.incoming.n_received_blocks(seq), seq.n_computed)
            own = min(seq.n_computed, seq.n_prompt) - received
            self._totals.cached_tokens += own
            seq.cached_by_tier = {"pushed": received} if received else {}
            for tier, n_blocks in (seq.fetched or {}).items():
                seq.cached_by_tier[tier] = min(own, n_blocks * BLOCK_TOKENS)
                own -= seq.cached_by_tier[tier]
            seq.cached_by_tier["device"] = own
        if self._tiers is not None:
            self._tiers.admitted(seq, n_hit)
            if seq.n_received:
                self._tiers.published(seq, 0, n_hit)
        if seq.n_received:
            self._transfers.incoming.leave(seq)  # its own table holds the received blocks now
            seq.n_received = 0
        if seq.prefill_only:
            self._transfers.outgoing.offer(seq)
            self._transfers.outgoing.send(seq, n_hit)
            if n_hit == seq.n_transferable:
                seq.vacated()
                self._cache.release(seq.table)
                seq.n_computed, seq.in_transfer = 0, True

    def reserved_for_running(self) -> list[int]:
        """Blocks of each group that whoever takes some for others than running sequences must leave."""
        return [n + 1 for n in self._reserved()]

    def _reserved(self) -> list[int]:
        """Blocks of each group that running sequences still need for the tokens they have, and one more for each."""
        running = self._queues.running
        reserved = [len(running)] * len(self._cache.groups)
        for seq in running:
            if seq.n_tokens - seq.n_computed > 1:
                owed = self._cache.owed(seq.table, seq.n_tokens)
                reserved = [n + more for n, more in zip(reserved, owed)]
        return reserved
