"""Kinds of KV groups: which blocks of a sequence each kind keeps, and how KV memory is divided among groups.

A KV group is its kind and its bytes per block (`KVGroup.block_bytes`). The cache, the tiers and the memory plan ask the
kind which blocks are needed, and never look at a window themselves; another kind is another subclass of `GroupKind`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from emberline.kv.block_pool import blocks_of
from emberline.kv.prefix_index import Blocks, LeadingBlocks, PrefixIndex
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.errors import BadInput

UNBOUNDED = 1 << 40  # tokens: a pool that holds all that a token can see holds sequences of any length

# Assumptions about sessions, for groups that keep only the end of each: a session has at least SESSION_TOKENS tokens on
# average, and at least SESSION_CHUNKS chunks if the model has chunked attention, which is made for long sessions.
SESSION_TOKENS = 2048
SESSION_CHUNKS = 16


class GroupKind:
    """The blocks that a group of this kind needs of a sequence. Block j holds tokens 16j .. 16j + 15."""

    keeps_all: ClassVar[bool] = False  # True if a sequence keeps all its blocks, and a prefix needs all of them
    session_tokens = SESSION_TOKENS

    def __init__(self, reach: int) -> None:
        self.reach = reach  # tokens that a token sees at most, itself included

    def first_visible(self, position: int) -> int:
        """Return the first block that the token at `position` can see."""
        raise NotImplementedError

    def next_passing(self, n_passed: int) -> int:
        """Return the first position whose token sees none of the first n_passed + 1 blocks."""
        raise NotImplementedError

    def longest(self, has: Callable[[int], bool], limit: int) -> int:
        """Return the largest n <= limit for which `has` every block that a token after n blocks can see."""
        end = start = limit  # the blocks start .. end - 1 are there
        while start > self.first_visible(end * BLOCK_TOKENS):
            start -= 1
            if not has(start):
                end = start
        return end

    def n_usable(self, index: PrefixIndex, keys: Sequence[bytes], limit: int, known: LeadingBlocks) -> int:
        """Return the length in blocks of the longest indexed prefix, up to `limit`. Updates `known` if it helps."""
        return self.longest(lambda j: keys[j] in index, limit)

    def visible(self, index: PrefixIndex, keys: Sequence[bytes], n: int, known: LeadingBlocks) -> Blocks:
        """Return the blocks of an indexed prefix of n blocks that the token after it can see."""
        return index.blocks(keys[self.first_visible(n * BLOCK_TOKENS) : n])

    def peak_blocks(self, n_tokens: int, chunk: int) -> int:
        """Return the most blocks that a sequence of n_tokens holds at once if it gains up to `chunk` tokens a step."""
        return min(blocks_of(n_tokens), blocks_of(self.reach - 1 + chunk) + 1)

    def capacity(self, n_usable: int, chunk: int) -> int:
        """Return the tokens of the longest sequence that n_usable blocks can hold."""
        return n_usable * BLOCK_TOKENS if n_usable < self.peak_blocks(UNBOUNDED, chunk) else UNBOUNDED

    def running_blocks(self, chunk: int, max_running: int) -> int:
        """Return the blocks that all running sequences need: a reach each, and the tokens that two steps add."""
        return max_running * (blocks_of(self.reach) + 2) + 2 * blocks_of(chunk)

    def pool_blocks(self, n_full: int, chunk: int, max_running: int) -> int:
        """Return the pool's size if groups that keep all blocks have n_full: enough to find the end of each session
        again, at most a quarter; or enough for all running sequences, if that is more; never more than n_full."""
        kept = n_full * (blocks_of(self.reach) + 1) // blocks_of(self.session_tokens)
        return min(n_full, max(min(kept, n_full // 4), self.running_blocks(chunk, max_running)))


class Full(GroupKind):
    """Full attention: every token sees all tokens before it."""

    keeps_all = True

    def __init__(self) -> None:
        super().__init__(UNBOUNDED)

    def first_visible(self, position: int) -> int:
        return 0

    def next_passing(self, n_passed: int) -> int:
        return UNBOUNDED

    def n_usable(self, index: PrefixIndex, keys: Sequence[bytes], limit: int, known: LeadingBlocks) -> int:
        return index.n_leading(keys, limit, known)

    def visible(self, index: PrefixIndex, keys: Sequence[bytes], n: int, known: LeadingBlocks) -> Blocks:
        return known.blocks[:n]

    def peak_blocks(self, n_tokens: int, chunk: int) -> int:
        return blocks_of(n_tokens)

    def pool_blocks(self, n_full: int, chunk: int, max_running: int) -> int:
        return n_full


class Window(GroupKind):
    """Sliding-window attention: a token sees the last `reach` tokens, itself included."""

    def first_visible(self, position: int) -> int:
        return 0 if position < self.reach else (position - self.reach + 1) // BLOCK_TOKENS

    def next_passing(self, n_passed: int) -> int:
        return BLOCK_TOKENS * (n_passed + 1) + self.reach - 1


class Chunk(GroupKind):
    """Chunked attention: a token sees the tokens of its own chunk of `reach` tokens, up to itself."""

    def __init__(self, reach: int) -> None:
        super().__init__(reach)
        self.session_tokens = max(SESSION_TOKENS, SESSION_CHUNKS * reach)

    def first_visible(self, position: int) -> int:
        return position // self.reach * self.reach // BLOCK_TOKENS

    def next_passing(self, n_passed: int) -> int:
        return -(-BLOCK_TOKENS * (n_passed + 1) // self.reach) * self.reach


def kind_of(layout: KVGroup) -> GroupKind:
    """Return the kind of a group by its description."""
    if layout.window is None:
        return Full()
    return Chunk(layout.window) if layout.chunked else Window(layout.window)


def counted_group(layouts: Iterable[KVGroup]) -> KVGroup:
    """Return the group whose blocks count as those of a prompt: the first that keeps all, or the first of all."""
    known = list(layouts)
    return next((layout for layout in known if layout.keeps_all), known[0])


def all_sequences(n_blocks: Sequence[int]) -> int:
    """Return the tokens that sequences have together in pools of n_blocks each, the null block included."""
    return (max(n_blocks) - 1) * BLOCK_TOKENS


def one_sequence(layouts: Sequence[KVGroup], n_blocks: Sequence[int], chunk: int) -> int:
    """Return the tokens of the longest sequence that pools of n_blocks each hold."""
    return min(kind_of(layout).capacity(n - 1, chunk) for layout, n in zip(layouts, n_blocks, strict=True))


def split_bytes(layouts: Sequence[KVGroup], kv_bytes: int, chunk: int, max_running: int) -> list[int]:
    """Return the blocks of each group's pool, the null block included. `chunk` is the tokens of a step, of all
    sequences together.

    Groups that keep all blocks get as many each as possible; the size of the others follows from it.
    """
    kinds = [kind_of(layout) for layout in layouts]

    def blocks(n_full: int) -> list[int]:
        return [kind.pool_blocks(n_full, chunk, max_running) for kind in kinds]

    def cost(n_full: int) -> int:
        return sum((n + 1) * layout.block_bytes for n, layout in zip(blocks(n_full), layouts))

    min_bytes = cost(2)
    if kv_bytes < min_bytes:
        raise BadInput(
            f"{kv_bytes} bytes of KV cache hold no sequence of this model; give at least {min_bytes}", param="kv_bytes"
        )
    low, high = 2, kv_bytes  # cost(low) fits, cost(high) does not: a block has more than one byte
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= kv_bytes else (low, middle)
    return [n + 1 for n in blocks(low)]
