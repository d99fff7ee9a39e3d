"""`emberline compress`: what it prints, where it writes, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from emberline.cli.main import main
from emberline.weights.checkpoint import open_checkpoint
from tests.weights.lossless_models import compressed_file, flip, part_of, stopped_run, write_model
from tests.weights.quantized_folder import write_llama


def test_a_folder_is_compressed_beside_it_verified_and_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_model(tmp_path / "model")
    assert main(["compress", str(plain), "--estimate", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert main(["compress", str(plain), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    packed = tmp_path / "model-lossless"
    assert done["path"] == str(packed)
    assert done["fingerprint"] == open_checkpoint(plain).fingerprint == open_checkpoint(packed).fingerprint
    assert estimate["compressed"] <= done["bytes"] < done["source_bytes"]
    assert main(["compress", str(packed), "--verify"]) == 0
    assert "decodes to the bytes that were compressed" in capsys.readouterr().out
    assert main(["compress", str(packed), "--restore", "--output", str(tmp_path / "restored")]) == 0
    assert (tmp_path / "restored" / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert main(["compress", str(plain)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_model_is_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_model(tmp_path / "model")
    assert main(["compress", str(plain), "--replace", "--output", "x"]) == 1
    assert "leave it out" in capsys.readouterr().err
    assert main(["compress", str(plain), "--replace"]) == 0
    assert compressed_file(plain).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_errors_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(tmp_path / "int4", "int4 g32")
    assert main(["compress", str(tmp_path / "int4")]) == 1
    assert "packed codes (INT4)" in capsys.readouterr().err
    plain = write_model(tmp_path / "model")
    assert main(["compress", str(plain), "--verify"]) == 1
    assert "is not compressed" in capsys.readouterr().err
    assert main(["compress", str(plain), "--output", str(tmp_path / "packed")]) == 0
    path = compressed_file(tmp_path / "packed")
    flip(path, part_of(path, "model.layers.1.mlp.up_proj.weight.rest").data_offsets[0])
    assert main(["compress", str(tmp_path / "packed"), "--verify"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_full_drive_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = stopped_run(tmp_path)
    part.unlink()
    part.symlink_to("/dev/full")
    assert main(["compress", str(tmp_path / "plain"), "--output", str(tmp_path / "packed")]) == 1
    assert "the drive is full. The model is as it was" in capsys.readouterr().err
