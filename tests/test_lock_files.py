"""The examples' lock files are complete: `npm ci` refuses one that lacks a package, even one for another platform.

The tests' own lock files are not installed by npm, but file by file, and only for platforms that tests run on.
"""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "examples").rglob("package-lock.json")
    if "node_modules" not in path.parts
)


def missing(packages: dict[str, Any]) -> list[str]:
    """Packages that others need and the lock does not have."""
    found = []
    for where, package in packages.items():
        wanted = {**package.get("dependencies", {}), **package.get("optionalDependencies", {})}
        found += [f"{where}: {name}" for name in wanted if not resolves(packages, where, name)]
    return found


def resolves(packages: dict[str, Any], where: str, name: str) -> bool:
    """True if a folder from `where` upward has the package, as node looks for it."""
    parts = where.split("/node_modules/") if where else [""]
    folders = ["/node_modules/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return any(f"{folder}/node_modules/{name}".lstrip("/") in packages for folder in [*folders, ""])


def test_the_example_has_a_lock() -> None:
    assert "examples/worker/package-lock.json" in LOCKS


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_is_complete(lock: str) -> None:
    packages = json.loads((ROOT / lock).read_text())["packages"]
    declared = json.loads((ROOT / lock).with_name("package.json").read_text())
    for kind in ("dependencies", "devDependencies"):
        assert packages[""].get(kind, {}) == declared.get(kind, {})
    assert not missing(packages)
