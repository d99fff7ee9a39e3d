"""The block file of one layout: fixed slots, each a header page and the bytes of one block, with their keyed tag.

    slot n = [header, 4 KiB][block, padded to 4 KiB]

A header names the block (content key, layout tag, owner, session, position, parent, length) and carries the keyed tag
over all of that and the stored bytes. A block is served only if the header names it and the tag verifies, so a torn
write, a bit flip, a truncated file and a slot that was overwritten meanwhile all read as a missing block.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from emberline.kv.tiers.block_tag import TAG_BYTES, BlockTagger
from emberline.kv.tiers.disk.block_cipher import BlockCipher
from emberline.kv.tiers.disk.direct_file import PAGE, DirectFile, aligned_buffer, is_aligned, padded
from emberline.kv.tiers.disk.slot_index import SlotIndex, runs
from emberline.kv.tiers.tier import BlockMeta
from emberline.protocol import block_hash

MAGIC = b"EMBERKV\0"
VERSION = 1
RUN_BYTES = 4 << 20  # that one call reads or writes; larger calls gain nothing
GROW_BYTES = 256 << 20

# magic, version, encrypted, position, key, layout tag, owner, session, parent, bytes, saved (Unix time), nonce
_HEADER = Struct("<8sHHI16s16s16s16s16sQd16s")


@dataclass(slots=True)
class SlotRun:
    """Blocks in neighbouring slots, moved by one call."""

    slot: int
    keys: list[bytes]
    buffers: list[memoryview]
    metas: list[BlockMeta]
    at: list[int]  # where each block is in the caller's request


class BlockFile:
    """Blocks of one layout in one file, and their index. `lock` guards the index; I/O runs without it."""

    def __init__(
        self,
        folder: Path,
        tag: bytes,
        block_bytes: int,
        n_slots: int,
        tagger: BlockTagger,
        cipher: BlockCipher | None,
        trusted: bool,
        grow_bytes: int = GROW_BYTES,
    ) -> None:
        """`grow_bytes`: disk space that is allocated in one call."""
        self._grow_bytes = grow_bytes
        self.tag, self.block_bytes, self.n_slots = tag, block_bytes, n_slots
        self.body_bytes = padded(block_bytes)
        self.slot_bytes = stored_bytes(block_bytes)
        self.lock = threading.Lock()
        self.index = SlotIndex(n_slots)
        self._tagger, self._cipher = tagger, cipher
        self._local = threading.local()
        paths = block_path(folder, tag), index_path(folder, tag)
        self.file = DirectFile(paths[0])
        if self.file.n_bytes > n_slots * self.slot_bytes:
            self.file.truncate(n_slots * self.slot_bytes)
        torn = self.index.load(paths[1], self.file.n_bytes, self.slot_bytes, trusted)
        self._index_descriptor = os.open(paths[1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.wipe(torn)

    @property
    def run_blocks(self) -> int:
        return max(1, RUN_BYTES // self.slot_bytes)

    @property
    def is_linked(self) -> bool:
        return self.file.is_linked

    @property
    def disk_bytes(self) -> int:
        """Space on disk that the blocks take, and that they left."""
        return self.file.disk_bytes

    def close(self) -> None:
        """Make everything durable. OSError where that fails."""
        with self.lock:
            self.index.store(self._index_descriptor, range(self.index.n_used))
        self.sync()

    def sync(self) -> None:
        """Make durable what was written and wiped. OSError where that fails."""
        self.file.sync()
        os.fsync(self._index_descriptor)

    def __del__(self) -> None:  # not before: a call that runs must not use the descriptor of another file
        if (descriptor := getattr(self, "_index_descriptor", None)) is not None:
            os.close(descriptor)

    # --- reading ---------------------------------------------------------------------------------------------------

    def located(self, wanted: Iterable[tuple[int, bytes, memoryview]]) -> list[SlotRun]:
        """The runs that hold the wanted blocks (place in the request, key, buffer), as far as they are known."""
        with self.lock:
            known = [(self.index.slots.get(key, -1), key, buffer, at) for at, key, buffer in wanted]
        return self._runs(sorted((slot, key, buffer, None, at) for slot, key, buffer, at in known if slot >= 0))

    def read(self, run: SlotRun) -> list[bool]:
        """Fill the buffers; which of the blocks verified. Those that did not are dropped. OSError of the drive."""
        headers, bounce = self._scratch(len(run.keys))
        bodies = [
            buffer if self._fits(buffer) else bounce[n * self.body_bytes :][: self.body_bytes]
            for n, buffer in enumerate(run.buffers)
        ]
        vectors = [part for n in range(len(bodies)) for part in (headers[n * PAGE :][:PAGE], bodies[n])]
        n_read = self.file.read(vectors, run.slot * self.slot_bytes)
        verified = []
        for n, (key, body, buffer) in enumerate(zip(run.keys, bodies, run.buffers)):
            good = n_read >= (n + 1) * self.slot_bytes
            good = good and self._verify(headers[n * PAGE :][:PAGE], key, body[: self.block_bytes])
            if good and body is not buffer:
                buffer[:] = body[: self.block_bytes]
            verified.append(good)
        with self.lock:
            self.index.touch(key for key, good in zip(run.keys, verified) if good)
            here = zip(run.keys, range(run.slot, run.slot + len(run.keys)), verified)
            bad = self.index.drop(key for key, slot, good in here if not good and self.index.slots.get(key) == slot)
            self.index.store(self._index_descriptor, bad)
        return verified

    def _verify(self, header: memoryview, key: bytes, body: memoryview) -> bool:
        """Decrypt the block in place. Returns True if it is the block that the key names."""
        known = _HEADER.unpack_from(header)
        encrypted = int(self._cipher is not None)
        expected = MAGIC, VERSION, encrypted, key, self.tag.ljust(16, b"\0"), self.block_bytes
        if (*known[:3], known[4], known[5], known[9]) != expected:
            return False
        if not self._tagger.verify(bytes(header[: _HEADER.size]), body, header[_HEADER.size :][:TAG_BYTES]):
            return False
        if self._cipher is not None:
            self._cipher.crypt(known[11], body, body)
        return True

    # --- writing ---------------------------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[tuple[bytes, memoryview, BlockMeta]], grow: bool = True) -> list[SlotRun]:
        """Slots for as many of the blocks as there is room for; what they held is evicted. Then each run is written.

        OSError of the drive or of the file system.
        """
        if grow:
            self._grow(len(blocks))
        with self.lock:
            slots = self.index.take(len(blocks))
            self.index.begin(slots, [key for key, _, _ in blocks], [meta for _, _, meta in blocks])
            self.index.store(self._index_descriptor, slots)
        found = [(slot, key, buffer, meta, 0) for slot, (key, buffer, meta) in zip(slots, blocks)]
        return self._runs(found)

    def write(self, run: SlotRun) -> None:
        """OSError of the drive: the blocks are not served then."""
        headers, bounce = self._scratch(len(run.keys))
        vectors: list[memoryview] = []
        for n, (key, buffer, meta) in enumerate(zip(run.keys, run.buffers, run.metas)):
            body = buffer
            if self._cipher is not None or not self._fits(buffer):
                body = bounce[n * self.body_bytes :][: self.body_bytes]
                if self._cipher is None:
                    body[: self.block_bytes] = buffer
            nonce = bytes(16)
            if self._cipher is not None:
                nonce = os.urandom(16)
                self._cipher.crypt(nonce, buffer, body[: self.block_bytes])
            header = headers[n * PAGE :][:PAGE]
            self._fill_header(header, key, meta, nonce)
            head = bytes(header[: _HEADER.size])
            header[_HEADER.size :][:TAG_BYTES] = self._tagger.tag(head, body[: self.block_bytes])
            vectors += (header, body)
        slots = range(run.slot, run.slot + len(run.keys))
        try:
            self.file.write(vectors, run.slot * self.slot_bytes)
        except BaseException:
            with self.lock:
                for slot in slots:
                    self.index.abandon(slot)
            raise
        with self.lock:
            for slot in slots:
                self.index.commit(slot)
            self.index.store(self._index_descriptor, slots)

    def _fill_header(self, header: memoryview, key: bytes, meta: BlockMeta, nonce: bytes) -> None:
        names = key, self.tag, meta.owner, meta.session, meta.parent
        rest = self.block_bytes, meta.saved_s or time.time(), nonce
        encrypted = int(self._cipher is not None)
        _HEADER.pack_into(header, 0, MAGIC, VERSION, encrypted, meta.position, *names, *rest)

    def _grow(self, n_blocks: int) -> None:
        """Have space for so many fresh slots, if the capacity allows and the disk has it."""
        if not (n := self._growth(n_blocks)):
            return
        self.file.allocate(self.index.n_ready * self.slot_bytes, n * self.slot_bytes)
        with self.lock:
            self.index.n_ready += n

    def _growth(self, n_blocks: int) -> int:
        """Slots by which the file grows before so many blocks are written."""
        with self.lock:
            index = self.index
            n = min(self.n_slots - index.n_ready, n_blocks - (index.n_ready - index.n_used))
        return min(self.n_slots - index.n_ready, max(n, self._grow_bytes // self.slot_bytes)) if n > 0 else 0

    def disk_bytes_after(self, n_blocks: int) -> int:
        """Space that the file takes at most once so many blocks more are written: also in slots that were wiped."""
        n_more = self._growth(n_blocks) + min(n_blocks, self.index.n_free)
        return min(self.n_slots * self.slot_bytes, self.disk_bytes + n_more * self.slot_bytes)

    def oldest_s(self) -> float:
        """Unix time at which the block was used that was not used for longest; 0: there is none."""
        with self.lock:
            return self.index.oldest_s()

    def next_used_s(self) -> int:
        """Unix time at which the block was used that `evict` would give up next; 0: there is none."""
        with self.lock:
            return self.index.next_used_s()

    # --- forgetting ------------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[bytes]) -> None:
        with self.lock:
            self.index.store(self._index_descriptor, sorted(self.index.drop(keys)))

    def purge(self, owner: bytes | None, session: bytes | None) -> int:
        """Wipe the blocks, and what is left of evicted ones; the number of blocks. Nothing may be written meanwhile."""
        with self.lock:
            before = len(self.index)
            slots = self.index.belonging(owner, session).tolist()
        self.wipe(slots)
        self.sync()
        return before - len(self.index)

    def evict(self, n_blocks: int) -> list[bytes]:
        """Forget the blocks that are evicted first, and give their space back. Returns their keys."""
        with self.lock:
            slots = sorted(self.index.evict(n_blocks))
            keys = block_hash.split(self.index.records["key"][slots].tobytes())
        self.wipe(slots)
        return keys

    def trim(self) -> None:
        """Give back the space of slots that hold no block, and what was allocated behind them."""
        with self.lock:
            slots = self.index.without_block()
        self.wipe(slots)
        self.file.truncate(self.file.n_bytes)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget blocks, and give their space back."""
        with self.lock:
            slots = sorted(self.index.drop(keys))
        self.wipe(slots)

    def wipe(self, slots: Sequence[int]) -> None:
        with self.lock:  # not served from now on, also if wiping fails
            self.index.hide(slots)
        for first, last in runs(slots):
            self.file.wipe(first * self.slot_bytes, (last + 1 - first) * self.slot_bytes)
        with self.lock:
            self.index.clear(slots)
            self.index.store(self._index_descriptor, slots)

    # --- buffers ---------------------------------------------------------------------------------------------------

    def _runs(self, found: Sequence[tuple[int, bytes, memoryview, BlockMeta | None, int]]) -> list[SlotRun]:
        made: list[SlotRun] = []
        for slot, key, buffer, meta, at in found:
            if not made or made[-1].slot + len(made[-1].keys) != slot or len(made[-1].keys) == self.run_blocks:
                made.append(SlotRun(slot, [], [], [], []))
            run = made[-1]
            run.keys.append(key)
            run.buffers.append(buffer)
            run.at.append(at)
            if meta is not None:
                run.metas.append(meta)
        return made

    def _fits(self, buffer: memoryview) -> bool:
        return self.block_bytes == self.body_bytes and is_aligned(buffer)

    def _scratch(self, n: int) -> tuple[memoryview, memoryview]:
        """The calling thread's header pages, and bytes for the blocks whose own buffer direct I/O cannot use."""
        n = min(n, self.run_blocks)
        if not hasattr(self._local, "headers"):
            self._local.headers = aligned_buffer(self.run_blocks * PAGE)
            self._local.bounce = aligned_buffer(self.run_blocks * self.body_bytes)
        return self._local.headers, self._local.bounce


def stored_bytes(block_bytes: int) -> int:
    """Bytes of a slot."""
    return PAGE + padded(block_bytes)


def block_path(folder: Path, tag: bytes) -> Path:
    return folder / f"{tag.hex()}.blocks"


def index_path(folder: Path, tag: bytes) -> Path:
    return folder / f"{tag.hex()}.index"
