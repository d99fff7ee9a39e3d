"""The shape of cached KV, as plain data: what the pool allocates, the transfer moves and the tiers store."""

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
