"""Distribution of test files among the processes of a run: files that share something expensive stay together.

A session fixture (a server, a browser, an engine worker) and a heavy import exist once per process. xdist would hand
the files that use it to all processes, and each would pay for it. Here these files form a group that one process runs,
in the order of collection; every other file is a group of its own.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

try:
    from xdist.scheduler.loadscope import LoadScopeScheduling
except ImportError:  # pytest without xdist runs everything in one process
    LoadScopeScheduling = object

ROOT = Path(__file__).parent.parent
# Groups by what a file contains or where it is; the first one that matches counts. The server of tests/e2e and the SDKs
# are one group, because most tests of that server use an SDK.
CONTENT_GROUPS = {
    "clients": re.compile(r"^from tests\.lazy_modules import .*\b(anthropic|cloudflare|openai)\b", re.M),
    "transformers": re.compile(
        r"^from tests\.(lazy_modules import transformers|encoders|models\.small_moe_models)", re.M
    ),
}
PATH_GROUPS = {
    "clients": re.compile(r"tests/e2e/test_(batches|clients|examples|roles|serving|structured)\.py"),
    "browser": re.compile(r"tests/api/playground/test_.*\.py"),
}


@cache
def group_of(path: str) -> str:
    """Return the group of a test file, given as its path in the repository. The default is the path itself."""
    for group, pattern in PATH_GROUPS.items():
        if pattern.fullmatch(path):
            return group
    file = ROOT / path
    text = file.read_text() if file.is_file() else ""
    return next((group for group, pattern in CONTENT_GROUPS.items() if pattern.search(text)), path)


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is a group of files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
