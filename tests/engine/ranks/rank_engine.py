"""An engine whose ranks are all in this process: the fake model on every rank, over the bytes of its own slices.

Each rank has real tiers and transfers, with their threads. A test says when a follower hears what rank 0 has told it,
when its reports reach rank 0, and when copies of its blocks end. A block that is written while some rank still copies
it, or read before its copy has ended, fails the test at once.
"""

import threading
import time
from argparse import Namespace
from collections import Counter, deque

import msgspec
import numpy as np

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.ranks import messages
from emberline.engine.ranks.messages import KVReport
from emberline.engine.ranks.opening import follow_kv, lead_kv
from emberline.engine.ranks.rank_runner import OrderReports
from emberline.engine.tiers.opening import open_tiers
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.disk.disk_tier import slot_bytes
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier, padded
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.messages import BlocksFetched, Saved
from emberline.kv.tiers.mover import HostMover
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import RankEndpoint
from tests.engine.fakes import EOS, VOCAB, FakeRunner, LateHandle
from tests.kv.transfer.rank_groups import divided, serve

# A row of a block is a token's entry: token and state, 8 bytes each.
WHOLE = KVGroup("full", (0, 1, 2, 3, 4, 5), kv_heads=2, head_dim=8, dtype="bfloat16")
WINDOW = KVGroup("window40", (6, 7, 8, 9, 10, 11), kv_heads=2, head_dim=8, dtype="bfloat16", window=40)
LAYOUTS = {1: {}, 2: {"tp": 2}, 3: {"pp": 3}, 4: {"tp": 2, "pp": 2}}
WAIT_S = 30.0
INFO = EngineInfo(model="m", fingerprint="fake", context_len=1, vocab_size=1, eos_ids=(), transfers=("tcp",))


class Progress:
    """A wait that fails if nothing changes any more, however long it takes on a busy machine."""

    def __init__(self):
        self._seen, self.still_s = None, time.monotonic()  # since then nothing has changed

    def check(self, state):
        now_s = time.monotonic()
        if state != self._seen:
            self._seen, self.still_s = state, now_s
        assert now_s < self.still_s + WAIT_S, f"it never ends: {state}"


class Gate:
    """Holds the copies of a rank while it is closed."""

    def __init__(self):
        self._open = threading.Event()
        self._open.set()
        self.close, self.open = self._open.clear, self._open.set

    def wait(self):
        assert self._open.wait(WAIT_S), "a gate was never opened"


class RankMemory(HostMemory):
    """The device pools of a rank. Every layer, plane and head has each token's entry, marked with its own place."""

    def __init__(self, slices, n_blocks):
        pools = [bytearray(n_blocks * group.block_bytes) for group in slices]
        super().__init__(list(map(memoryview, pools)), [group.block_bytes for group in slices])
        self.pools_of_entries = [_Pool(self, *pair) for pair in enumerate(zip(slices, pools))]
        self._lock = threading.Lock()
        self.gate = Gate()
        self.copied_from, self.copied_to = Counter(), Counter()  # (group, block), by copies that have not ended
        self.is_held = lambda place: True  # by a sequence, a fetch or a transfer
        self.faults = []  # of threads, where nobody sees them
        self.n_filled = 0  # times that a sender has written to a block

    def begin(self, places, to):
        with self._lock:
            self.faults += [
                f"block {place} is copied while it is copied, or free"
                for place in places
                if self.copied_to[place] or (to and self.copied_from[place]) or not self.is_held(place)
            ]
            (self.copied_to if to else self.copied_from).update(places)

    def end(self, places, to):
        with self._lock:
            (self.copied_to if to else self.copied_from).subtract(places)

    def fill(self, group, block, runs, read_into):
        """A sender of KV writes a block. Parts of it may come from several senders."""
        self.gate.wait()
        place = group, block
        with self._lock:
            self.faults += [] if self.is_held(place) and not self.copied_from[place] else [f"block {place} is written"]
            self.copied_to[place] += 1
        super().fill(group, block, runs, read_into)
        self.end([place], to=True)
        self.n_filled += 1


