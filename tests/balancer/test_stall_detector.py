import pytest

from emberline.balancer.stall_detector import DEFAULTS, STALL_STEPS, StallDetector
from emberline.protocol.frames import Heartbeat


class Watched:
    """An engine that is checked every half second; each check may be preceded by a heartbeat."""

    def __init__(self) -> None:
        self.detector = StallDetector()
        self.now_s = 100.0
        self.detector.connected(self.now_s)

    def after(self, seconds: float, heartbeat: Heartbeat | None = None, gap_s: float = DEFAULTS.check_s) -> str:
        """What the checks of so many seconds find."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += gap_s
            if heartbeat is not None:
                self.detector.received()
                self.detector.beat(heartbeat)
            if why := self.detector.check(0, self.now_s):
                return why
        return ""


@pytest.fixture
def engine() -> Watched:
    return Watched()


def test_an_engine_that_sends_nothing_hangs_even_if_it_was_idle(engine: Watched) -> None:
    assert not engine.after(60, Heartbeat())
    assert not engine.after(DEFAULTS.silent_s)
    assert "sent nothing" in engine.after(1)


def test_silence_while_this_process_was_stopped_does_not_count(engine: Watched) -> None:
    assert not engine.after(60, gap_s=30)
    assert 30 > DEFAULTS.silent_s > 2 * DEFAULTS.max_gap_s


def test_a_step_may_take_twenty_times_as_long_as_predicted(engine: Watched) -> None:
    assert not engine.after(STALL_STEPS * 3.0 - 1, Heartbeat(7, in_step=True, step_s=3.0))
    assert "no token" in engine.after(2, Heartbeat(7, in_step=True, step_s=3.0))


def test_a_fast_step_has_five_seconds(engine: Watched) -> None:
    assert not engine.after(4.5, Heartbeat(7, in_step=True, step_s=0.01))
    assert "no token" in engine.after(2, Heartbeat(7, in_step=True, step_s=0.01))


def test_computed_tokens_are_progress(engine: Watched) -> None:
    for computed_tokens in range(20):
        assert not engine.after(4, Heartbeat(computed_tokens, in_step=True, step_s=0.01))


def test_an_engine_that_waits_for_grammars_or_transfers_is_in_no_step(engine: Watched) -> None:
    assert not engine.after(3600, Heartbeat(7))


def test_a_first_step_has_time_to_compile_and_more_each_time_that_it_was_given_up(engine: Watched) -> None:
    first = Heartbeat(0, in_step=True)
    for patience in (1, 2, 4):
        assert not engine.after(patience * DEFAULTS.first_step_s - 1, first)
        assert engine.after(2, first)
        engine.detector.connected(engine.now_s)
    assert not engine.after(1, first)
    assert not engine.after(1, Heartbeat(64, in_step=True))  # it computes after all
    engine.detector.connected(engine.now_s)
    assert engine.after(DEFAULTS.first_step_s + 2, first)


def test_a_step_after_long_preparations_has_its_own_time(engine: Watched) -> None:
    for n_prepared in range(100):
        assert not engine.after(20, Heartbeat(7, preparing=True, n_prepared=n_prepared))
    assert not engine.after(4.5, Heartbeat(7, in_step=True, n_prepared=99, step_s=0.01))
    assert engine.after(2, Heartbeat(7, in_step=True, n_prepared=99, step_s=0.01))


def test_preparing_kernels_is_no_stall(engine: Watched) -> None:
    assert not engine.after(DEFAULTS.prepare_s - 1, Heartbeat(7, preparing=True, step_s=0.01))
    assert engine.after(2, Heartbeat(7, preparing=True, step_s=0.01))
