"""Waiting for a step that the device waits for."""

import pytest

pytest.importorskip("triton")

from emberline.engine.runners.gpu import stream


class Clock:
    """Of a host and of a device that runs one step after the other."""

    now_s = 0.0
    ends_s = 0.0
    slept_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s = seconds
        self.now_s += seconds

    def record(self) -> None: ...

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.ends_s)

    def seconds_since(self, earlier: object) -> float | None:
        return None


def test_it_sleeps_for_most_of_the_time_that_the_last_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, urgent = Clock(), stream.UrgentWait()
    monkeypatch.setattr(stream, "time", clock)

    def step(seconds: float) -> tuple[float, float]:
        clock.ends_s, clock.slept_s, began_s = clock.now_s + seconds, 0.0, clock.now_s
        urgent.wait(clock)
        return clock.slept_s, clock.now_s - began_s

    assert step(0.004) == (0.0, pytest.approx(0.004))
    assert step(0.004) == (pytest.approx(0.0032), pytest.approx(0.004))
    for _ in range(10):  # shorter steps are read late only until that is known
        slept_s, took_s = step(0.001)
    assert (slept_s, took_s) == (pytest.approx(0.0008, rel=0.05), pytest.approx(0.001))
    step(0.05)  # delayed: no measure of the next
    assert step(0.001)[1] == pytest.approx(0.001)
