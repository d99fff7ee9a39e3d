"""Incremental decoding of a custom tool's text from its JSON arguments."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.api.openai.responses.tools import ArgumentTextDecoder


@given(st.text(), st.lists(st.integers(0, 400)), st.booleans(), st.sampled_from(["", " ", "\n  "]))
def test_any_text_in_any_chunks(text: str, cuts: list[int], ascii_only: bool, space: str) -> None:
    arguments = f'{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=ascii_only)}{space}}}'
    places = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
    reader = ArgumentTextDecoder()
    pieces = [reader.push(arguments[a:b]) for a, b in pairwise(places)]
    assert "".join(pieces) == text


def test_text_is_decoded_incrementally() -> None:
    reader = ArgumentTextDecoder()
    assert [reader.push(piece) for piece in ('{"input":"ab', "c\\", "nd", '"}', "more")] == ["ab", "c", "\nd", "", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'{"input":"a\ud83d"}', "a\ufffd"),
        (r'{"input":"\ud83d\n"}', "\ufffd\n"),
        (r'{"input":"\ude00x"}', "\ufffdx"),
        (r'{"input":"\ud83d\ud83d\ude00"}', "\ufffd😀"),
        (r'{"input":"cut\u00', "cut"),
        ("{}", ""),
    ],
)
def test_not_a_string(arguments: str, text: str) -> None:
    for size in (1, 3, 100):
        reader = ArgumentTextDecoder()
        pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(pieces) == text
