"""The suffix index against a search through all tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.speculation import suffix_index
from emberline.engine.speculation.suffix_index import SuffixIndex, SuffixMatcher
from emberline.protocol.token_ids import pack, unpack

pytestmark = pytest.mark.skipif(not suffix_index.available(), reason="needs a C compiler")
TOKENS = st.integers(0, 3)
BREAK = -1


def longest_match(texts, context):
    """Length of the longest end of the context that occurs with a continuation in the index, and all continuations."""
    best, following = 0, []
    for text in texts:
        for end in range(1, len(text)):
            n = 0
            while n < min(end, len(context)) and text[end - 1 - n] == context[-1 - n]:
                n += 1
            if n > best:
                best, following = n, []
            if n == best and n:
                following.append(text[end:])
    return best, following


@given(st.lists(st.lists(TOKENS, max_size=12), max_size=2), st.lists(TOKENS, min_size=1, max_size=8))
def test_the_longest_match_is_continued_as_it_went_on_most_often(texts, context):
    """Few enough occurrences that none is beyond the number that is looked at."""
    index = SuffixIndex(1024)
    for text in texts:
        index.extend(pack(text), end=True)
    best, following = longest_match([[*text, BREAK] for text in texts], context)
    best = min(best, suffix_index.MAX_MATCH)
    found = SuffixMatcher(factor=1.0, min_probability=0.0).propose(pack(context), 16, index)
    ends = [tail for tail in following if tail[0] != BREAK]
    if not ends:
        assert found is None
        return
    assert found is not None
    ids = unpack(found.ids)
    assert found.match_len == best
    assert 0 < len(ids) <= best
    alive, probability = following, 1.0
    for place, token in enumerate(ids):
        nexts = [tail[place] for tail in alive if len(tail) > place]
        assert nexts.count(token) == max(map(nexts.count, set(nexts) - {BREAK}))
        probability *= nexts.count(token) / len(nexts)
        assert found.probabilities[place] == pytest.approx(probability)
        alive = [tail for tail in alive if len(tail) > place and tail[place] == token]


@given(st.lists(st.lists(TOKENS, max_size=30), max_size=8), TOKENS)
def test_a_draft_is_always_a_text_that_followed(texts, last):
    index = SuffixIndex(1024)
    for text in texts:
        index.extend(pack(text), end=True)
    found = SuffixMatcher(factor=8.0, min_probability=0.0).propose(pack([last]), 16, index)
    if found is not None:
        draft = [last, *unpack(found.ids)]
        assert any(text[at : at + len(draft)] == draft for text in texts for at in range(len(text)))


def test_appending_token_by_token_or_at_once_is_the_same():
    ids = [n * n % 17 for n in range(500)]
    whole, pieces = SuffixIndex(1024), SuffixIndex(1024)
    whole.extend(pack(ids))
    for token_id in ids:
        pieces.extend(pack([token_id]))
    matcher = SuffixMatcher()
    for end in range(5, 500, 7):
        assert matcher.propose(pack(ids[:end]), 8, whole) == matcher.propose(pack(ids[:end]), 8, pieces)


def test_a_full_ring_drops_the_oldest_tokens():
    index = SuffixIndex(1024)
    assert index.size == 1024
    index.extend(pack([7, 8, 9]))
    index.extend(pack(range(10_000, 10_000 + 1021)))
    matcher = SuffixMatcher()
    assert matcher.propose(pack([7, 8]), 1, index).ids == pack([9])
    index.extend(pack(range(20_000, 30_000)))
    assert matcher.propose(pack([7, 8]), 1, index) is None
    assert matcher.propose(pack([29_000, 29_001]), 2, index).ids == pack([29_002, 29_003])
    assert index.n_bytes == 1024 * suffix_index.TOKEN_BYTES


def test_a_draft_grows_with_the_match_and_ends_where_texts_part():
    index = SuffixIndex(1024)
    for tail in ([5, 6, 7], [5, 6, 8], [5, 9, 9]):
        index.extend(pack([1, 2, 3, 4, *tail]), end=True)
    matcher = SuffixMatcher(factor=1.0, min_probability=0.5)
    assert matcher.propose(pack([1, 2, 3, 4]), 16, index).ids == pack([5, 6])  # 7 followed one time in three
    assert matcher.propose(pack([4]), 16, index).ids == pack([5])
    assert matcher.propose(pack([1, 2, 3, 4]), 1, index).ids == pack([5])
    assert matcher.propose(pack([99]), 16, index) is None
    assert matcher.propose(b"", 16, index) is None


def test_two_indexes_vote_and_the_first_is_preferred():
    own, tenant = SuffixIndex(1024), SuffixIndex(1024)
    own.extend(pack([1, 2, 3]))
    tenant.extend(pack([1, 2, 4]), end=True)
    matcher = SuffixMatcher()
    assert matcher.propose(pack([1, 2]), 1, own, tenant).ids == pack([3])
    tenant.extend(pack([1, 2, 4]), end=True)
    assert matcher.propose(pack([1, 2]), 1, own, tenant).ids == pack([4])
    tenant.extend(pack([9, 1, 2, 5]), end=True)
    assert matcher.propose(pack([9, 1, 2]), 1, own, tenant).ids == pack([5])
