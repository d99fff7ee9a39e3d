"""`emberline compress`: what it prints, where it writes, and what it says when it cannot."""

import hashlib
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from emberline.catalog.integrity import verify
from emberline.catalog.model_card import describe_path
from emberline.catalog.model_store import ModelStore
from emberline.cli.main import main
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.lossless_files import is_compressed
from emberline.weights.lossless_folder import compress_folder
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


def test_a_model_is_not_replaced_by_what_was_made_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, left = write_model(tmp_path / "model"), tmp_path / ".model.compressed"
    compress_folder(plain, left)  # as by a run that was stopped before the exchange
    path = plain / "model.safetensors"
    before = path.read_bytes()
    flip(path, len(before) - 1)
    assert main(["compress", str(plain), "--replace"]) == 1
    assert "has changed since it was compressed" in capsys.readouterr().err
    path.write_bytes(before)
    (tmp_path / "link").symlink_to(plain)
    assert main(["compress", str(tmp_path / "link"), "--replace"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "model"]
    write_model(left)
    assert main(["compress", str(plain), "--replace"]) == 1  # as after a run that was stopped behind the exchange
    assert "compressed already" in capsys.readouterr().err


def test_a_pulled_model_that_was_replaced_is_still_whole(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    card = msgspec.structs.replace(describe_path(write_model(tmp_path / "model")), id="@local/models/mine")
    shutil.copytree(tmp_path / "model", store.staging(card.id))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "model").iterdir()}
    with store.lock():
        store.place(card, ".", hashes)
    verify(store, card)
    assert main(["compress", card.id]) == 1  # the store has no place for a second folder
    assert main(["compress", card.id, "--replace", "--data-dir", str(tmp_path)]) == 0
    verify(store, card)
    entry = store.find(card.id)
    assert entry is not None
    assert is_compressed(entry.path)
    assert set(store.pulled_files(card)) == {"config.json"}


def test_show_tells_the_ratio_of_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(write_model(tmp_path / "model"))]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "model-lossless")]) == 0
    shown = capsys.readouterr().out
    assert "compression     all: " in shown
    assert main(["show", str(tmp_path / "model-lossless"), "--json"]) == 0
    parts = {part["name"]: part for part in json.loads(capsys.readouterr().out)["compression"]}
    assert list(parts) == ["attention", "feed-forward", "embedding", "head", "other"]
    assert parts["feed-forward"]["stored_bytes"] < 0.75 * parts["feed-forward"]["n_bytes"]
    assert parts["other"]["stored_bytes"] == parts["other"]["n_bytes"]


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
