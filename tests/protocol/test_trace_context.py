import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.trace_context import TraceContext, new_span_id, new_trace_id, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_the_example_of_the_standard() -> None:
    assert parse(f"00-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, True)
    assert parse(f" 00-{TRACE}-{SPAN}-00 ", "a=1,b=2") == TraceContext(TRACE, SPAN, False, "a=1,b=2")
    assert parse(f"cc-{TRACE}-{SPAN}-09-more") == TraceContext(TRACE, SPAN, True), "a later version"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01" + "0" * 300,
        f"00-{TRACE}-{SPAN}-01\r\nx: y",
    ],
)
def test_an_invalid_header_is_ignored(header: str | None) -> None:
    assert parse(header) is None


@given(st.text(max_size=600))
def test_only_a_safe_tracestate_is_passed_on(state: str) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-01", state)
    assert found is not None
    assert found.state in ("", state.strip())
    assert found.headers.count("\r\n") == (2 if found.state else 1)
    assert len(found.state) <= 512


@given(st.booleans())
def test_round_trip(sampled: bool) -> None:
    context = TraceContext(new_trace_id(), new_span_id(), sampled)
    assert parse(context.traceparent) == context


@given(st.text(max_size=80))
def test_no_header_raises(header: str) -> None:
    parse(header)
