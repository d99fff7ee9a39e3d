"""The content key of a KV block: a 128-bit keyed BLAKE2 chain over token ids.

The chain is rooted in the model's fingerprint and the account's salt, so no two models or tenants ever share a key.
One chain serves the prefix cache, the tiers, the transfer and the router.
"""

from hashlib import blake2b

from emberline.protocol.layout import BLOCK_TOKENS

DIGEST_BYTES = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of u32 token ids


def root(fingerprint: str, salt: bytes, extras: bytes = b"") -> bytes:
    """Where a chain begins. `extras` will carry what else decides KV content (a LoRA's digest)."""
    keyed = blake2b(key=b"emberline.kv.root", digest_size=DIGEST_BYTES)
    for part in (fingerprint.encode(), salt, extras):
        keyed.update(len(part).to_bytes(4, "little"))
        keyed.update(part)
    return keyed.digest()


def extend(digests: list[bytes], chain_root: bytes, token_ids: bytes | bytearray) -> None:
    """Append the digests of the full blocks of `token_ids` (u32 LE) that `digests` does not have yet."""
    parent = digests[-1] if digests else chain_root
    view = memoryview(token_ids)
    for start in range(len(digests) * BLOCK_BYTES, len(view) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = blake2b(view[start : start + BLOCK_BYTES], key=parent, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
