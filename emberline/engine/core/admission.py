"""Admission of waiting sequences: a slot, a cached prefix, and blocks for the rest of the prompt."""

from collections.abc import Iterable
from math import inf

import numpy as np

from emberline.engine.core.feature import Brought, Moments, NewBlocks
from emberline.engine.core.limits import WorkLimits
from emberline.engine.core.plan import Admission, StepPlan
from emberline.engine.core.queues import Queues
from emberline.engine.core.rows import Cell
from emberline.engine.core.sequence import NO_SLOT, Hold, Sequence
from emberline.kv.cache import KVCache, PrefixHit
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
        totals: EngineLoad,
        limits: WorkLimits,
        moments: Moments,
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._totals = totals
        self._limits = limits
        self._moments = moments
        self.now_s = 0.0  # of the step that is planned
        self.tokens_per_s = 0.0  # of prompts, as measured; 0: unknown
        self._computing: dict[int, set[bytes]] = {}  # content keys of blocks that a plan in flight computes, by plan
        self._refused = (-1, -1)  # (number, cache.n_releases) of the sequence that did not fit, and when

    def enqueue(self, seq: Sequence) -> None:
        """Let a sequence wait, in its rank."""
        self._queues.enqueue(seq, self._totals.steps)
        for queued in self._moments.queued:
            queued(seq)

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
        """Look up the prefix of a sequence in the cache."""
        return self._match(seq, seq.max_cached)

    def _match(self, seq: Sequence, most: int) -> PrefixHit:
        """Look up the first blocks of a sequence. Computes keys as far as those in the cache reach, and a few more."""
        keys = seq.keys
        while len(keys) < most and (not keys or self._cache.may_go_on(keys[-1])):
            seq.extend_keys(len(keys) + self._limits.keys_at_once)
        return self._cache.match(keys, most, seq.hit)

    def n_known(self, seq: Sequence) -> int:
        """Tokens that need not be computed any more."""
        return self.match(seq).n_blocks * BLOCK_TOKENS if seq.slot == NO_SLOT else seq.n_computed

    def fits(self, seq: Sequence) -> bool:
        """True if there is room for a waiting sequence with all its tokens."""
        return self._cache.fits(seq.keys, self.match(seq), seq.n_tokens, self._reserved())

    def was_refused(self, seq: Sequence) -> bool:
        """True if the sequence did not fit and no block was released since."""
        return self._refused == (seq.number, self._cache.n_releases)

    def would_overtake(self, seq: Sequence) -> bool:
        """True if the first waiting sequence, of a better rank, did not fit: no blocks are taken for this one."""
        waiting = self._queues.waiting
        return bool(waiting) and waiting[0].rank < seq.rank and self.was_refused(waiting[0])

    def try_admit(self, plan: StepPlan, seq: Sequence) -> bool:
        """Give a waiting sequence a slot, if it fits and need not wait a step. False: none behind it may pass."""
        moments = self._moments
        if not self._queues.free_slots or self.was_refused(seq):
            return False
        if any(precedes(seq) for precedes in moments.precedes):
            return False
        n_hit = self.match(seq).n_blocks
        if n_hit < seq.max_cached and self.is_computing(seq.keys[n_hit]):
            return True
        while not self.fits(seq):
            if self._queues.running or not self.reclaim(seq):
                self._refused = (seq.number, self._cache.n_releases)
                return False
        if not all(admits(seq, n_hit) for admits in moments.admits):
            return True
        self._queues.dequeue(seq)
        n_computed = self._take_hit(seq)
        if not seq.is_parked:
            self._queues.run(seq, n_computed)
            output = bytes(memoryview(seq.ids)[4 * seq.n_prompt :])
            blocks = [list(held.blocks) for held in seq.table.groups]
            plan.admissions.append(Admission(seq.slot, seq.request, seq.seed, output, blocks))
        return True

    def reclaim(self, seq: Sequence) -> bool:
        """Take blocks back that features hold for sequences that wait after this one, so that the first in rank always
        advances. Returns False if there are none."""
        return any(gives_back(seq) for gives_back in self._moments.gives_back)

    def publish(self, *seqs: Sequence) -> None:
        """Add the full blocks of what is done of different sequences to the prefix index."""
        new = list[NewBlocks]()
        for seq in seqs:
            first, end = seq.table.n_published, seq.n_done // BLOCK_TOKENS
            if end > first:
                seq.extend_keys(end)
                new.append((seq, first, end))
        if new:
            self._cache.publish([(seq.table, seq.keys, end) for seq, _, end in new])
            for published in self._moments.published:
                published(new)

    def release(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks back; its full blocks stay cached until others need the room."""
        self.publish(seq)
        seq.vacated(seq.n_computed)
        self._cache.release(seq.table)
        self._queues.vacate(seq)

    def is_computing(self, key: bytes) -> bool:
        """True if a plan in flight computes the block with this content key."""
        return any(key in keys for keys in self._computing.values())

    def computes(self, plan: StepPlan, keys: list[bytes]) -> None:
        """The plan computes the blocks with these keys, from now until it is `done`."""
        self._computing.setdefault(id(plan), set()).update(keys)

    def chunk(self, plan: StepPlan, seq: Sequence, n: int) -> int:
        """Tokens that the next chunk of a prompt with images may have, of n. Returns 0 if it waits for a later plan."""
        for chunk in self._moments.chunk:
            n = chunk(plan, seq, n)
        return n

    def done(self, plan: StepPlan) -> None:
        self._computing.pop(id(plan), None)

    def _take_hit(self, seq: Sequence) -> int:
        """Give a sequence its cached prefix. If a feature then holds it, it gives its blocks back: it needs no slot.

        Returns the number of tokens whose KV the sequence has.
        """
        hit = self.match(seq)
        n_hit = hit.n_blocks
        brought = [found for bring in self._moments.bring if (found := bring(seq)) is not None]
        if seq.table.conversation is None:  # blocks from a cache may well be its own
            n_found = n_hit - sum(sum(each.blocks.values()) for each in brought if each.cached)
            begin = self._cache.retention.begin
            seq.table.conversation = begin(seq.root_key, seq.session_digest, seq.keys, max(0, n_found))
        table = next((each.table for each in brought if each.table is not None), None)
        self._cache.take_hit(seq.table, seq.keys, hit, table)
        n_computed = n_hit * BLOCK_TOKENS
        if seq.cached_by_tier is None:
            seq.waited_s = max(0.0, self.now_s - seq.arrived_s)
            self._count_cached(seq, n_computed, brought)
        for admitted in self._moments.admitted:
            admitted(seq, n_hit)
        if not all(each.cached for each in brought):
            for published in self._moments.published:
                published([(seq, 0, n_hit)])
        if seq.is_parked:
            seq.vacated(n_computed)
            self._cache.release(seq.table)
        return n_computed

    def _count_cached(self, seq: Sequence, n_computed: int, brought: Iterable[Brought]) -> None:
        """Count the prompt tokens that need not be computed, by where they were."""
        n_cached = left = min(n_computed, seq.n_prompt)
        seq.cached_by_tier = {}
        for found in brought:
            for source, n_blocks in found.blocks.items():
                n_tokens = min(left, n_blocks * BLOCK_TOKENS)
                seq.cached_by_tier[source] = n_tokens
                left -= n_tokens
                n_cached -= 0 if found.cached else n_tokens
        seq.cached_by_tier["device"] = left
        self._totals.cached_tokens += n_cached

    def reserved_for_running(self) -> list[int]:
        """Blocks of each group that whoever takes some for others than running sequences must leave."""
        return [n + 1 for n in self._reserved()]

    def _reserved(self) -> list[int]:
        """Blocks of each group that running sequences still need for the tokens they have, and one more for each."""
        queues, by_slot = self._queues, self._queues.rows.by_slot  # free slots have zeros
        reserved = [len(queues.running)] * len(self._cache.groups)
        for slot in np.flatnonzero(by_slot[Cell.N_KNOWN] - by_slot[Cell.N_COMPUTED] > 1).tolist():
            seq = queues.by_slot[slot]
            owed = self._cache.owed(seq.table, seq.n_tokens)
            reserved = [n + more for n, more in zip(reserved, owed)]
        return reserved
