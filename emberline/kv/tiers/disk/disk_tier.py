"""The disk tier: blocks in one block file per layout, in a folder that one process has for itself.

A worker takes the first folder below its model's that no other process has locked, so two workers of one model have
two folders, and a worker that restarts finds what it or another one left. Everything in a folder may be deleted at any
time: the tier notices and starts anew.

What groups of another number of ranks have left is served as well (`other_layouts.py`), and gives way to new blocks:
both together take no more space than the tier was given. If the old blocks alone take more, the tier starts all the
same, and a thread gives blocks up in small steps; until it is done, a write frees as much space as it takes.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path

import msgspec

from emberline.kv.kv_events import TierChanges
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.disk.block_cipher import BlockCipher
from emberline.kv.tiers.disk.block_file import GROW_BYTES, BlockFile, SlotRun, stored_bytes
from emberline.kv.tiers.disk.block_reader import BlockReader
from emberline.kv.tiers.disk.complete_blocks import CompleteBlocks
from emberline.kv.tiers.disk.direct_file import IoThreads
from emberline.kv.tiers.disk.disk_folder import FolderFormat, TierFolder
from emberline.kv.tiers.disk.drive_health import DRIVE_TIMES, NO_ROOM, DriveHealth, DriveTimes
from emberline.kv.tiers.disk.other_layouts import OtherLayouts
from emberline.kv.tiers.tier import BlockId, BlockMeta, TierStats, layout_tag
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput

WRITE_THREADS = 2
MIN_GROWTHS = 32  # of a tier beside blocks of other layouts, before it has all its space
AGE_S = 30.0  # between two looks for the oldest block, which takes milliseconds
MIN_RATED_BYTES = 1 << 20  # of a read: less says nothing about the drive's rate
_RATE_GAIN = 0.2

_log = logging.getLogger(__name__)


class DiskTier:
    """`base`: the folder of its model. `key`: the tagging key; blocks that were written under another one are
    discarded at start, as are those of another encryption key."""

    name = "disk"
    remote = False

    def __init__(
        self,
        base: Path,
        groups: Sequence[KVGroup],
        capacity_bytes: int,
        key: bytes,
        cipher_key: bytes | None = None,
        fingerprint: str = "",
        times: DriveTimes = DRIVE_TIMES,
        clock: Callable[[], float] = time.monotonic,
        grow_bytes: int = GROW_BYTES,
        others: Sequence[Sequence[Path]] = (),
        whole: Sequence[KVGroup] = (),
    ) -> None:
        """`clock`: in seconds, for `times`. `grow_bytes`: disk space that is allocated in one call. `others`: for each
        group of another number of ranks, the folders of its ranks. `whole`: blocks that are not divided; `others` need
        them."""
        self._base, self._other_groups = base, others
        self.unreadable: list[Path] = []  # folders of other groups with blocks that this one cannot use
        self._groups, self._whole = groups, whole
        self._times, self._clock, self._grow_bytes = times, clock, grow_bytes
        self._fingerprint = fingerprint
        self._layouts = {layout_tag(group): group.block_bytes for group in groups}
        self._slot_bytes = slot_bytes(groups)
        self._n_slots = capacity_bytes // self._slot_bytes
        if not self._n_slots:
            raise BadInput(
                f"{capacity_bytes} bytes of disk hold no KV block of this model; give at least {self._slot_bytes}",
                param="kv_disk_bytes",
            )
        self._key, self._cipher_key = key, cipher_key
        self._tagger = BlockTagger(key)
        self._cipher = BlockCipher(cipher_key) if cipher_key is not None else None
        self._health = DriveHealth(f"the KV cache on disk ({base})", clock, times)
        self._reader = BlockReader(self._health)
        self._writers = IoThreads(WRITE_THREADS - 1, "kv-disk-write")  # the caller is one more
        self._mutation = threading.RLock()  # held while blocks are written, purged or given up, or files opened
        self._shrinking = False  # a thread gives up blocks of other layouts
        self._closed = threading.Event()
        self._files: dict[bytes, BlockFile] = {}
        self._others: OtherLayouts | None = None
        self._folder: TierFolder | None = None
        self._format: FolderFormat | None = None
        self._checked_s = self._full_until_s = -inf
        self._full = ""
        self._oldest_s, self._aged_s = 0.0, -inf  # Unix time of the block least recently used; when it was looked up
        self._stats = TierStats("disk", capacity_bytes=self._n_slots * self._slot_bytes)
        self._stats_lock = threading.Lock()
        self._evicted = 0  # by files that are gone
        self.changes: TierChanges | None = None
        self.evicted: deque[BlockId] | None = None  # for other ranks, if somebody wants to know
        self._retention: Retention | None = None
        self._available()

    # --- asked by the step loop ------------------------------------------------------------------------------------

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        if not self._health.usable:
            self._health.check()
            return [False] * len(ids)
        own = {tag: file.index.slots for tag, file in self._files.items()}
        others = self._others  # once: another thread opens the files anew where they were removed
        complete: dict[bytes, set[bytes]] = {} if others is None else others.complete.keys
        return [key in own.get(tag, ()) or key in complete.get(tag, ()) for key, tag in ids]

    def has_own(self, id_: BlockId) -> bool:
        """True if this rank has written the block itself."""
        file = self._files.get(id_.tag)
        return file is not None and id_.key in file.index.slots

    def held(self) -> list[BlockId]:
        found = dict.fromkeys(BlockId(key, tag) for tag, file in self._files.items() for key in list(file.index.slots))
        if (others := self._others) is not None:
            for tag, keys in others.complete.keys.items():
                found |= dict.fromkeys(BlockId(key, tag) for key in list(keys))
        return list(found)

    def look_up(self, ids: Sequence[BlockId]) -> None:
        """All is known."""

    def stats(self) -> TierStats:
        self._health.check()
        stats, files = self._stats, list(self._files.values())
        stats.blocks = sum(len(file.index) for file in files)
        stats.used_bytes = sum(len(file.index) * file.slot_bytes for file in files)
        if (others := self._others) is not None:
            stats.blocks += len(others.complete)
            stats.used_bytes += others.used_bytes
        stats.evicted = self._evicted + sum(file.index.evicted for file in files)
        state = self._health.state
        stats.state = f"degraded: {self._full}" if state == "ok" and self._full else state
        stats.oldest_s = max(0.0, time.time() - self._oldest_s) if self._oldest_s else 0.0
        return msgspec.structs.replace(stats)

    # --- asked by the tier's threads -------------------------------------------------------------------------------

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        """Returns when the drive has answered: until then the buffers are in use."""
        found = [False] * len(ids)
        if self._available():
            began_s = time.perf_counter()
            files, others = self._files, self._others
            found = self._reader.read(lambda _, tag: files.get(tag), ids, buffers)
            if others is not None and (missing := [at for at, has in enumerate(found) if not has]):
                read = others.read([ids[at] for at in missing], [buffers[at] for at in missing])
                for at, good in zip(missing, read):
                    found[at] = good
            self._count_read(ids, found, time.perf_counter() - began_s)
        else:
            self._count_read(ids, found, 0.0)
        return found

    def write(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], metas: Sequence[BlockMeta]) -> None:
        n_new = 0
        with self._mutation:
            n_written = 0
            wanted: dict[bytes, dict[bytes, tuple[bytes, memoryview, BlockMeta]]] = {}
            for (key, tag), buffer, meta in zip(ids, buffers, metas):
                if tag in self._layouts:
                    wanted.setdefault(tag, {})[key] = key, buffer.cast("B"), meta
            if self._available():
                for tag, blocks in wanted.items():
                    file = self._files[tag]
                    self.touch([BlockId(key, tag) for key in blocks])
                    missing = [block for key, block in blocks.items() if key not in file.index.slots]
                    n_new += len(missing)
                    self._make_room(file, len(missing))
                    n_written += self._write_blocks(file, missing)
            else:
                n_new = sum(map(len, wanted.values()))
            if time.monotonic() >= self._aged_s + AGE_S:
                self._aged_s = time.monotonic()
                sources = [*self._files.values(), *((self._others,) if self._others is not None else ())]
                oldest = [source.oldest_s() for source in sources]
                self._oldest_s = min((at_s for at_s in oldest if at_s), default=0.0)
        with self._stats_lock:
            self._stats.dropped += n_new - n_written

    def touch(self, ids: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        for tag, keys in _by_tag(ids).items():
            if (file := self._files.get(tag)) is not None:
                with file.lock:
                    file.index.touch(keys, conversation)
        if (others := self._others) is not None:
            others.touch(ids)

    def follow(self, retention: Retention) -> None:
        self._retention = retention
        for file in self._files.values():
            with file.lock:
                file.index.order.follow(retention)

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        for file in self._files.values():
            with file.lock:
                file.index.retire(owner, session, first)
        if (others := self._others) is not None:
            others.retire(owner, session, first)

    def remove(self, ids: Sequence[BlockId]) -> None:
        with self._mutation:
            for tag, keys in _by_tag(ids).items():
                if (file := self._files.get(tag)) is not None:
                    self._try(partial(file.remove, keys))
            if self._others is not None:
                self._try(partial(self._others.remove, ids))

    def evict(self, ids: Sequence[BlockId]) -> None:
        """Forget valid blocks. The index file may still name them after a crash, which does no harm."""
        for tag, keys in _by_tag(ids).items():
            if (file := self._files.get(tag)) is not None:
                with file.lock:
                    file.index.drop(keys)
        if (others := self._others) is not None:
            others.evict(ids)

    def purge(self, owner: bytes | None = None, session: bytes | None = None) -> int:
        """Unlike the others it raises OSError: whoever purges must know that something may be left."""
        with self._mutation:
            if not self._files:
                self._open()
            n_others = 0 if self._others is None else self._others.purge(owner, session)
            return n_others + sum(file.purge(owner, session) for file in self._files.values())

    def chains(self, owner: bytes, session: bytes | None) -> list[tuple[BlockId, BlockMeta]]:
        """The blocks of a session, or of all sessions of an owner, with those before them in their chains."""
        found: list[tuple[BlockId, BlockMeta]] = []
        for tag, file in self._files.items():
            with file.lock:
                found += [(BlockId(key, tag), meta) for key, meta in file.index.chains(owner, session)]
        others = self._others
        return found if others is None else found + others.chains(owner, session)

    def close(self) -> None:
        self._closed.set()
        with self._mutation:
            self._reader.close()
            self._writers.close()
            files, self._files = self._files, {}
            folder, self._folder = self._folder, None
            others, self._others = self._others, None
            if others is not None:
                self._try(others.close)
            if folder is None or self._format is None:
                return
            if all(map(self._try, [file.close for file in files.values()])):
                self._try(partial(folder.write_format, msgspec.structs.replace(self._format, clean=True)))

    # --- one write -------------------------------------------------------------------------------------------------

    def _write_blocks(self, file: BlockFile, blocks: list[tuple[bytes, memoryview, BlockMeta]]) -> int:
        """Write blocks to the file, and return the number written."""
        written: list[int] = []
        if not blocks:
            return 0
        may_grow = self._clock() >= self._full_until_s
        try:
            runs = self._reserve(file, blocks, may_grow)
        except OSError as error:
            self._write_failed(error)
            may_grow = False
            try:  # the space that it has can still be used
                runs = file.reserve(blocks, may_grow)
            except OSError as again:
                return self._write_failed(again)

        def write(run: SlotRun) -> None:
            try:
                with self._health.call():
                    file.write(run)
                written.append(len(run.keys))
            except OSError as error:
                self._write_failed(error, counted=True)  # by the call

        self._writers.run_all([partial(write, run) for run in runs])
        if may_grow and sum(written) == len(blocks):
            self._full = ""
        with self._stats_lock:
            self._stats.written_bytes += sum(written) * file.block_bytes
        return sum(written)

    def _reserve(
        self, file: BlockFile, blocks: list[tuple[bytes, memoryview, BlockMeta]], may_grow: bool
    ) -> list[SlotRun]:
        """Reserve slots. On a full disk blocks of other layouts give way. Raises OSError of the drive."""
        try:
            return file.reserve(blocks, may_grow)
        except OSError as error:
            if self._others is None or error.errno not in NO_ROOM:
                raise
        needed = file.disk_bytes_after(len(blocks)) - file.disk_bytes
        self._shrink_others(self._others, self._others.disk_bytes - needed)
        return file.reserve(blocks, may_grow)

    def _make_room(self, file: BlockFile | None = None, n_blocks: int = 0) -> None:
        """Have blocks of other layouts give way, as far as they and this rank's own would take more space than there
        is, once so many blocks are written to a file. What takes too much even now is left to a thread."""
        if (others := self._others) is None:
            return
        growth = 0 if file is None else file.disk_bytes_after(n_blocks) - file.disk_bytes
        left, before = self._left_for_others(), others.disk_bytes
        self._try(partial(self._shrink_others, others, max(left, before) - growth))
        if before > left and not self._shrinking:
            self._shrinking = True
            args = weakref.ref(self), self._closed, self._times.shrink_pause_s
            threading.Thread(target=_shrink_in_steps, args=args, name="kv-disk-shrink", daemon=True).start()

    def _left_for_others(self) -> int:
        """Bytes that this rank's own blocks leave to those of other layouts."""
        return self._stats.capacity_bytes - sum(file.disk_bytes for file in self._files.values())

    def _shrink_others(self, others: OtherLayouts, limit_bytes: int, max_steps: int | None = None) -> int:
        """Have blocks give way. Returns their number. Raises OSError of the drive."""
        n_blocks = 0
        for evicted in islice(others.shrink(limit_bytes), max_steps):
            n_blocks += len(evicted)
            gone = [id_ for id_ in evicted if not self.has_own(id_)]
            self._evicted += len(gone)
            if self.evicted is not None:
                self.evicted.extend(gone)
        return n_blocks

    def shrink_once(self) -> bool:
        """Have some blocks of other layouts give way to the size limit. Returns False once none needs to, or can."""
        with self._mutation:
            self._shrinking = False
            if (others := self._others) is not None:
                try:
                    self._shrinking = self._shrink_others(others, self._left_for_others(), 1) > 0
                except OSError as error:
                    self._health.failed(error)
            return self._shrinking

    def _write_failed(self, error: OSError, counted: bool = False) -> int:
        if error.errno in NO_ROOM:
            if not self._full:
                _log.warning("the disk of the KV cache is full (%s): it cannot grow for now", self._base)
            self._full = "the disk is full"
            self._full_until_s = self._clock() + self._times.full_pause_s
        elif not counted:
            self._health.failed(error)
        return 0

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except OSError as error:
            self._health.failed(error)
            return False
        return True

    def _count_read(self, ids: Sequence[BlockId], found: list[bool], took_s: float) -> None:
        n_bytes = sum(self._layouts[tag] for (_, tag), good in zip(ids, found) if good)
        with self._stats_lock:
            stats = self._stats
            stats.hits += sum(found)
            stats.misses += len(found) - sum(found)
            stats.read_bytes += n_bytes
            if n_bytes >= MIN_RATED_BYTES and took_s:
                rate = n_bytes / took_s
                stats.read_rate += (rate - stats.read_rate) * (_RATE_GAIN if stats.read_rate else 1.0)

    # --- files -----------------------------------------------------------------------------------------------------

    def _available(self) -> bool:
        """True if the drive may be asked now. Opens the files where they are not open, or are not there any more."""
        if not self._health.usable:
            self._health.check()
            return False
        now_s = self._clock()
        if self._files and now_s < self._checked_s + self._times.check_s:
            return True
        if not self._mutation.acquire(blocking=not self._files):
            return True  # blocks are being written: look next time
        try:
            self._checked_s = now_s
            if self._files and self._folder is not None:
                linked = self._folder.is_linked and all(file.is_linked for file in self._files.values())
                if linked and (self._others is None or self._others.is_linked):
                    return True
                _log.warning("files of the KV cache on disk were removed (%s): it starts anew", self._folder.path)
            self._open()
        except OSError as error:
            self._health.failed(error, lasting=True)
            return False
        finally:
            self._mutation.release()
        return True

    def _open(self) -> None:
        for file in self._files.values():
            self._evicted += file.index.evicted
            if self._retention is not None:
                self._retention.remove_listener(file.index.order)
        self._files, self._folder, self._others = {}, None, None
        began_s = time.perf_counter()
        folder = TierFolder.take(self._base)
        known = folder.read_format()
        new = FolderFormat.of(self._fingerprint, self._layouts, self._n_slots, self._key, self._cipher_key)
        same = known is not None and known.is_compatible(new)
        if folder.keep_only(self._layouts if same else ()) and not same:
            _log.warning("the KV cache in %s was written by another version or key: it is discarded", folder.path)
        folder.write_format(new)
        trusted = known is not None and known.is_trusted(new.boot)
        others = self._open_others(new)
        if others is not None:  # they give way to what is allocated at once
            self._grow_bytes = min(self._grow_bytes, self._stats.capacity_bytes // MIN_GROWTHS)
        opened = {
            tag: self._open_file(folder.path, tag, n_bytes, self._n_slots, trusted)
            for tag, n_bytes in self._layouts.items()
        }
        complete = None if others is None else others.complete
        for tag, file in opened.items():
            # A cycle would keep the folder locked.
            file.index.on_change = partial(_on_change, weakref.ref(self), complete, tag)
            file.index.on_evict = partial(_on_evict, weakref.ref(self), tag)
            if complete is not None:
                complete.own_changed(tag, file.index.slots, stored=True)
            if self._retention is not None:
                file.index.order.follow(self._retention)
        self._files, self._folder, self._format = opened, folder, new
        self._others = others
        self._make_room()
        if self.changes is not None:
            self.changes.reset()
        n_blocks = sum(len(file.index) for file in opened.values())
        took_ms = round(1000 * (time.perf_counter() - began_s))
        facts = {"blocks": n_blocks, "took_ms": took_ms, "direct": all(file.file.direct for file in opened.values())}
        if self._others is not None:
            facts["blocks_of_other_layouts"] = len(self._others.complete)
        _log.info("KV cache on disk: %s", folder.path, extra=facts)

    def _open_file(self, folder: Path, tag: bytes, n_bytes: int, n_slots: int, trusted: bool) -> BlockFile:
        return BlockFile(folder, tag, n_bytes, n_slots, self._tagger, self._cipher, trusted, self._grow_bytes)

    def _open_others(self, known: FolderFormat) -> OtherLayouts | None:
        """Open what groups of another number of ranks have left. Returns None if there is nothing to serve."""
        slices = self._groups, self._whole
        others = OtherLayouts(self._other_groups, *slices, known, self._open_file, self._reader)
        self.unreadable = others.unreadable
        others.complete.on_lost = partial(_on_lost, weakref.ref(self))
        return others if others.files else None


def _shrink_in_steps(of: "weakref.ref[DiskTier]", closed: threading.Event, pause_s: float) -> None:
    """Let other threads use the tier between two steps."""
    while not closed.wait(pause_s) and (tier := of()) is not None and tier.shrink_once():
        del tier


def slot_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes on disk of a block of each KV group."""
    return sum(stored_bytes(group.block_bytes) for group in groups)


def _on_change(
    of: "weakref.ref[DiskTier]", complete: CompleteBlocks | None, tag: bytes, key: bytes, stored: bool
) -> None:
    if complete is not None:
        complete.own_changed(tag, (key,), stored)
    tier = of()
    if tier is not None and tier.changes is not None:
        (tier.changes.stored if stored else tier.changes.removed)((BlockId(key, tag),))


def _on_lost(of: "weakref.ref[DiskTier]", id_: BlockId) -> None:
    tier = of()
    if tier is not None and tier.changes is not None and not tier.has_own(id_):
        tier.changes.removed((id_,))


def _on_evict(of: "weakref.ref[DiskTier]", tag: bytes, key: bytes) -> None:
    tier = of()
    if tier is not None and tier.evicted is not None:
        tier.evicted.append(BlockId(key, tag))


def _by_tag(ids: Iterable[BlockId]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for key, tag in ids:
        found.setdefault(tag, []).append(key)
    return found
