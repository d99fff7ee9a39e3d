from hypothesis import given
from hypothesis import strategies as st

from emberline.text.tokenizers.detokenizer import StopMatcher

letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def _stream(matcher, pieces):
    out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.finish(), None


def _by_hand(stops, text):
    """The first character at which some stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stops, st.lists(letters, max_size=6))
def test_matches_as_by_hand_however_the_text_is_cut(stops, pieces):
    assert _stream(StopMatcher(stops), pieces) == _by_hand(stops, "".join(pieces))


@given(stops, letters)
def test_holds_back_no_more_than_may_become_a_stop(stops, text):
    matcher = StopMatcher(stops)
    out, stop = matcher.push(text)
    held = matcher.finish()
    if stop is None:
        assert out + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stops_text_passes():
    matcher = StopMatcher(["", ""])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_holds_back_over_pushes():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("fine.\n") == ("fine.", None)
    assert matcher.push("\nUse") == ("", None)
    assert matcher.push("r of") == ("\n\nUser of", None)
    assert matcher.push(" it\n\nUser: no") == (" it", "\n\nUser:")