class _Pool:
    """The blocks of a group as the fake runner has them."""

    def __init__(self, memory, number, made):
        self.memory, self.number, (group, pool) = memory, number, made
        layers, planes, heads, tokens, _ = group.block_shape
        self.entries = np.frombuffer(pool, np.uint64).reshape(-1, layers, planes, heads, tokens, 2)
        heads = range(group.first_head, group.first_head + heads)
        places = [
            [[(layer * 16 + plane) * 16 + head for head in heads] for plane in range(planes)] for layer in group.layers
        ]
        self.marks = np.array(places, np.uint64)

    def __getitem__(self, block):
        return _Block(self, block)

    def plain(self, block):
        """The block's entries, or None if its layers, planes and heads do not have the same, each in its place."""
        plain = self.entries[block] ^ self.marks[..., None, None]
        return plain[0, 0, 0].tobytes() if (plain == plain[0, 0, 0]).all() else None


class _Block:
    """An entry for each of 16 tokens."""

    def __init__(self, pool, block):
        self._pool, self._block, self._place = pool, block, (pool.number, block)

    def __getitem__(self, position):
        assert not self._pool.memory.copied_to[self._place], f"block {self._place} is read while it is copied"
        mark = int(self._pool.marks[0, 0, 0])
        token, state = self._pool.entries[self._block, 0, 0, 0, position].tolist()
        return token ^ mark, state ^ mark

    def __setitem__(self, position, entry):
        memory = self._pool.memory
        busy = memory.copied_to[self._place] or memory.copied_from[self._place]
        assert not busy, f"block {self._place} is written while it is copied"
        self._pool.entries[self._block, :, :, :, position] = np.array(entry, np.uint64) ^ self._pool.marks[..., None]


class GatedMover:
    """Copies as a device does: for some time a block is neither what it was nor what it will be."""

    def __init__(self, memory):
        self._memory, self._mover = memory, HostMover(memory)

    def load(self, copies):
        self._memory.begin([(copy.group, copy.block) for copy in copies], to=True)
        for copy in copies:
            self._memory.block(copy.group, copy.block)[:] = b"\xaa" * len(copy.slot.buffer)
        return _Copying(self, copies, to=True)

    def save(self, copies):
        self._memory.begin([(copy.group, copy.block) for copy in copies], to=False)
        return _Copying(self, copies, to=False)

    def finish(self, copies, to):
        self._memory.gate.wait()
        (self._mover.load if to else self._mover.save)(copies)
        self._memory.end([(copy.group, copy.block) for copy in copies], to)


class _Copying:
    def __init__(self, mover, copies, to):
        self._finish = lambda: mover.finish(copies, to)

    def wait(self):
        self._finish()


class Member:
    """A follower's connection to rank 0. The test delivers its reports."""

    def __init__(self, rank, slices):
        self.rank, self.slices = rank, slices
        self.reports = deque()

    def send(self, report):
        self.reports.append(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=KVReport))


class Leader:
    """Rank 0's end of the group: what it tells waits in the inbox of each follower."""

    def __init__(self, slices):
        self.slices, self.end_s, self.on_report = slices, 0.0, None
        self.inboxes = [deque() for _ in slices[1:]]
        self.layout = self
        self.n_ranks = len(slices)

    def publish_plan(self, plan):
        encoded = messages.encoder.encode(messages.Launch(plan))
        for inbox in self.inboxes:
            inbox.append((plan, messages.step_messages.decode(encoded).plan))


