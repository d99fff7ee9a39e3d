"""The cluster's KV pool, a tier on Mooncake Store: what one worker has computed, every worker of the cluster can fetch.

Anyone who reaches the pool's ports can write to it, so nothing that comes from it is believed. An object is a header
and a block; the header names the chain and the session that the block belongs to, and has a keyed tag over them, the
block and its address. What does not verify is removed, counted, and computed again. Objects are named by (content key,
layout tag) within the namespace of the cluster: models, dtypes, layouts, drafters and clusters never meet.

Mooncake's master evicts. What the pool holds is known from lookups and own writes, for a while.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec

from emberline.kv.host_memory import shared_pages
from emberline.kv.kv_events import TierChanges
from emberline.kv.tiers.block_tag import TAG_BYTES, BlockTagger
from emberline.kv.tiers.host import copy
from emberline.kv.tiers.pool.pool_client import PoolClient, PoolUnavailable
from emberline.kv.tiers.pool.pool_master import MasterMetrics, PoolUsage
from emberline.kv.tiers.pool.pool_process import Operation
from emberline.kv.tiers.tier import BlockId, BlockMeta, TierStats
from emberline.protocol.kv_store import StoreSettings

OWNER_BYTES = SESSION_BYTES = 16
HEADER_BYTES = 128  # owner, session, tag; the block after it is aligned
STAGE_BYTES = 17 << 20  # of one batch: half of the 32 MiB that are asked for at once, and headers
N_TAGGERS = 2  # threads that compute tags of one batch
N_STAGES = 4  # two for reading and two for writing: one is transferred, one is verified or filled
NAMES_PER_CALL = 1024
LOOKUP_LIMIT_S = 1.0
CALL_LIMIT_S = 3.0  # for a call, in addition to its bytes at MIN_RATE
MIN_RATE = 20e6  # bytes per second
HELD_S = 60.0  # that a block counts as held after a lookup, a read or a write; the master may evict it earlier
MAX_KNOWN = 1 << 18  # blocks
TOO_LARGE = -600  # Mooncake's code of a `get` whose object is larger than its buffer
RATE_KEEP = 0.9  # weight of the past in the read rate


class PoolStore(Protocol):
    """Calls of Mooncake Store on objects that lie in memory which the store shares with the tier: `PoolClient`."""

    generation: int  # changes when the connection is a new one: the pool may be another

    @property
    def problem(self) -> str: ...

    def call(
        self,
        operation: Operation,
        names: Sequence[str],
        starts: Sequence[int] = (),
        sizes: Sequence[int] = (),
        *,
        limit_s: float,
    ) -> list[int]:
        """The store's code for each name. PoolUnavailable: nothing is written into the memory after it."""

    def close(self) -> None: ...


class PoolMaster(Protocol):
    """Source of facts that the store itself does not tell: `MasterMetrics`."""

    def usage(self) -> PoolUsage:
        """The last known, at once."""

    def names(self) -> list[str]:
        """Names of all objects. Blocks. Raises OSError if the master does not answer."""


class _Belongs(NamedTuple):
    """To whom a block belongs, as its header says."""

    owner: bytes
    session: bytes

    @classmethod
    def of(cls, meta: BlockMeta) -> "_Belongs":
        return cls(_fixed(meta.owner, OWNER_BYTES), _fixed(meta.session, SESSION_BYTES))

    def matches(self, owner: bytes | None, session: bytes | None) -> bool:
        return (owner is None or _fixed(owner, OWNER_BYTES) == self.owner) and (
            session is None or _fixed(session, SESSION_BYTES) == self.session
        )


class _Batch(NamedTuple):
    """Blocks that are transferred together: indices into the caller's lists, and where their objects are staged."""

    indices: list[int]
    starts: list[int]
    sizes: list[int]


