"""When a delivery that failed is tried again."""

from collections.abc import Callable

# Seconds before each attempt, after the one before it failed; the first is made at once.
DELAYS_S = (0, 5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600)
JITTER = 0.1  # at most this part of a delay is added, so that what failed together does not come back together
MAX_RETRY_AFTER_S = 24 * 3600.0


def next_delay_s(n_made: int, retry_after_s: float | None, random: Callable[[], float]) -> float | None:
    """How long to wait after attempt number `n_made` (1 is the first) failed; None: it was the last.

    A receiver that asks for more time gets it, up to a day; asking for less changes nothing.
    """
    if n_made >= len(DELAYS_S):
        return None
    delay_s = DELAYS_S[n_made] * (1 + JITTER * random())
    return max(delay_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))
