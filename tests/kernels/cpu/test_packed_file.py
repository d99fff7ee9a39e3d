"""Matrices packed once: the file beside a model gives the same ones again, or none."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from emberline.kernels.cpu.packed_file import MIN_BYTES, PackedArray, PackedFile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a [model].gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"code")
    return path


def matrices(n_bytes: int = MIN_BYTES) -> dict[str, PackedArray]:
    numbers = np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8)
    return {"first": PackedArray(numbers[:70_001], 4), "second+third": PackedArray(numbers[70_001:], 8)}


def save(file: PackedFile, arrays: dict[str, PackedArray]) -> bool:
    for name, packed in arrays.items():
        file.add(name, packed)
    thread = file.save()
    if thread is not None:
        thread.join()
    return thread is not None


def kept(model: Path) -> list[Path]:
    return sorted(model.parent.glob(".*.packed*"))


def test_what_was_saved_is_mapped_by_the_next_start(model: Path, library: Path) -> None:
    arrays = matrices()
    assert save(PackedFile.beside(model, "f1", library), arrays)
    again = PackedFile.beside(model, "f1", library)
    for name, packed in arrays.items():
        found = again.find(name)
        assert found is not None
        assert found.bits == packed.bits
        assert np.array_equal(found.panels, packed.panels)
        assert found.panels.ctypes.data % 64 == 0
    assert again.find("fourth") is None
    assert not save(again, arrays)  # it is there


def test_another_model_or_other_kernels_find_nothing_and_replace_the_file(model: Path, library: Path) -> None:
    save(PackedFile.beside(model, "f1", library), matrices())
    [before] = kept(model)
    assert PackedFile.beside(model, "f2", library).find("first") is None
    library.write_bytes(b"other code")
    other = PackedFile.beside(model, "f1", library)
    assert other.find("first") is None
    save(other, matrices())
    [after] = kept(model)
    assert after != before


def test_a_model_that_was_edited_in_place_is_packed_again(model: Path, library: Path, tmp_path: Path) -> None:
    save(PackedFile.beside(model, "f1", library), matrices())
    model.write_bytes(b"Weights, edited where the fingerprint has no sample")
    assert PackedFile.beside(model, "f1", library).find("first") is None
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "gone.safetensors").symlink_to("nowhere")
    names = set()
    for n in range(2):
        (folder / "model.safetensors").write_bytes(b"weights")
        os.utime(folder / "model.safetensors", ns=(n, n))
        file = PackedFile.beside(folder, "f1", library)
        save(file, matrices())
        names |= {path.name for path in folder.glob(".*.packed")}
    assert len(names) == 2


def test_a_damaged_file_is_as_good_as_none(model: Path, library: Path) -> None:
    save(PackedFile.beside(model, "f1", library), matrices())
    [path] = kept(model)
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"something else",
        whole[:40],
        whole[:5000],
        whole.replace(b'"bytes": 70001', b'"bytes": 99999')[:80_000],
    ):
        path.write_bytes(damaged)
        assert PackedFile.beside(model, "f1", library).find("second+third") is None


def test_partial_files_of_killed_processes_are_removed_and_those_being_written_stay(model: Path, library: Path) -> None:
    abandoned, written = (model.parent / f".{model.name}.12345678.packed{name}" for name in ("abandoned", "written"))
    abandoned.write_bytes(b"partial")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(PackedFile.beside(model, "f1", library), matrices())
    assert [path.name for path in kept(model) if path.suffix != ".packed"] == [written.name]


def test_a_process_that_ends_finishes_the_file(model: Path, library: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.kernels.cpu.test_packed_file import *\n"
        "file = PackedFile.beside(Path(sys.argv[1]), 'f1', Path(sys.argv[2]))\n"
        "for name, packed in matrices().items(): file.add(name, packed)\n"
        "file.save()"
    )
    subprocess.run([sys.executable, "-c", code, model, library], check=True)
    assert PackedFile.beside(model, "f1", library).find("first") is not None


def test_small_models_are_not_kept(model: Path, library: Path) -> None:
    assert not save(PackedFile.beside(model, "f1", library), matrices(100_000))
    assert not kept(model)


def test_a_folder_that_cannot_be_written_keeps_nothing(model: Path, library: Path) -> None:
    file = PackedFile.beside(model, "f1", library)
    model.unlink()
    library.unlink()
    model.parent.rmdir()
    assert save(file, matrices())
    assert not model.parent.exists()
