"""Sequences whose cached prefix is fetched from tiers into the device pool: neither waiting nor running meanwhile.

A long prefix is looked up, reserved and published over several steps, as much in each as its `StepBudget` allows. The
copies begin with the first blocks that were reserved.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat
from math import inf
from operator import itemgetter

from emberline.engine.core.sequence import Sequence
from emberline.engine.tiers.saving import block_meta
from emberline.engine.tiers.step_budget import StepBudget
from emberline.kv.cache import BlockTable, KVCache
from emberline.kv.groups import counted_group
from emberline.kv.tiers import fetch_policy
from emberline.kv.tiers.fetch_policy import ComputeQueue, TierRun
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.messages import BlocksFetched, Item, WantedBlock
from emberline.protocol.block_hash import BLOCK_TOKENS

ORDERED_BLOCKS = 64  # of one group are fetched before those of the next group
MAX_TRIES = 64  # steps in which there was no room for more of a fetch; then it ends where it is


@dataclass(slots=True, eq=False)
class TierMatch:
    """A prefix whose blocks are in the device pool or in tiers, of every group those that the next token can see."""

    n_hit: int  # blocks in the device pool
    n_blocks: int  # at most, as long as it is not complete
    where: list[dict[int, str]]  # per group: the tier of each block that the device pool lacks, by its index
    next: Item = (0, 0)  # what is looked up next
    complete: bool = False


@dataclass(slots=True, eq=False)
class RunningFetch:
    number: int
    seq: Sequence
    table: BlockTable  # its references keep fetched blocks until the end
    match: TierMatch
    n_tokens: int
    began_s: float
    deadline_s: float  # monotonic
    limit_s: float  # from its beginning
    n_promised: int  # leading blocks, once it is complete
    n_useful: int  # leading blocks that can still become complete
    n_reserved: int = 0  # leading blocks that its table has
    n_tries: int = 0  # steps in which there was no room for more
    missing: list[dict[int, str]] = field(default_factory=list)  # as `where`, of blocks that are being fetched
    arrived: Counter[str] = field(default_factory=Counter)  # blocks of the counted group, by tier

    @property
    def n_arrived(self) -> int:
        return self.arrived.total()

    @property
    def n_there(self) -> int:
        """Leading blocks that need not be computed, of groups that keep all of them."""
        return min(self.n_useful, self.n_reserved, *(min(missing) for missing in self.missing if missing))

    @property
    def is_complete(self) -> bool:
        """True if nothing is missing any more that could be of use."""
        return self.n_reserved >= self.n_useful and not any(
            j < self.n_useful for missing in self.missing for j in missing
        )


class TierFetches:
    """Owner of the tables of fetches, and of blocks that a cancelled fetch may still write."""

    def __init__(self, cache: KVCache, port: GroupTiers, budget: StepBudget) -> None:
        self._cache = cache
        self._port = port
        self._budget = budget
        layouts = [group.layout for group in cache.groups]
        self._sizes = [layout.block_bytes for layout in layouts]
        self._counted_group = layouts.index(counted_group(layouts))
        self._by_number: dict[int, RunningFetch] = {}
        self._by_seq: dict[int, RunningFetch] = {}
        self._quarantine: dict[int, dict[Item, int]] = {}  # by fetch: device blocks that are still written
        self._ended: dict[int, BlockTable] = {}  # by sequence: what was fetched, until it is admitted, or the next step
        self._arrived: dict[int, dict[str, int]] = {}  # by sequence: blocks that its last fetch brought, by tier
        self._n_begun = 0
        self._keys: dict[bytes, int] = {}  # the fetch that brings the block with this content key
        self.n_missed = 0  # fetches that did not meet their deadline
        self.recomputed: Counter[str] = Counter()  # blocks that a fetch promised and did not bring, by tier

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def n_tokens(self) -> int:
        return sum(fetch.n_tokens for fetch in self._by_number.values())

    @property
    def wake_s(self) -> float:
        return min((fetch.deadline_s for fetch in self._by_number.values()), default=inf)

    @property
    def has_work(self) -> bool:
        """True if the next step has more of some fetch to reserve, or to give back."""
        return bool(self._ended) or any(fetch.n_reserved < fetch.n_useful for fetch in self._by_number.values())

    def is_fetching(self, key: bytes) -> bool:
        """True if the block with this content key is being fetched, or is about to be."""
        if key in self._keys:
            return True
        unreserved = (fetch for fetch in self._by_number.values() if fetch.n_reserved < fetch.n_useful)
        return any(fetch.seq.keys[fetch.n_reserved] == key for fetch in unreserved)

    # --- what there is ----------------------------------------------------------------------------------------------

    def match(self, seq: Sequence, n_hit: int) -> TierMatch:
        """Return what is to be looked up, with n_hit blocks in the device pool."""
        return TierMatch(n_hit, seq.max_cached, [{} for _ in self._sizes])

    def look_up(self, seq: Sequence, match: TierMatch) -> None:
        """Find out more of the longest prefix that need not be computed, given the tiers."""
        groups, keys = self._cache.groups, seq.keys
        first_group, at = match.next
        for g in range(first_group, len(groups)):
            if not groups[g].kind.keeps_all:
                continue
            at = max(at, match.n_hit)
            while at < match.n_blocks:
                n = self._budget.look_up(match.n_blocks - at)
                if not n:
                    match.next = g, at
                    return
                self._look_up_part(match, g, at, keys[at : at + n])
                at += n
            at = 0
        self._look_up_visible(seq, match)
        match.complete = True

    def _look_up_part(self, match: TierMatch, g: int, first: int, keys: list[bytes]) -> None:
        """Look up blocks of a group that keeps all of them."""
        known = self._cache.groups[g].index.find(keys)
        lacking = [n for n, block in enumerate(known) if block is None]
        found = self._port.own.find(g, keys if len(lacking) == len(keys) else [keys[n] for n in lacking])
        if None in found:
            end = found.index(None)
            match.n_blocks = first + lacking[end]
            lacking, found = lacking[:end], found[:end]
        match.where[g].update(zip((first + n for n in lacking), filter(None, found)))

    def _look_up_visible(self, seq: Sequence, match: TierMatch) -> None:
        """Look up those blocks of the other groups that the token after the prefix can see."""
        groups, keys, where, n = self._cache.groups, seq.keys, match.where, match.n_blocks

        def has(g: int, j: int) -> bool:
            if keys[j] in groups[g].index or j in where[g]:
                return True
            (tier,) = self._port.own.find(g, keys[j : j + 1])
            if tier is not None:
                where[g][j] = tier
            return tier is not None

        agreed = -1
        while agreed != n:
            agreed = n
            for g, group in enumerate(groups):
                if not group.kind.keeps_all:
                    n = group.kind.longest(partial(has, g), n)
        match.n_blocks = n

    def choose(self, seq: Sequence, match: TierMatch, compute: ComputeQueue) -> fetch_policy.Fetch | None:
        if match.n_blocks <= match.n_hit:
            return None
        tiers, mover = self._port.own.queues()
        n_tail = seq.n_tokens - match.n_blocks * BLOCK_TOKENS
        return fetch_policy.choose(list(self._runs(match)), tiers, mover, n_tail, compute, self._cache.windowed)

    def _runs(self, match: TierMatch) -> Iterator[TierRun]:
        """Yield what is fetched, in order. Tokens of blocks in the device pool belong to the next run, or the last."""
        tiers = list(map(match.where[0].get, range(match.n_hit, match.n_blocks)))
        if len(self._sizes) == 1 and not self._cache.windowed and None not in tiers:  # the common case, and long
            for tier, run in groupby(filter(None, tiers)):
                n = len(list(run))
                yield TierRun(tier, n * BLOCK_TOKENS, n * self._sizes[0])
            return
        tier, n_tokens, n_bytes = "", 0, 0
        where = match.where
        early = (
            (g, j) for g, found in enumerate(where) for j in found if j < match.n_hit
        )  # of groups that keep the end alone
        later = ((g, j) for j in range(match.n_hit, match.n_blocks) for g in range(len(self._sizes)))
        for g, j in (*early, *later):
            if j in where[g] and where[g][j] != tier:
                if tier:
                    yield TierRun(tier, n_tokens, n_bytes)
                    n_tokens, n_bytes = 0, 0
                tier = where[g][j]
            n_tokens += BLOCK_TOKENS if g == 0 and j >= match.n_hit else 0
            n_bytes += self._sizes[g] if j in where[g] else 0
        if tier:
            yield TierRun(tier, n_tokens, n_bytes)

    # --- fetching it ------------------------------------------------------------------------------------------------

    def begin(
        self, seq: Sequence, match: TierMatch, chosen: fetch_policy.Fetch, reserved: list[int], now_s: float
    ) -> bool:
        """Take the first blocks that the sequence lacks, and let the tiers write them. Returns False if not now."""
        n_blocks = match.n_blocks if self._cache.windowed else match.n_hit + chosen.n_tokens // BLOCK_TOKENS
        fetch = RunningFetch(
            number=self._n_begun + 1,
            seq=seq,
            table=self._cache.reservation(n_blocks, seq.table.owner),
            match=match,
            n_tokens=chosen.n_tokens,
            began_s=now_s,
            deadline_s=now_s + chosen.deadline_s,
            limit_s=chosen.limit_s,
            n_promised=n_blocks,
            n_useful=n_blocks,
            missing=[{} for _ in self._sizes],
        )
        if not self._reserve(fetch, reserved):
            return False
        self._n_begun += 1
        self._by_number[fetch.number] = self._by_seq[seq.number] = fetch
        return True

    def go_on(self, reserved: Callable[[], list[int]]) -> list[Sequence]:
        """Reserve more of each fetch. Returns the sequences of those that end because there is no room."""
        unreserved = [fetch for fetch in self._by_number.values() if fetch.n_reserved < fetch.n_useful]
        ended = []
        for fetch in unreserved:
            if self._budget.takes and not self._reserve(fetch, reserved()):
                fetch.n_tries += 1
                if fetch.n_tries == MAX_TRIES:
                    self._shorten(fetch, fetch.n_reserved)
            if fetch.is_complete:
                ended.append(self._end(fetch))
        return ended

    def _reserve(self, fetch: RunningFetch, reserved: list[int]) -> bool:
        """Reserve as much as this step allows. Returns False if there is no room, or steps may still write to it."""
        n_known = max(0, fetch.match.n_hit - fetch.n_reserved)  # they are only referenced
        n = self._budget.look_up(n_known)
        if n == n_known:
            n += self._budget.take(fetch.n_useful - fetch.n_reserved - n)
        lacking = self._cache.reserve_more(fetch.table, fetch.seq.keys, fetch.n_reserved + n, reserved)
        if lacking is None:
            return False
        fetch.n_reserved += n
        tiers = [self._expect(fetch, g, blocks) for g, blocks in enumerate(lacking)]
        if any(lacking):
            self._port.fetch(fetch.number, self._wanted(fetch, lacking, tiers))
        return True

    def _expect(self, fetch: RunningFetch, g: int, blocks: dict[int, int]) -> dict[int, str]:
        """Return the tiers of reserved blocks of a group, without those that no tier has any more."""
        keys = fetch.seq.keys
        tiers = list(map(fetch.match.where[g].get, blocks))
        if None in tiers:  # the device pool has evicted it since it was looked up
            tiers = self._port.own.find(g, [keys[j] for j in blocks])
            for j in [j for j, tier in zip(blocks, tiers) if tier is None]:
                self._shorten(fetch, j)
                del blocks[j]
        found = dict(zip(blocks, filter(None, tiers)))
        fetch.missing[g].update(found)
        if g == self._counted_group:
            self._keys.update(zip(map(keys.__getitem__, blocks), repeat(fetch.number)))
        return found

    def _shorten(self, fetch: RunningFetch, n_blocks: int) -> None:
        """Give up what is not among the first n_blocks. Groups that do not keep all blocks have none of a shorter
        prefix, so nothing is left then."""
        fetch.n_useful = 0 if self._cache.windowed else min(fetch.n_useful, n_blocks)

    def _wanted(
        self, fetch: RunningFetch, lacking: list[dict[int, int]], tiers: list[dict[int, str]]
    ) -> Iterator[WantedBlock]:
        """Yield blocks in the order of the chain, as far as a tier's reads of many blocks of one group allow."""
        seq = fetch.seq
        order = sorted((j // ORDERED_BLOCKS, g, j) for g, blocks in enumerate(lacking) for j in blocks)
        for _, g, j in order:
            yield WantedBlock((g, j), lacking[g][j], seq.keys[j], block_meta(seq, j), tiers[g][j])

    def fetched(self, notice: BlocksFetched) -> Sequence | None:
        """Publish blocks that have arrived. Returns the sequence if nothing of its fetch is missing any more."""
        fetch = self._by_number.get(notice.number)
        if fetch is None:
            self._end_quarantine(notice)
            return None
        keys = fetch.seq.keys
        for group, items in groupby(notice.fetched, key=itemgetter(0)):
            indices = [j for _, j in items]
            tiers = list(map(fetch.missing[group].pop, indices))
            self._cache.publish_received(fetch.table, keys, group, indices)
            if group == self._counted_group:
                fetch.arrived.update([notice.tier or tier for tier in tiers])
                self._forget_keys(fetch, indices)
        for item in notice.missing:
            del fetch.missing[item[0]][item[1]]
            self._shorten(fetch, item[1])
            self._forget_keys(fetch, (item[1],) if item[0] == self._counted_group else ())
        return self._end(fetch) if fetch.is_complete else None

    def look_up_arrived(self) -> None:
        """Look up what has arrived, step by step, so that a sequence is admitted without looking all of it up."""
        for fetch in self._by_number.values():
            self._cache.match(fetch.seq.keys, fetch.match.n_hit + fetch.n_arrived, fetch.seq.hit)

    def _forget_keys(self, fetch: RunningFetch, indices: Iterable[int]) -> None:
        keys, number = fetch.seq.keys, fetch.number
        for key in [keys[j] for j in indices]:
            if self._keys.get(key) == number:
                del self._keys[key]

    def late(self, now_s: float, compute: Callable[[Sequence], ComputeQueue]) -> list[Sequence]:
        """Return the sequences whose fetch has missed its deadline; what has arrived of it counts."""
        missed = []
        for fetch in [fetch for fetch in self._by_number.values() if now_s >= fetch.deadline_s]:
            elapsed_s, n_arrived = now_s - fetch.began_s, BLOCK_TOKENS * fetch.n_arrived
            next_s = fetch_policy.extended(
                elapsed_s, n_arrived, fetch.n_tokens - n_arrived, fetch.limit_s, compute(fetch.seq)
            )
            if next_s is None:
                self.n_missed += 1
                missed.append(self._end(fetch))
            else:
                fetch.deadline_s = fetch.began_s + next_s
        return missed

    def _end(self, fetch: RunningFetch) -> Sequence:
        """End a fetch, complete or not. Fetched blocks stay cached until others need the room."""
        seq = fetch.seq
        if (n_there := fetch.n_there) < fetch.n_promised:
            first = 0 if self._cache.windowed else n_there
            promised = fetch.match.where[self._counted_group].items()
            self.recomputed.update(tier for j, tier in promised if first <= j < fetch.n_promised)
        del self._by_number[fetch.number], self._by_seq[seq.number]
        self._forget_keys(fetch, fetch.missing[self._counted_group])
        writing = self._port.cancel(fetch.number)
        if writing:
            self._quarantine[fetch.number] = {
                (group, j): self._cache.withdraw(fetch.table, group, j) for group, j in writing
            }
        if (before := self._ended.pop(seq.number, None)) is not None:
            self._cache.release(before)
        self._ended[seq.number] = fetch.table
        if fetch.n_arrived:
            self._arrived[seq.number] = dict(fetch.arrived)
        return seq

    # --- what was fetched -------------------------------------------------------------------------------------------

    def take_fetched(self, seq: Sequence) -> tuple[dict[str, int], BlockTable | None]:
        """Blocks that were fetched for a sequence that is admitted now, by tier, and a table of those that are still
        referenced; these references are the caller's."""
        return self._arrived.pop(seq.number, {}), self._ended.pop(seq.number, None)

    def give_back(self) -> None:
        """Give back the references to what was fetched for sequences that could not be admitted at once."""
        for number, table in list(self._ended.items()):
            most = max(len(held.blocks) - held.n_passed for held in table.groups)
            if self._cache.release_last(table, self._budget.publish(most)):
                del self._ended[number]

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if (fetch := self._by_seq.get(seq.number)) is not None:
            fetch.n_promised = 0  # nothing is computed again
            self._end(fetch)
        self._arrived.pop(seq.number, None)
        if (table := self._ended.pop(seq.number, None)) is not None:
            self._cache.release(table)

    def _end_quarantine(self, notice: BlocksFetched) -> None:
        blocks = self._quarantine.get(notice.number)
        if blocks is None:
            return
        for item in (*notice.fetched, *notice.missing):
            if (block := blocks.pop(item, None)) is not None:
                self._cache.unpin(item[0], block)
        if not blocks:
            del self._quarantine[notice.number]
