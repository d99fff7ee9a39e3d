import re

from hypothesis import given
from hypothesis import strategies as st

from emberline.text.tokenizers.tokenizer import MAX_WORD_CHARS, MAX_WORDS, MIN_CACHED_WORDS, WordCache, _cutter
from tests.text.strategies import snippets


def _words(**kwargs):
    asked = []

    def encode(text):
        asked.append(text)
        return text.encode()

    return WordCache(encode, **kwargs), asked


@given(snippets)
def test_words_are_the_whole_text(text):
    words, asked = _words()
    assert words.encode(text) == text.encode()
    assert all(asked)


def test_cuts_before_single_spaces_and_after_single_line_breaks():
    words, asked = _words()
    words.encode("one two\nthree  four\n\nfive\n six")
    assert asked == ["one", " two\n", "three  four\n\nfive\n six"]


def test_no_cut_after_an_uncuttable_character():
    words, asked = _words(uncuttable=">")
    words.encode("<b> </b> x")
    assert asked == ["<b> </b> x"]


@given(st.text("a>\n\t ", max_size=12), st.sampled_from(["", ">"]))
def test_cuts_lose_nothing(text, uncuttable):
    """Nor in the oldest Python: before 3.11.5 a possessive repeat of a group goes on at the wrong place."""
    pattern = _cutter(uncuttable)
    assert "".join(pattern.findall(text)) == text
    assert not re.search(r"\)[*+?]\+", pattern.pattern)


def test_a_word_is_tokenized_once():
    words, asked = _words()
    for _ in range(3):
        words.encode("again and again")
    assert asked == ["again", " and", " again"]


def test_new_text_is_tokenized_at_once_and_its_common_words_are_learned():
    words, asked = _words()
    text = " often" * 3 + "".join(f" w{n}" for n in range(100))
    assert words.encode(text) == text.encode()
    assert asked[0] == " often"
    assert asked[-1] == text
    assert len(asked) == MIN_CACHED_WORDS + len(text) // 256 + 1
    asked.clear()
    assert words.encode(text) == text.encode()
    assert asked[-1] == text, "most of it is still new"
    assert " often" not in asked
    while asked[-1:] == [text]:
        asked.clear()
        assert words.encode(text) == text.encode()
    asked.clear()
    assert words.encode(text) == text.encode()
    assert not asked, "by and by all of it is learned"


def test_tokens_that_a_cut_would_split():
    words, _ = _words()
    for token in ("a b", "a ", "\nb", "a\nb c"):
        assert words.cuts(token)
    for token in ("a", " ", "  ", " a", "a\n", "\n", "\n\n", "<think>"):
        assert not words.cuts(token)


def test_memory_is_bounded():
    words, _ = _words()
    for number in range(2 * MAX_WORDS):
        words.encode(str(number))
        assert len(words._known) <= MAX_WORDS
    words.encode("x" * (MAX_WORD_CHARS + 1))
    assert "x" * (MAX_WORD_CHARS + 1) not in words._known
