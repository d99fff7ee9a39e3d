"""Content keys of a prompt whose tokenizer is not known: hashes of its bytes.

A key stands for about 16 tokens, as everywhere; eight of them are made from one hash of 512 bytes, since it is the
number of hashes that costs.
"""

from hashlib import blake2b

CHUNK_BYTES = 512
BYTES_PER_TOKEN = 4
KEYS_PER_CHUNK = CHUNK_BYTES // (16 * BYTES_PER_TOKEN)
_STEM_BYTES = 15
_NUMBERS = [bytes([number]) for number in range(KEYS_PER_CHUNK)]


def byte_keys(model: str, salt: bytes, *parts: bytes) -> bytes:
    """Equal up to where the parts' bytes are equal; another model's or tenant's are never equal."""
    chain = blake2b(b"%d/%s%s" % (len(salt), salt, model.encode()), person=b"emberline.bytes").digest()
    text = b"".join(parts)
    keys: list[bytes] = []
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chain = blake2b(text[start : start + CHUNK_BYTES], key=chain, digest_size=_STEM_BYTES).digest()
        keys += [chain + number for number in _NUMBERS]
    return b"".join(keys)


def estimated_tokens(n_bytes: int) -> int:
    return max(1, n_bytes // BYTES_PER_TOKEN)