class OrderBook:
    """Rank 0's tiers as the scheduler has them, and a check that each of its orders ends, and ends once."""

    def __init__(self, tiers, engine):
        self._tiers, self._engine = tiers, engine
        self.saves, self.fetches, self.cancelled = {}, {}, {}
        self.contents = {}  # entries of every content key that was saved
        self.n_wanted = 0  # blocks of all fetches
        self.n_named = 0  # blocks in notices

    def __getattr__(self, name):
        return getattr(self._tiers, name)

    def _set_order(self, order):
        self._tiers.order = order

    order = property(fset=_set_order)

    def save(self, number, blocks):
        assert number not in self.saves
        self.saves[number] = blocks
        for block in blocks:
            self.contents[block.group, block.key] = self._engine.content(block.group, block.block)
        self._tiers.save(number, blocks)

    def fetch(self, number, blocks):
        wanted = list(blocks)
        known = self.fetches.setdefault(number, {})
        assert not known.keys() & {block.item for block in wanted}
        known.update((block.item, block) for block in wanted)
        self.n_wanted += len(wanted)
        self._tiers.fetch(number, wanted)

    def cancel(self, number):
        left = self._tiers.cancel(number)
        known = self.fetches.pop(number, {})
        assert set(left) <= known.keys(), "what was named already is not written any more"
        if left:
            self.cancelled[number] = {item: (item[0], known[item].block) for item in left}
        return left

    def notices(self):
        taken = self._tiers.notices()
        for notice in taken:
            if isinstance(notice, Saved):
                self.n_named += len(self.saves.pop(notice.number))
            elif isinstance(notice, BlocksFetched):
                self._named(notice)
        return taken

    def _named(self, notice):
        items = [*notice.fetched, *notice.missing]
        self.n_named += len(items)
        assert len(set(items)) == len(items)
        if notice.number in self.cancelled:
            for item in items:
                del self.cancelled[notice.number][item]  # named once
            if not self.cancelled[notice.number]:
                del self.cancelled[notice.number]
            return
        known = self.fetches.get(notice.number, {})
        for item in items:
            assert item in known, "named twice, or after the end"
        blocks = [known.pop(item) for item in items if item in known]
        for block in blocks[: len(notice.fetched)]:
            group = block.item[0]
            expected = self.contents[group, block.key]
            assert self._engine.content(group, block.block) == expected, "fetched on every rank, or missing"

    @property
    def blocks(self):
        """Device blocks that some rank may still read or write."""
        saved = {(block.group, block.block) for blocks in self.saves.values() for block in blocks}
        return saved.union(*(left.values() for left in self.cancelled.values()))

    @property
    def open(self):
        return bool(self.saves or self.cancelled or any(self.fetches.values()))


class RankRunner:
    """Computes a step on every rank when its result is asked for; all must draw the same tokens."""

    def __init__(self, engine, cache):
        self._engine = engine
        self._runners = [FakeRunner(cache) for _ in engine.memories]
        for runner, memory in zip(self._runners, engine.memories):
            runner.blocks = memory.pools_of_entries
        self.meanwhile = lambda: None

    def launch(self, plan):
        return LateHandle(lambda: self.meanwhile() or self._compute(plan))

    def _compute(self, plan):
        for rank in range(1, self._engine.n_ranks):
            self._engine.hear(rank, until=plan)
        own, *others = [runner.launch(plan) for runner in self._runners]
        drawn = own.result()
        for other in others:
            assert [each.token_id for each in other.result()] == [each.token_id for each in drawn]
        return own


