from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kv.block_pool import NULL_BLOCK
from emberline.kv.cache import KVCache
from emberline.kv.groups import Window
from emberline.kv.prefix_index import NO_OWNER
from emberline.protocol import block_hash as blockhash
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.token_ids import pack
from tests.examples import n_examples

FULL = KVGroup("full", (0,), 1, 1, "float16")
WINDOW = KVGroup("window", (1,), 1, 1, "float16", window=24)
CHUNKED = KVGroup("chunk", (1,), 1, 1, "float16", window=48, chunked=True)


class Record:
    def __init__(self):
        self.keys = {}

    def stored(self, group, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            assert (group.name, key) not in self.keys
            self.keys[group.name, key] = block

    def evicted(self, group, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            assert self.keys.pop((group.name, key)) == block


def keys_of(ids, salt=b""):
    keys = []
    blockhash.extend(keys, blockhash.root("model", salt), pack(ids))
    return keys


def fill(cache, ids, chunk=16, owner=NO_OWNER):
    """Compute a sequence to its end, as a scheduler would, and return its table."""
    keys, table = keys_of(ids), cache.table(owner)
    hit = cache.match(keys, (len(ids) - 1) // 16)
    cache.take_hit(table, keys, hit)
    for start in range(16 * hit.n_blocks, len(ids), chunk):
        end = min(start + chunk, len(ids))
        assert cache.grow(table, start, end) is not None
        cache.publish([(table, keys, end // 16)])
    return table


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda parts: [n for n in parts for _ in range(16)])


@given(prompts=st.lists(PROMPT, min_size=1, max_size=4), layout=st.sampled_from([WINDOW, CHUNKED]))
@settings(max_examples=n_examples(100))
def test_tables_that_are_published_together_are_as_one_after_the_other(prompts, layout):
    found = []
    for together in (False, True):
        record = Record()
        cache = KVCache([FULL, layout], [60, 60], chunk=16, listener=record)
        parts = [(cache.table((b"%d" % n, b"")), keys_of(ids), len(ids) // 16) for n, ids in enumerate(prompts)]
        for (table, _, _), ids in zip(parts, prompts, strict=True):
            for start in range(0, len(ids), 16):
                assert cache.grow(table, start, start + 16) is not None
        for some in [parts] if together else [[part] for part in parts]:
            cache.publish(some)
        owned = [group.index.belonging(table.owner[0]) for group in cache.groups for table, _, _ in parts]
        found.append((record.keys, owned, [table.n_published for table, _, _ in parts]))
        for table, _, _ in parts:
            cache.release(table)
        assert cache.n_used == 0
    assert found[0] == found[1]


def test_a_second_sequence_shares_the_full_blocks_of_the_first():
    cache = KVCache([FULL], [20], chunk=16)
    first = fill(cache, range(40))
    assert cache.n_used == 3
    second = fill(cache, [*range(32), 99, 98])
    assert first.groups[0].blocks[:2] == second.groups[0].blocks[:2]
    assert cache.n_used == 4
    cache.release(first)
    assert cache.n_used == 3
    cache.release(second)
    assert cache.n_used == 0


def test_a_hit_leaves_at_least_one_token_to_compute():
    cache = KVCache([FULL], [20], chunk=16)
    cache.release(fill(cache, range(32)))
    assert cache.match(keys_of(range(32)), (32 - 1) // 16).n_blocks == 1
    assert cache.match(keys_of(range(33)), (33 - 1) // 16).n_blocks == 2


def test_another_salt_never_hits():
    cache = KVCache([FULL], [20], chunk=16)
    cache.release(fill(cache, range(33)))
    assert cache.match(keys_of(range(33), b"other"), 2).n_blocks == 0


def test_tails_are_evicted_before_beginnings_and_listeners_notified():
    record = Record()
    cache = KVCache([FULL], [5], chunk=64, listener=record)
    cache.release(fill(cache, range(64), chunk=64))
    assert len(record.keys) == 4
    other = fill(cache, range(100, 132))
    assert cache.match(keys_of(range(64)), 4).n_blocks == 2
    assert {key for _, key in record.keys} == {*keys_of(range(64))[:2], *keys_of(range(100, 132))}
    cache.release(other)


def test_running_sequences_are_never_evicted():
    cache = KVCache([FULL], [5], chunk=64)
    running = fill(cache, range(40))
    table = cache.table()
    assert cache.grow(table, 0, 40) is None
    assert table.groups[0].blocks == []
    assert cache.grow(table, 0, 16) == [table.groups[0].blocks]
    assert not set(table.groups[0].blocks) & set(running.groups[0].blocks)


def test_blocks_that_leave_the_window_are_freed_while_the_sequence_runs():
    cache = KVCache([WINDOW], [6], chunk=16)
    table = fill(cache, range(200))
    held = table.groups[0]
    assert len(held.blocks) == 13
    assert held.blocks[: held.n_passed] == [NULL_BLOCK] * held.n_passed
    assert held.n_passed == Window(24).first_visible(192) == 10
    assert cache.n_used == 3


def test_a_group_of_attention_chunks_keeps_the_blocks_of_one_chunk():
    cache = KVCache([FULL, CHUNKED], [20, 7], chunk=16)
    table = fill(cache, range(100))
    assert [held.n_passed for held in table.groups] == [0, 6], "token 96 begins a chunk: it sees no token before"
    assert cache.grow(table, 100, 101) == []
    assert table.groups[1].n_passed == 6
    cache.release(table)
    keys = keys_of([*range(96), 1])
    assert cache.match(keys, 6).n_blocks == 6, "after a whole chunk the group needs nothing"
    cache.take_hit(again := cache.table(), keys, cache.match(keys, 6))
    assert [held.n_passed for held in again.groups] == [0, 6]


def test_a_window_group_needs_only_the_last_blocks_of_a_hit():
    cache = KVCache([FULL, WINDOW], [20, 6], chunk=16)
    cache.release(fill(cache, range(128)))
    keys = keys_of([*range(128), 1])
    window = cache.groups[1].index
    assert window.n_leading(keys, 8) == 0, "the first blocks are evicted in the window group"
    assert cache.match(keys, 8).n_blocks == 8
    table = cache.table()
    cache.take_hit(table, keys, cache.match(keys, 8))
    assert [held.n_passed for held in table.groups] == [0, Window(24).first_visible(128)]
    assert cache.match(keys, 3).n_blocks == 0, "no shorter prefix has its window left"


def test_discarded_content_is_not_found_again():
    cache = KVCache([FULL], [20], chunk=16)
    shared = fill(cache, range(33))
    other = fill(cache, range(33))
    cache.discard(other)
    assert cache.match(keys_of(range(33)), 2).n_blocks == 0
    cache.release(shared)
    assert cache.n_used == 0


def test_fits_counts_shared_blocks_once_and_free_hits_as_taken():
    cache = KVCache([FULL], [6], chunk=64)  # 5 usable
    table = fill(cache, range(33))  # 3 blocks
    keys = keys_of([*range(32), *range(90, 122)])  # 64 tokens, 2 blocks shared
    assert cache.fits(keys, cache.match(keys, 2), 64, [0])
    assert not cache.fits(keys, cache.match(keys, 2), 64, [1])
    assert not cache.fits(keys, cache.match(keys, 0), 64, [0])
    cache.release(table)
    assert cache.fits(keys, cache.match(keys, 2), 64, [1])
    assert not cache.fits(keys, cache.match(keys, 2), 64, [2])


@settings(max_examples=n_examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([[FULL], [WINDOW], [FULL, WINDOW]]),
    st.integers(7, 16),
)
def test_all_blocks_are_freed_and_hits_are_correct(requests, layouts, n_blocks):
    """Random sequences with shared prefixes, some kept running: references add up, hits have the right content."""
    record = Record()
    cache = KVCache(layouts, [n_blocks] * len(layouts), chunk=16, listener=record)
    content = {}  # (group, block) -> key that was computed there
    running = []
    for variant, length, stay in requests:
        ids = [*range(32), *range(100 * variant, 100 * variant + 90)][:length]
        keys = keys_of(ids)
        if not cache.fits(keys, cache.match(keys, (length - 1) // 16), length, [0] * len(layouts)):
            continue
        table = fill(cache, ids)
        for g, held in enumerate(table.groups):
            for j, block in enumerate(held.blocks):
                if block == NULL_BLOCK or j >= len(keys):
                    continue
                if cache.groups[g].index.key(block) is not None:
                    assert cache.groups[g].index.key(block) == keys[j]
                assert content.get((g, block), keys[j]) == keys[j] or cache.groups[g].pool.refs[block] == 1
                content[g, block] = keys[j]
        running.append(table)
        if not stay:
            cache.release(running.pop())
        for g, group in enumerate(cache.groups):
            held_blocks = [b for t in running for b in t.groups[g].blocks if b != NULL_BLOCK]
            assert sum(group.pool.refs) == len(held_blocks)
            assert group.pool.n_total - group.pool.n_free == len(set(held_blocks))
        assert {key for _, key in record.keys} == {k for g in cache.groups for k in g.index._blocks}
    for table in running:
        cache.release(table)
    assert cache.n_used == 0


def test_purge_forgets_the_content_of_an_owner_or_of_a_session():
    record = Record()
    cache = KVCache([FULL, WINDOW], [30, 30], chunk=16, listener=record)
    owners = [(b"A", b"x"), (b"A", b"y"), (b"B", b"x"), (b"A", b"x")]
    tables = [fill(cache, range(100 * n, 100 * n + 40), owner=owner) for n, owner in enumerate(owners)]
    cache.release(tables.pop())
    assert cache.purge(b"A", b"x") == 8, "of a sequence that runs, and of one that has ended"
    for n, n_hit in enumerate((0, 2, 2, 0)):
        assert cache.match(keys_of(range(100 * n, 100 * n + 40)), 2).n_blocks == n_hit
    assert cache.purge(b"A") == 4
    assert len(record.keys) == 4
    assert cache.purge(None) == 4
    assert not record.keys
    for table in tables:
        cache.release(table)
    assert cache.n_used == 0
    assert cache.match(keys_of(range(40)), 2).n_blocks == 0
