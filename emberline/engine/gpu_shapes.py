"""The sizes that steps are rounded up to, so that few shapes are captured. No torch: the scheduler plans by them."""

from bisect import bisect_left

TILE = 128  # matrix products compute whole tiles of tokens
MAX_CAPTURED_TOKENS = 1024  # a step of more keeps the device busy for longer than it takes to launch
CHUNK_ROWS = (16, 64)  # prompts in a step; one of them is nobody's

_DECODE_STEPS = ((64, 8), (256, 16), (1 << 30, 32))  # up to so many rows: in steps of
_BESIDE_CHUNKS = (0, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def decode_rows(rows: int, most: int) -> int:
    """Of a step that only decodes: powers of two, then ever coarser steps."""
    if rows <= 16:
        return min(1 << (rows - 1).bit_length(), most)
    step = next(step for limit, step in _DECODE_STEPS if rows <= limit)
    return min(-(-rows // step) * step, most)


def rows_beside_chunks(rows: int, most: int = 1 << 30) -> int:
    """Of those that decode in a step with chunks."""
    place = bisect_left(_BESIDE_CHUNKS, rows)
    return min(_BESIDE_CHUNKS[place] if place < len(_BESIDE_CHUNKS) else -(-rows // TILE) * TILE, most)


def tokens(n: int) -> int:
    """Of a step with chunks."""
    return -(-n // TILE) * TILE
