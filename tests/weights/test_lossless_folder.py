"""Compressed folders: every bit is read back, a stopped run continues, and damage is named before it does harm."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.lossless_files import MANIFEST
from emberline.weights.lossless_folder import (
    compress_folder,
    estimate_folder,
    replace_folder,
    restore_folder,
    verify_folder,
)
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.rank_checkpoint import Rank, RankCheckpoint
from tests.weights.lossless_models import (
    bits,
    compressed_file,
    edit_manifest,
    file_header,
    flip,
    part_of,
    stopped_run,
    write_model,
)
from tests.weights.quantized_folder import write_llama

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same compressed."""
    folder = tmp_path_factory.mktemp("lossless")
    compress_folder(write_model(folder / "plain"), folder / "packed")
    return folder / "plain", folder / "packed"


@pytest.fixture
def packed(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A compressed model to damage."""
    return shutil.copytree(pair[1], tmp_path / "packed")


def test_every_weight_of_every_rank_has_the_same_bits(pair: tuple[Path, Path]) -> None:
    plain, packed = map(open_checkpoint, pair)
    assert packed.fingerprint == plain.fingerprint
    for n_ranks in (1, 2):
        for number in range(n_ranks):
            mine, its = (
                RankCheckpoint(each, Rank(number, n_ranks)) if n_ranks > 1 else each for each in (plain, packed)
            )
            assert list(its.names) == list(mine.names)
            for name in mine.names:
                a, b = mine.weight(name), its.weight(name)
                assert np.array_equal(bits(a.tensor(torch.bfloat16)), bits(b.tensor(torch.bfloat16)))
                assert np.array_equal(a.dense().view(np.uint32), b.dense().view(np.uint32))


def test_the_fingerprint_follows_a_changed_configuration(pair: tuple[Path, Path], packed: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(pair[0], tmp_path / "plain")
    before = open_checkpoint(packed).fingerprint
    for folder in (plain, packed):
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | {"rope_theta": 5000.0}))
    assert open_checkpoint(packed).fingerprint == open_checkpoint(plain).fingerprint != before


def test_a_loader_fills_and_hands_over_the_same_bits(pair: tuple[Path, Path]) -> None:
    loaded = []
    for folder in pair:
        loader, checkpoint = WeightLoader("cpu"), open_checkpoint(folder)
        weight = DeferredCheckpoint(checkpoint, loader).weight("blk.1.ffn_up.weight")
        filled, handed = (torch.zeros(weight.shape, dtype=torch.bfloat16) for _ in range(2))
        weight.into(filled)
        weight.read_rows(lambda rows, first, to=handed: to[first : first + len(rows)].copy_(rows))
        loader.finish()
        loaded += [bits(filled), bits(handed)]
    assert all(np.array_equal(each, loaded[0]) for each in loaded)


def test_restoring_gives_the_source_byte_for_byte(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, packed = pair
    restore_folder(packed, tmp_path / "restored")
    names = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in (tmp_path / "restored").iterdir()) == names
    assert all((plain / name).read_bytes() == (tmp_path / "restored" / name).read_bytes() for name in names)


# --- damage -----------------------------------------------------------------------------------------------------------


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.names:
        checkpoint.weight(name).dense()


@pytest.mark.parametrize("plane", [".coded", ".rest"])
def test_a_damaged_plane_is_named_when_it_is_read(packed: Path, plane: str) -> None:
    path = compressed_file(packed)
    begin, end = part_of(path, UP + plane).data_offsets
    flip(path, (begin + end) // 2)
    with pytest.raises(BadCheckpoint, match=rf"model.lossless.safetensors: tensor '{UP}' is damaged: block 0"):
        load(packed)
    with pytest.raises(BadCheckpoint, match="is damaged"):
        verify_folder(packed)


def test_swapped_planes_are_found(packed: Path) -> None:
    path, data = compressed_file(packed), bytearray(compressed_file(packed).read_bytes())
    one, other = (part_of(path, f"model.layers.{n}.mlp.gate_proj.weight.rest").data_offsets for n in (0, 1))
    data[slice(*one)], data[slice(*other)] = data[slice(*other)], data[slice(*one)]
    path.write_bytes(bytes(data))
    with pytest.raises(BadCheckpoint, match="its numbers differ from their checksum"):
        load(packed)


@pytest.mark.parametrize("name", [UP + ".blocks", "model.norm.weight"])
def test_damaged_tables_and_small_tensors_are_found_when_the_file_is_opened(packed: Path, name: str) -> None:
    flip(compressed_file(packed), part_of(compressed_file(packed), name).data_offsets[0] + 9)
    with pytest.raises(BadCheckpoint, match="damaged"):
        open_checkpoint(packed)


def test_a_truncated_file_is_found_when_it_is_opened(packed: Path) -> None:
    os.truncate(compressed_file(packed), compressed_file(packed).stat().st_size - 1)
    with pytest.raises(BadCheckpoint, match="truncated"):
        open_checkpoint(packed)


def test_the_file_of_another_model_is_found(packed: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (other / "model.safetensors").write_bytes(bytes(data))
    compress_folder(other, tmp_path / "other-packed")
    shutil.copy(compressed_file(tmp_path / "other-packed"), compressed_file(packed))
    with pytest.raises(BadCheckpoint, match=r"truncated, or another file|of another model"):
        open_checkpoint(packed)


def test_other_versions_and_damaged_manifests_are_refused(packed: Path) -> None:
    edit_manifest(packed, version=2)
    with pytest.raises(BadCheckpoint, match=r"version 2 of the compressed format.* reads version 1: upgrade"):
        open_checkpoint(packed)
    edit_manifest(packed, version=1, files=[{"name": "../x.safetensors"}])
    with pytest.raises(BadCheckpoint, match="damaged"):
        open_checkpoint(packed)
    for damaged in (b"{", (packed / MANIFEST).read_bytes().replace(b'"fingerprint"', b'"f\xff"')):
        (packed / MANIFEST).write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match="damaged"):
            open_checkpoint(packed)


def test_a_missing_file_is_named(packed: Path) -> None:
    compressed_file(packed).unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.lossless\.safetensors; copy"):
        open_checkpoint(packed)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_continued(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    part = stopped_run(tmp_path)
    written = part.read_bytes()
    assert not (tmp_path / "packed").exists()
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    start = len(file_header(compressed_file(tmp_path / "packed")))
    assert compressed_file(tmp_path / "packed").read_bytes()[start : len(written)] == written[start:]
    assert compressed_file(tmp_path / "packed").read_bytes() == compressed_file(pair[1]).read_bytes()


def test_what_is_on_the_drive_is_compared_before_it_counts(tmp_path: Path) -> None:
    part = stopped_run(tmp_path)
    flip(part, part.stat().st_size - 200)  # a run that continues keeps these bytes, and finds them damaged
    with pytest.raises(BadCheckpoint):
        compress_folder(tmp_path / "plain", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    verify_folder(tmp_path / "packed")


@pytest.mark.parametrize("kind", [".rest", ".coded", ".blocks", "stored as it was"])
def test_whatever_the_drive_damages_is_found_before_the_file_counts(tmp_path: Path, kind: str) -> None:
    part = stopped_run(tmp_path)
    lines = part.with_suffix(".journal").read_bytes().splitlines()
    parts = {name: each["data_offsets"] for line in lines for name, each in json.loads(line)["parts"].items()}
    data = part.stat().st_size - max(end for _, end in parts.values())  # begins here
    name = next(name for name in parts if name.endswith("norm.weight" if kind == "stored as it was" else kind))
    flip(part, data + parts[name][0] + 3)
    with pytest.raises(BadCheckpoint, match="differs from the source after it was written"):
        compress_folder(tmp_path / "plain", tmp_path / "packed")
    assert not part.exists()
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    verify_folder(tmp_path / "packed")


def test_a_changed_source_is_compressed_from_the_beginning(tmp_path: Path) -> None:
    part = stopped_run(tmp_path)
    flip(part, part.stat().st_size - 200)
    os.utime(tmp_path / "plain" / "model.safetensors", (1, 1))
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    verify_folder(tmp_path / "packed")


def test_a_full_drive_loses_nothing(tmp_path: Path) -> None:
    part = stopped_run(tmp_path)
    kept = part.read_bytes()
    part.rename(tmp_path / "kept")
    part.symlink_to("/dev/full")
    source = (tmp_path / "plain" / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        compress_folder(tmp_path / "plain", tmp_path / "packed")
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == source
    part.unlink()
    part.write_bytes(kept)
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    load(tmp_path / "packed")


def test_a_compressed_folder_takes_the_place_of_its_source(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "model")
    fingerprint = open_checkpoint(plain).fingerprint
    compress_folder(plain, tmp_path / ".new")
    replace_folder(plain, tmp_path / ".new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert open_checkpoint(plain).fingerprint == fingerprint
    with pytest.raises(BadCheckpoint, match="compressed already"):
        compress_folder(plain, tmp_path / "again")


def test_folders_within_are_copied(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "model")
    for name in ("1_Pooling/config.json", "onnx/model.onnx", ".cache/config.json"):
        (plain / name).parent.mkdir()
        (plain / name).write_text(name)
    compress_folder(plain, tmp_path / "packed")
    restore_folder(tmp_path / "packed", tmp_path / "restored")
    for folder in (tmp_path / "packed", tmp_path / "restored"):
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*/*"))
        assert found == ["1_Pooling/config.json"]
        assert (folder / found[0]).read_text() == found[0]


def test_formats_that_gain_nothing_are_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "int4", "int4 g32")
    with pytest.raises(BadCheckpoint, match=r"would become .* smaller: .* of its bytes are packed codes \(INT4\)"):
        compress_folder(tmp_path / "int4", tmp_path / "packed")
    with pytest.raises(BadCheckpoint, match="GGUF"):
        compress_folder(tmp_path / "int4" / "config.json", tmp_path / "packed")


def test_fp8_is_estimated_by_its_format(tmp_path: Path) -> None:
    tensors = {f"t{n}": (torch.randn(512, 512) * 0.1).to(torch.float8_e4m3fn) for n in range(2)}
    tensors["codes"] = torch.randint(-(2**31), 2**31, (256, 256), dtype=torch.int64).to(torch.int32)
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    found = {kind.dtype: kind.stored / kind.source for kind in estimate_folder(tmp_path)}
    assert 0.7 < found["F8_E4M3"] < 0.9
    assert found["I32"] == 1
