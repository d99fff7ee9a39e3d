"""The prefix index of one KV group: which block holds which content."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.intp]  # many blocks are handled in one call each: a long prompt has thousands
LOOKED_UP_AT_ONCE = 256  # keys of a chain, which may end anywhere
_NONE = 0  # no content is in the null block
_NEVER = 1 << 62
Owner = tuple[bytes, bytes]  # root key of a chain, which names model and account, and digest of a session
NO_OWNER: Owner = (b"", b"")


@dataclass(slots=True)
class LeadingBlocks:
    """The blocks of a chain's first keys as an index had them at `version`, as far as they were looked up."""

    blocks: Blocks = field(default_factory=lambda: np.empty(0, np.intp))
    version: int = 0


class PrefixIndex:
    """Content key (protocol/block_hash) to block, and back. One block per key: the first one published stays."""

    def __init__(self, n_blocks: int) -> None:
        self.version = 0  # how often content was added
        self._blocks: dict[bytes, int] = {}
        self._added = array("q", [_NEVER]) * n_blocks  # by block: the version that its content came with
        self._versions = np.frombuffer(self._added, np.int64)
        self._keys: list[bytes | None] = [None] * n_blocks
        self._owners: list[Owner] = [NO_OWNER] * n_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def block(self, key: bytes) -> int:
        return self._blocks[key]

    def blocks(self, keys: Sequence[bytes]) -> Blocks:
        """Return the blocks of keys that are all indexed."""
        return np.fromiter(map(self._blocks.__getitem__, keys), np.intp, len(keys))

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the block of each key, None if it is not indexed."""
        return list(map(self._blocks.get, keys))

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def indexed(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return for each block True if its content is indexed."""
        found: NDArray[np.bool_] = self._versions[blocks] != _NEVER
        return found

    def put(
        self, keys: Iterable[bytes], blocks: Iterable[int], owners: Iterable[Owner] = repeat(NO_OWNER)
    ) -> list[int]:
        """Index blocks under keys. Returns the places of those whose key was not indexed before."""
        index, keys_of, owners_of, added, new = self._blocks, self._keys, self._owners, self._added, []
        self.version = version = self.version + 1
        for place, (key, block, owner) in enumerate(zip(keys, blocks, owners)):
            assert keys_of[block] is None or keys_of[block] == key, "an indexed block's content does not change"
            if key not in index:
                index[key], keys_of[block], owners_of[block], added[block] = block, key, owner, version
                new.append(place)
        return new

    def belonging(self, root_key: bytes | None, session: bytes = b"") -> list[int]:
        """Return the indexed blocks of an account, or of one of its sessions; all of them if `root_key` is None."""
        owners = self._owners
        if root_key is None:
            return list(self._blocks.values())
        return [
            block
            for block in self._blocks.values()
            if owners[block][0] == root_key and session in (b"", owners[block][1])
        ]

    def remove(self, blocks: Iterable[int]) -> tuple[list[bytes], list[int]]:
        """Remove the content of blocks. Returns the keys and blocks of those that were indexed."""
        index, keys_of, added = self._blocks, self._keys, self._added
        keys: list[bytes] = []
        removed: list[int] = []
        for block in blocks:
            if (key := keys_of[block]) is not None:
                del index[key]
                keys_of[block], added[block] = None, _NEVER
                keys.append(key)
                removed.append(block)
        return keys, removed

    def n_leading(self, keys: Sequence[bytes], limit: int, known: LeadingBlocks | None = None) -> int:
        """Return how many of the first `limit` keys are indexed, up to the first that is not.

        `known` is what was found before. It is looked up again only after the first block that has lost its content.
        """
        known = LeadingBlocks() if known is None else known
        lost = self._versions[known.blocks] > known.version
        parts = [known.blocks[: lost.argmax()] if lost.any() else known.blocks]
        n = len(parts[0])
        while n < limit and keys[n] in self._blocks:
            some = keys[n : min(limit, n + LOOKED_UP_AT_ONCE)]
            found = np.fromiter(map(self._blocks.get, some, repeat(_NONE)), np.intp, len(some))
            n_found = len(found) if found.all() else int((found == _NONE).argmax())
            parts.append(found[:n_found])
            n += n_found
            if n_found < len(some):
                break
        known.blocks, known.version = np.concatenate(parts) if len(parts) > 1 else parts[0], self.version
        return min(n, limit)