class PoolTier:
    """`memory`: N_STAGES stages, shared with the store. The tier owns the store."""

    name = "pool"
    remote = True

    def __init__(
        self,
        store: PoolStore,
        memory: memoryview,
        tagger: BlockTagger,
        namespace: str,
        master: PoolMaster | None = None,
        call_limit_s: float = CALL_LIMIT_S,
        min_rate: float = MIN_RATE,
    ) -> None:
        """A transfer of n bytes is given up after `call_limit_s` + n / `min_rate` seconds."""
        self._call_limit_s, self._min_rate = call_limit_s, min_rate
        self._store, self._memory, self._tagger, self._master = store, memory, tagger, master
        self._prefix = f"{namespace}/"
        self._stage_bytes = len(memory) // N_STAGES
        self._threads = ThreadPoolExecutor(2 * (1 + N_TAGGERS), "kv-pool-call")
        self._reading, self._writing = threading.Lock(), threading.Lock()  # own the stages
        self._lock = threading.Lock()  # guards what follows
        self._held: OrderedDict[BlockId, float] = OrderedDict()  # until when it counts as held
        self._saved: OrderedDict[BlockId, tuple[float, _Belongs]] = OrderedDict()  # by this worker: when
        self._stats = TierStats(self.name, extra={"refused": 0.0})
        self._generation = store.generation  # for which the above is known
        self.changes: TierChanges | None = None

    # --- lookup -----------------------------------------------------------------------------------------------------

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        if self._store.problem:
            return [False] * len(ids)
        now_s, held = time.monotonic(), self._held
        with self._lock:
            if self._generation != self._store.generation:
                self._generation = self._store.generation
                self._held.clear()
                self._saved.clear()
            return [held.get(id_, 0.0) > now_s for id_ in ids]

    def held(self) -> list[BlockId]:
        now_s = time.monotonic()
        with self._lock:
            return [id_ for id_, until_s in self._held.items() if until_s > now_s]

    def look_up(self, ids: Sequence[BlockId]) -> None:
        fresh_s = time.monotonic() + HELD_S / 2
        self.holds(())
        with self._lock:
            unknown = [id_ for id_ in ids if self._held.get(id_, 0.0) < fresh_s]
        try:
            for start in range(0, len(unknown), NAMES_PER_CALL):
                part = unknown[start : start + NAMES_PER_CALL]
                codes = self._store.call("exist", [*map(self._name, part)], limit_s=LOOKUP_LIMIT_S)
                self._learn(part, [code == 1 for code in codes])
                if 1 not in codes:
                    break  # a chain that is not held here goes on nowhere
        except PoolUnavailable:
            pass

    def _learn(self, ids: Sequence[BlockId], held: Sequence[bool]) -> None:
        until_s = time.monotonic() + HELD_S
        gained = []
        with self._lock:
            for id_, is_held in zip(ids, held):
                if is_held:
                    if id_ not in self._held:
                        gained.append(id_)
                    self._held[id_] = until_s
                    self._held.move_to_end(id_)
                else:
                    self._held.pop(id_, None)
                    self._saved.pop(id_, None)
            while len(self._held) > MAX_KNOWN:
                self._held.popitem(last=False)
        if self.changes is not None:  # what is absent may have been told by another worker
            self.changes.removed([id_ for id_, is_held in zip(ids, held) if not is_held])
            self.changes.stored(gained)

    # --- movement ---------------------------------------------------------------------------------------------------

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        got = [False] * len(ids)
        refused: list[BlockId] = []
        with self._reading:
            began_s = time.monotonic()
            try:
                for batch, codes in self._transferred("get", ids, self._batches(buffers, range(len(ids)), 0)):

                    def verify(at: int, batch: _Batch = batch, codes: list[int] = codes) -> None:
                        index, start, size = batch.indices[at], batch.starts[at], batch.sizes[at]
                        if codes[at] == size:
                            got[index] = self._verified(ids[index], self._memory[start : start + size], buffers[index])

                    self._for_each(len(codes), verify)
                    refused += [
                        ids[index]
                        for index, code in zip(batch.indices, codes)
                        if not got[index] and (code >= 0 or code == TOO_LARGE)
                    ]
            except PoolUnavailable:
                pass
            took_s = time.monotonic() - began_s
        self._learn(ids, got)
        if refused:
            self.remove(refused)  # so that they can be written anew
        n_bytes = sum(len(buffer) for buffer, ok in zip(buffers, got) if ok)
        with self._lock:
            stats = self._stats
            stats.hits += sum(got)
            stats.misses += len(ids) - sum(got)
            stats.read_bytes += n_bytes
            stats.extra["refused"] += len(refused)
            if n_bytes and all(got):
                rate = n_bytes / max(took_s, 1e-6)
                stats.read_rate = RATE_KEEP * stats.read_rate + (1 - RATE_KEEP) * rate if stats.read_rate else rate
        return got

    def _verified(self, id_: BlockId, staged: memoryview, buffer: memoryview) -> bool:
        """Copy the block of a staged object, and then verify the copy: nobody else can change it."""
        header = bytes(staged[:HEADER_BYTES])
        belongs, tag = header[: OWNER_BYTES + SESSION_BYTES], header[OWNER_BYTES + SESSION_BYTES :][:TAG_BYTES]
        copy(buffer, staged[HEADER_BYTES:])
        return self._tagger.verify(id_.key + id_.tag + belongs, buffer, tag)

    def write(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], metas: Sequence[BlockMeta]) -> None:
        lacking = [index for index, held in enumerate(self.holds(ids)) if not held]
        belongs = [_Belongs.of(meta) for meta in metas]
        n_done = n_bytes = 0

        def stage(batch: _Batch) -> None:
            def fill(at: int) -> None:
                index, start, size = batch.indices[at], batch.starts[at], batch.sizes[at]
                staged, block = self._memory[start : start + size], buffers[index]
                about = b"".join(belongs[index])
                address = ids[index].key + ids[index].tag + about
                staged[:HEADER_BYTES] = _fixed(about + self._tagger.tag(address, block), HEADER_BYTES)
                copy(staged[HEADER_BYTES:], block)

            self._for_each(len(batch.indices), fill)

        with self._writing:
            try:
                for batch, codes in self._transferred("put", ids, self._batches(buffers, lacking, 2), stage):
                    done = [index for index, code in zip(batch.indices, codes) if code == 0]
                    n_done += len(done)
                    n_bytes += sum(len(buffers[index]) for index in done)
                    self._learn([ids[index] for index in done], [True] * len(done))
                    self._remember([(ids[index], belongs[index]) for index in done])
            except PoolUnavailable:
                pass
        with self._lock:
            self._stats.written_bytes += n_bytes
            self._stats.dropped += len(lacking) - n_done

    def _remember(self, saved: Sequence[tuple[BlockId, _Belongs]]) -> None:
        now_s = time.monotonic()
        with self._lock:
            for id_, belongs in saved:
                self._saved[id_] = now_s, belongs
            while len(self._saved) > MAX_KNOWN:
                self._saved.popitem(last=False)

    def _batches(self, buffers: Sequence[memoryview], indices: Iterable[int], first_stage: int) -> Iterator[_Batch]:
        """Divide buffers into batches that fill two stages in turn. A block larger than a stage is in none."""
        stage, at = first_stage, 0
        batch = _Batch([], [], [])
        for index in indices:
            size = HEADER_BYTES + len(buffers[index])
            if size > self._stage_bytes:
                continue
            if at + size > self._stage_bytes:
                yield batch
                stage, at = stage ^ 1, 0
                batch = _Batch([], [], [])
            batch.indices.append(index)
            batch.starts.append(stage * self._stage_bytes + at)
            batch.sizes.append(size)
            at += size
        if batch.indices:
            yield batch

    def _transferred(
        self,
        operation: Operation,
        ids: Sequence[BlockId],
        batches: Iterator[_Batch],
        stage: Callable[[_Batch], None] = lambda batch: None,
    ) -> Iterator[tuple[_Batch, list[int]]]:
        """Each batch, with the store's codes. The next is transferred while the caller has one, or fills one: one at a
        time, since the library waits for a transfer by polling."""
        before: tuple[_Batch, Future[list[int]]] | None = None
        try:
            for batch in batches:
                stage(batch)
                codes = before[1].result() if before is not None else []
                names = [self._name(ids[index]) for index in batch.indices]
                limit_s = self._call_limit_s + sum(batch.sizes) / self._min_rate
                call = partial(self._store.call, operation, names, batch.starts, batch.sizes, limit_s=limit_s)
                done, before = before, (batch, self._threads.submit(call))
                if done is not None:
                    yield done[0], codes
            if before is not None:
                yield before[0], before[1].result()
        finally:
            if before is not None:
                wait([before[1]])  # it uses a stage

    def _for_each(self, n: int, work: Callable[[int], None]) -> None:
        """Do it n times, in several threads: tags are computed without the interpreter's lock."""
        n_threads = min(N_TAGGERS, n)

        def some(first: int) -> None:
            for at in range(first, n, n_threads):
                work(at)

        others = [self._threads.submit(some, first) for first in range(1, n_threads)]
        some(0)
        for other in others:
            other.result()

    # --- removal ----------------------------------------------------------------------------------------------------

    def touch(self, ids: Sequence[BlockId], conversation: object = None) -> None:
        """The master's own order of eviction follows lookups and reads."""

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """Other workers may use them; the master evicts by its own order."""

    def remove(self, ids: Sequence[BlockId]) -> None:
        self._learn(ids, [False] * len(ids))
        self._remove([self._name(id_) for id_ in ids])

    def _remove(self, names: Sequence[str]) -> int:
        n_removed = 0
        try:
            for start in range(0, len(names), NAMES_PER_CALL):
                part = names[start : start + NAMES_PER_CALL]
                n_removed += self._store.call("remove", part, limit_s=self._call_limit_s).count(0)
        except PoolUnavailable:
            pass
        return n_removed

    def purge(self, owner: bytes | None = None, session: bytes | None = None) -> int:
        """Purge all workers' blocks where the master lists them, else this worker's. A header is not verified here: a
        forged one costs its own object at most."""
        with self._lock:
            own = [self._name(id_) for id_, (_, belongs) in self._saved.items() if belongs.matches(owner, session)]
            self._held.clear()
            self._saved.clear()
        try:
            listed = [] if self._master is None else self._master.names()
        except OSError:
            listed = []
        others = [name for name in listed if name.startswith(self._prefix)]
        if owner is not None or session is not None:
            others = self._belonging(others, owner, session)
        return self._remove(list(dict.fromkeys((*own, *others))))

    def _belonging(self, names: Sequence[str], owner: bytes | None, session: bytes | None) -> list[str]:
        """Names of the objects whose headers name this owner and session."""
        found = []
        n_most = min(NAMES_PER_CALL, self._stage_bytes // HEADER_BYTES)
        with self._reading:
            try:
                for at in range(0, len(names), n_most):
                    part = names[at : at + n_most]
                    starts = [HEADER_BYTES * number for number in range(len(part))]
                    sizes = [HEADER_BYTES] * len(part)
                    codes = self._store.call("get_head", part, starts, sizes, limit_s=self._call_limit_s)
                    for name, start, code in zip(part, starts, codes):
                        header = bytes(self._memory[start : start + OWNER_BYTES + SESSION_BYTES])
                        belongs = _Belongs(header[:OWNER_BYTES], header[OWNER_BYTES:])
                        if code == HEADER_BYTES and belongs.matches(owner, session):
                            found.append(name)
            except PoolUnavailable:
                pass
        return found

    def stats(self) -> TierStats:
        usage = PoolUsage() if self._master is None else self._master.usage()
        problem = self._store.problem
        with self._lock:
            oldest_s = next((at_s for at_s, _ in self._saved.values()), None)
            return msgspec.structs.replace(
                self._stats,
                used_bytes=usage.used_bytes,
                capacity_bytes=usage.capacity_bytes,
                blocks=usage.blocks,
                oldest_s=0.0 if oldest_s is None else time.monotonic() - oldest_s,
                state=f"degraded: {problem}" if problem else "ok",
                extra=dict(self._stats.extra),
            )

    def close(self) -> None:
        self._store.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _name(self, id_: BlockId) -> str:
        return f"{self._prefix}{id_.key.hex()}{id_.tag.hex()}"


def open_pool(settings: StoreSettings, key: bytes, call_limit_s: float = CALL_LIMIT_S) -> PoolTier:
    """Open the pool at an address, for those who have this key: it tags their blocks and names their part of the pool.

    It connects in the background, and again whenever the connection is lost. `call_limit_s`: see PoolTier."""
    memory = shared_pages(N_STAGES * STAGE_BYTES)
    namespace = f"emberline-{blake2b(key, digest_size=8, person=b'kv.namespace').hexdigest()}"
    master = MasterMetrics(settings.metrics) if settings.metrics else None
    client, tagger = PoolClient(settings, memory), BlockTagger(key)
    return PoolTier(client, memoryview(memory.buffer), tagger, namespace, master, call_limit_s)


def _fixed(value: bytes, n_bytes: int) -> bytes:
    return value[:n_bytes].ljust(n_bytes, b"\0")
