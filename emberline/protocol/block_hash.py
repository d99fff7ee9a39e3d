"""Content keys of KV blocks: a 128-bit keyed BLAKE2 chain over token ids, and the layout of the blocks themselves.

A chain is rooted in the model's fingerprint and the account's salt, so two models or tenants never share a key. The
same chain serves the prefix cache, the host and disk tiers, KV transfer and the router.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import chain as concatenate
from struct import Struct

import msgspec

BLOCK_TOKENS = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # by torch dtype name


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV is allocated and freed together. A block holds BLOCK_TOKENS tokens of all of them, contiguous:

    [layers, planes, kv_heads, BLOCK_TOKENS, head_dim]

    A rank of several has a slice of every block, with the same number: its own layers and heads, and under decode
    context parallelism (`kernels.context_parallel`) some of the tokens. `kv.groups` says which blocks are kept.
    """

    name: str  # "full", "window<N>" or "chunk<N>"
    layers: tuple[int, ...]  # model layer numbers, ascending; none: another stage has them, and blocks have no bytes
    kv_heads: int
    head_dim: int
    dtype: str  # torch dtype name, a key of ITEM_BYTES
    window: int | None = None  # sliding window in tokens, the query included; None: full attention
    chunked: bool = False  # `window` is the size of chunks instead: a token sees the tokens of its own chunk only
    keys: str = "token"  # K inside a block is [BLOCK_TOKENS, head_dim]; "channel": transposed, [head_dim, BLOCK_TOKENS]
    planes: int = 2  # K and V; 1: MLA's row of latent and rotated key, which has one head
    first_head: int = 0  # of `kv_heads`, among the model's
    tokens: tuple[int, int] = (0, BLOCK_TOKENS)  # of each block: the first, and the one behind the last

    @property
    def block_shape(self) -> tuple[int, ...]:
        return len(self.layers), self.planes, self.kv_heads, self.tokens[1] - self.tokens[0], self.head_dim

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one token of one head, in each plane."""
        return (self.head_dim * ITEM_BYTES[self.dtype],) * self.planes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: all that the cache, tiers and transfers know of what is in it."""
        return len(self.layers) * self.kv_heads * (self.tokens[1] - self.tokens[0]) * sum(self.row_bytes)

    @property
    def keeps_all(self) -> bool:
        """True if a sequence keeps the blocks of all its tokens; if False, only those that its next token can see."""
        return self.window is None

    @property
    def tag(self) -> str:
        """Layout tag: part of a stored block's address, never of its content key."""
        layers = f"L{self.layers[0]}-{self.layers[-1]}x{len(self.layers)}" if self.layers else "none"
        heads = f"H{self.first_head}-{self.first_head + self.kv_heads}"
        tokens = "" if self.tokens == (0, BLOCK_TOKENS) else f":T{self.tokens[0]}-{self.tokens[1]}"
        return f"{self.name}:{self.dtype}:{self.keys}:{layers}:{heads}:{self.planes}x{self.head_dim}{tokens}"


def bytes_per_token(groups: Iterable[KVGroup]) -> float:
    """Return the bytes of KV that each further token of a long sequence takes."""
    return sum(group.block_bytes for group in groups if group.keeps_all) / BLOCK_TOKENS


DIGEST_BYTES = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of u32 token ids
_SEGMENT_BYTES = 64 * BLOCK_BYTES  # token ids whose digests are memoized together
_MAX_SEGMENTS = 4096  # of 1,024 tokens each: 20 MB
_DIGESTS_64 = Struct(f"{DIGEST_BYTES}s" * 64)
NO_EXTRAS: Mapping[int, bytes] = {}


@lru_cache(1024)  # accounts
def root(fingerprint: str, salt: bytes, extras: bytes = b"") -> bytes:
    """Return the root of a chain. `extras` is anything else that determines all KV of it, such as an adapter's digest.

    Without extras it also names the owner of stored blocks: an account is purged by it, whatever its chains begin with.
    """
    keyed = blake2b(key=b"emberline.kv.root", digest_size=DIGEST_BYTES)
    for part in (fingerprint.encode(), salt, extras):
        keyed.update(len(part).to_bytes(4, "little"))
        keyed.update(part)
    return keyed.digest()


