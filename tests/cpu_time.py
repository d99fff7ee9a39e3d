"""CPU time of the tests, by folder, checked against a budget: `scripts/test` passes `--cpu-budget`.

Wall time says little on a busy machine. CPU time, too, grows with load (caches, hyperthreads), differs between
processors and, on a virtual machine, between one minute and the next, so the budget is stated for a machine that takes
CALIBRATION_S for a fixed loop. Every test process runs the loop every few seconds, between two tests. Processes that a
test starts count when the test process waits for them; a daemon such as PostgreSQL does not. Slow tests count nowhere.

What several folders share would otherwise fall to whichever test comes first, so it counts apart, under names of its
own in the budget: fixtures of the session, which end after the last test of a process (SHARED), the import of lazy
modules (IMPORTS) and full garbage collections, which grow with all that a process has loaded (GARBAGE).
"""

import contextlib
import gc
import resource
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import lazy_modules

BUDGET = Path(__file__).parent / "cpu_budget.toml"
CALIBRATION_S = 0.01  # CPU time of `calibrate` on the machine that the budget is stated for, when it is idle
CALIBRATION_LOOPS = 35_000
CALIBRATION_PAUSE_S = 3.0
MAX_TEST_S = 2.0  # of a test that is neither slow nor listed in the budget, without its fixtures
# A figure may exceed its calibrated budget by this factor: two runs differ, and load varies during a run.
HEADROOM = 1.4
TEST_HEADROOM = 2.0  # the same for a single test, over which nothing is averaged
SHARED, IMPORTS, GARBAGE = APART = "shared fixtures", "lazy imports", "garbage collection"
KEY = pytest.StashKey["CpuTimes"]()


class CpuTimes(msgspec.Struct):
    """CPU seconds of one test process, or of all of them. slow_downs: results of `calibrate`."""

    folders: dict[str, float] = {}
    tests: dict[str, float] = {}  # above MAX_TEST_S, by node id: without fixtures
    collection_s: float = 0.0
    slow_downs: list[float] = []
    calibrated_s: float = 0.0  # when the loop ran last, by the monotonic clock

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Count what the block takes under `name`, and not for the test or the block around it."""
        begin = cpu_s() - self.apart_s
        try:
            yield
        finally:
            self.folders[name] = self.folders.get(name, 0.0) + cpu_s() - self.apart_s - begin

    @property
    def apart_s(self) -> float:
        return sum(self.folders.get(name, 0.0) for name in APART)

    def calibrate(self) -> None:
        """Run the loop if it has not run for a while."""
        if time.monotonic() - self.calibrated_s > CALIBRATION_PAUSE_S:
            self.slow_downs.append(calibrate())
            self.calibrated_s = time.monotonic()

    def add(self, other: "CpuTimes") -> None:
        self.folders = dict(Counter(self.folders) + Counter(other.folders))
        self.tests |= other.tests
        self.collection_s += other.collection_s
        self.slow_downs += other.slow_downs

    @property
    def slow_down(self) -> float:
        return sum(self.slow_downs) / len(self.slow_downs) if self.slow_downs else 1.0


class Budget(msgspec.Struct, forbid_unknown_fields=True):
    """CPU seconds that folders of tests/ and single tests may take."""

    folders: dict[str, float]
    tests: dict[str, float] = {}  # by node id without parameters


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def calibrate() -> float:
    """Return how many times longer than CALIBRATION_S a fixed loop takes here."""
    begin, table = time.process_time(), dict.fromkeys(range(1000), 0)
    for i in range(CALIBRATION_LOOPS):
        table[i * 7919 % 1000] += len(str(i))
    return (time.process_time() - begin) / CALIBRATION_S


def overruns(times: CpuTimes, budget: Budget) -> list[str]:
    """Return a line for each folder and each test that took more than its budget allows on this machine."""
    slow_down = max(1.0, times.slow_down)
    lines = []
    for folder, took in times.folders.items():
        if took > (allowed := budget.folders.get(folder, 0.0) * slow_down * HEADROOM):
            lines.append(f"tests/{folder} took {took:.1f} s of CPU, {allowed:.1f} s are allowed here")
    for test, took in times.tests.items():
        if took > (allowed := budget.tests.get(test.partition("[")[0], MAX_TEST_S) * slow_down * TEST_HEADROOM):
            lines.append(
                f"{test} took {took:.1f} s of CPU, {allowed:.1f} s are allowed here: make it cheaper, or mark it "
                "`slow` and add a cheaper test of the same behaviour"
            )
    return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-budget", action="store_true", help="print CPU times by folder and check tests/cpu_budget.toml"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = CpuTimes()


def pytest_collection_finish(session: pytest.Session) -> None:
    times = session.config.stash[KEY]
    times.collection_s = cpu_s()
    lazy_modules.importing = partial(times.apart, IMPORTS)
    collecting: list[contextlib.AbstractContextManager[None]] = []

    def collect(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            collecting.append(times.apart(GARBAGE))
            collecting[-1].__enter__()
        elif info["generation"] == 2 and collecting:
            collecting.pop().__exit__(None, None, None)

    gc.callbacks.append(collect)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    times = item.config.stash[KEY]
    begin = cpu_s() - times.apart_s
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow") is None:
            parts = item.path.relative_to(item.config.rootpath / "tests").parts
            folder = parts[0] if len(parts) > 1 else "."
            times.folders[folder] = times.folders.get(folder, 0.0) + cpu_s() - times.apart_s - begin
        if item.config.getoption("--cpu-budget"):
            times.calibrate()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    with request.config.stash[KEY].apart(SHARED) if fixturedef.scope == "session" else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Count what ends with the last test of a process apart: it belongs to no folder."""
    with item.config.stash[KEY].apart(SHARED) if nextitem is None else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    times = item.config.stash[KEY]
    begin = cpu_s() - times.apart_s
    try:
        return (yield)
    finally:
        took = cpu_s() - times.apart_s - begin
        if took > MAX_TEST_S and item.get_closest_marker("slow") is None:
            times.tests[item.nodeid] = took


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the times of an xdist worker over to the controller; elsewhere, fail the run that is over its budget."""
    config = session.config
    if not config.getoption("--cpu-budget"):
        return
    times = config.stash[KEY]
    if hasattr(config, "workeroutput"):
        config.workeroutput["cpu_times"] = msgspec.json.encode(times).decode()
    elif overruns(times, read_budget()) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the times of an xdist worker that has ended."""
    if given := getattr(node, "workeroutput", {}).get("cpu_times"):
        node.config.stash[KEY].add(msgspec.json.decode(given, type=CpuTimes))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--cpu-budget"):
        return
    times, write = config.stash[KEY], terminalreporter.write_line
    terminalreporter.section("CPU time")
    folders = sorted(times.folders.items(), key=lambda item: -item[1])
    write(", ".join(f"{folder} {took:.1f}" for folder, took in folders if took >= 0.1))
    total, slow_down = sum(times.folders.values()), times.slow_down
    write(
        f"tests {total:.0f} s, imports and collection {times.collection_s:.0f} s; a fixed loop took {slow_down:.2f} "
        f"times as long as on the budget's machine, so about {(total + times.collection_s) / slow_down:.0f} s there"
    )
    for line in overruns(times, read_budget()):
        write(line, red=True)


def read_budget() -> Budget:
    return msgspec.convert(tomllib.loads(BUDGET.read_text()), Budget)
