"""The content key of a KV block: a 128-bit keyed BLAKE2 chain over token ids.

The chain is rooted in the model's fingerprint and the account's salt, so no two models or tenants ever share a key.
One chain serves the prefix cache, the tiers, the transfer and the router.
"""

from functools import lru_cache
from hashlib import blake2b
from itertools import chain as joined
from struct import Struct

import msgspec

BLOCK_TOKENS = 16


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV lives and dies together. A block holds BLOCK_TOKENS tokens of all of them, contiguous:

    [layers, 2 (k, v), kv_heads, BLOCK_TOKENS, head_dim]
    """

    name: str  # "full", "window", later "latent", "draft"
    layers: tuple[int, ...]  # model layer numbers, ascending
    kv_heads: int
    head_dim: int
    dtype: str  # torch dtype name: "float16", "bfloat16", "float32"
    window: int | None = None  # tokens a query may look back, itself included; None: all
    keys: str = "token"  # K inside a block is [BLOCK_TOKENS, head_dim]; "channel": transposed, [head_dim, BLOCK_TOKENS]

    @property
    def block_bytes(self) -> int:
        item = 4 if self.dtype == "float32" else 2
        return len(self.layers) * 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim * item

    @property
    def tag(self) -> str:
        """Names where bytes lie: part of a stored block's address, never of its content key."""
        layers = f"L{self.layers[0]}-{self.layers[-1]}x{len(self.layers)}"
        return f"{self.name}:{self.dtype}:{self.keys}:{layers}:H0-{self.kv_heads}"


DIGEST_BYTES = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of u32 token ids
_STRETCH_BYTES = 64 * BLOCK_BYTES  # remembered together
_STRETCHES = 4096  # of 1,024 tokens each: 20 MB
_MANY = Struct(f"{DIGEST_BYTES}s" * 64)


@lru_cache(1024)  # accounts
def root(fingerprint: str, salt: bytes, extras: bytes = b"") -> bytes:
    """Where a chain begins. `extras` will carry what else decides KV content (a LoRA's digest)."""
    keyed = blake2b(key=b"emberline.kv.root", digest_size=DIGEST_BYTES)
    for part in (fingerprint.encode(), salt, extras):
        keyed.update(len(part).to_bytes(4, "little"))
        keyed.update(part)
    return keyed.digest()


def extend(digests: list[bytes], chain_root: bytes, token_ids: bytes | bytearray, most: int | None = None) -> None:
    """Append the digests of the full blocks of `token_ids` (u32 LE) that `digests` lacks; until it has `most`."""
    parent = digests[-1] if digests else chain_root
    n_blocks = len(token_ids) // BLOCK_BYTES if most is None else min(most, len(token_ids) // BLOCK_BYTES)
    for start in range(len(digests) * BLOCK_BYTES, n_blocks * BLOCK_BYTES, BLOCK_BYTES):
        parent = blake2b(token_ids[start : start + BLOCK_BYTES], key=parent, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


def split(keys: bytes) -> list[bytes]:
    """The digests that lie end to end in `keys`; there may be thousands."""
    n_many = len(keys) // _MANY.size * _MANY.size
    rest = [keys[at : at + DIGEST_BYTES] for at in range(n_many, len(keys), DIGEST_BYTES)]
    return [*joined.from_iterable(_MANY.iter_unpack(keys[:n_many])), *rest]


def chain(chain_root: bytes, token_ids: bytes) -> bytes:
    """The digests of all full blocks, end to end. A conversation's turn costs little more than what is new in it."""
    parts = [b""]
    parent = chain_root
    for start in range(0, len(token_ids) // BLOCK_BYTES * BLOCK_BYTES, _STRETCH_BYTES):
        stretch = token_ids[start : start + _STRETCH_BYTES]
        if len(stretch) < _STRETCH_BYTES:
            parts.append(_stretch.__wrapped__(parent, stretch))  # it will have grown by the next turn
            break
        parts.append(_stretch(parent, stretch))
        parent = parts[-1][-DIGEST_BYTES:]
    return b"".join(parts)


@lru_cache(_STRETCHES)
def _stretch(parent: bytes, token_ids: bytes) -> bytes:
    digests: list[bytes] = []
    extend(digests, parent, token_ids)
    return b"".join(digests)
