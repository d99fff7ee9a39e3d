"""Kinds of KV groups: which blocks each kind needs, checked against the tokens that attention reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.block_pool import blocks_of
from emberline.kv.cache import KVCache
from emberline.kv.groups import UNBOUNDED, Chunk, Full, Window, counted_group, kind_of, one_sequence, split_bytes
from emberline.kv.prefix_index import LeadingBlocks, PrefixIndex
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup, bytes_per_token
from emberline.protocol.errors import BadInput

KEYS = [bytes([n]) * 16 for n in range(20)]
FULL = KVGroup("full", (0, 1), kv_heads=2, head_dim=8, dtype="float16")
WINDOW = KVGroup("window", (2, 3, 4), kv_heads=2, head_dim=8, dtype="float16", window=40)

reaches = st.integers(1, 120)
kinds = st.one_of(st.just(Full()), reaches.map(Window), reaches.map(Chunk))
layouts = st.tuples(st.none() | reaches, st.booleans()).map(
    lambda drawn: KVGroup("any", (0,), 1, 1, "float16", window=drawn[0], chunked=drawn[0] is not None and drawn[1])
)


def seen_tokens(kind, position):
    """The positions that a token attends to, by the definition of its attention."""
    if isinstance(kind, Full):
        return range(position + 1)
    if isinstance(kind, Chunk):
        return range(position - position % kind.reach, position + 1)
    return range(max(0, position - kind.reach + 1), position + 1)


def usable(kind, present, limit):
    """The prefixes, in blocks, after which a token finds all that it sees in `present`."""
    for n in range(limit + 1):
        if all(t // BLOCK_TOKENS in present for t in seen_tokens(kind, n * BLOCK_TOKENS) if t < n * BLOCK_TOKENS):
            yield n


def test_a_group_has_the_kind_that_its_layout_describes():
    assert isinstance(kind_of(FULL), Full)
    assert isinstance(kind_of(WINDOW), Window)
    chunked = kind_of(KVGroup("chunk", (0,), 1, 1, "float16", window=32, chunked=True))
    assert isinstance(chunked, Chunk)
    assert (chunked.reach, kind_of(WINDOW).reach, kind_of(FULL).reach) == (32, 40, UNBOUNDED)


@given(layouts)
def test_a_layout_and_its_kind_agree_on_what_is_kept(layout):
    kind = kind_of(layout)
    assert kind.keeps_all == layout.keeps_all
    assert kind.keeps_all == (kind.first_visible(1 << 20) == 0)
    assert bytes_per_token([layout]) == (layout.block_bytes / BLOCK_TOKENS if kind.keeps_all else 0)


@given(kinds, st.integers(0, 1000))
def test_the_first_visible_block_holds_the_first_token_that_is_seen(kind, position):
    assert kind.first_visible(position) == seen_tokens(kind, position)[0] // BLOCK_TOKENS
    assert len(seen_tokens(kind, position)) <= kind.reach
    assert kind.first_visible(position) <= kind.first_visible(position + 1), "a passed block is never seen again"


@given(kinds, st.sets(st.integers(0, 19)), st.integers(0, 20))
def test_the_longest_usable_prefix_is_found_and_its_visible_blocks_are_indexed(kind, present, limit):
    index, known = PrefixIndex(32), LeadingBlocks()
    for n in present:
        index.put([KEYS[n]], [n + 1])
    longest = max(usable(kind, present, limit))
    assert kind.longest(present.__contains__, limit) == longest
    assert kind.n_usable(index, KEYS, limit, known) == longest
    visible = kind.visible(index, KEYS, longest, known)
    assert visible.tolist() == list(range(kind.first_visible(16 * longest) + 1, longest + 1))


@given(st.lists(layouts, min_size=1, max_size=4), st.data())
def test_a_prefix_hit_is_the_longest_that_every_group_can_use(groups, data):
    """Whatever each group has lost, and in whatever order the groups are."""
    cache = KVCache(groups, [41] * len(groups), chunk=16)
    limit = data.draw(st.integers(0, 12))
    present = [data.draw(st.sets(st.integers(0, 11))) for _ in groups]
    table = cache.table()
    for held, group in zip(table.groups, cache.groups):
        held.blocks = group.pool.take_all(12)
    for g, has in enumerate(present):
        cache.publish_received(table, KEYS, g, sorted(has))
    every = [set(usable(kind_of(layout), has, limit)) for layout, has in zip(groups, present)]
    hit = cache.match(KEYS[:12], limit)
    assert hit.n_blocks == max(set.intersection(*every))
    taken = cache.table()
    cache.take_hit(taken, KEYS[:12], hit)
    for held, filled, layout in zip(taken.groups, table.groups, groups):
        assert held.n_passed == kind_of(layout).first_visible(16 * hit.n_blocks)
        assert held.blocks[held.n_passed :] == filled.blocks[held.n_passed : hit.n_blocks]


@given(kinds, st.integers(1, 300), st.integers(1, 64))
def test_peak_is_never_exceeded_by_a_chunked_prefill(kind, n_tokens, chunk):
    for start in range(0, n_tokens, chunk):
        end = min(start + chunk, n_tokens)
        assert blocks_of(end) - kind.first_visible(start) <= kind.peak_blocks(n_tokens, chunk)


@given(layouts, st.integers(2, 40), st.integers(1, 64))
def test_a_sequence_as_long_as_the_capacity_can_be_computed(layout, n_blocks, chunk):
    n_tokens = min(one_sequence([layout], [n_blocks], chunk), 2000)
    cache, start = KVCache([layout], [n_blocks], chunk), 0
    assert cache.capacity == one_sequence([layout], [n_blocks], chunk)
    table = cache.table()
    for start in range(0, n_tokens, chunk):
        assert cache.grow(table, start, min(start + chunk, n_tokens)) is not None


def test_capacity():
    assert kind_of(FULL).capacity(10, chunk=16) == 160
    window = kind_of(WINDOW)
    peak = window.peak_blocks(UNBOUNDED, chunk=16)
    assert window.capacity(peak, chunk=16) == UNBOUNDED
    assert window.capacity(peak - 1, chunk=16) == (peak - 1) * 16


@given(st.integers(0, 10_000_000), st.integers(1, 64), st.integers(1, 512))
def test_kv_bytes_are_used_and_never_exceeded(kv_bytes, max_running, chunk):
    layouts = [FULL, WINDOW]
    if kv_bytes < 3 * (FULL.block_bytes + WINDOW.block_bytes):
        with pytest.raises(BadInput, match="at least"):
            split_bytes(layouts, kv_bytes, chunk, max_running)
        return
    n_blocks = split_bytes(layouts, kv_bytes, chunk, max_running)
    spent = sum(n * layout.block_bytes for n, layout in zip(n_blocks, layouts))
    assert spent <= kv_bytes < spent + 2 * (FULL.block_bytes + WINDOW.block_bytes)
    assert n_blocks[1] <= n_blocks[0]
    assert one_sequence(layouts, n_blocks, chunk) > 0


def test_a_window_group_gets_fewer_blocks_when_memory_is_plentiful():
    n_full, n_window = split_bytes([FULL, WINDOW], 100_000_000, 64, max_running=8)
    assert n_window - 1 == (n_full - 1) * 4 // 128, "a window of 3 blocks, and one more, of every 2,048 tokens"
    wide = KVGroup("wide", (2, 3, 4), kv_heads=2, head_dim=8, dtype="float16", window=8192)
    n_full, n_window = split_bytes([FULL, wide], 100_000_000, 64, max_running=8)
    assert n_window - 1 == (n_full - 1) // 4


def test_a_narrow_window_needs_little_for_many_sequences_and_large_steps():
    """GPT-OSS-20B's groups with 256 sequences and steps of 8,192 tokens."""
    full = KVGroup("full", tuple(range(12)), kv_heads=8, head_dim=64, dtype="bfloat16")
    window = KVGroup("window", tuple(range(12, 24)), kv_heads=8, head_dim=64, dtype="bfloat16", window=128)
    n_full, n_window = split_bytes([full, window], 100 << 30, 8192, 256)
    assert n_window < n_full // 10
    assert n_window > 256 * 10 + 2 * 512
    assert kind_of(window).capacity(n_window - 1, 8192) == UNBOUNDED


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=6), st.integers(1, 64))
def test_running_sequences_fit_their_windows(sequences, reach):
    """Whatever they have, a step's tokens are shared by all: two steps' new blocks and a window each are enough."""
    kind, chunk = Window(reach), sum(new for _, new in sequences)
    held = sum(blocks_of(before + new) - kind.first_visible(before) for before, new in sequences)
    assert held <= kind.running_blocks(chunk, len(sequences))


def test_content_is_counted_by_a_group_that_keeps_all():
    assert counted_group([WINDOW, FULL]) is FULL
    assert counted_group([WINDOW]) is WINDOW


@pytest.mark.parametrize(("dtype", "n_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_bytes_per_block_follow_from_the_type_of_an_entry(dtype, n_bytes):
    layout = KVGroup("full", (3, 5), kv_heads=2, head_dim=8, dtype=dtype, tokens=(4, 12))
    assert layout.block_bytes == 2 * 2 * 2 * 8 * 8 * n_bytes
