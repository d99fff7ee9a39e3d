"""The blocks of one KV group: reference counts, and the order in which free ones are handed out again."""

NULL_BLOCK = 0  # never handed out: padding, and table entries whose block fell out of the window, point here


class BlockPool:
    """Blocks 1 .. n_blocks - 1. Those nobody references form a doubly-linked list, next to be reused first.

        head ⇄ worthless ⇄ oldest cached ⇄ ... ⇄ newest cached ⇄ head

    A free block keeps its content until it is handed out, so cached content is evicted only when room is needed.
    The links live in two flat lists; index NULL_BLOCK is the list's head.
    """

    def __init__(self, n_blocks: int) -> None:
        assert n_blocks >= 2, "a pool needs a block besides the null block"
        self.n_total = n_blocks - 1
        self.n_free = self.n_total
        self.n_releases = 0  # how often a block became free; unchanged means no new room
        self.refs = [0] * n_blocks
        self._next: list[int] = [*range(1, n_blocks), 0]
        self._prev: list[int] = [n_blocks - 1, *range(n_blocks - 1)]

    def take(self) -> int:
        """The free block that is missed least, referenced once. Its old content is the caller's to forget."""
        assert self.n_free, "take() from an empty pool: check n_free first"
        block = self._next[NULL_BLOCK]
        self._unlink(block)
        self.refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference; a free block comes back to life with its content."""
        assert block != NULL_BLOCK
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def drop(self, block: int, worth_keeping: bool) -> None:
        """One reference less. Without any, the block is free: last in line if its content may be asked for again."""
        assert self.refs[block] > 0, f"block {block} dropped more often than held"
        self.refs[block] -= 1
        if self.refs[block]:
            return
        before = self._prev[NULL_BLOCK] if worth_keeping else NULL_BLOCK
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.n_free += 1
        self.n_releases += 1

    def free_blocks(self) -> list[int]:
        """In the order of reuse. For tests and reports: O(free)."""
        blocks, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.n_free -= 1
