"""The weight loader and read-ahead: loaded bytes equal those of the mapped file."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from emberline.models.registry import begin_loading
from emberline.weights import loader as loader_module
from emberline.weights import readahead
from emberline.weights.generated import generate_checkpoint
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.lossless_files import LosslessFile
from emberline.weights.lossless_tensor import LosslessRows
from emberline.weights.lossless_writer import LosslessWriter
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors
from emberline.weights.tensors import FileLocation, Weight
from tests.weights.test_generated import LLAMA


def weight_of(path, offset, values, kind, **more):
    raw = np.frombuffer(path.read_bytes(), np.uint8, values.nbytes, offset).reshape(values.shape[0], -1)
    return Weight(path.name, values.shape, kind, raw, location=FileLocation(path, offset), **more)


@pytest.fixture(params=["drive", "page cache", "no O_DIRECT"])
def read_path(request, monkeypatch):
    if request.param == "no O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(loader_module, "resident", lambda address, n: request.param == "page cache")


@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
@pytest.mark.parametrize("piece_bytes", [4096, 10_000, 1 << 20])
def test_pieces_at_any_offset(tmp_path, monkeypatch, read_path, offset, piece_bytes):
    monkeypatch.setattr(loader_module, "PIECE_BYTES", piece_bytes)
    values = np.random.default_rng(1).standard_normal((123, 77)).astype(np.float32)
    path = tmp_path / "w"
    path.write_bytes(bytes(offset) + values.tobytes() + b"after")
    weight = weight_of(path, offset, values, "f32")
    target = torch.full((2, 123, 77), torch.nan)
    loader = WeightLoader("cpu")
    loader.fill(weight, target[1])
    assert target.isnan().all(), "nothing is read before finish()"
    assert loader.finish() == values.nbytes
    assert torch.equal(target[1], torch.from_numpy(values))
    assert target[0].isnan().all()


def test_converts_dtype_order_shift_and_strides(tmp_path):
    values = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    path = tmp_path / "w"
    path.write_bytes(values.tobytes())
    order = np.array([5, 4, 3, 2, 1, 0])
    half = torch.zeros(6, 32, dtype=torch.bfloat16)
    reordered, shifted, strided = torch.zeros(6, 32), torch.zeros(6, 32), torch.zeros(6, 2, 32)
    loader = WeightLoader("cpu")
    loader.fill(weight_of(path, 0, values, "f32"), half)
    loader.fill(weight_of(path, 0, values, "f32", order=order), reordered)
    loader.fill(weight_of(path, 0, values, "f32", shift=1.0), shifted)
    loader.fill(weight_of(path, 0, values, "f32"), strided[:, 1])
    loader.finish()
    plain = torch.from_numpy(values)
    assert torch.equal(half, plain.bfloat16())
    assert torch.equal(reordered, plain.flip(0))
    assert torch.equal(shifted, plain + 1)
    assert torch.equal(strided[:, 1], plain)
    assert not strided[:, 0].any()


def test_reports_a_truncated_file(tmp_path):
    values = np.ones((64, 64), np.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(values.tobytes())
    weight = weight_of(path, 0, values, "f32")
    os.truncate(path, 1000)
    loader = WeightLoader("cpu")
    loader.fill(weight, torch.zeros(64, 64))
    with pytest.raises(BadCheckpoint, match=r"model.safetensors ended 15384 bytes early"):
        loader.finish()


def test_a_deferred_checkpoint_is_filled_by_the_loader(tmp_path):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    path = tmp_path / "w"
    path.write_bytes(values.tobytes())

    class Source:
        config = "a config"
        has = staticmethod(lambda name: name == "a")
        weight = staticmethod(lambda name: weight_of(path, 0, values, "f32"))

    loader = WeightLoader("cpu")
    source = DeferredCheckpoint(Source(), loader)
    assert (source.config, source.has("a"), source.has("b")) == ("a config", True, False)
    weight, target = source.weight("a"), torch.zeros(8, 8)
    assert weight.shape == (8, 8)
    assert np.array_equal(weight.dense(), values)
    weight.into(target)
    loader.finish()
    assert torch.equal(target, torch.from_numpy(values))


def read_all(files, limit=1 << 30):
    ahead = readahead.ReadAhead(files, limit)
    ahead.wait()
    return ahead


@pytest.fixture
def uncached(monkeypatch):
    monkeypatch.setattr(readahead, "resident", lambda address, n: False)
    monkeypatch.setattr(readahead, "PIECE_BYTES", 8192)


def test_loader_uses_read_ahead_bytes(tmp_path, uncached):
    folder = tmp_path / "model"
    folder.mkdir()
    values = np.random.default_rng(4).standard_normal((100, 50)).astype(np.float32)
    (folder / "a.safetensors").write_bytes(bytes(300) + values.tobytes())
    (folder / "config.json").write_text("{}")
    [path] = readahead.model_files(folder)
    ahead = read_all([path, tmp_path / "gone"])
    if not ahead.n_bytes:
        pytest.skip("O_DIRECT is not supported here")
    assert ahead.n_bytes == 300 + values.nbytes
    weight = weight_of(path, 300, values, "f32")
    os.truncate(path, 0)  # the bytes can now only come from the read-ahead
    target = torch.zeros(100, 50)
    loader = WeightLoader("cpu", ahead)
    loader.fill(weight, target)
    loader.finish()
    assert torch.equal(target, torch.from_numpy(values))
    assert ahead.n_bytes == 0, "freed with the last copy"


def test_loader_reads_what_exceeded_the_read_ahead_limit(tmp_path, uncached):
    values = np.random.default_rng(5).standard_normal((100, 50)).astype(np.float32)
    path = tmp_path / "w"
    path.write_bytes(values.tobytes())
    ahead = read_all([path], 8192)
    assert ahead.n_bytes in (0, 8192)
    target = torch.zeros(100, 50)
    loader = WeightLoader("cpu", ahead)
    loader.fill(weight_of(path, 0, values, "f32"), target)
    loader.finish()
    assert torch.equal(target, torch.from_numpy(values))
    ahead.stop()


def test_loader_takes_bytes_that_are_still_being_read(tmp_path, uncached):
    values = np.random.default_rng(7).standard_normal((500, 500)).astype(np.float32)
    path = tmp_path / "w"
    path.write_bytes(values.tobytes())
    weight = weight_of(path, 0, values, "f32")
    for _ in range(20):
        loader, target = WeightLoader("cpu", readahead.ReadAhead([path], 1 << 30)), torch.zeros(500, 500)
        loader.fill(weight, target)
        loader.finish()
        assert torch.equal(target, torch.from_numpy(values))


def test_loader_reads_what_could_not_be_read_ahead(tmp_path, uncached):
    values = np.random.default_rng(8).standard_normal((100, 50)).astype(np.float32)
    path, longer = tmp_path / "w", tmp_path / "longer"
    path.write_bytes(values.tobytes())
    weight = weight_of(path, 0, values, "f32")
    os.truncate(path, 5000)
    ahead = read_all([path])
    longer.write_bytes(values.tobytes())
    longer.rename(path)
    target, loader = torch.zeros(100, 50), WeightLoader("cpu", ahead)
    loader.fill(weight, target)
    loader.finish()
    assert torch.equal(target, torch.from_numpy(values))


def test_read_ahead_that_is_released_begins_no_further_piece(tmp_path, uncached):
    path, n_bytes = tmp_path / "w", 64 << 20
    path.touch()
    os.truncate(path, n_bytes)
    ahead = readahead.ReadAhead([path], 1 << 30)
    ahead.release_all()
    ahead.wait()
    assert not ahead.expect(path, n_bytes - 1, 1)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="tells what a child process would get")
def test_a_child_process_gets_no_memory_that_files_are_read_into(tmp_path, uncached):
    path = tmp_path / "w"
    path.write_bytes(bytes(30_000))
    ahead = read_all([path])
    if (read := ahead.view(path, 0, 30_000)) is None:
        pytest.skip("O_DIRECT is not supported here")
    for memory in (read, np.frombuffer(readahead.direct_memory(4096), np.uint8)):
        holds, flags = False, []
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                start, end = (int(each, 16) for each in first.split("-"))
                holds = start <= memory.ctypes.data < end
            elif holds and first == "VmFlags:":
                flags = rest
        assert "dc" in flags, "not copied by a fork"


def test_a_model_that_is_loaded_on_a_cpu_releases_what_was_read_ahead(tmp_path, uncached):
    path = tmp_path / "w"
    path.write_bytes(bytes(30_000))
    ahead = read_all([path])
    begin_loading(generate_checkpoint(LLAMA, 0), "cpu", read_ahead=ahead)
    until_s = time.monotonic() + 20
    while ahead.n_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def compressed(tmp_path) -> tuple[LosslessFile, np.ndarray]:
    """A compressed matrix, [400, 300]."""
    values = np.random.default_rng(6).standard_normal((400, 300)).astype("<f4").view("<u4") >> 16
    write_safetensors(tmp_path / "w.safetensors", {"w": ("BF16", values.shape, values.astype("<u2").tobytes())})
    with ThreadPoolExecutor(2) as threads:
        LosslessWriter(SafetensorsFile.open(tmp_path / "w.safetensors"), tmp_path, threads).write(lambda *_: None)
    return LosslessFile.open(tmp_path / "w.lossless.safetensors"), values.astype("<u2")


def load_compressed(file: LosslessFile, ahead: readahead.ReadAhead | None) -> list[torch.Tensor]:
    """The matrix as it is, converted, and handed over."""
    weight, loader = Weight("w", (400, 300), "bf16", file.rows_of("w")[0]), WeightLoader("cpu", ahead)
    filled, handed = (torch.zeros(400, 300, dtype=torch.bfloat16) for _ in range(2))
    converted = torch.zeros(400, 300)
    loader.fill(weight, filled)
    loader.fill(weight, converted)
    loader.read(weight, handed.copy_)
    with loader:
        loader.finish()
    return [filled, converted.bfloat16(), handed]


def test_a_compressed_file_is_read_as_others_are(tmp_path, read_path):
    file, values = compressed(tmp_path)
    for each in load_compressed(file, None):
        assert np.array_equal(each.view(torch.int16).numpy().view("<u2"), values)


def test_a_compressed_file_is_decoded_from_the_read_ahead_bytes(tmp_path, uncached):
    file, values = compressed(tmp_path)
    ahead = read_all([file.path])
    if not ahead.n_bytes:
        pytest.skip("O_DIRECT is not supported here")
    before = ahead.n_bytes
    with file.path.open("r+b") as damaged:  # the planes can now only come from the read-ahead
        first = min(each.offset for each in LosslessRows.of(file.coded["w"], (400, 300)).stored())
        damaged.seek(first)
        damaged.write(bytes(file.path.stat().st_size - first))
    for each in load_compressed(file, ahead):
        assert np.array_equal(each.view(torch.int16).numpy().view("<u2"), values)
    assert ahead.n_bytes < before / 2, "freed with the last copy"
    with pytest.raises(BadCheckpoint, match="'w' is damaged"):
        load_compressed(file, None)


def test_read_ahead_skips_files_in_the_page_cache(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(bytes(1 << 16))
    assert path.read_bytes() == bytes(1 << 16)
    assert read_all([path]).n_bytes == 0
    assert readahead.model_files(path) == [path]


def test_an_error_ends_the_reading():
    """Of a terabyte the rest would take minutes, and the process could not end before."""
    n_read = []

    class Part:
        name, kind, order, shift, transposed, location, raw = "part", "made", None, 0.0, False, None, None

        def __init__(self, number):
            self.number = number

        def tensor(self, dtype, device):
            if not self.number:
                raise BadCheckpoint("a part cannot be read")
            time.sleep(0.02)
            n_read.append(self.number)
            return torch.zeros(1)

    loader = WeightLoader("cpu")
    for number in range(5000):
        loader.fill(Part(number), torch.zeros(1))
    with pytest.raises(BadCheckpoint, match="a part cannot be read"):
        loader.finish()
    assert len(n_read) < 4000
