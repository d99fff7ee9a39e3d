"""Threads shared by need among workers: alone a worker has all of them, beside others that compute an even share."""

from pathlib import Path

import pytest

from emberline.engine.worker import cpu_share
from emberline.engine.worker.cpu_share import CpuShare, open_share


class Worker:
    def __init__(self, path: Path, slot: int, n_threads: int) -> None:
        self.n_threads = n_threads
        self.share = CpuShare(path, slot, n_threads, self._set)

    def _set(self, n: int) -> None:
        self.n_threads = n


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [10**12]
    monkeypatch.setattr(cpu_share.time, "monotonic_ns", lambda: now[0])
    return now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return cpu_share.create(tmp_path / "cpu-share")


def test_a_worker_has_all_threads_beside_idle_ones(path: Path, clock: list[int]) -> None:
    first, second, third = (Worker(path, slot, 8) for slot in range(3))
    with first.share:
        assert first.n_threads == 8
        with second.share, third.share:
            assert (second.n_threads, third.n_threads) == (4, 3)
    with first.share:
        assert first.n_threads == 3, "the others were computing a moment ago"
    clock[0] += cpu_share.PAUSE_NS
    with first.share:
        assert first.n_threads == 8


def test_more_workers_than_cores_still_compute(path: Path, clock: list[int]) -> None:
    workers = [Worker(path, slot, 2) for slot in range(5)]
    for worker in workers:
        worker.share.__enter__()
    assert [worker.n_threads for worker in workers] == [2, 1, 1, 1, 1]


def test_a_worker_that_died_in_a_step_stops_counting(path: Path, clock: list[int]) -> None:
    dead, other = Worker(path, 0, 4), Worker(path, 1, 4)
    dead.share.__enter__()
    with other.share:
        assert other.n_threads == 2
    clock[0] += cpu_share.STEP_NS
    with other.share:
        assert other.n_threads == 4


def test_a_worker_without_a_file_keeps_its_threads(path: Path) -> None:
    assert open_share(None, 4, lambda n: None) is None
    assert open_share(f"{path}:7", None, lambda n: None) is not None
