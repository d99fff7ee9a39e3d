"""The tiers of an engine: their threads, the copies between them and the device pool, and what a fetch has to expect.

    device pool ──saver──▶ host memory ──writers──▶ disk, pool
    device pool ◀─loader── host memory ◀──readers── disk, pool

Blocks are saved when they are published and fetched when a sequence needs them, in batches. Every block passes through
a slot of the host tier, which keeps it there if it has the room.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice, repeat
from math import inf
from queue import SimpleQueue
from typing import cast

from emberline.kv.groups import counted_group
from emberline.kv.kv_events import TierChanges
from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.retention import Conversation, Retention
from emberline.kv.slices import Slices, copy, whole
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.kv.tiers.host import HostTier, Slot
from emberline.kv.tiers.messages import BlocksFetched, Item, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.mover import BlockCopy, BlockMover, Ticket
from emberline.kv.tiers.orders import (
    BlocksWritten,
    CancelFetch,
    FetchCancelled,
    Flush,
    Flushed,
    Purge,
    ReadBlocks,
    Save,
    SlicesRead,
    TierOrder,
    TierReport,
    WriteBlocks,
)
from emberline.kv.tiers.orders import Fetch as FetchOrder
from emberline.kv.tiers.rates import ReadRate
from emberline.kv.tiers.tier import BlockId, BlockMeta, Retained, Tier, layout_tag
from emberline.kv.tiers.tier_worker import TierWorker
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import TierStats

MAX_EVICTED = 1 << 16  # evictions that followers are yet to hear of; of older ones they keep the blocks for longer
BATCH_BYTES = 32 << 20  # of one copy to the device
SAVING_BYTES = 2 << 30  # of the device pool that are being saved at once: the blocks of a step, which come together
LOADS_IN_FLIGHT = 2
STATS_S = 1.0  # age at which statistics are made anew
FLUSH_S = 10.0  # for blocks on their way to be written when the engine ends

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way to the device pool."""

    number: int
    cancelled: bool = False
    writing: set[Item] = field(default_factory=set)  # device blocks that are written now

    def is_cancelled(self) -> bool:
        """True if no request waits for the blocks any more."""
        return self.cancelled


