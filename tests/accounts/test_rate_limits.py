"""Rate limits: what is admitted stays within the limits, and what is refused would not have."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.rate_limits import MINUTE_S, RateLimit, RateLimiter, Taken
from emberline.protocol.errors import RateLimited
from emberline.protocol.rate_limits import LimitState


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> RateLimiter:
    return RateLimiter(clock)


def key_limit(rpm: int | None = None, tpm: int | None = None, concurrency: int | None = None) -> RateLimit:
    return RateLimit("key:1", "this API key", rpm, tpm, concurrency)


def account_limit(rpm: int | None = None, tpm: int | None = None, concurrency: int | None = None) -> RateLimit:
    return RateLimit("account:acme", "account acme", rpm, tpm, concurrency)


def refusal(limiter: RateLimiter, limits: list[RateLimit], n_input: int = 0, n_output: int = 0) -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        limiter.take(limits, n_input, n_output)
    return refused.value


def states(limiter: RateLimiter, limits: list[RateLimit]) -> tuple[LimitState, LimitState]:
    state = limiter.state(limits)
    assert state is not None
    none = LimitState(0, 0, 0.0)
    return state.requests or none, state.tokens or none


def test_requests_a_minute_are_a_token_bucket(limiter: RateLimiter, clock: Clock) -> None:
    limits = [key_limit(rpm=2)]
    for _ in range(2):
        limiter.put_back(limiter.take(limits, 5, 5), 10)
    refused = refusal(limiter, limits)
    assert "this API key is limited to 2 requests a minute" in refused.message
    assert refused.retry_after_s == pytest.approx(30)
    assert refused.rate_limits is not None
    assert refused.rate_limits.requests == LimitState(2, 0, 60)
    assert refused.rate_limits.tokens is None
    clock.now_s += refused.retry_after_s
    limiter.take(limits, 5, 5)
    refusal(limiter, limits)


def test_what_a_request_does_not_use_is_put_back(limiter: RateLimiter) -> None:
    limits = [key_limit(tpm=100)]
    taken = limiter.take(limits, 10, 80)
    refused = refusal(limiter, limits, 10, 1)
    assert "limited to 100 tokens a minute" in refused.message
    assert "max_tokens" in refused.message
    limiter.put_back(taken, 15)
    assert states(limiter, limits)[1] == LimitState(100, 85, pytest.approx(9))
    limiter.take(limits, 10, 75)


def test_a_request_that_may_use_more_than_a_minute_holds_needs_the_full_bucket(
    limiter: RateLimiter, clock: Clock
) -> None:
    limits = [key_limit(tpm=100)]
    limiter.put_back(limiter.take(limits, 10, 1000), 20)
    refused = refusal(limiter, limits, 10, 1000)
    assert refused.retry_after_s == pytest.approx(12)
    clock.now_s += 12
    limiter.take(limits, 10, 1000)


def test_a_prompt_beyond_the_limit_is_refused_for_what_it_is(limiter: RateLimiter) -> None:
    assert "the prompt has 101 tokens" in refusal(limiter, [key_limit(tpm=100)], 101, 1).message


def test_concurrency(limiter: RateLimiter) -> None:
    limits = [key_limit(concurrency=1)]
    taken = limiter.take(limits, 1, 1)
    assert "as many as its limit on concurrent requests" in refusal(limiter, limits).message
    limiter.put_back(taken, 2)
    limiter.take(limits, 1, 1)
    assert limiter.state(limits) is None  # nothing per minute to report


def test_a_request_that_never_ran_does_not_count(limiter: RateLimiter) -> None:
    limits = [key_limit(rpm=1, tpm=100, concurrency=1)]
    limiter.put_back(limiter.take(limits, 50, 50), 0, ran=False)
    limiter.take(limits, 50, 50)


def test_a_refusal_by_the_account_takes_nothing_from_the_key(limiter: RateLimiter) -> None:
    key, account = key_limit(rpm=10), account_limit(rpm=1)
    limiter.take([key, account], 1, 1)
    assert "account acme is limited" in refusal(limiter, [key, account]).message
    assert states(limiter, [key])[0].remaining == 9


def test_the_scarcer_limit_is_reported(limiter: RateLimiter) -> None:
    limits = [key_limit(rpm=10, tpm=1000), account_limit(rpm=100, tpm=500)]
    limiter.take(limits, 100, 0)
    requests, tokens = states(limiter, limits)
    assert (requests.limit, requests.remaining) == (10, 9)
    assert (tokens.limit, tokens.remaining) == (500, 400)


def test_idle_scopes_are_forgotten(limiter: RateLimiter, clock: Clock) -> None:
    running = RateLimit("key:running", "this API key", concurrency=1)
    limiter.take([running], 1, 1)
    for number in range(2000):
        limit = RateLimit(f"key:{number}", "this API key", 60, 6000, 2)
        limiter.put_back(limiter.take([limit], 10, 10), 20)
        clock.now_s += 1.0
    assert len(limiter) < 100
    refusal(limiter, [running])


MOVES = st.lists(
    st.tuples(st.floats(0, 90), st.integers(1, 60), st.integers(0, 80), st.floats(0, 1), st.integers(0, 5)),
    max_size=60,
)


@given(st.integers(1, 20), st.integers(50, 200), MOVES)
def test_never_more_than_the_buckets_hold(rpm: int, tpm: int, moves: list[tuple[float, int, int, float, int]]) -> None:
    """Compared with buckets that know each request's use from its start: no more is admitted, and a request is refused
    only if it does not fit, nor after waiting as long as it was told."""
    clock = Clock()
    limiter = RateLimiter(clock)
    limits = [key_limit(rpm, tpm)]

    def wait(seconds: float) -> None:
        nonlocal true_requests, true_tokens
        clock.now_s += seconds
        true_requests = max(0.0, true_requests - seconds * rpm / MINUTE_S)
        true_tokens = max(0.0, true_tokens - seconds * tpm / MINUTE_S)

    true_requests = true_tokens = 0.0
    running: list[tuple[Taken, int]] = []
    for wait_s, n_input, n_output, used_share, end in moves:
        wait(wait_s)
        if end < len(running):
            limiter.put_back(*running.pop(end))
        try:
            taken = limiter.take(limits, n_input, n_output)
        except RateLimited as error:
            refused = error
        else:
            refused = None
        if refused is not None:
            if n_input <= tpm:
                requests, tokens = states(limiter, limits)
                assert requests.remaining < 1 or tokens.remaining < min(tpm, n_input + n_output)
            if n_input <= tpm and not running:
                wait(refused.retry_after_s or 0.0)
                limiter.put_back(limiter.take(limits, n_input, n_output), 0, ran=False)
            continue
        used = n_input + math.floor(n_output * used_share)
        running.append((taken, used))
        true_requests += 1
        true_tokens += used
        assert true_requests <= rpm + 1e-3
        assert true_tokens <= max(tpm, n_input + n_output) + 1e-3
