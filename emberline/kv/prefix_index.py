"""The prefix index of one KV group: which block holds which content."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from emberline.protocol.block_hash import BLOCK_TOKENS


def first_visible(position: int, window: int | None, chunked: bool = False) -> int:
    """The first block that the token at `position` can see. `window` counts the token itself; None is unlimited.

    `chunked`: it sees the tokens of its own chunk of `window` tokens.
    """
    if window is None or position < window:
        return 0
    return (position // window * window if chunked else position - window + 1) // BLOCK_TOKENS


Owner = tuple[bytes, bytes]  # root key of a chain, which names model and account, and digest of a session
NO_OWNER: Owner = (b"", b"")


class PrefixIndex:
    """Content key (protocol/block_hash) to block, and back. One block per key: the first one published stays."""

    def __init__(self, n_blocks: int) -> None:
        self._blocks: dict[bytes, int] = {}
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

    def blocks(self, keys: Iterable[bytes]) -> list[int]:
        """Of keys that are all indexed."""
        return list(map(self._blocks.__getitem__, keys))

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each key; None: not indexed."""
        return list(map(self._blocks.get, keys))

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def indexed(self, blocks: Iterable[int]) -> list[bool]:
        """Whether the content of each block is indexed."""
        keys = self._keys
        return [keys[block] is not None for block in blocks]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[int], indices: Sequence[int], owner: Owner = NO_OWNER
    ) -> list[int]:
        """Index blocks[j] under keys[j] for these j; those j whose key was not indexed before."""
        index, keys_of, owners, new = self._blocks, self._keys, self._owners, []
        for j in indices:
            key, block = keys[j], blocks[j]
            assert keys_of[block] is None or keys_of[block] == key, "an indexed block's content does not change"
            if key not in index:
                index[key], keys_of[block], owners[block] = block, key, owner
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
        index, keys_of = self._blocks, self._keys
        keys: list[bytes] = []
        removed: list[int] = []
        for block in blocks:
            if (key := keys_of[block]) is not None:
                del index[key]
                keys_of[block] = None
                keys.append(key)
                removed.append(block)
        return keys, removed

    def n_leading(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` keys are indexed, up to the first that is not."""
        known = list(map(self._blocks.__contains__, islice(keys, limit)))
        return len(known) if all(known) else known.index(False)

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
