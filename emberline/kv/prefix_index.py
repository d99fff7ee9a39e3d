"""The prefix index of one KV group: which block holds which content."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.block_hash import BLOCK_TOKENS

Blocks = NDArray[np.intp]  # many blocks are handled in one call each: a long prompt has thousands
LOOKED_UP_AT_ONCE = 256  # keys of a chain, which may end anywhere
_NONE = 0  # no content is in the null block
_NEVER = 1 << 62


def first_visible(position: int, window: int | None, chunked: bool = False) -> int:
    """The first block that the token at `position` can see. `window` counts the token itself; None is unlimited.

    `chunked`: it sees the tokens of its own chunk of `window` tokens.
    """
    if window is None or position < window:
        return 0
    return (position // window * window if chunked else position - window + 1) // BLOCK_TOKENS


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
        """Of keys that are all indexed."""
        return np.fromiter(map(self._blocks.__getitem__, keys), np.intp, len(keys))

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each key; None: not indexed."""
        return list(map(self._blocks.get, keys))

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def indexed(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Whether the content of each block is indexed."""
        found: NDArray[np.bool_] = self._versions[blocks] != _NEVER
        return found

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[int], indices: Sequence[int], owner: Owner = NO_OWNER
    ) -> list[int]:
        """Index blocks[j] under keys[j] for these j; those j whose key was not indexed before."""
        index, keys_of, owners, added, new = self._blocks, self._keys, self._owners, self._added, []
        self.version = version = self.version + 1
        for j in indices:
            key, block = keys[j], blocks[j]
            assert keys_of[block] is None or keys_of[block] == key, "an indexed block's content does not change"
            if key not in index:
                index[key], keys_of[block], owners[block], added[block] = block, key, owner, version
                new.append(j)
        return new

    def belonging(self, root_key: bytes | None, session: bytes = b"") -> list[int]:
        """The indexed blocks of an account, or of one of its sessions; None: all."""
        owners = self._owners
        if root_key is None:
            return list(self._blocks.values())
        return [
            block
            for block in self._blocks.values()
            if owners[block][0] == root_key and session in (b"", owners[block][1])
        ]

    def remove(self, blocks: Iterable[int]) -> tuple[list[bytes], list[int]]:
        """The keys and blocks that were indexed."""
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
        """How many of the first `limit` keys are indexed, up to the first that is not. `known`: what was found before,
        which is looked up again only behind the first block that has lost its content."""
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

    def n_windowed(self, keys: Sequence[bytes], limit: int, window: int, chunked: bool = False) -> int:
        """The largest n <= limit for which all blocks that a token after n blocks can see are indexed."""
        return n_windowed(lambda j: keys[j] in self._blocks, limit, window, chunked)


def n_windowed(has: Callable[[int], bool], limit: int, window: int, chunked: bool = False) -> int:
    """The largest n <= limit for which there are all blocks that a token after n blocks can see."""
    end = start = limit  # the blocks start .. end - 1 are there
    while start > first_visible(end * BLOCK_TOKENS, window, chunked):
        start -= 1
        if not has(start):
            end = start
    return end
