"""The interface of a KV cache tier: blocks by (content key, layout tag), read and written whole, lost without harm."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from emberline.kv.kv_events import TierChanges
from emberline.kv.retention import Conversation, Retention
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import TierStats

__all__ = ["BlockId", "BlockMeta", "Tier", "TierStats", "layout_tag"]

TAG_BYTES = 8


class BlockId(NamedTuple):
    """The address of a block in every tier. A tier never returns bytes that were not written under the same address."""

    key: bytes  # content key (protocol/block_hash), rooted in model fingerprint and account salt
    tag: bytes  # layout tag: KV group, dtype, layers, heads, block size


@lru_cache(256)
def layout_tag(group: KVGroup) -> bytes:
    return blake2b(f"{group.tag}:{group.block_bytes}".encode(), digest_size=TAG_BYTES).digest()


class BlockMeta(msgspec.Struct, frozen=True, gc=False):
    """Facts about a block that tiers need besides its bytes, for retention, purging and export.

    There are as many as blocks: a struct that the garbage collector ignores, as collections stop all threads.
    """

    owner: bytes = b""  # root key of its chain: one per account and model
    session: bytes = b""  # 16-byte digest; empty: unknown
    position: int = 0  # block number in its chain
    parent: bytes = b""  # content key of the block before it; the owner for the first one
    priority: int = 0  # a retention hint: larger is kept longer
    keep_s: float = 0.0  # a retention hint: seconds after its last use during which it should stay
    saved_s: float = 0.0  # Unix time
    used_s: float = 0.0  # Unix time
    conversation: Conversation | None = None  # that it is part of, where this process knows it


@runtime_checkable
class Retained(Protocol):
    """A tier whose blocks stay as long as retention thinks."""

    evicted: deque[BlockId] | None  # what was evicted and other ranks are yet to hear of; None: no rank is told

    def follow(self, retention: Retention) -> None:
        """Called once, before blocks of conversations are written."""

    def evict(self, ids: Sequence[BlockId]) -> None:
        """Forget valid blocks, and wait for no drive."""


class Tier(Protocol):
    """Thread-safe. `holds` and `stats` are called by the step loop's thread and never wait; the others by threads that
    the tier manager has for this tier, and may take long. None raises because of a bad device, a lost server or a
    bad block: the tier degrades, says so in `stats`, and recovers by itself.
    """

    name: str  # "host", "disk", "pool"
    remote: bool  # True: `holds` knows of other processes' blocks only after `look_up`
    changes: TierChanges | None  # told what it gains and loses

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        """True for each block that `read` would probably return. Looks in memory: well below a microsecond each."""

    def held(self) -> list[BlockId]:
        """All blocks that `holds` knows of."""

    def look_up(self, ids: Sequence[BlockId]) -> None:
        """Learn which of the blocks are held, for `holds`. Blocking; does nothing unless the tier is remote."""

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill each buffer with its whole block; False: the block is absent or not verified, its buffer is undefined.

        Buffers are writable, of the block's size, and mostly page-aligned. They stay valid until the call returns.
        """

    def write(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], metas: Sequence[BlockMeta]) -> None:
        """Store blocks, or drop some of them. The buffers are read before the call returns, and not after."""

    def touch(self, ids: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """The blocks were used, though not read from here: they are as recent as if they were, and stay as long as the
        conversation; or longer, if they are part of another one as well."""

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """The session's blocks from this position on will hardly be used again: evict them first."""

    def remove(self, ids: Sequence[BlockId]) -> None:
        """Forget the blocks."""

    def purge(self, owner: bytes | None = None, session: bytes | None = None) -> int:
        """Forget all blocks of an owner, or of a session, or all; the number of blocks. Nothing of them stays."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Make what was written durable where the tier is, and let go of threads, files and connections."""
