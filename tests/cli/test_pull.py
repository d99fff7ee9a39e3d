"""`emberline pull`: what it says of a model that cannot run yet."""

import json
from pathlib import Path

import pytest

from tests.cli.console import emberline, emberline_process, without_module


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    """The folder of a speech model, as far as its files are read at `pull`."""
    folder = tmp_path / "ears"
    folder.mkdir()
    config = {"suppress_ids": [], "suppress_ids_begin": [], "lang_ids": [], "alignment_heads": []}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(bytes(64))
    (folder / "vocabulary.txt").write_text("a\nb\n")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_whose_library_is_missing_says_so(whisper: Path, tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper")
    home = tmp_path / "home"
    complete = emberline("pull", str(whisper), home=home)
    assert (complete.returncode, complete.stderr) == (0, f"pulling {whisper}\n")
    hidden = without_module("faster_whisper", tmp_path / "site")
    lacking = emberline_process("pull", str(whisper), "--json", home=home, **hidden)
    assert lacking.returncode == 0, lacking.stderr
    for said in (lacking.stderr, json.loads(lacking.stdout)["problem"]):
        assert "it cannot run yet: speech to text needs faster-whisper: pip install 'emberline[speech]'" in said
