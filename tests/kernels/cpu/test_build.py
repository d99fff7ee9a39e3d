"""Compiling the CPU kernels: cached, and optional for serving."""

from pathlib import Path

import pytest

from emberline.kernels.cpu import build
from emberline.models import registry


def test_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_KERNEL_CACHE", str(tmp_path))
    first = build.library_path()
    stamp = first.stat().st_mtime_ns
    assert build.library_path() == first
    assert first.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_missing_compiler_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="install gcc"):
        build.library_path()


def test_compiler_errors_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = tmp_path / "cc"
    cc.write_text("#!/bin/sh\necho 'no such target' >&2\nexit 1\n")
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.setenv("EMBERLINE_KERNEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="no such target"):
        build.library_path()


def test_falls_back_to_pytorch_without_a_compiler(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    from emberline.weights.checkpoint import open_checkpoint

    def refuse(target: str | None = None) -> None:
        raise build.BuildError("no C compiler found")

    monkeypatch.setattr("emberline.kernels.cpu.native_backend.load_library", refuse)
    assert registry.select_backend(open_checkpoint(smollm2), "cpu", False, None).name == "torch"
