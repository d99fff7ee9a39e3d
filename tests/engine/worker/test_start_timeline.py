import logging

import pytest

from emberline.engine.worker import start_timeline
from emberline.engine.worker.start_timeline import StartTimeline, process_age_s


def test_phases_partition_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    monkeypatch.setattr(start_timeline.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(start_timeline, "process_age_s", lambda: 0.5)
    timeline = StartTimeline()
    for phase, seconds in (("torch", 2.0), ("steps", 1.0), ("weights", 3.0), ("steps", 0.25)):
        now_s[0] += seconds
        timeline.end(phase)
    assert timeline.seconds == {"python": 0.5, "torch": 2.0, "steps": 1.25, "weights": 3.0}
    with caplog.at_level(logging.INFO):
        timeline.log()
    assert caplog.messages == ["started in 6.75 s: python 0.50, torch 2.00, steps 1.25, weights 3.00"]


def test_the_age_of_a_process_is_that_of_this_one() -> None:
    first = process_age_s()
    assert 0 <= first <= process_age_s() < 86_400