def session_digest(session: str | None) -> bytes:
    """Return the name of a session among an account's stored blocks; empty without one."""
    return b"" if not session else blake2b(session.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()


def extras_at(parts: Iterable[tuple[int, bytes]]) -> dict[int, bytes]:
    """Return the extras of each block, by its number, from pairs of a token's position and a digest.

    Such a part is an input that token ids do not name, an image for example, at the position of its first token. The
    keys of that block and of all after it depend on the digest and on the position.
    """
    extras: dict[int, bytes] = {}
    for position, digest in sorted(parts):
        block, offset = divmod(position, BLOCK_TOKENS)
        extras[block] = extras.get(block, b"") + bytes((offset,)) + len(digest).to_bytes(4, "little") + digest
    return extras


def extend(
    digests: list[bytes],
    chain_root: bytes,
    token_ids: bytes | bytearray,
    most: int | None = None,
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> None:
    """Append the missing digests of `token_ids`'s full blocks (u32 LE) to `digests`, up to `most` digests in all.

    `extras` has what else determines a block's content, by block number (`extras_at`).
    """
    parent = digests[-1] if digests else chain_root
    n_blocks = len(token_ids) // BLOCK_BYTES if most is None else min(most, len(token_ids) // BLOCK_BYTES)
    for start in range(len(digests) * BLOCK_BYTES, n_blocks * BLOCK_BYTES, BLOCK_BYTES):
        content = token_ids[start : start + BLOCK_BYTES]
        if extras and (extra := extras.get(start // BLOCK_BYTES)):
            content += extra  # longer than any block without extras, so no key of one is a key of the other
        parent = blake2b(content, key=parent, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


def split(keys: bytes) -> list[bytes]:
    """Split concatenated digests; 64 at a time, because there may be thousands."""
    n_whole = len(keys) // _DIGESTS_64.size * _DIGESTS_64.size
    rest = [keys[at : at + DIGEST_BYTES] for at in range(n_whole, len(keys), DIGEST_BYTES)]
    return [*concatenate.from_iterable(_DIGESTS_64.iter_unpack(keys[:n_whole])), *rest]


def chain(chain_root: bytes, token_ids: bytes, extras: Mapping[int, bytes] = NO_EXTRAS) -> bytes:
    """Return the digests of all full blocks, concatenated; `extras` as for `extend`.

    Memoized, so a conversation's next turn hashes only what is new.
    """
    parts = [b""]
    parent = chain_root
    for start in range(0, len(token_ids) // BLOCK_BYTES * BLOCK_BYTES, _SEGMENT_BYTES):
        segment = token_ids[start : start + _SEGMENT_BYTES]
        within = _extras_of(extras, start // BLOCK_BYTES) if extras else ()
        if len(segment) < _SEGMENT_BYTES:  # not memoized: the next turn will extend it
            parts.append(_segment_digests.__wrapped__(parent, segment, within))
            break
        parts.append(_segment_digests(parent, segment, within))
        parent = parts[-1][-DIGEST_BYTES:]
    return b"".join(parts)


@lru_cache(_MAX_SEGMENTS)
def _segment_digests(parent: bytes, token_ids: bytes, extras: tuple[tuple[int, bytes], ...]) -> bytes:
    digests: list[bytes] = []
    extend(digests, parent, token_ids, extras=dict(extras))
    return b"".join(digests)


def _extras_of(extras: Mapping[int, bytes], first: int) -> tuple[tuple[int, bytes], ...]:
    """Return the extras of a segment, by block number within it; `first` is the number of its first block."""
    last = first + _SEGMENT_BYTES // BLOCK_BYTES
    return tuple(sorted((block - first, extra) for block, extra in extras.items() if first <= block < last))
