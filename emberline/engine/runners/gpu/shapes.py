"""The sizes to which steps are rounded up, so that few CUDA graphs are needed. No torch."""

from bisect import bisect_left
from functools import cache

from emberline.engine.core.latency_target import ShapePolicy

TILE = 128  # tokens; matrix products compute whole tiles
MAX_GRAPH_TOKENS = 1024  # as efficient as larger steps; those need thousands of tokens to be worth an eager launch
LATENT_GRAPH_TOKENS = 256  # the same for MLA, whose larger chunks are faster by a library that cannot be captured
PROMPT_MULTIPLE = 8192  # prompts are cut at multiples of it where possible: attention plans for them exist
CHUNK_ROWS = 32  # chunks in a captured step, one of them padding
BURST_TOKENS = 2048  # of the one larger step that is captured: a burst of prompts beside sequences that decode
GPU_SHAPES = ShapePolicy(
    TILE, MAX_GRAPH_TOKENS, CHUNK_ROWS - 1, PROMPT_MULTIPLE, BURST_TOKENS
)  # for the prefill policy

VERIFY_TOKENS = (2, 3, 4, 5, 9, 16)  # of the rows of a step that verifies drafts, on average
MAX_VERIFY_ROWS = 128
MIN_DRAWS = 160  # that such a step may have, however few sequences run

_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_MIXED_ROWS = (16, 64, 128, 256, 512)


def graph_tokens(latent: bool) -> int:
    """Tokens of the largest step with chunks that is captured; latent: of a model with MLA."""
    return LATENT_GRAPH_TOKENS if latent else MAX_GRAPH_TOKENS


def decode_rows(rows: int, max_rows: int) -> int:
    """Rows of a step that only decodes: each row costs."""
    return min(_round_up(rows, _ROWS), max_rows)


def mixed_decode_rows(rows: int, max_rows: int) -> int:
    """Decode rows of a step with chunks: an unused one costs next to nothing."""
    return min(_round_up(rows, _MIXED_ROWS), max_rows)


def mixed_tokens(n: int) -> int:
    """Tokens of a step with chunks."""
    return -(-n // TILE) * TILE


def table_width(context_len: int) -> int:
    """Blocks of a row's table, a multiple of 16: Triton recompiles kernels for other strides."""
    return -(-max(context_len, BURST_TOKENS) // 256) * 16  # padding tokens have a context, too


def burst_tokens(n_decodes: int, n_tokens: int, largest: int, token_budget: int) -> int:
    """Tokens of the captured step for a burst of prompts; 0 if such a step does not suit, or memory for the token
    budget does not hold it. largest: `graph_tokens`."""
    suits = n_decodes > 0 and MAX_GRAPH_TOKENS < n_tokens <= BURST_TOKENS <= token_budget
    return BURST_TOKENS if suits and largest == MAX_GRAPH_TOKENS else 0


def all_decode_rows(max_rows: int) -> list[int]:
    """All results of `decode_rows`."""
    return _all_sizes(_ROWS, max_rows)


def all_mixed_decode_rows(max_rows: int) -> list[int]:
    return _all_sizes(_MIXED_ROWS, max_rows)


def max_draws(max_rows: int) -> int:
    """The most draws of a step: one of each row, or several of each of fewer rows."""
    return max(max_rows + CHUNK_ROWS, MIN_DRAWS)


def verify_rows(max_rows: int) -> int:
    """The most of a step that verifies drafts."""
    return min(max_rows, MAX_VERIFY_ROWS)


@cache
def all_verify_shapes(max_rows: int) -> tuple[tuple[int, int], ...]:
    """Rows and tokens of the steps that verify drafts."""
    sizes = [rows for rows in all_decode_rows(max_rows) if rows <= MAX_VERIFY_ROWS]
    most = {n: max_draws(max_rows) if n <= 5 else MIN_DRAWS for n in VERIFY_TOKENS}
    return tuple((rows, rows * n) for rows in sizes for n in VERIFY_TOKENS if rows * n <= most[n])


def timed_verify_shapes(max_rows: int) -> list[tuple[int, int]]:
    """Shapes whose times tell what drafts cost, beside plain steps of the same rows, which have a token of each."""
    timed = [(rows, rows * n) for rows in (1, 4, 16, 64) for n in (3, 5, 9)]
    found = [shape for shape in timed if shape in all_verify_shapes(max_rows)]
    return [*((rows, rows) for rows in sorted({rows for rows, _ in found})), *found]


@cache
def verify_shape(rows: int, n_tokens: int, max_rows: int) -> tuple[int, int] | None:
    """The smallest of these shapes that holds so many rows and tokens."""
    fitting = ((r, n) for r, n in all_verify_shapes(max_rows) if r >= rows and n >= n_tokens)
    return min(fitting, key=lambda shape: (shape[1], shape[0]), default=None)


@cache
def most_drafts(rows: int, max_rows: int) -> int:
    """The most drafts of all rows of a step together."""
    padded = decode_rows(rows, max_rows)
    return max((n - rows for r, n in all_verify_shapes(max_rows) if r == padded), default=0)


def max_graphs(max_rows: int, speculates: bool = False) -> int:
    """No fewer than the shapes of steps that are captured, with and without cascade attention."""
    n_decodes, n_mixed = len(all_decode_rows(max_rows)), len(all_mixed_decode_rows(max_rows))
    n_verifying = len(all_verify_shapes(max_rows)) if speculates else 0
    return 2 * n_decodes + (n_mixed + 1) * (MAX_GRAPH_TOKENS // TILE) + n_mixed + n_verifying


def is_essential(n_decodes: int, n_tokens: int | None, max_rows: int, largest: int = MAX_GRAPH_TOKENS) -> bool:
    """True if a shape is captured before requests are accepted. n_tokens is None for a step that only decodes.

    largest: `graph_tokens` of the model.

    Any step that fits a CUDA graph can be padded to one of these, in most cases to one of at most four times its size.
    The end of a cached prompt beside up to 64 sequences that decode fits a tile, and more tokens cost them time; decode
    rows cost next to nothing, so that the largest steps have one shape.
    """
    if n_tokens is None:
        return n_decodes in (1, 16, 64, max_rows)
    smallest = n_decodes == min(_MIXED_ROWS[0], max_rows)
    sizes = {TILE, min(512, largest)} if smallest or n_decodes == 64 else set()
    if smallest or n_decodes == max_rows:
        sizes |= {512, largest}
    if n_decodes == max_rows:
        sizes.add(BURST_TOKENS)  # no smaller one holds such a step
    return n_tokens in sizes


def _round_up(n: int, sizes: tuple[int, ...]) -> int:
    index = bisect_left(sizes, n)
    return sizes[index] if index < len(sizes) else -(-n // TILE) * TILE


def _all_sizes(sizes: tuple[int, ...], max_rows: int) -> list[int]:
    beyond = range(sizes[-1] + TILE, max_rows + TILE, TILE)
    return sorted({min(size, max_rows) for size in (*sizes, *beyond)})
