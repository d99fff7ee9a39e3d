"""Utilisation and the fitted cost of steps, with durations that the test chooses."""

from itertools import count
from random import Random

import pytest

from emberline.engine.core.step_times import WINDOW_S, DeviceTime, StepFit
from emberline.protocol.frames import StepCost
from emberline.protocol.request import Priority
from tests.engine.fakes import loop_of, request

TRUE = StepCost(4e-3, 1e-5, 3e-8, 2e-5, 1e-9)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def steps(device: DeviceTime, clock: Clock, n: int, busy_s: float, idle_s: float, jobs: bool = False) -> None:
    for _ in range(n):
        clock.now_s += busy_s
        device.add(busy_s, jobs)
        device.shares()
        clock.now_s += idle_s


def test_utilisation_is_the_share_of_the_last_seconds_in_which_the_device_computed() -> None:
    clock = Clock()
    device = DeviceTime(clock)
    assert device.shares() == (0.0, 0.0)
    steps(device, clock, 2000, 0.006, 0.002)
    assert device.shares()[0] == pytest.approx(0.75, abs=0.01)
    steps(device, clock, 2000, 0.002, 0.006)
    assert device.shares()[0] == pytest.approx(0.25, abs=0.01)
    assert device.busy_s == pytest.approx(2000 * 0.008)


def test_steps_of_jobs_alone_are_told_apart() -> None:
    clock = Clock()
    device = DeviceTime(clock)
    for _ in range(400):
        steps(device, clock, 1, 0.01, 0.0)
        steps(device, clock, 1, 0.03, 0.0, jobs=True)
    busy, jobs = device.shares()
    assert (busy, jobs) == (1.0, pytest.approx(0.75, abs=0.01))


def test_an_idle_device_falls_to_zero_and_stays_there() -> None:
    clock = Clock()
    device = DeviceTime(clock)
    steps(device, clock, 1000, 0.01, 0.0)
    assert device.shares()[0] == 1.0
    clock.now_s += WINDOW_S / 2
    assert device.shares()[0] == pytest.approx(0.5, abs=0.03)
    clock.now_s += WINDOW_S
    assert device.shares() == (0.0, 0.0)
    clock.now_s += 1000 * WINDOW_S
    assert device.shares() == (0.0, 0.0)
    steps(device, clock, 1000, 0.01, 0.0)
    assert device.shares()[0] == 1.0


def test_a_step_longer_than_the_window_counts_as_all_of_it() -> None:
    clock = Clock()
    device = DeviceTime(clock)
    steps(device, clock, 1, 4 * WINDOW_S, 0.0)
    assert device.shares()[0] == 1.0


def terms(rng: Random) -> tuple[float, ...]:
    n_rows = rng.randrange(0, 128)
    context = n_rows * rng.randrange(100, 8000)
    n_tokens = rng.choice([0, 0, 0, 512, 2048])
    return 1.0, float(n_rows), float(context), float(n_tokens), n_tokens * (rng.randrange(0, 30_000) + n_tokens / 2)


def test_the_fitted_cost_predicts_steps_that_it_has_not_seen() -> None:
    rng, fit = Random(1), StepFit()
    for _ in range(640):
        found = terms(rng)
        fit.add(found, TRUE.seconds(*found[1:]) * rng.uniform(0.97, 1.03))
    assert fit.cost is not None
    assert fit.cost.n_steps == 640
    assert fit.cost.error < 0.05
    for _ in range(50):
        found = terms(rng)
        assert fit.cost.seconds(*found[1:]) == pytest.approx(TRUE.seconds(*found[1:]), rel=0.03)


def test_a_step_in_which_a_kernel_was_compiled_is_left_out() -> None:
    rng, fit = Random(2), StepFit()
    for n in range(1280):
        found = terms(rng)
        fit.add(found, TRUE.seconds(*found[1:]) * (1000 if n % 10 == 9 and n > 100 else 1))
    assert fit.cost is not None
    assert fit.cost.seconds(32, 64_000) == pytest.approx(TRUE.seconds(32, 64_000), rel=0.01)


def test_terms_that_no_step_had_cost_nothing_and_none_is_negative() -> None:
    rng, fit = Random(3), StepFit()
    for _ in range(128):
        n_rows = float(rng.randrange(1, 64))
        fit.add((1.0, n_rows, 0.0, 0.0, 0.0), 0.01 - 1e-5 * n_rows)  # falls with the rows
    assert fit.cost is not None
    assert (fit.cost.row_s, fit.cost.token_s, fit.cost.pair_s) == (0.0, 0.0, 0.0)
    assert fit.cost.step_s > 0


@pytest.mark.parametrize(("priority", "of_jobs"), [(Priority.DEFAULT, False), (Priority.BATCH, True)])
def test_a_step_loop_reports_what_its_device_computes(priority: Priority, of_jobs: bool) -> None:
    loop = loop_of(max_running=8)
    numbers = count()
    while not loop.load.utilisation:  # a tenth of a second and more of steps without a pause
        if not loop.busy:
            loop.submit(request(f"r{next(numbers)}", [1, 2, 3], priority=priority, max_tokens=100), 0.0)
        loop.step(0.0)
    load = loop.load
    assert load.utilisation is not None
    assert 0 < load.utilisation <= 1
    assert load.jobs_utilisation == (load.utilisation if of_jobs else 0.0)
    assert load.busy_s > 0
