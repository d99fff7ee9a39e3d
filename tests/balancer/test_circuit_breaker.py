from emberline.balancer.circuit_breaker import FAILURES, OF_LAST, OPEN_S, SUCCESSES, CircuitBreaker


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES):
        assert breaker.allows
        breaker.failed(now_s)
    return breaker


def test_it_opens_at_the_failure_threshold() -> None:
    breaker = opened()
    assert breaker.state == "open"
    assert not breaker.allows


def test_it_opens_when_every_other_request_fails() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(0.0)
    assert breaker.state == "open"


def test_occasional_failures_do_not_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(100):
        breaker.failed(0.0)
        for _ in range(2 * OF_LAST // FAILURES):
            breaker.succeeded()
    assert breaker.state == "closed"


def test_half_open_lets_one_probe_through_and_closes_after_three_successes() -> None:
    breaker = opened()
    breaker.check(OPEN_S - 0.1)
    assert breaker.state == "open"
    breaker.check(OPEN_S)
    for _ in range(SUCCESSES):
        assert breaker.state == "half_open"
        assert breaker.allows
        breaker.sent()
        assert not breaker.allows
        breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(OPEN_S)
    assert breaker.state == "closed"  # earlier outcomes are forgotten


def test_a_failed_probe_opens_it_again() -> None:
    breaker = opened()
    breaker.check(OPEN_S)
    breaker.sent()
    breaker.failed(OPEN_S + 5)
    breaker.check(2 * OPEN_S)
    assert breaker.state == "open"
    breaker.check(2 * OPEN_S + 5)
    assert breaker.state == "half_open"


def test_a_cancelled_probe_is_inconclusive() -> None:
    breaker = opened()
    breaker.check(OPEN_S)
    breaker.sent()
    breaker.inconclusive()
    assert breaker.state == "half_open"
    assert breaker.allows
