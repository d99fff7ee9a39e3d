"""Blocks on disk that groups of another number of ranks have written, of which a rank makes slices of its own.

A rank opens the folders of such groups with a shared lock, so that all ranks of its group can: a worker of that other
layout, which starts meanwhile, takes another folder. Nothing is added there. Blocks are read, each part verified under
its own address, and given up, least recently used first, as the rank needs the space for slices of its own.

Several ranks may have the same files open. Each has an index of its own in memory, and all that one may do to a slot is
to wipe it: another one, which still believes in it, reads a block that does not verify, which is a missing block.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from emberline.kv.slices import runs
from emberline.kv.tiers.disk.block_file import BlockFile, block_path, stored_bytes
from emberline.kv.tiers.disk.block_reader import BlockReader
from emberline.kv.tiers.disk.complete_blocks import CompleteBlocks
from emberline.kv.tiers.disk.disk_folder import FolderFormat, TierFolder
from emberline.kv.tiers.reslicing import Division, Reslicer
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup

EVICTED_AT_ONCE = 128  # blocks, in one step

_log = logging.getLogger(__name__)

OpenFile = Callable[[Path, bytes, int, int, bool], BlockFile]  # folder, layout tag, block bytes, slots, trusted index


class PartFiles:
    """The files of parts, as a `reslicing.BlockStore`."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self.by_tag: dict[bytes, list[BlockFile]] = {}  # by layout tag: workers side by side had a folder each

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        return self._reader.read(self._file_of, ids, buffers)

    def _file_of(self, key: bytes, tag: bytes) -> BlockFile | None:
        return next((file for file in self.by_tag.get(tag, ()) if key in file.index.slots), None)


