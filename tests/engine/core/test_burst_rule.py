"""Prompts beside streams in virtual time: no request starves, and gaps between tokens are bounded."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.burst_rule import Request, burst, serve, steady, summary
from tests.examples import n_examples

MAX_GAP_S = 0.065
arrivals = st.lists(
    st.builds(
        Request,
        at_s=st.floats(0, 0.4),
        n_in=st.sampled_from([1, 40, 512, 700, 1500]),
        n_out=st.integers(1, 24),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=n_examples(40), deadline=None)
@given(arrivals, st.sampled_from([4, 16, 64]))
def test_every_request_is_served_and_no_stream_waits_long_for_prompts(requests, max_running):
    steps = serve(requests, max_running)
    assert all(len(one.times_s) == one.n_out for one in requests)
    gaps = [after - before for one in requests for before, after in pairwise(one.times_s)]
    assert max(gaps, default=0.0) <= MAX_GAP_S
    first_tokens = [one.times_s[0] for one in sorted(requests, key=lambda one: one.at_s)]
    longest_s = max(one.n_out for one in requests) * MAX_GAP_S + 0.3
    assert all(first - earlier >= -longest_s for earlier, first in pairwise(first_tokens)), "in the order of arrival"
    assert sum(work.n_tokens for work in steps) >= sum(one.n_in - 1 for one in requests)


def test_a_burst_of_256():
    requests = burst(256)
    serve(requests)
    found = summary(requests)
    assert found["itl_max"] <= 1e3 * MAX_GAP_S
    assert found["ttft_max"] <= 3.8
    assert found["tok_s"] >= 10_000


def test_a_steady_load_of_short_replies_keeps_the_target():
    requests = steady(55, 3.0)
    serve(requests)
    found = summary(requests)
    assert found["itl_p99"] <= 20
    assert found["ttft_p50"] <= 0.1
