"""Skipped tests are shown by reason, and in continuous integration (CI=true) only the reasons below are accepted.

A dependency that does not import would otherwise turn its tests green. A reason is accepted if a machine that runs the
tests may lack the thing for good, or if the combination of parameters has no meaning.
"""

import os
import re
from collections import Counter
from typing import Any

import pytest

ACCEPTED = [
    # what the machine lacks
    r"needs (two GPUs|a Hopper GPU|the fa3-fwd wheel and a Hopper GPU)",
    r"Triton compiles for the GPU|the interpreter has two SMs|more KV cache than a test should take",
    r"needs Chromium: .*",
    r"(needs )?Prometheus.*|.*(promtool|prometheus).*",
    r"(npm|node|go|bun|deno|curl) is not installed|.*npm.*",
    r"processors of another family|O_DIRECT is not supported here|futexes are Linux's",
    r"needs bubblewrap: .*|needs Landlock and seccomp|needs a container engine: .*",
    r"may not mount a file system|only root can give a file away",
    r"kustomize is not installed.*|pip install kubernetes-validate.*",
    r"this Python has no OpenSSL 3 that can be called|openssl makes the certificate",
    # extras that are not installed for development
    r".*Mooncake.*|.*mooncake.*|.*any_llm.*",
    # parameters without meaning
    r"has no template|the library mangles special tokens.*|one core alone uses SQLite|SQLite has one writer",
    r"then it was done|what prefill says is not read there",
]
_ACCEPTED = re.compile("|".join(f"(?:{pattern})" for pattern in ACCEPTED), re.DOTALL)
KEY = pytest.StashKey[dict[str, str]]()


def is_accepted(reason: str) -> bool:
    """Return True if a test may be skipped for this reason in continuous integration."""
    return _ACCEPTED.fullmatch(reason) is not None


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


class SkipReport:
    """Reasons by node id, from the reports that reach this process: under xdist, those of all workers."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[report.nodeid] = reason.removeprefix("Skipped: ")

    @property
    def unaccepted(self) -> dict[str, str]:
        return {test: reason for test, reason in self.reasons.items() if not is_accepted(reason)}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if in_ci() and self.unaccepted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.reasons:
            return
        terminalreporter.section("skipped")
        for reason, n in Counter(self.reasons.values()).most_common():
            terminalreporter.write_line(f"{n} × {reason}")
        if in_ci():
            for test, reason in self.unaccepted.items():
                line = f"{test} may not be skipped in CI: {reason} (tests/skip_rules.py lists the accepted reasons)"
                terminalreporter.write_line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport())
