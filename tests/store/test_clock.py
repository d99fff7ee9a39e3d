from hypothesis import given
from hypothesis import strategies as st

from emberline.store.clock import SLEW, SteadyClock


class Times:
    def __init__(self) -> None:
        self.ticks_us = 5_000
        self.wall_us = 1_700_000_000_000_000

    def pass_us(self, n: int) -> None:
        self.ticks_us += n
        self.wall_us += n


HOUR_US = 3_600_000_000


@given(st.lists(st.tuples(st.integers(0, 60_000_000), st.integers(-HOUR_US, HOUR_US)), max_size=60))
def test_the_clock_never_jumps(steps: list[tuple[int, int]]) -> None:
    times = Times()
    clock = SteadyClock(lambda: times.wall_us, lambda: times.ticks_us)
    before = clock.now_us()
    for n, jump in steps:
        times.pass_us(n)
        times.wall_us += jump
        now = clock.now_us()
        assert n * (1 - SLEW) - 2 <= now - before <= n * (1 + SLEW) + 2
        before = now


def test_the_clock_converges_to_the_time_of_day() -> None:
    times = Times()
    clock = SteadyClock(lambda: times.wall_us, lambda: times.ticks_us)
    times.wall_us -= 60_000_000
    for _ in range(60 * 30):
        times.pass_us(1_000_000)
        clock.now_us()
    assert abs(clock.now_us() - times.wall_us) < 10_000
