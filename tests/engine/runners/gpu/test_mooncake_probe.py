"""The probe of Mooncake's Transfer Engine: a process that sends within a device's memory, here that of a CPU."""

import sys

import pytest

from emberline.engine.runners.gpu.mooncake_probe import probe, why_not_device_memory


@pytest.mark.slow
def test_memory_that_the_engine_moves() -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    assert why_not_device_memory("tcp", "127.0.0.1", "cpu") == ""


@pytest.mark.slow
def test_a_process_that_ends_or_hangs_says_why() -> None:
    assert "ends the process" in why_not_device_memory("tcp", "127.0.0.1", "cuda:99")
    assert "more than 0.01 s" in why_not_device_memory("tcp", "127.0.0.1", "cpu", limit_s=0.01)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    assert "cannot be loaded" in probe("tcp", "127.0.0.1", "cpu")
