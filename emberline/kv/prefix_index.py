"""The prefix index of one KV group: which block holds which content."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

from emberline.protocol.block_hash import BLOCK_TOKENS


def first_visible(position: int, window: int | None, chunked: bool = False) -> int:
    """The first block that the token at `position` can see. `window` counts the token itself; None is unlimited.

    `chunked`: it sees the tokens of its own chunk of `window` tokens.
    """
    if window is None or position < window:
        return 0
    return (position // window * window if chunked else position - window + 1) // BLOCK_TOKENS


class PrefixIndex:
    """Content key (protocol/block_hash) to block, and back. One block per key: the first one published stays."""

    def __init__(self, n_blocks: int) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * n_blocks

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

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def indexed(self, blocks: Iterable[int]) -> list[bool]:
        """Whether the content of each block is indexed."""
        keys = self._keys
        return [keys[block] is not None for block in blocks]

    def put(self, keys: Sequence[bytes], blocks: Sequence[int], indices: range) -> list[int]:
        """Index blocks[j] under keys[j] for these j; those j whose key was not indexed before."""
        index, keys_of, new = self._blocks, self._keys, []
        for j in indices:
            key, block = keys[j], blocks[j]
            assert keys_of[block] is None or keys_of[block] == key, "an indexed block's content does not change"
            if key not in index:
                index[key], keys_of[block] = block, key
                new.append(j)
        return new

    def remove(self, blocks: Iterable[int]) -> list[tuple[bytes, int]]:
        """The (key, block) pairs that were indexed."""
        index, keys_of, removed = self._blocks, self._keys, []
        for block in blocks:
            if (key := keys_of[block]) is not None:
                del index[key]
                keys_of[block] = None
                removed.append((key, block))
        return removed

    def n_leading(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` keys are indexed, up to the first that is not."""
        return len(list(takewhile(self._blocks.__contains__, islice(keys, limit))))

    def n_windowed(self, keys: Sequence[bytes], limit: int, window: int, chunked: bool = False) -> int:
        """The largest n <= limit for which all blocks that a token after n blocks can see are indexed."""
        end = start = limit  # keys[start:end] are indexed
        while start > first_visible(end * BLOCK_TOKENS, window, chunked):
            start -= 1
            if keys[start] not in self._blocks:
                end = start
        return end
