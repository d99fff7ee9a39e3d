import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.block_pool import UNBOUNDED, blocks_of, capacity, peak_blocks, split_bytes
from emberline.kv.prefix_index import first_visible
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput

FULL = KVGroup("full", (0, 1), kv_heads=2, head_dim=8, dtype="float16")
WINDOW = KVGroup("window", (2, 3, 4), kv_heads=2, head_dim=8, dtype="float16", window=40)


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 64))
def test_peak_is_never_exceeded_by_a_chunked_prefill(n_tokens, window, chunk):
    layout = KVGroup("window", (0,), 1, 1, "float16", window=window)
    for start in range(0, n_tokens, chunk):
        end = min(start + chunk, n_tokens)
        assert blocks_of(end) - first_visible(start, window) <= peak_blocks(layout, n_tokens, chunk)


def test_capacity():
    assert capacity(FULL, 10, chunk=16) == 160
    peak = peak_blocks(WINDOW, UNBOUNDED, chunk=16)
    assert capacity(WINDOW, peak, chunk=16) == UNBOUNDED
    assert capacity(WINDOW, peak - 1, chunk=16) == (peak - 1) * 16


@given(st.integers(0, 10_000_000), st.integers(1, 64), st.integers(1, 512))
def test_bytes_are_used_and_never_exceeded(kv_bytes, max_running, chunk):
    layouts = [FULL, WINDOW]
    if kv_bytes < 3 * (FULL.block_bytes + WINDOW.block_bytes):
        with pytest.raises(BadInput, match="at least"):
            split_bytes(layouts, kv_bytes, chunk, max_running)
        return
    n_blocks = split_bytes(layouts, kv_bytes, chunk, max_running)
    spent = sum(n * layout.block_bytes for n, layout in zip(n_blocks, layouts))
    assert spent <= kv_bytes < spent + 2 * (FULL.block_bytes + WINDOW.block_bytes)
    assert n_blocks[1] <= n_blocks[0]
    assert min(capacity(layout, n - 1, chunk) for layout, n in zip(layouts, n_blocks)) > 0


def test_a_window_group_gets_less_when_bytes_are_plenty():
    n_full, n_window = split_bytes([FULL, WINDOW], 100_000_000, 64, max_running=8)
    assert n_window - 1 == (n_full - 1) // 4
