"""The plugins of this test suite: CPU budget, reasons to skip, groups of files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu_time import APART, GARBAGE, HEADROOM, SHARED, Budget, CpuTimes, calibrate, cpu_s, overruns, read_budget
from tests.scheduling import PATH_GROUPS, group_of
from tests.skip_rules import SkipReport, is_accepted

TESTS = Path(__file__).parent
BUDGET = Budget({"kv": 10.0}, {"tests/kv/test_a.py::test_long": 5.0})


@pytest.mark.parametrize(
    ("times", "culprit"),
    [
        (CpuTimes(folders={"kv": 10 * HEADROOM + 0.1}), "tests/kv took 14.1 s"),
        (CpuTimes(folders={"kv": 10 * HEADROOM - 0.1}), None),
        (CpuTimes(folders={"kv": 25.0}, slow_downs=[1.0, 3.0]), None),  # a busy machine
        (CpuTimes(folders={"kv": 15.0}, slow_downs=[0.5]), "tests/kv"),  # a quick one gets no less, but no more
        (CpuTimes(folders={"new": 0.5}), "tests/new"),  # a folder without a budget
        (CpuTimes(tests={"tests/kv/test_b.py::test_b[x]": 4.1}), "test_b[x] took 4.1 s"),
        (CpuTimes(tests={"tests/kv/test_a.py::test_long[x]": 9.9}), None),
        (CpuTimes(tests={"tests/kv/test_a.py::test_long[x]": 10.1}), "test_long[x]"),
    ],
)
def test_what_exceeds_the_budget(times: CpuTimes, culprit: str | None) -> None:
    found = overruns(times, BUDGET)
    assert [culprit in line for line in found] == [True] if culprit else found == []


def test_times_of_several_processes_add_up() -> None:
    times = CpuTimes(folders={"kv": 1.0}, collection_s=2.0, slow_downs=[1.0])
    times.add(CpuTimes(folders={"kv": 2.0, "api": 3.0}, tests={"t": 4.0}, collection_s=1.0, slow_downs=[2.0]))
    assert times == CpuTimes({"kv": 3.0, "api": 3.0}, {"t": 4.0}, 3.0, [1.0, 2.0])
    assert times.slow_down == 1.5
    assert calibrate() > 0


def test_what_folders_share_counts_once_and_apart() -> None:
    times = CpuTimes()
    begin = cpu_s()
    with times.apart(SHARED):
        calibrate()
        with times.apart(GARBAGE):
            calibrate()
    took = cpu_s() - begin
    assert 0 < times.folders[GARBAGE] < took
    assert 0 < times.folders[SHARED] < took
    assert times.apart_s == sum(times.folders.values()) <= took


def test_the_budget_names_every_folder_and_tests_that_exist() -> None:
    budget = read_budget()
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert set(budget.folders) == folders - {"machines"} | {".", *APART}
    for test in budget.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS.parent / path).read_text(), test


@pytest.mark.parametrize(
    ("reason", "accepted"),
    [
        ("needs Chromium: `make pages` installs it from the system's packages", True),
        ("could not import 'triton': No module named 'triton'", False),
        ("could not import 'asyncpg': No module named 'asyncpg'", False),
        ("has no template", True),
        ("has no template, really", False),
    ],
)
def test_reasons_to_skip(reason: str, accepted: bool) -> None:
    assert is_accepted(reason) == accepted


@pytest.mark.parametrize(("ci", "status"), [("true", pytest.ExitCode.TESTS_FAILED), ("", pytest.ExitCode.OK)])
def test_a_skip_fails_continuous_integration(ci: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    found, session = SkipReport(), SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    for nodeid, reason in (("a", "needs two GPUs"), ("b", "Skipped: needs two GPUs")):
        found.pytest_runtest_logreport(_skipped(nodeid, reason))
    found.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.OK
    found.pytest_collectreport(_skipped("c", "Skipped: could not import 'zmq'"))
    found.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert (found.unaccepted, session.exitstatus) == ({"c": "could not import 'zmq'"}, status)


def _skipped(nodeid: str, reason: str) -> Any:
    return SimpleNamespace(skipped=True, nodeid=nodeid, longrepr=("file.py", 1, reason))


def test_files_that_share_something_are_a_group() -> None:
    assert group_of("tests/api/test_clients.py") == group_of("tests/e2e/test_serving.py") == "clients"
    assert group_of("tests/weights/test_hf_checkpoint.py") == "transformers"
    assert group_of("tests/kv/test_cache.py") == "tests/kv/test_cache.py"
    files = [str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")]
    assert all(any(map(pattern.fullmatch, files)) for pattern in PATH_GROUPS.values())