class TierManager:
    """The tiers of one rank: does what it is ordered. `host` is the first tier, or only stages for the others."""

    def __init__(
        self,
        layouts: Sequence[KVGroup],
        mover: BlockMover,
        host: HostTier,
        tiers: Sequence[Tier],
        host_rate: float,
        ranks: Sequence[Sequence[KVGroup]] = (),
    ) -> None:
        """ranks: slices that each rank of a group has of a block; empty if this engine has one rank."""
        self._host, self._mover = host, mover
        self.layouts = tuple(layouts)
        self.ranks: tuple[Slices, ...] = tuple(map(tuple, ranks)) or (self.layouts,)
        self.whole = whole(self.ranks)  # layouts of blocks that are not divided
        self.sizes = [layout.block_bytes for layout in layouts]
        self._tags = [layout_tag(layout) for layout in layouts]
        self._tiers: dict[str, Tier] = {tier.name: tier for tier in tiers}
        self._all: list[Tier] = [host, *tiers] if host.keeps else list(tiers)
        self.names = tuple(tier.name for tier in self._all)
        self.remote = any(tier.remote for tier in tiers)
        self.queue: NoticeQueue[TierReport] = NoticeQueue()
        told = layout_tag(counted_group(layouts))
        # A stage has no bytes of a drafter that another stage has. It takes such blocks to be where its others are.
        self._asked_tags = [tag if size else told for tag, size in zip(self._tags, self.sizes)]
        self.changes: list[TierChanges] = []
        for tier in self._all:
            tier.changes = TierChanges(tier.name, told, tier.held, self._tier_changed)
            self.changes.append(tier.changes)
        self._lock = threading.Lock()  # guards fetches, and what is loaded for them
        self._fetches: dict[int, Fetch] = {}
        self._n_unsaved = 0  # blocks for which host memory had no room
        self.max_saving = min(SAVING_BYTES, host.capacity_bytes // 4)
        self._load_rate = ReadRate(host_rate)
        self._saves: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # what the saver does, in this order
        self._promised: dict[int, list[tuple[int, int]]] = {}  # by save: block sizes, and slots of the host tier
        self._loads: SimpleQueue[tuple[Fetch, list[tuple[WantedBlock, Slot]]] | None] = SimpleQueue()
        self._wanted: SimpleQueue[tuple[Fetch, Iterable[WantedBlock]] | None] = SimpleQueue()
        self._workers = {name: TierWorker(tier, host) for name, tier in self._tiers.items()}
        self._stats: tuple[TierStats, ...] = ()
        self._stats_s = 0.0
        self._stats_stale = False
        self._threads = [
            threading.Thread(target=target, name=f"kv-{name}", daemon=True)
            for name, target in (("fetch", self._divide_all), ("save", self._save_all), ("load", self._load_all))
        ]
        self.allocate_more = host.allocate_more
        host.start_allocating()
        for thread in self._threads:
            thread.start()

    # --- the step loop's side ---------------------------------------------------------------------------------------

    def execute(self, orders: Sequence[TierOrder]) -> None:
        """Begin what is ordered, in this order; threads do it, and `reports` tells what has become of it."""
        for order in orders:
            if isinstance(order, FetchOrder):
                self.fetch(order.number, order.blocks)
            elif isinstance(order, CancelFetch):
                self.cancel(order.number)
            elif isinstance(order, Flush):
                threading.Thread(target=self._execute_flush, args=(order,), name="kv-flush", daemon=True).start()
            elif isinstance(order, Save):
                self._saves.put(partial(self._save, order))
            elif isinstance(order, ReadBlocks):
                threading.Thread(target=self._read_blocks, args=(order,), name="kv-export", daemon=True).start()
            elif isinstance(order, WriteBlocks):
                threading.Thread(target=self._write_blocks, args=(order,), name="kv-import", daemon=True).start()
            else:
                self._saves.put(partial(self._tell, order.keys, lambda tier, ids: tier.remove(ids)))

    def reports(self) -> list[TierReport]:
        """Take what has happened since the last call."""
        return self.queue.take()

    def record_evictions(self) -> None:
        """Remember from now on what tiers evict, for `make_room`."""
        for tier in self._all:
            if isinstance(tier, Retained):
                tier.evicted = deque(maxlen=MAX_EVICTED)

    def make_room(self, number: int, blocks: Sequence[SavedBlock]) -> dict[str, list[tuple[int, bytes]]]:
        """Evict blocks of the host tier now, so that a save finds room there. Returns by tier the group and key of all
        that was evicted since the last call."""
        if self._host.keeps:
            blocks = [block for block in blocks if self.sizes[block.group]]
            ids, promised = self._ids(blocks), Counter[int]()

            def lacking() -> Counter[int]:
                held = self._host.holds(ids)
                return Counter(self.sizes[block.group] for block, has in zip(blocks, held) if not has) - promised

            while more := lacking():  # again: what is evicted may be blocks of this save, which need room then
                for size, n in more.items():
                    self._host.promise(size, n)
                promised += more
            self._promised[number] = list(promised.items())
        found: dict[str, list[tuple[int, bytes]]] = {}
        for tier in self._all:
            evicted = tier.evicted if isinstance(tier, Retained) else None
            while evicted:
                key, tag = evicted.popleft()
                if tag in self._tags:
                    found.setdefault(tier.name, []).append((self._tags.index(tag), key))
        return found

    def follow(self, retention: Retention) -> None:
        """Keep blocks as long as this retention thinks. Called once, first."""
        for tier in self._all:
            if isinstance(tier, Retained):
                tier.follow(retention)

    def used(self, keys: Sequence[bytes], conversation: Conversation | None) -> None:
        """Keep blocks that a turn of a conversation has found in the device pool, as if they were read from a tier."""
        self._saves.put(partial(self._tell, keys, lambda tier, ids: tier.touch(ids, conversation)))

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """Evict the blocks of a session that has ended first, from a position on."""
        self._saves.put(partial(self._tell, (), lambda tier, _: tier.retire(owner, session, first)))

    def _tell(self, keys: Sequence[bytes], call: Callable[[Tier, list[BlockId]], None]) -> None:
        """Call a function with every tier, and the blocks of all layouts. A tier that fails at it does not keep the
        others from it."""
        ids = [BlockId(key, tag) for tag in self._tags for key in keys]
        for tier in self._all:
            with contextlib.suppress(Exception):
                call(tier, ids)

    def find(self, group: int, keys: Sequence[bytes]) -> list[str | None]:
        """Return the name of the fastest tier that holds each block of a KV group."""
        if self._host.capacity_bytes < max(self.sizes):  # none could be allocated: nothing passes
            return [None] * len(keys)
        ids = cast(
            "list[BlockId]", list(zip(keys, repeat(self._asked_tags[group])))
        )  # which are equal, and sooner made
        first, *others = self._all
        found = [first.name if held else None for held in first.holds(ids)]
        for tier in others:
            if None not in found:
                break
            found = [tier.name if held and known is None else known for known, held in zip(found, tier.holds(ids))]
        return found

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        """Ask remote tiers which blocks they hold, of all layouts, for `find`. Answered by `LookedUp`."""
        ids = [BlockId(key, tag) for tag in self._tags for key in keys]
        workers = [worker for worker in self._workers.values() if worker.tier.remote]
        left = [len(workers)]

        def done() -> None:
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self.queue.put(LookedUp(number))

        for worker in workers:
            worker.look_up(ids, done)

    def fetch(self, number: int, blocks: Iterable[WantedBlock]) -> None:
        """Begin a fetch, or add blocks to it. Fetches have numbers of their own, which are not used again."""
        with self._lock:
            fetch = self._fetches.setdefault(number, Fetch(number))
        self._wanted.put((fetch, blocks))

    def _divide_all(self) -> None:
        """Divide fetches into batches, for those who read and load them."""
        while (entry := self._wanted.get()) is not None:
            try:
                self._divide(*entry)
            except Exception:
                _log.exception("a fetch could not be begun")  # it will miss its deadline

    def _divide(self, fetch: Fetch, blocks: Iterable[WantedBlock]) -> None:
        wanted = list(blocks)
        if empty := [block.item for block in wanted if not self.sizes[block.group]]:
            self.queue.put(BlocksFetched(fetch.number, empty))
            wanted = [block for block in wanted if self.sizes[block.group]]
        for tier, run in groupby(wanted, key=lambda block: block.tier):
            for batch in self._batches(run):
                if fetch.cancelled:
                    return
                if tier == self._host.name:
                    self._load_held(fetch, batch)
                else:
                    self._workers[tier].read(
                        self._ids(batch), self._size(batch), fetch.is_cancelled, self._read(fetch, batch)
                    )

    def cancel(self, number: int) -> Sequence[Item]:
        """End a fetch, complete or not. Returns the blocks that are being written at this moment: `FetchCancelled` is
        reported once none is. Others are not written."""
        with self._lock:
            fetch = self._fetches.pop(number, None)
            writing = () if fetch is None else tuple(fetch.writing)
            if fetch is not None:
                fetch.cancelled = True
        if not writing:
            self.queue.put(FetchCancelled(number))
        return writing

    def queues(self) -> tuple[dict[str, TierQueue], TierQueue]:
        """Return what a fetch has to expect of each tier, and of the copies into the device pool."""
        load = self._load_rate.queue()
        return {name: self._workers[name].queue() if name in self._workers else load for name in self.names}, load

    def _tier_changed(self) -> None:
        self._stats_stale = True
        self.queue.wake()

    @property
    def report_s(self) -> float:
        """When statistics are to be asked for again; inf: they are not known to have changed. A tier that is out of use
        recovers by itself, and tells nobody."""
        stale = self._stats_stale or any(stats.state != "ok" for stats in self._stats)
        return self._stats_s + STATS_S if stale else inf

    def stats(self) -> tuple[TierStats, ...]:
        now_s = time.monotonic()
        if now_s >= self._stats_s + STATS_S:
            self._stats_s, self._stats_stale = now_s, False
            made = []
            for tier in self._all:
                stats, worker = tier.stats(), self._workers.get(tier.name)
                stats.read_rate = (self._load_rate if worker is None else worker.rate).rate
                stats.dropped += self._n_unsaved if worker is None else worker.n_dropped
                made.append(stats)
            self._stats = tuple(made)
        return self._stats

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until what was saved and fetched by now is where it belongs; False: it took longer. Not from the step
        loop's thread."""
        until_s = time.monotonic() + limit_s

        def left_s() -> float:
            return max(0.0, until_s - time.monotonic())

        with self._lock:
            fetches = list(self._fetches)
        saved = threading.Event()
        self._saves.put(saved.set)
        if not saved.wait(left_s()):
            return False
        while any(number in self._fetches for number in fetches) and left_s():
            time.sleep(0.01)
        if not all(worker.wait_read(left_s()) for worker in self._workers.values()):  # which faster tiers keep, too
            return False
        barriers = [threading.Event() for _ in self._workers]
        for worker, barrier in zip(self._workers.values(), barriers):
            worker.flush(barrier)
        return all(barrier.wait(left_s()) for barrier in barriers)

    def _execute_flush(self, order: Flush) -> None:
        """Flush, and purge every tier if that is ordered. An error means that something may be left."""
        purged: dict[str, int] = {}
        try:
            error = "" if self.flush(order.limit_s) else "a tier of the KV cache does not answer"
            if isinstance(order, Purge) and not error:
                purged = {tier.name: tier.purge(order.owner, order.session) for tier in self.all_tiers}
                self._stats_s = 0.0  # the next report tells it
        except OSError as failed:
            error = failed.strerror or str(failed)
        self.queue.put(Flushed(order.number, purged, error))

    def _read_blocks(self, order: ReadBlocks) -> None:
        """Read blocks for an export, each from the first tier that has it."""
        found: list[bytes | None] = [None if self.sizes[group] else b"" for group, _ in order.blocks]
        for tier in self._all:
            wanted = [n for n, data in enumerate(found) if data is None]
            ids = [BlockId(order.blocks[n][1], self._tags[order.blocks[n][0]]) for n in wanted]
            held = [(n, id_) for n, id_, has in zip(wanted, ids, tier.holds(ids)) if has]
            sizes = [self.sizes[order.blocks[n][0]] for n, _ in held]
            buffers = [memoryview(bytearray(size)) for size in sizes]
            try:
                for (n, _), buffer, good in zip(held, buffers, tier.read([id_ for _, id_ in held], buffers)):
                    found[n] = bytes(buffer) if good else None
            except Exception:
                _log.exception("the %s tier failed to read blocks", tier.name)
        self.queue.put(SlicesRead(order.number, found))

    def _write_blocks(self, order: WriteBlocks) -> None:
        """Write this rank's slices of imported blocks."""
        slices, blocks = [], [block for block in order.blocks if self.sizes[block.group]]
        for block in blocks:
            buffer = bytearray(self.sizes[block.group])
            copy(self.whole[block.group], block.data, self.layouts[block.group], buffer)
            slices.append(memoryview(buffer))
        ids, metas = [BlockId(block.key, self._tags[block.group]) for block in blocks], [block.meta for block in blocks]
        for tier in self._all:
            try:
                if not tier.remote:
                    tier.write(ids, slices, metas)
            except Exception:
                _log.exception("the %s tier failed to write blocks", tier.name)
        self.queue.put(BlocksWritten(order.number))

    @property
    def all_tiers(self) -> Sequence[Tier]:
        """Fastest first."""
        return self._all

    def close(self) -> None:
        """Write what was saved, within FLUSH_S, and close the tiers."""
        until_s = time.monotonic() + FLUSH_S
        for queue in (self._wanted, self._saves, self._loads):
            queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for worker in self._workers.values():
            worker.stop(until_s)
        self._host.close()
        self.queue.close()

    def _size(self, blocks: Sequence[WantedBlock]) -> int:
        return self.sizes[blocks[0].item[0]]

    def _batches(self, blocks: Iterable[WantedBlock]) -> Iterator[list[WantedBlock]]:
        """Divide the blocks into batches of one size."""
        for group, run in groupby(blocks, key=lambda block: block.item[0]):
            n = max(1, BATCH_BYTES // self.sizes[group])
            while batch := list(islice(run, n)):
                yield batch

    # --- fetching ---------------------------------------------------------------------------------------------------

    def _load_held(self, fetch: Fetch, batch: list[WantedBlock]) -> None:
        """Load blocks that the host tier holds."""
        slots = self._host.find(self._ids(batch))
        found = [(block, slot) for block, slot in zip(batch, slots) if slot is not None]
        if found:
            self._queue_load(fetch, found)
        self._fall_back(fetch, [block for block, slot in zip(batch, slots) if slot is None])

    def _fall_back(self, fetch: Fetch, blocks: Sequence[WantedBlock]) -> None:
        """Read blocks of one size, which a tier did not have after all, from the next one that has them."""
        left = list(blocks)
        if not left or fetch.cancelled:
            return
        names = [tier.name for tier in self._all]
        tried = names.index(left[0].tier) + 1 if left[0].tier in names else len(names)
        for tier in self._all[tried:]:
            held = tier.holds(self._ids(left))
            again = [block._replace(tier=tier.name) for block, has in zip(left, held) if has]
            left = [block for block, has in zip(left, held) if not has]
            if again:
                read = self._read(fetch, again)
                self._workers[tier.name].read(self._ids(again), self._size(again), fetch.is_cancelled, read)
        if left:
            self.queue.put(BlocksFetched(fetch.number, (), [block.item for block in left]))

    def _read(self, fetch: Fetch, batch: list[WantedBlock]) -> Callable[[int, Sequence[Slot], Sequence[bool]], None]:
        """A callback for parts of a batch that were read from another tier: the first index, its slots, and which are
        valid. It takes over the references to the slots."""

        def done(first: int, slots: Sequence[Slot], valid: Sequence[bool]) -> None:
            blocks = batch[first : first + len(valid)]
            found = [(block, slot) for block, slot, ok in zip(blocks, slots, valid) if ok]
            self._host.drop([slot for slot, ok in zip(slots, valid) if not ok])
            self._fall_back(fetch, [block for block, ok in zip(blocks, valid) if not ok])
            if found:
                read = [slot for _, slot in found]
                self._host.hold(read)
                self._queue_load(fetch, found)
                self._promote([block for block, _ in found], read)
                self._host.drop(read)

        return done

    def _promote(self, blocks: Sequence[WantedBlock], slots: Sequence[Slot]) -> None:
        """Keep blocks that were read from one tier in the faster ones, too."""
        ids, metas = self._ids(blocks), [block.meta for block in blocks]
        self._host.put(ids, slots, metas)
        for name, worker in self._workers.items():
            if name == blocks[0].tier:
                return
            worker.write(ids, slots, metas)

    def _queue_load(self, fetch: Fetch, found: list[tuple[WantedBlock, Slot]]) -> None:
        self._load_rate.queued(sum(len(slot.buffer) for _, slot in found))
        self._loads.put((fetch, found))

    def _load_all(self) -> None:
        loading: deque[tuple[Ticket | None, Fetch, list[tuple[WantedBlock, Slot]]]] = deque()
        while True:
            if loading and (len(loading) == LOADS_IN_FLIGHT or self._loads.empty()):
                self._finish_load(*loading.popleft())
                continue
            entry = self._loads.get()
            if entry is None:
                return
            fetch, found = entry
            with self._lock:
                wanted = not fetch.cancelled
                if wanted:
                    fetch.writing.update(block.item for block, _ in found)
            if not wanted:
                self._load_rate.dropped(sum(len(slot.buffer) for _, slot in found))
                self._host.drop([slot for _, slot in found])
                continue
            self._load_rate.begin()
            ticket: Ticket | None = None
            try:
                ticket = self._mover.load([BlockCopy(block.item[0], block.block, slot) for block, slot in found])
            except Exception:
                _log.exception("blocks could not be copied to the device")
            loading.append((ticket, fetch, found))

    def _finish_load(self, ticket: Ticket | None, fetch: Fetch, found: list[tuple[WantedBlock, Slot]]) -> None:
        items = [block.item for block, _ in found]
        try:
            if ticket is not None:
                ticket.wait()
        except Exception:
            _log.exception("blocks could not be copied to the device")
            ticket = None
        self._load_rate.done(sum(len(slot.buffer) for _, slot in found))
        self._host.drop([slot for _, slot in found])
        with self._lock:
            fetch.writing.difference_update(items)
            cancelled, writing = fetch.cancelled, bool(fetch.writing)
        if cancelled:
            if not writing:
                self.queue.put(FetchCancelled(fetch.number))
            return
        fetched, missing = (items, []) if ticket else ([], items)
        self.queue.put(BlocksFetched(fetch.number, fetched, missing, found[0][0].tier))

    # --- saving -----------------------------------------------------------------------------------------------------

    def _save_all(self) -> None:
        while (do := self._saves.get()) is not None:
            do()

    def _save(self, order: Save) -> None:
        copied: list[tuple[BlockId, Slot, BlockMeta]] = []
        try:
            for tier in self._all if order.evicted else ():
                if isinstance(tier, Retained) and tier.evicted is None:  # this rank does not decide what is evicted
                    tier.evict([BlockId(key, self._tags[g]) for g, key in order.evicted.get(tier.name, ())])
            copied.extend(self._copy_out(order.blocks))  # those before an error, too: they have slots
        except Exception:
            _log.exception("blocks could not be saved")
        for size, n in self._promised.pop(order.number, ()):
            self._host.end_promise(size, n)
        self.queue.put(Saved(order.number))
        self._distribute(copied)

    def _ids(self, blocks: Iterable[SavedBlock | WantedBlock]) -> list[BlockId]:
        """Addresses of blocks in the tiers of this rank."""
        return [BlockId(block.key, self._tags[block.group]) for block in blocks]

    def _copy_out(self, blocks: Sequence[SavedBlock]) -> Iterator[tuple[BlockId, Slot, BlockMeta]]:
        """Copy blocks that some tier lacks into slots of host memory."""
        for group in {block.group for block in blocks if self.sizes[block.group]}:
            _, numbers, keys, metas = zip(*[block for block in blocks if block.group == group])
            ids = list(map(BlockId, keys, repeat(self._tags[group])))
            held = zip(*(tier.holds(ids) for tier in self._all))
            wanted = [each for each, has in zip(zip(numbers, ids, metas), held) if not all(has)]
            while wanted and (slots := self._host.take(self.sizes[group], len(wanted), wait_s=0.05)):
                pairs = list(zip(wanted, slots))
                del wanted[: len(slots)]
                try:
                    self._mover.save([BlockCopy(group, number, slot) for (number, _, _), slot in pairs]).wait()
                except Exception:
                    self._host.drop(slots)
                    _log.exception("blocks could not be copied to host memory")
                    continue
                yield from [(id_, slot, meta) for (_, id_, meta), slot in pairs]
            self._n_unsaved += len(wanted)  # all slots are in use: lost when the device evicts them

    def _distribute(self, copied: list[tuple[BlockId, Slot, BlockMeta]]) -> None:
        """Hand saved blocks to the tiers; drops the references to the slots."""
        if not copied:
            return
        ids, slots, metas = zip(*copied)
        self._host.put(ids, slots, metas)
        for worker in self._workers.values():
            worker.write(ids, slots, metas)
        self._host.drop(slots)
