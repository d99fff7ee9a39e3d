"""The library of the package that fits a processor: the best level of which it has every instruction."""

import platform
from pathlib import Path

import pytest

from emberline.kernels import native_library
from emberline.kernels.native_library import LEVELS, prebuilt_path

HERE = [level for level in LEVELS if level.machine == platform.machine()]


def test_a_source_tree_has_none(tmp_path: Path) -> None:
    assert prebuilt_path(tmp_path / "prebuilt") is None
    assert prebuilt_path(tmp_path) is None


def test_the_best_level_that_this_processor_has_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERLINE_KERNEL_BUILD", raising=False)
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for level in LEVELS:
        (tmp_path / f"{level.name}.so").touch()
    fitting = [level for level in HERE if level.flags <= flags]
    assert prebuilt_path(tmp_path) == (tmp_path / f"{fitting[0].name}.so" if fitting else None)
    if fitting:
        (tmp_path / f"{fitting[0].name}.so").unlink()
        lower = fitting[1].name if len(fitting) > 1 else None
        assert prebuilt_path(tmp_path) == (lower and tmp_path / f"{lower}.so")
    monkeypatch.setenv("EMBERLINE_KERNEL_BUILD", "native")
    assert prebuilt_path(tmp_path) is None


def test_levels_are_named_once_and_the_better_one_needs_more() -> None:
    assert len({level.name for level in LEVELS}) == len(LEVELS)
    better, lower = (level for level in LEVELS if level.machine == "x86_64")
    assert lower.flags < better.flags
    assert native_library.PREBUILT.name == "prebuilt"
