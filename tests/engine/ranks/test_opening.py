"""What rank 0 leaves on the machine."""

import tempfile
from pathlib import Path

import pytest

from emberline.engine.ranks.opening import private_folder


def test_the_folder_of_a_group_is_beside_the_workers_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        found = private_folder(f"unix:{short}/w0.sock")
        assert found.parent == Path(short)
        assert found.stat().st_mode & 0o077 == 0
    long = tmp_path / ("n" * 100)
    long.mkdir()
    for address in ("tcp:10.0.0.1:7000", str(long / "w0.sock")):
        assert private_folder(address).parent == tmp_path / "elsewhere"
