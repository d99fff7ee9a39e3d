"""How many blocks a sequence needs, and how many of each group a number of bytes buys."""

from collections.abc import Sequence

from emberline.protocol.errors import BadInput
from emberline.protocol.layout import BLOCK_TOKENS, KVGroup

UNBOUNDED = 1 << 40  # tokens; a pool that holds a whole window holds sequences of any length


def blocks_of(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_TOKENS)


def peak_blocks(layout: KVGroup, n_tokens: int, chunk: int) -> int:
    """The most blocks a sequence of n_tokens holds at once when it gains at most `chunk` tokens a step."""
    if layout.window is None:
        return blocks_of(n_tokens)
    return min(blocks_of(n_tokens), blocks_of(layout.window - 1 + chunk) + 1)


def capacity(layout: KVGroup, n_usable: int, chunk: int) -> int:
    """Tokens of the longest sequence that n_usable blocks of this group hold."""
    bounded = layout.window is None or n_usable < peak_blocks(layout, UNBOUNDED, chunk)
    return n_usable * BLOCK_TOKENS if bounded else UNBOUNDED


def split_bytes(layouts: Sequence[KVGroup], kv_bytes: int, chunk: int, max_running: int) -> list[int]:
    """Blocks for each group, the null block included.

    Groups that see everything get as many blocks each as they can. A window group gets a quarter of that, enough to
    find sessions again by their last window, or what all running sequences can need if that is more; never more than
    the others.
    """

    def blocks(n_full: int) -> list[int]:
        windows = [max(n_full // 4, max_running * peak_blocks(layout, UNBOUNDED, chunk)) for layout in layouts]
        return [n_full if layout.window is None else min(n_full, n) for layout, n in zip(layouts, windows)]

    def cost(n_full: int) -> int:
        return sum((n + 1) * layout.block_bytes for n, layout in zip(blocks(n_full), layouts))

    least = cost(2)
    if kv_bytes < least:
        raise BadInput(
            f"{kv_bytes} bytes of KV hold no sequence of this model; give at least {least}", param="kv_bytes"
        )
    low, high = 2, kv_bytes  # cost(low) fits, cost(high) does not: a block has more than one byte
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= kv_bytes else (low, middle)
    return [n + 1 for n in blocks(low)]