class OtherLayouts:
    """Serves this rank's slices of the blocks. Callers name a slice by this rank's own layout tag."""

    def __init__(
        self,
        groups: Sequence[Sequence[Path]],
        own: Sequence[KVGroup],
        whole: Sequence[KVGroup],
        known: FolderFormat,
        open_file: OpenFile,
        reader: BlockReader,
    ) -> None:
        """groups: of each other group the folders of its ranks. known: format of this rank's own blocks."""
        self._parts = PartFiles(reader)
        self._own = {layout_tag(group): group for group in own if group.block_bytes}
        self._reslicer = Reslicer(self._parts, own, whole)
        every = {tag: ((group,), *self._reslicer.divisions.get(tag, ())) for tag, group in self._own.items()}
        parts = {layout_tag(part): part for found in every.values() for division in found for part in division}
        self.files: list[BlockFile] = []  # of every layout: those that this rank does not read are purged, too
        self._folders: list[TierFolder] = []  # stay locked
        self.unreadable: list[Path] = []  # folders of groups of whose blocks this rank can use none
        for ranks in groups:
            found = [has_usable for base in ranks for has_usable in self._open(base, parts, known, open_file)]
            self.unreadable += ranks if found and not any(found) else []
        self._divisions: dict[bytes, list[Division]] = {
            tag: [division for division in found if all(layout_tag(part) in self._parts.by_tag for part in division)]
            for tag, found in every.items()
        }
        self._weights: dict[BlockFile, float] = {}  # share of a block's bytes that this rank takes
        self._tags: dict[BlockFile, bytes] = {}  # the own tag that a file's blocks are parts of
        for tag, group in self._own.items():
            for part in {part for division in every[tag] for part in division}:  # also where another part is lacking
                taken = group.block_bytes if part == group else sum(run.n_bytes for run in runs(part, group))
                for file in self._parts.by_tag.get(layout_tag(part), ()):
                    self._weights[file], self._tags[file] = taken / part.block_bytes, tag
        self.complete = CompleteBlocks(self._divisions, self._parts.by_tag)
        for file, tag in self._tags.items():
            self.complete.watch(file, tag)
        self._dropped: deque[tuple[BlockFile, int]] = deque()  # slots whose space is yet to be given back

    def _open(
        self, base: Path, parts: dict[bytes, KVGroup], known: FolderFormat, open_file: OpenFile
    ) -> Iterator[bool]:
        """Open the folders of one rank of a group, except those that a worker uses. Yields for each folder with blocks
        whether this rank can use any. A folder that cannot be read is left out."""
        for lock in sorted(base.glob("*/lock")):
            try:
                has_blocks, is_usable = self._open_folder(lock.parent, parts, known, open_file)
            except BlockingIOError:
                continue
            except (OSError, ValueError, MemoryError) as error:  # of the drive, or of a damaged format
                _log.warning("KV on disk of another number of ranks, in %s, is not used: %s", lock.parent, error)
                continue
            if has_blocks:
                yield is_usable

    def _open_folder(
        self, path: Path, parts: dict[bytes, KVGroup], known: FolderFormat, open_file: OpenFile
    ) -> tuple[bool, bool]:
        """Open one folder. Returns whether it has blocks, and whether this rank can use any. Raises BlockingIOError
        where a worker uses it, OSError, ValueError or MemoryError where it cannot be read."""
        folder = TierFolder(path, shared=True)
        theirs = folder.read_format()
        if theirs is None or not theirs.is_compatible(known):
            return any(each.stat().st_size for each in path.glob("*.blocks")), False
        layouts = {bytes.fromhex(tag): n_bytes for tag, n_bytes in theirs.layouts.items()}
        sizes = {tag: each.stat().st_size for tag in layouts if (each := block_path(path, tag)).exists()}
        usable = [tag for tag in sizes if tag in parts and layouts[tag] == parts[tag].block_bytes]
        if not usable:
            return any(sizes.values()), False
        trusted = theirs.is_trusted(known.boot)
        if theirs.clean:  # from now on it is trusted until the machine crashes
            folder.write_format(msgspec.structs.replace(theirs, clean=False, boot=known.boot))
        n_slots = {tag: max(1, -(-size // stored_bytes(layouts[tag]))) for tag, size in sizes.items()}  # none is added
        files = {tag: open_file(path, tag, layouts[tag], n_slots[tag], trusted) for tag in sizes}
        for tag in usable:
            files[tag].trim()
            self._parts.by_tag.setdefault(tag, []).append(files[tag])
        self.files += files.values()
        self._folders.append(folder)
        return True, True

    @property
    def is_linked(self) -> bool:
        """True if nobody has removed files."""
        return all(file.is_linked for file in self.files)

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks, of which this rank counts its share."""
        return round(sum(len(file.index) * file.slot_bytes * weight for file, weight in self._weights.items()))

    @property
    def disk_bytes(self) -> int:
        """Space that the files take, of which this rank counts its share. The shares of all ranks add up to it."""
        return round(sum(file.disk_bytes * weight for file, weight in self._weights.items()))

    def oldest_s(self) -> float:
        """Unix time at which the block was used that was not used for longest; 0: there is none."""
        return min((at_s for file in self._weights if (at_s := file.oldest_s())), default=0.0)

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill each buffer with this rank's slice of a block. False: a part is missing, or was not verified."""
        got = [False] * len(ids)
        for tag, divisions in self._divisions.items():
            for division in divisions:
                mine = [at for at, id_ in enumerate(ids) if id_.tag == tag and not got[at]]
                complete = self.complete.in_division({ids[at].key for at in mine}, division)
                mine = [at for at in mine if ids[at].key in complete]
                read = (
                    self._parts.read
                    if division == (self._own[tag],)
                    else partial(self._reslicer.read, division=division)
                )
                for at, good in zip(mine, read([ids[at] for at in mine], [buffers[at] for at in mine])):
                    got[at] = good
        return got

    # --- retention -------------------------------------------------------------------------------------------------

    def touch(self, ids: Sequence[BlockId]) -> None:
        """The blocks were used."""
        for file, keys in self._parts_of(ids):
            with file.lock:
                file.index.touch(keys)

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """Give up the session's blocks from this position on before all others."""
        for file in self._weights:
            with file.lock:
                file.index.retire(owner, session, first)

    def shrink(self, limit_bytes: int) -> Iterator[list[BlockId]]:
        """Give up blocks, least recently used first, until this rank's share of the space is so small.

        Yields the blocks after each step that gave some up, of EVICTED_AT_ONCE at most. Raises OSError of the drive.
        """
        dropped: dict[BlockFile, list[int]] = {}
        while self._dropped:
            file, slot = self._dropped.popleft()
            dropped.setdefault(file, []).append(slot)
        for file, slots in dropped.items():
            file.wipe(sorted(slots))
        while (excess := self.disk_bytes - max(0, limit_bytes)) > 0:
            left = [file for file in self._weights if len(file.index)]
            if not left:
                for file in self._weights:  # what blocks that were lost have left
                    file.file.truncate(0)
                return
            file = min(left, key=BlockFile.next_used_s)
            tag = self._tags[file]
            parts_of_it = {other.tag: other for other, each in self._tags.items() if each == tag}.values()
            freed = sum(other.slot_bytes * self._weights[other] for other in parts_of_it)  # at most, by each block
            n = min(EVICTED_AT_ONCE, max(1, int(excess / freed)))
            evicted = [BlockId(key, tag) for key in file.evict(n)]
            for other, parts in self._parts_of(evicted):
                other.discard(parts)
            yield evicted

    # --- forgetting ------------------------------------------------------------------------------------------------

    def remove(self, ids: Sequence[BlockId]) -> None:
        """Forget the blocks in every layout: their content is invalid. Raises OSError of the drive."""
        for file, keys in self._parts_of(ids):
            file.remove(keys)

    def evict(self, ids: Sequence[BlockId]) -> None:
        """Forget valid blocks, and wait for no drive: the next `shrink` gives their space back."""
        for file, keys in self._parts_of(ids):
            with file.lock:
                slots = file.index.drop(keys)
            self._dropped.extend((file, slot) for slot in slots)

    def purge(self, owner: bytes | None, session: bytes | None) -> int:
        """Wipe blocks, and what is left of them, in every layout. Returns their number. Raises OSError."""
        before = len(self.complete)
        for file in self.files:
            file.purge(owner, session)
        return before - len(self.complete)

    def chains(self, owner: bytes, session: bytes | None) -> list[tuple[BlockId, BlockMeta]]:
        """The blocks of a session, or of all sessions of an owner, with those before them in their chains."""
        found: dict[BlockId, BlockMeta] = {}
        for tag, divisions in self._divisions.items():
            for first, *_ in divisions:
                for file in self._parts.by_tag[layout_tag(first)]:
                    with file.lock:
                        found |= {BlockId(key, tag): meta for key, meta in file.index.chains(owner, session)}
        return [(id_, meta) for id_, meta in found.items() if id_.key in self.complete.keys[id_.tag]]

    def close(self) -> None:
        """Make what was wiped durable. The index in memory may be older than the one on disk. Raises OSError."""
        for file in self.files:
            file.sync()

    def _parts_of(self, ids: Iterable[BlockId]) -> list[tuple[BlockFile, list[bytes]]]:
        """Files with parts of the blocks, and the keys of these."""
        mine = list(ids)
        found = []
        for file, tag in self._tags.items():
            keys = [key for key, each in mine if each == tag and key in file.index.slots]
            found += [(file, keys)] if keys else []
        return found
