"""The order in which one tier's blocks are evicted: runs of blocks, one for each conversation, by `Retention`.

    queue of a kind: run ⇄ run ⇄ …, least recently used first        run: head ⇄ first block ⇄ … ⇄ last block ⇄ head

Blocks are numbers below `n_blocks` and in at most one run; links are two flat arrays, so that a block costs the same to
add, take out or evict however many there are, and many that are given as an array are linked in one call. A run's last
blocks are evicted before its first ones.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from heapq import merge
from itertools import chain

import numpy as np

from emberline.kv.prefix_index import Blocks
from emberline.kv.retention import HINTED_SHARE, OWNER_SHARE, Conversation, Kind, Retention

SPARSE = 1 << 62
LONG_HINT_S = 3600.0  # shorter ones act on tiers only: the device's cache is needed sooner
_RATED = (Kind.SIDE, Kind.IDLE, Kind.TOOL)


class EvictionRun:
    """Blocks of one conversation, or others that were added together."""

    __slots__ = ("charged", "conversation", "head", "kind", "n_blocks", "n_lost", "queue", "step", "used_s")

    def __init__(self, head: int, kind: Kind, used_s: float, conversation: Conversation | None, step: int) -> None:
        self.head, self.kind, self.used_s, self.conversation, self.step = head, kind, used_s, conversation, step
        self.n_blocks = 0  # at most; blocks that were taken out one by one still count
        self.n_lost = 0  # evicted from its end since blocks were last added
        self.charged = 0  # blocks of the owner's share of hints
        self.queue: OrderedDict[int, EvictionRun] = OrderedDict()  # that it is in


class EvictionOrder:
    """Used by one thread at a time; only `changed` may be called by another.

    `sparse`: blocks are any numbers below SPARSE, and links take memory for those that there were. `by_age`: what is
    left after superseded blocks goes least recently used first, whatever it waits for; so do tiers below the device,
    which are large enough that nothing else pays there.
    """

    def __init__(self, n_blocks: int, retention: Retention, sparse: bool = False, by_age: bool = False) -> None:
        self.n_blocks = n_blocks
        self._retention = retention
        self._sparse, self._by_age = sparse, by_age
        self._min_hint_s = 0.0 if by_age else LONG_HINT_S
        self._n_heads = 0
        self._next, self._prev = _links(n_blocks, sparse), _links(n_blocks, sparse)  # then the heads of runs
        self._runs: dict[int, EvictionRun] = {}  # by head
        self._free_heads: list[int] = []
        self._queues: list[OrderedDict[int, EvictionRun]] = [OrderedDict() for _ in Kind]
        self._hinted: dict[float, OrderedDict[int, EvictionRun]] = {}  # by how long they should stay
        self._expired: dict[float, OrderedDict[int, EvictionRun]] = {}  # the hinted that stayed so long, oldest first
        self.charged: dict[bytes, int] = {}  # blocks that hints keep, by owner; read-only for others
        self.n_charged = 0  # of all owners
        self._of: dict[Conversation, EvictionRun] = {}
        self._victim: EvictionRun | None = None  # the run that is being evicted
        self._changes: deque[tuple[Conversation, int]] = deque()
        retention.add_listener(self)

    def follow(self, retention: Retention) -> None:
        """Take the place of a retention that was told nothing."""
        self._retention = retention
        retention.add_listener(self)

    def changed(self, conversation: Conversation, n_superseded: int = 0) -> None:
        self._changes.append((conversation, n_superseded))

    # --- blocks ------------------------------------------------------------------------------------------------------

    def add(self, blocks: Iterable[int] | Blocks, conversation: Conversation, step: int = 0) -> None:
        """Append blocks, in the order of the chain, to the run of their conversation."""
        self.apply_changes()
        run = self._of.get(conversation)
        if run is None:
            run = self._new_run(conversation.kind, conversation, step)
            self._of[conversation] = run
        run.step, run.n_lost = step, 0
        self._append(run, blocks)
        self._requeue(run)

    def add_shared(self, blocks: Iterable[int] | Blocks, step: int = 0) -> None:
        """Append blocks of a prefix that several sessions have."""
        self._add_run(Kind.SHARED, blocks, step)

    def add_plain(self, blocks: Iterable[int] | Blocks, step: int = 0, used_s: float | None = None) -> None:
        """Append blocks of no known conversation. `used_s`: when, not before those that were appended before."""
        run = self._new_run(Kind.IDLE, None, step)
        run.used_s = run.used_s if used_s is None else used_s
        self._append(run, blocks)

    def add_dead(self, blocks: Iterable[int] | Blocks, step: int = 0) -> None:
        """Append blocks that will hardly be used again."""
        self._add_run(Kind.DEAD, blocks, step)

    def add_empty(self, blocks: Iterable[int] | Blocks, step: int = 0) -> None:
        """Append blocks without content, to the last such run if that is of the same step."""
        queue = self._queues[Kind.EMPTY]
        run = next(reversed(queue.values())) if queue else None
        self._append(run if run is not None and run.step == step else self._new_run(Kind.EMPTY, None, step), blocks)

    def remove(self, blocks: Iterable[int] | Blocks) -> None:
        """Soonest in the order of their chains: neighbors are taken out together."""
        following, preceding = self._next, self._prev
        for first, last in self._neighbors(blocks):
            before, after = preceding[first], following[last]
            following[before], preceding[after] = after, before
            if before == after:  # both are the head
                self._drop(self._runs[before])

    def _neighbors(self, blocks: Iterable[int] | Blocks) -> Iterator[tuple[int, int]]:
        """First and last of the blocks that follow each other, here as in their runs."""
        if isinstance(blocks, np.ndarray):
            ends = np.flatnonzero(_view(self._next)[blocks[:-1]] != blocks[1:])
            firsts, lasts = np.append(blocks[:1], blocks[ends + 1]), np.append(blocks[ends], blocks[-1:])
            yield from zip(firsts.tolist(), lasts.tolist())
            return
        following, left = self._next, iter(blocks)
        block = next(left, None)
        while block is not None:
            first = last = block
            block = None
            for block in left:
                if following[last] != block:
                    break
                last = block
            else:
                block = None
            yield first, last

    def take(self, n: int) -> list[int]:
        """Remove and return the next n blocks to evict; there must be as many."""
        if self._changes:
            self.apply_changes()
        found: list[int] = []
        while len(found) < n:
            run = self._victim = self._victim or self._choose_victim()
            taken = self._pop(run, n - len(found))
            found += taken
            run.n_lost += len(taken)
            if self._prev[run.head] == run.head:
                self._drop(run)
        return found

    def peek(self) -> int | None:
        """The next block to evict; None if there is none."""
        self.apply_changes()
        if not self._runs:
            return None
        self._victim = self._victim or self._choose_victim()
        return self._prev[self._victim.head]

    def first(self, n: int, last_step: int, but: AbstractSet[int] = frozenset()) -> list[int]:
        """The next n blocks to evict, without those of `but` and those that were added after `last_step`; fewer if
        there are not so many. They stay."""
        return [block for _, blocks in self._first(n, last_step, but) for block in blocks]

    def take_others(self, n: int, but: AbstractSet[int]) -> list[int]:
        """Remove and return the next n blocks to evict without those of `but`; fewer if there are not so many."""
        found = self._first(n, SPARSE, but) if n else []
        for run, blocks in found:
            run.n_lost += len(blocks)
            self.remove(reversed(blocks))
        return [block for _, blocks in found for block in blocks]

    def _first(self, n: int, last_step: int, but: AbstractSet[int]) -> list[tuple[EvictionRun, list[int]]]:
        preceding, found = self._prev, list[tuple[EvictionRun, list[int]]]()
        for run in self._in_order():
            if run.step > last_step:
                continue
            block, head, blocks = preceding[run.head], run.head, list[int]()
            while block != head and len(blocks) < n:
                if block not in but:
                    blocks.append(block)
                block = preceding[block]
            if blocks:
                found.append((run, blocks))
                n -= len(blocks)
                if not n:
                    break
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(block, step) of all blocks, the next to evict first; shared prefixes behind what follows them."""
        for run in self._in_order():
            block = self._prev[run.head]
            while block != run.head:
                yield block, run.step
                block = self._prev[block]

    def _in_order(self) -> Iterator[EvictionRun]:
        self.apply_changes()
        self._expire_hints()
        queues = self._queues
        rated = merge(*(queue.values() for queue in self._rated()), key=self._rate)
        hinted = [queue.values() for queue in self._hinted.values()]
        yield from chain(queues[Kind.EMPTY].values(), queues[Kind.DEAD].values(), rated)
        yield from chain(queues[Kind.SHARED].values(), *hinted)

    # --- runs --------------------------------------------------------------------------------------------------------

    def _new_run(self, kind: Kind, conversation: Conversation | None, step: int) -> EvictionRun:
        if self._free_heads:
            head = self._free_heads.pop()
        else:
            head = (SPARSE if self._sparse else self.n_blocks) + self._n_heads
            self._n_heads += 1
            for links in (self._next, self._prev):
                if isinstance(links, dict):
                    links[head] = head
                else:
                    links.append(head)
        run = self._runs[head] = EvictionRun(head, kind, self._retention.now_s, conversation, step)
        run.queue = self._queues[kind]
        run.queue[head] = run
        return run

    def _add_run(self, kind: Kind, blocks: Iterable[int] | Blocks, step: int) -> None:
        self._append(self._new_run(kind, None, step), blocks)

    def _append(self, run: EvictionRun, blocks: Iterable[int] | Blocks) -> None:
        following, preceding = self._next, self._prev
        head = run.head
        last = preceding[head]
        n = 0
        if isinstance(blocks, np.ndarray) and len(blocks):
            _view(following)[blocks[:-1]], _view(preceding)[blocks[1:]] = blocks[1:], blocks[:-1]
            first, n = int(blocks[0]), len(blocks)
            following[last], preceding[first] = first, last
            last = int(blocks[-1])
        else:
            for block in blocks:
                following[last] = block
                preceding[block] = last
                last = block
                n += 1
        following[last], preceding[head] = head, last
        run.n_blocks += n
        if last == head:
            self._drop(run)
        elif run.kind <= Kind.DEAD:
            self._victim = None  # these go first

    def _pop(self, run: EvictionRun, most: int) -> list[int]:
        """Take blocks from the end of a run."""
        preceding, head = self._prev, run.head
        found: list[int] = []
        block = preceding[head]
        while block != head and len(found) < most:
            found.append(block)
            block = preceding[block]
        preceding[head], self._next[block] = block, head
        return found

    def _drop(self, run: EvictionRun) -> None:
        """The run is empty."""
        self._leave_queue(run)
        if run.conversation is not None:
            del self._of[run.conversation]
        del self._runs[run.head]
        self._free_heads.append(run.head)

    def _leave_queue(self, run: EvictionRun) -> None:
        del run.queue[run.head]
        if run is self._victim:
            self._victim = None
        if run.charged:
            assert run.conversation is not None
            self.n_charged -= run.charged
            self.charged[run.conversation.owner] -= run.charged
            if not self.charged[run.conversation.owner]:
                del self.charged[run.conversation.owner]
            run.charged = 0

    def apply_changes(self) -> None:
        """Reorder the blocks of conversations that `changed` has reported since the last call."""
        while self._changes:
            conversation, n_superseded = self._changes.popleft()
            run = self._of.get(conversation)
            if run is not None and n_superseded > run.n_lost:
                blocks = self._pop(run, n_superseded - run.n_lost)
                run.n_lost += len(blocks)
                self._add_run(Kind.DEAD, reversed(blocks), run.step)
                if self._prev[run.head] == run.head:
                    self._drop(run)
                    continue
            if run is not None:
                self._requeue(run)

    def _requeue(self, run: EvictionRun) -> None:
        """Put the run of a conversation at the end of the queue that it belongs to now."""
        conversation = run.conversation
        if conversation is None or run.head not in self._runs:
            return
        self._leave_queue(run)
        run.kind = conversation.kind
        run.used_s = self._retention.now_s if conversation.ended_s < 0 else conversation.ended_s
        run.queue = self._queues[run.kind]
        if 0 < conversation.hint_s >= self._min_hint_s and self._charge(run, conversation.owner):
            run.queue = self._hinted.setdefault(conversation.hint_s, OrderedDict())
        elif run.kind is Kind.DEAD:
            self._victim = None
        run.queue[run.head] = run

    def _charge(self, run: EvictionRun, owner: bytes) -> bool:
        """Charge the run to its owner's hints. Returns False if the hints of this owner, or of all owners, would keep
        too many blocks."""
        n_owner, n_all = self.charged.get(owner, 0), self.n_charged
        if n_owner + run.n_blocks > OWNER_SHARE * self.n_blocks or n_all + run.n_blocks > HINTED_SHARE * self.n_blocks:
            return False
        self.charged[owner] = n_owner + run.n_blocks
        self.n_charged += run.n_blocks
        run.charged = run.n_blocks
        return True

    def _choose_victim(self) -> EvictionRun:
        queues = self._queues
        for kind in (Kind.EMPTY, Kind.DEAD):
            if queues[kind]:
                return next(iter(queues[kind].values()))
        self._expire_hints()
        first = [next(iter(queue.values())) for queue in self._rated() if queue]
        shared = next(iter(queues[Kind.SHARED].values()), None)
        # What follows a shared prefix was not used after it, and is worth nothing without it.
        if shared is not None and all(shared.used_s < run.used_s for run in first):
            return shared
        if first:
            return min(first, key=self._rate)
        return next(run for queue in self._hinted.values() for run in queue.values())

    def _expire_hints(self) -> None:
        now_s = self._retention.now_s
        for hint_s, queue in self._hinted.items():
            while queue and (run := next(iter(queue.values()))).used_s + hint_s <= now_s:
                self._leave_queue(run)
                run.queue = self._expired.setdefault(hint_s, OrderedDict())
                run.queue[run.head] = run

    def _rated(self) -> Iterator[OrderedDict[int, EvictionRun]]:
        """Queues whose first runs are compared by their rates of return."""
        return chain((self._queues[kind] for kind in _RATED), self._expired.values())

    def _rate(self, run: EvictionRun) -> float:
        if self._by_age:
            return run.used_s
        return self._retention.times.rate(run.kind, self._retention.now_s - run.used_s)


def _links(n_blocks: int, sparse: bool) -> "array[int] | dict[int, int]":
    return {} if sparse else array("q", range(n_blocks))


def _view(links: "array[int] | dict[int, int]") -> Blocks:
    """The same memory, to be used at once: an array that somebody views cannot grow."""
    assert isinstance(links, array), "sparse blocks are given one by one"
    return np.frombuffer(links, np.int64)