class RankEngine:
    """A step loop over n ranks. `host_blocks` of them fit into each rank's host tier; 0: it has no tiers.

    `disk`: folder of a disk tier instead, and the number of blocks that fit into it."""

    def __init__(self, n_ranks, n_blocks, host_blocks, closing, steps_in_flight=1, layouts=(WHOLE,), disk=None):
        self.n_ranks = n_ranks
        self.disk = disk
        self.layouts = layouts
        self.slices = tuple(
            tuple(group for (group,) in rank) for rank in zip(*(divided(each, **LAYOUTS[n_ranks]) for each in layouts))
        )
        self.memories = [RankMemory(slices, n_blocks) for slices in self.slices]
        self.gates = [memory.gate for memory in self.memories]
        has_tiers = bool(host_blocks or disk)
        self.managers = [self._open_tiers(rank, host_blocks) if has_tiers else None for rank in range(n_ranks)]
        transfers = self.all_transfers = [host_transfers("fake", *pair) for pair in zip(self.slices, self.memories)]
        self.leader = Leader(self.slices)
        self.transfers = GroupTransfers(transfers[0], self.slices if n_ranks > 1 else ())
        self.inboxes = self.leader.inboxes
        self.members = [Member(rank, self.slices) for rank in range(1, n_ranks)]
        self.executors = [
            follow_kv(member, transfers[member.rank], self.managers[member.rank]) for member in self.members
        ]
        self.followers = [OrderReports(*pair) for pair in zip(self.members, self.executors)]
        self.tiers = GroupTiers(self.managers[0]) if has_tiers else None
        if n_ranks > 1:
            lead_kv(self.leader, self.transfers, self.tiers)
        self.book = OrderBook(self.tiers, self) if has_tiers else None
        self.alive = set(range(n_ranks))
        for rank in range(n_ranks):
            closing.callback(self.kill, rank)
        self.cache = KVCache(self.slices[0], [n_blocks] * len(layouts), chunk=32)
        for memory in self.memories:
            memory.is_held = self.is_held
        self.limits = Limits(min(400, self.cache.capacity), VOCAB, (EOS,), 4, 32)
        self.runner = RankRunner(self, self.cache)
        scheduler = build_scheduler(self.cache, self.limits, "fake", tiers=self.book, transfers=self.transfers)
        publish = self.leader.publish_plan if n_ranks > 1 else None
        self.loop = StepLoop(scheduler, self.runner, steps_in_flight, publish=publish)

    def _open_tiers(self, rank, host_blocks):
        sizes = [group.block_bytes for group in self.slices[rank]]
        if self.disk is not None:
            folder, disk_blocks = self.disk
            disk_bytes = self.n_ranks * disk_blocks * max(map(slot_bytes, self.slices))
            flags = {"kv_host_bytes": 0, "kv_store": None, "kv_disk_encrypt": False, "kv_disk_path": folder}
            args = Namespace(rank=rank, kv_disk_bytes=disk_bytes, **flags)
            slices, mover = self.slices, GatedMover(self.memories[rank])
            return open_tiers(args, "fake", slices[rank], mover, ranks=slices[: len(slices) * (len(slices) > 1)])
        host = HostTier(host_blocks * sum(map(padded, sizes)), sizes, segment_bytes=padded(max(sizes)))
        mover = GatedMover(self.memories[rank])
        return TierManager(self.slices[rank], mover, host, [], 1e9, self.slices)

    def is_held(self, place):
        """True if something references the block, so that it is not taken for anything else."""
        group, block = place
        return self.cache.groups[group].pool.refs[block] > 0

    def content(self, group, block):
        """The entries of a block on all ranks, or None if ranks do not have the same."""
        first, *others = [memory.pools_of_entries[group].plain(block) for memory in self.memories]
        return first if all(other == first for other in others) else None

    def hear(self, rank, most=1 << 30, until=None):
        """A follower does what rank 0 has told it: `most` commands, or those up to a plan. Rows are computed when rank
        0 asks for their result."""
        inbox, executors = self.inboxes[rank - 1], self.executors[rank - 1]
        while inbox and most > 0:
            plan, sent = inbox.popleft()
            most -= 1
            for feature, orders in messages.orders_of(sent).items():
                executors[feature].execute(orders)
            if plan is until:
                return

    def deliver(self, rank, most=1 << 30):
        """Reports of a follower reach rank 0."""
        reports = self.members[rank - 1].reports
        while reports and most > 0:
            self.leader.on_report(rank, reports.popleft())
            most -= 1

    def pump(self, silent=0):
        """Let everything arrive that was told or reported, but what one rank reports."""
        for rank in range(1, self.n_ranks):
            self.hear(rank)
            if rank != silent:
                self.deliver(rank)

    def listen(self, folder, name, closing):
        """Let other engines send KV to every rank."""
        self.endpoints = []
        for rank, transfers in enumerate(self.all_transfers):
            address = serve(str(folder / f"{name}{rank}"), transfers, INFO, closing)
            self.endpoints.append(RankEndpoint(address, self.slices[rank]))

    def kill(self, rank):
        """A rank ends: its connections are lost, and so is what it had to report."""
        if rank not in self.alive:
            return
        self.alive.remove(rank)
        for gate in self.gates:
            gate.open()
        if rank:
            self.followers[rank - 1].close()
            return
        self.transfers.close()
        if self.managers[0] is not None:
            self.managers[0].close()

    @property
    def faults(self):
        return [fault for memory in self.memories for fault in memory.faults]

    def flush(self):
        """Wait until all that was saved and fetched is where it belongs."""
        for manager in self.managers:
            assert manager is None or manager.flush(WAIT_S)

    @property
    def recomputed(self):
        """Blocks that fetches promised and that were computed again, by tier, as the engine reports them."""
        return Counter({tier.name: tier.extra.get("recomputed", 0) for tier in self.loop.load.tiers})

    def lose(self, rank, n):
        """Some block of a rank's tiers is lost."""
        tier = self.managers[rank].all_tiers[0]
        held = sorted(tier.held())
        tier.remove(held[n % len(held) :][:1] if held else ())
