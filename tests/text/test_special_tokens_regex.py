import re

from hypothesis import given
from hypothesis import strategies as st

from emberline.text.tokenizers import special_tokens as trie

words = st.lists(st.text("ab<|>.[", min_size=1, max_size=5))


@given(words, st.text("ab<|>.[", max_size=20))
def test_longest_is_the_longest_at_a_place(strings, text):
    pattern = re.compile(trie.longest_match(strings))
    for at in range(len(text) + 1):
        found = pattern.match(text, at)
        fitting = [string for string in strings if text.startswith(string, at)]
        assert (found[0] if found else "") == max(fitting, key=len, default="")


@given(words, st.text("ab<|>.[", max_size=20))
def test_beginnings_are_where_a_string_stands(strings, text):
    places = {found.start() for found in re.finditer(trie.first_characters(strings), text)}
    assert places == {at for at in range(len(text)) if any(text.startswith(string, at) for string in strings)}
