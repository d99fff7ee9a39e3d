"""The sizes that steps are rounded up to, so that few shapes are captured. No torch: the scheduler plans by them."""

from bisect import bisect_left

TILE = 128  # matrix products compute whole tiles of tokens
MAX_CAPTURED_TOKENS = 1024  # as efficient as larger ones, which must have thousands to be worth their launching
ROUND = 8192  # prompts are cut at multiples of this where it can be: attention over such lengths is planned already
CHUNK_ROWS = 32  # prompts in a captured step; one of them is nobody's

_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_ROWS_BESIDE_CHUNKS = (16, 64, 128, 256, 512)


def decode_rows(rows: int, most: int) -> int:
    """Of a step that only decodes: each of them costs."""
    return min(_up(rows, _ROWS), most)


def rows_beside_chunks(rows: int, most: int) -> int:
    """Places for those that decode in a step with chunks: one that nobody takes costs next to nothing."""
    return min(_up(rows, _ROWS_BESIDE_CHUNKS), most)


def tokens(n: int) -> int:
    """Of a step with chunks."""
    return -(-n // TILE) * TILE


def table_width(context_len: int) -> int:
    """Blocks of a row's table, in whole sixteens: Triton compiles kernels anew for strides that are not."""
    return -(-max(context_len, MAX_CAPTURED_TOKENS) // 256) * 16  # tokens that fill a step up have a context, too


def all_decode_rows(most: int) -> list[int]:
    """What `decode_rows` may say."""
    return _all(_ROWS, most)


def all_rows_beside_chunks(most: int) -> list[int]:
    return _all(_ROWS_BESIDE_CHUNKS, most)


def _up(n: int, sizes: tuple[int, ...]) -> int:
    place = bisect_left(sizes, n)
    return sizes[place] if place < len(sizes) else -(-n // TILE) * TILE


def _all(sizes: tuple[int, ...], most: int) -> list[int]:
    beyond = range(sizes[-1] + TILE, most + TILE, TILE)
    return sorted({min(size, most) for size in (*sizes, *beyond)})
