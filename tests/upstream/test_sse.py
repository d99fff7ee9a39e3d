"""Streams on their way through: whole lines, untouched but for the usage."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.upstream.dialects.sse import (
    MAX_LINE_BYTES,
    MalformedLine,
    StreamEditor,
    StreamError,
    cached_of,
    read_usage,
    usage_objects,
    write_cached,
)

USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}


def event(body: object, gap: str = " ") -> bytes:
    return f"data:{gap}{json.dumps(body)}\n\n".encode()


def chunk(text: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [] if text is None else [{"index": 0, "delta": {"content": text}}], **more}


def run(
    stream: bytes,
    sizes: list[int] | None = None,
    cached: int | None = None,
    hides: bool = False,
    running: bool = False,
) -> tuple[bytes, StreamEditor]:
    editor = StreamEditor(hides_usage=hides, running_usage=running)
    editor.cached = cached
    out, rest = b"", stream
    for size in [*(sizes or []), len(stream) + 1]:
        piece, rest = rest[:size], rest[size:]
        if piece:
            out += editor.feed(piece)
    return out + editor.flush(), editor


def events(stream: bytes) -> list[Any]:
    lines = [line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


STREAM = event(chunk("Hél")) + b": ping\n\n" + event(chunk("lo"), "") + event(chunk(usage=USAGE)) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(1, 40), max_size=60))
def test_pieces_cut_anywhere_give_the_same_stream(sizes: list[int]) -> None:
    out, editor = run(STREAM, sizes)
    assert out == STREAM
    assert editor.ended
    assert editor.usage is not None
    assert editor.usage.prompt_tokens == 100


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 200))
def test_prefills_cached_tokens_are_put_in_however_it_is_cut(sizes: list[int], cached: int) -> None:
    out, editor = run(STREAM, sizes, cached)
    found = events(out)
    assert found[-1]["usage"] == {**USAGE, "prompt_tokens_details": {"cached_tokens": min(cached, 100)}}
    assert [found[0], found[1]] == [chunk("Hél"), chunk("lo")]
    assert out.endswith(b"data: [DONE]\n\n")
    assert b": ping\n\n" in out
    assert editor.usage is not None
    assert editor.usage.cached_tokens == min(cached, 100)


@given(st.lists(st.integers(1, 40), max_size=60), st.booleans(), st.booleans())
def test_the_usage_so_far_is_read_and_taken_out(sizes: list[int], hides: bool, compact: bool) -> None:
    """As servers write it, and as any other JSON writer would."""
    separators = (",", ":") if compact else None

    def usage_so_far(text: str, n: int) -> bytes:
        usage = {"prompt_tokens": 5, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 2}}
        return b"data: " + json.dumps({**chunk(text), "usage": usage}, separators=separators).encode() + b"\n\n"

    begun = usage_so_far('],"usage":{', 3) + usage_so_far("b", 7)
    out, editor = run(begun, sizes, hides=hides, running=True)
    assert events(out) == [chunk('],"usage":{'), chunk("b")]
    assert editor.usage is not None
    assert (editor.usage.completion_tokens, editor.usage.cached_tokens) == (7, 2)
    out, editor = run(begun + event(chunk(usage=USAGE)) + b"data: [DONE]\n\n", sizes, hides=hides, running=True)
    assert [bool(found.get("usage")) for found in events(out)] == [False, False, *([] if hides else [True])]
    assert editor.usage is not None
    assert editor.usage.prompt_tokens == 100


PARTS = [
    event(chunk("a")),
    event(chunk("b", usage=None)),
    b'data: {"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\"error\\" \\"usage\\":{"},"finish_reason":null}]}\n\n',
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    event(chunk("d", usage=USAGE)),
    event(chunk(usage=USAGE)),
    event({"error": {"message": "no", "code": 500}}),
    event(chunk("e")).replace(b"\n", b"\r\n"),
    b"data: [DONE]\n\n",
    b": ping\n\n",
    b"event: x\n",
    b"data: {",
    b"}\n\n",
    b"\n",
]


def is_read_the_same(pieces: Sequence[bytes], hides: bool) -> bool:
    """True if a stream passed on as whole events comes out as one whose lines are all read."""

    def read(editor: StreamEditor, feed: Callable[[bytes], bytes]) -> list[Any]:
        found: list[Any] = []
        for piece in pieces:
            try:
                lines = feed(piece)
            except (StreamError, MalformedLine) as error:
                return [*found, repr(error), editor.finished, editor.ended]
            found.append((lines, editor.n_events, editor.finished, editor.ended, editor.usage))
        return [*found, editor.closing()]

    whole, by_lines = StreamEditor(hides_usage=hides), StreamEditor(hides_usage=hides)
    return read(whole, whole.feed) == read(by_lines, lambda piece: by_lines.edit(by_lines.whole(piece)))


@pytest.mark.parametrize("hides", [False, True])
def test_passing_events_on_is_the_same_as_reading_their_lines(hides: bool) -> None:
    """Every two parts as one piece, after every other part."""
    assert all(is_read_the_same((first, second + third), hides) for first, second, third in product(PARTS, repeat=3))


@given(st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map(b"".join), max_size=4), st.booleans())
def test_passing_many_events_on_is_the_same_as_reading_their_lines(pieces: list[bytes], hides: bool) -> None:
    assert is_read_the_same(pieces, hides)


def test_the_usage_of_lines_with_an_error_does_not_count() -> None:
    """The client does not get these lines either."""
    first = b'data: {"choices":[{"index":0}],"usage":{"completion_tokens":1}}\n\n'
    editor = StreamEditor(running_usage=True)
    editor.feed(first)
    with pytest.raises(StreamError):
        editor.feed(first.replace(b":1}", b":2}") + b'data: {"error":{"message":"no"}}\n\n')
    assert editor.usage is not None
    assert editor.usage.completion_tokens == 1


def test_decodes_own_count_is_overwritten_and_its_other_details_kept() -> None:
    stream = event(chunk(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 99, "audio_tokens": 1}}))
    out, _ = run(stream, cached=16)
    assert events(out)[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16, "audio_tokens": 1}


def test_without_prefill_nothing_is_rewritten() -> None:
    stream = event(chunk(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 99}}))
    out, editor = run(stream)
    assert out == stream
    assert editor.usage is not None
    assert editor.usage.cached_tokens == 99


@pytest.mark.parametrize("line", [b"data: [DONE]", b"data:[DONE]", b"event: ping", b": comment", b"data: null"])
def test_what_is_no_object_passes_verbatim_even_unterminated(line: bytes) -> None:
    for end in (b"\n\n", b"\r\n\r\n", b"\n", b""):
        out, _ = run(event(chunk(usage=USAGE)) + line + end, cached=5)
        assert out.endswith(line + end)


@pytest.mark.parametrize("line", [b"data: {broken", b"data: \xff\xfe", b'data:{"choices":[}'[:-1]])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b""])
def test_data_that_is_no_json_is_not_passed_on(line: bytes, end: bytes) -> None:
    with pytest.raises(MalformedLine, match="cannot be read"):
        run(event(chunk("well")) + line + end)


def test_an_unterminated_usage_is_rewritten_too() -> None:
    out, _ = run(event(chunk(usage=USAGE)).rstrip(), cached=7)
    assert events(out)[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def test_the_word_usage_in_a_text_is_left_alone() -> None:
    stream = event(chunk('they wrote "usage": {"prompt_tokens": 1}'))
    out, editor = run(stream, cached=5)
    assert out == stream
    assert editor.usage is None


def test_usage_that_nobody_asked_for_is_read_and_hidden() -> None:
    out, editor = run(STREAM, hides=True)
    assert events(out) == [chunk("Hél"), chunk("lo")]
    assert out.endswith(b"data: [DONE]\n\n")
    assert b"\n\n\n" not in out
    assert editor.usage is not None
    assert editor.usage.completion_tokens == 3


def test_usage_on_every_chunk_is_hidden_and_the_text_kept() -> None:
    out, _ = run(event(chunk("a", usage=USAGE)) + event(chunk("b", usage=None)), hides=True)
    assert [item["choices"][0]["delta"]["content"] for item in events(out)] == ["a", "b"]
    assert "usage" not in events(out)[0]


def test_an_error_inside_the_stream_is_raised() -> None:
    with pytest.raises(StreamError) as caught:
        run(event(chunk("a")) + event({"error": {"message": "out of memory", "code": 500}}))
    assert (caught.value.message, caught.value.code) == ("out of memory", 500)


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    editor = StreamEditor()
    for _ in range(8):
        editor.whole(b"x" * (MAX_LINE_BYTES // 8))
    with pytest.raises(MalformedLine):
        editor.whole(b"x")


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    """Adding each piece to what came before would copy 16 GiB."""
    editor, started_s = StreamEditor(), time.process_time()
    for _ in range(4096):
        assert editor.whole(b"x" * 1024) == b""
    assert editor.whole(b"\n") == b"x" * (4 << 20) + b"\n"
    assert time.process_time() - started_s < 2


def test_anthropics_usage_counts_cached_tokens_separately() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}
    out, editor = run(b"event: message_start\n" + event(start), cached=32)
    found = events(out)[0]["message"]["usage"]
    assert found == {"input_tokens": 68, "cache_read_input_tokens": 32, "output_tokens": 1}
    assert out.startswith(b"event: message_start\n")
    assert editor.usage is not None
    assert (editor.usage.prompt_tokens, editor.usage.cached_tokens) == (100, 32)


def test_responses_usage_is_inside_the_response() -> None:
    usage = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105}
    out, editor = run(event({"type": "response.completed", "response": {"usage": usage}}), cached=48)
    assert events(out)[0]["response"]["usage"] == {**usage, "input_tokens_details": {"cached_tokens": 48}}
    assert editor.usage is not None
    assert (editor.usage.prompt_tokens, editor.usage.cached_tokens, editor.usage.completion_tokens) == (100, 48, 5)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*USAGE, "prompt_tokens_details", "cached_tokens", "input_tokens", "usage", "message"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(anything, st.integers(0, 1 << 40))
def test_no_usage_however_odd_breaks_the_books(answer: Any, cached: int) -> None:
    for usage in usage_objects(answer):
        write_cached(usage, cached)
        read = read_usage(usage)
        assert 0 <= read.cached_tokens <= read.prompt_tokens
        assert 0 <= read.reasoning_tokens <= read.completion_tokens


def test_cached_tokens_of_a_whole_answer() -> None:
    usage = {**USAGE, "prompt_tokens_details": {"cached_tokens": 64}}
    assert cached_of(json.dumps({"usage": usage}).encode()) == 64
    assert cached_of(json.dumps({"usage": {**USAGE, "prompt_tokens_details": None}}).encode()) == 0
    assert cached_of(b"{") == cached_of(b"[]") == 0


def test_a_finished_reply_is_closed_with_the_usage_that_was_told_so_far() -> None:
    editor = StreamEditor(running_usage=True)
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    editor.edit(
        event({"id": "x", "model": "m", "choices": [choice], "usage": USAGE}).replace(b", ", b",").replace(b": ", b":")
    )
    assert editor.finished
    assert editor.usage is not None  # asked for in between, it is still closed with
    assert editor.closing() == b'data: {"id":"x","model":"m","choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % (
        json.dumps(USAGE, separators=(",", ":")).encode()
    )


def test_usage_that_the_client_has_or_did_not_ask_for_is_not_told_again() -> None:
    for hides in (False, True):
        editor = StreamEditor(hides_usage=hides)
        editor.edit(event(chunk("a")) + event(chunk(usage=USAGE))[:-1])
        assert editor.closing() == (b"" if hides else b"\n") + b"data: [DONE]\n\n"
