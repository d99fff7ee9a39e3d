"""Index of the blocks of other layouts that have all parts on disk: one look-up for a block, however many parts it has.

Parts are lost, and never added: the tier makes the set of keys once, as it opens the files, and takes a key out when
the block lacks a part.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from emberline.kv.tiers.disk.block_file import BlockFile
from emberline.kv.tiers.reslicing import Division
from emberline.kv.tiers.tier import BlockId, layout_tag


class CompleteBlocks:
    """Keys of complete blocks by this rank's own layout tag, in `keys`, which any thread may read.

    It refers to the indexes of the files and not to the files, which refer to it: a cycle would keep folders locked.
    """

    def __init__(
        self, divisions: Mapping[bytes, Sequence[Division]], files: Mapping[bytes, Sequence[BlockFile]]
    ) -> None:
        """divisions: by own tag. files: of each part, by its tag."""
        self._divisions = divisions
        self._slots = {tag: [file.index.slots for file in each] for tag, each in files.items()}
        self._lock = threading.Lock()  # guards changes of `keys` and of `_own`
        self.keys = {tag: set().union(*map(self._all, found)) for tag, found in divisions.items()}
        self._own: set[tuple[bytes, bytes]] = set()  # addresses of complete blocks that this rank has written, too
        self.on_lost: Callable[[BlockId], None] = lambda id_: None  # a block is not complete any more

    def __len__(self) -> int:
        """Number of blocks, without those that this rank has written itself."""
        return sum(map(len, self.keys.values())) - len(self._own)

    def in_division(self, keys: set[bytes], division: Division) -> set[bytes]:
        """Return the keys of blocks that have all parts of a division."""
        for part in division:
            keys = {key for slots in self._slots[layout_tag(part)] for key in keys if key in slots}
        return keys

    def _all(self, division: Division) -> set[bytes]:
        return self.in_division(set().union(*self._slots[layout_tag(division[0])]), division)

    def watch(self, file: BlockFile, tag: bytes) -> None:
        """Hear of the parts that a file loses. tag: this rank's own, of the blocks that they are parts of."""
        file.index.on_change = partial(self._part_changed, tag)

    def _part_changed(self, tag: bytes, key: bytes, stored: bool) -> None:
        with self._lock:
            if key not in self.keys[tag] or any(self.in_division({key}, division) for division in self._divisions[tag]):
                return
            self.keys[tag].discard(key)
            self._own.discard((key, tag))
        self.on_lost(BlockId(key, tag))

    def own_changed(self, tag: bytes, keys: Iterable[bytes], stored: bool) -> None:
        """Take note of blocks that this rank has written itself, or has no more."""
        complete = self.keys.get(tag, ())
        with self._lock:
            for key in keys:
                if stored and key in complete:
                    self._own.add((key, tag))
                else:
                    self._own.discard((key, tag))
