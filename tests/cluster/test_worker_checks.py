"""When a worker that has requests of ours is given up, and when it is not."""

import time

import pytest

from emberline.cluster.timings import DEFAULTS
from emberline.cluster.worker_checks import (
    FORGOTTEN_S,
    MAX_EXCLUSION_S,
    Exclusion,
    Exclusions,
    RequestProgress,
)
from emberline.engine.grammar.translator_process import START_S, WALL_S
from emberline.protocol.frames import EngineInfo, EngineLoad, Heartbeat

INFO = EngineInfo(model="m", fingerprint="f", context_len=64, vocab_size=64, eos_ids=())
SILENT = EngineLoad(running=1)
NO_STEP_S, NO_WORK_S, GAP_S = 5.0, 10.0, 1.0


@pytest.fixture
def progress() -> RequestProgress:
    progress = RequestProgress(NO_STEP_S, NO_WORK_S, GAP_S)
    progress.last_s = 100.0
    return progress


def problem_at(progress: RequestProgress, first_s: float, last_s: float, load: EngineLoad = SILENT) -> str:
    """The result of the last of the checks that are made twice a second."""
    said, now_s = "", first_s
    while now_s <= last_s:
        said = progress.problem(INFO, load, True, now_s)
        now_s += 0.5
    return said


def test_a_worker_without_steps_is_given_up(progress: RequestProgress) -> None:
    assert not problem_at(progress, 100.5, 109.5)
    assert "no step for 10 s" in problem_at(progress, 110.0, 110.0)


def test_a_core_that_was_stopped_does_not_give_up_its_workers(progress: RequestProgress) -> None:
    assert not problem_at(progress, 100.5, 102.0)
    assert not problem_at(progress, 200.0, 206.5)  # their frames of the time between are still unread
    assert problem_at(progress, 207.0, 210.0)


def test_an_idle_time_before_a_request_counts_as_no_silence(progress: RequestProgress) -> None:
    assert not problem_at(progress, 100.5, 102.0)
    progress.last_s = 500.0  # the next request, after minutes
    assert not problem_at(progress, 500.5, 509.5)
    assert problem_at(progress, 510.0, 510.0)


@pytest.mark.parametrize("waiting", ["awaiting", "pushing", "fetching"])
def test_a_worker_that_waits_for_others_is_not_given_up(progress: RequestProgress, waiting: str) -> None:
    assert not problem_at(progress, 100.5, 200.0, EngineLoad(running=1, **{waiting: 1}))


def test_a_long_step_is_no_silence(progress: RequestProgress) -> None:
    progress.beat(Heartbeat(in_step=True))
    assert not problem_at(progress, 100.5, 400.0)


def test_a_worker_that_computes_and_sends_no_steps_is_given_up_sooner(progress: RequestProgress) -> None:
    for n_computed in range(1, 4):
        progress.beat(Heartbeat(n_computed, in_step=True))
    assert "it computes" in problem_at(progress, 100.5, 105.0)


def test_the_first_grammar_may_take_longer_than_any_step() -> None:
    """A process is started for it. Neither load reports nor heartbeats tell that a sequence waits for its grammar."""
    assert DEFAULTS.no_work_s >= START_S + WALL_S + 10.0


def test_exclusions_grow_and_are_forgotten() -> None:
    exclusion = Exclusion()
    assert [exclusion.extend(60.0) for _ in range(3)] == [60.0, 120.0, 240.0]
    exclusion.n_times = 100
    assert exclusion.extend(60.0) == MAX_EXCLUSION_S
    exclusion.until_s = time.monotonic() - FORGOTTEN_S / 2
    assert exclusion.extend(60.0) == MAX_EXCLUSION_S
    exclusion.until_s = time.monotonic() - FORGOTTEN_S - 1
    assert exclusion.extend(60.0) == 60.0


def test_the_table_of_exclusions_is_bounded() -> None:
    """Workers that join under ever new names do not fill the memory. The exclusion that ends first is forgotten."""
    exclusions = Exclusions()
    exclusions.of("first").extend(60.0)
    for n in range(Exclusions.MAX):
        exclusions.of(f"worker {n}").extend(600.0)
    assert exclusions.of("worker 0").n_times == 1
    assert exclusions.of("first").n_times == 0
