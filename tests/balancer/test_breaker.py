from emberline.balancer.circuit_breaker import FAILURES, OF_LAST, OPEN_S, SUCCESSES, CircuitBreaker


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES):
        assert breaker.allows
        breaker.failed(now_s)
    return breaker


def test_it_opens_after_so_many_failures_and_not_before() -> None:
    breaker = opened()
    assert breaker.state == "open"
    assert not breaker.allows


def test_one_that_fails_every_other_request_is_no_use_either() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(0.0)
    assert breaker.state == "open"


def test_a_failure_now_and_then_is_forgiven() -> None:
    breaker = CircuitBreaker()
    for _ in range(100):
        breaker.failed(0.0)
        for _ in range(2 * OF_LAST // FAILURES):
            breaker.succeeded()
    assert breaker.state == "closed"


def test_half_open_lets_one_at_a_time_through_and_closes_after_three() -> None:
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
    assert breaker.state == "closed"  # what was before is forgotten


def test_a_probe_that_fails_opens_it_for_another_minute() -> None:
    breaker = opened()
    breaker.check(OPEN_S)
    breaker.sent()
    breaker.failed(OPEN_S + 5)
    breaker.check(2 * OPEN_S)
    assert breaker.state == "open"
    breaker.check(2 * OPEN_S + 5)
    assert breaker.state == "half_open"


def test_a_probe_whose_client_leaves_tells_nothing() -> None:
    breaker = opened()
    breaker.check(OPEN_S)
    breaker.sent()
    breaker.inconclusive()
    assert breaker.state == "half_open"
    assert breaker.allows
