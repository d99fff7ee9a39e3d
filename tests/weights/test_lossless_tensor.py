"""Rows of compressed tensors: as an array's, whatever the shape, the dtype and the part that is asked for."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard

from emberline.kernels.byte_planes import Rectangle, StoredPlanes, decode_blocks, split_planes
from emberline.weights.lossless_blocks import BLOCK_NUMBERS, Grid
from emberline.weights.lossless_files import METADATA_KEY, VERSION, LosslessFile
from emberline.weights.lossless_tensor import LosslessRows, LosslessTensor, PlaneBytes
from emberline.weights.lossless_writer import LosslessWriter, source_bytes
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors
from tests.weights.lossless_models import bf16_patterns, bits

SHAPES = {
    "one row": (1, 3 * BLOCK_NUMBERS + 5),
    "one column": (70_001, 1),
    "odd": (263, 1031),
    "experts": (4, 96, 640),
    "many blocks": (700, 2048),
}


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed).standard_normal(shape, np.float32) * 0.02
    words = random.view(np.uint32)
    if dtype == "F32":
        return words
    return random.astype("<f2").view("<u2") if dtype == "F16" else (words >> 16).astype("<u2")


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, threads: ThreadPoolExecutor) -> tuple[Path, LosslessFile, dict]:
    folder = tmp_path_factory.mktemp("tensors")
    found = {name: ("BF16", numbers(shape, "BF16")) for name, shape in SHAPES.items()}
    found |= {dtype: (dtype, numbers((300, 900), dtype)) for dtype in ("F16", "F32")}
    found["every pattern"] = "BF16", np.concatenate([bits(bf16_patterns()).view("<u2"), numbers((1 << 17,), "BF16")])
    found["every pattern"] = "BF16", found["every pattern"][1].reshape(3, -1)
    found["F8"] = "F8_E4M3", np.random.default_rng(3).binomial(255, 0.5, (300, 900)).astype(np.uint8)
    found["constant"] = "BF16", np.full((256, 512), 0x7FC1, "<u2")  # a NaN with a payload
    found["noise"] = "BF16", np.random.default_rng(1).integers(0, 1 << 16, (256, 256)).astype("<u2")
    found["norm"] = "BF16", numbers((9,), "BF16")
    stored = {name: (dtype, each.shape, each.tobytes()) for name, (dtype, each) in found.items()}
    write_safetensors(folder / "model.safetensors", stored)
    LosslessWriter(SafetensorsFile.open(folder / "model.safetensors"), folder, threads).write(lambda *_: None)
    return folder, LosslessFile.open(folder / "model.lossless.safetensors"), found


def test_every_tensor_has_the_same_bits(files) -> None:
    folder, file, found = files
    for name, (_, each) in found.items():
        raw, _ = file.rows_of(name)
        assert np.array_equal(np.asarray(raw).reshape(-1), each.reshape(-1).view(np.uint8)), name
    assert {name for name in found if name not in file.coded} == {"noise", "norm"}
    assert b"".join(source_bytes(file)) == (folder / "model.safetensors").read_bytes()


def test_every_block_is_decoded_by_the_kernel(files) -> None:
    """None of them waits for the interpreter's lock, as zstd's Python package would."""
    for tensor in files[1].coded.values():
        grid, planes = tensor.grid, StoredPlanes(tensor.coded, tensor.rest)
        out, whole = (
            np.empty((grid.rows, grid.columns * tensor.width), np.uint8),
            Rectangle(0, grid.rows, 0, grid.columns),
        )
        numbers = range(grid.n_blocks)
        assert decode_blocks(planes, tensor.blocks, numbers, grid, whole, tensor.width, out) == grid.n_blocks


def test_blocks_that_the_kernel_refuses_are_decoded_by_zstd() -> None:
    """Frames with a checksum of their own: the format allows what other versions of the writer might make."""
    whole, grid = numbers((300, 96), "BF16"), Grid(300, 96, 64, 48)
    coded, rest, table = b"", b"", []
    for block in range(grid.n_blocks):
        planes = split_planes(np.ascontiguousarray(whole[grid.place(block)]).reshape(-1).view(np.uint8), 2)
        coded += zstandard.ZstdCompressor(write_checksum=True).compress(planes.top.tobytes())
        rest += planes.rest.tobytes()
        table.append((len(coded), *planes.checksum))
    memory = (np.frombuffer(each, np.uint8) for each in (coded, rest))
    tensor = LosslessTensor(
        "w", Path("model"), "BF16", grid, *memory, 0, 0, np.array(table, "<u8"), lambda first, last: None
    )  # fmt: skip
    for rows, columns in (
        (slice(0, 300), slice(0, 96)),
        (slice(10, 201), slice(7, 60)),
        (slice(299, 300), slice(1, 2)),
    ):
        array = np.ascontiguousarray(whole[rows, columns])
        assert np.array_equal(tensor.decode(rows, columns), array.view(np.uint8))


def test_blocks_that_are_larger_than_the_format_allows_are_refused(tmp_path: Path) -> None:
    """A number of one byte needs nothing in the rest plane: the file does not grow with the shape that it claims, and
    the kernel would count 2 ** 64 numbers as none."""
    n, coded = 1 << 32, zstandard.ZstdCompressor().compress(b"")
    table = np.array([[len(coded), 0, 0]], "<u8")
    planes = {"coded": ("U8", coded), "rest": ("U8", b"\0"), "blocks": ("U64", table.tobytes())}
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, part) in planes.items():
        shape = [1, 3] if name == "blocks" else [len(part)]
        header[f"w.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    entry = {"dtype": "F8_E4M3", "shape": [n, n], "block": [n, n]}
    header["__metadata__"] = {METADATA_KEY: json.dumps({"version": VERSION, "tensors": {"w": entry}})}
    text = json.dumps(header).encode()
    path = tmp_path / "model.lossless.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(BadCheckpoint, match="'w' is damaged: its blocks have more than 131,072 numbers"):
        LosslessFile.open(path)


@pytest.mark.parametrize("name", ["odd", "many blocks", "F32", "F8"])
def test_only_the_bytes_of_some_rows_and_columns_are_read(files, name: str) -> None:
    folder, file, found = files
    whole, stored = found[name][1], (folder / "model.lossless.safetensors").read_bytes()
    rows, array = LosslessRows.of(file.coded[name], whole.shape), whole.view(np.uint8).reshape(len(whole), -1)
    n_read = []

    def read(plane: PlaneBytes) -> np.ndarray:
        n_read.append(plane.mapped.nbytes)
        return np.frombuffer(stored, np.uint8, plane.mapped.nbytes, plane.offset)

    width = whole.itemsize
    for part in (lambda a: a[150:], lambda a: a[:, : a.shape[1] // width // 2 * width], lambda a: a):
        n_read.clear()
        some = part(rows)
        assert np.array_equal(some.read(read=read), part(array))
        assert n_read == [each.mapped.nbytes for each in some.stored()]
        assert sum(n_read) <= rows.stored_bytes
    assert sum(n_read) > 0.99 * rows.stored_bytes


def test_other_tools_can_open_the_file(files) -> None:
    from safetensors.torch import load_file

    assert "constant.coded" in load_file(files[0] / "model.lossless.safetensors")


@pytest.mark.parametrize("name", ["odd", "many blocks", "F16", "F32"])
def test_parts_are_those_of_an_array(files, name: str) -> None:
    _, file, found = files
    whole = found[name][1]
    rows, array = LosslessRows.of(file.coded[name], whole.shape), whole.view(np.uint8).reshape(len(whole), -1)
    width, order = whole.itemsize, np.random.default_rng(2).permutation(200) + 31
    assert rows.nbytes == array.nbytes
    assert 0.5 < rows.stored_bytes / rows.nbytes < 0.9
    for part in (lambda a: a[10:211], lambda a: a[:, 8 * width : 99 * width], lambda a: a[50:60][:, : 7 * width]):
        assert np.array_equal(np.asarray(part(rows)), part(array))
    for part in (lambda a: a[order], lambda a: a[20:250][order[:7]], lambda a: a[:, 3:11], lambda a: a[5:5]):
        assert np.array_equal(np.asarray(part(rows)), part(array))
    assert np.array_equal(np.asarray(rows.reshape(-1)), array.reshape(-1))


@pytest.mark.parametrize("n_bytes", [1, 5000, 300_000, 1 << 30])
def test_pieces_are_all_of_the_rows_in_order(files, n_bytes: int) -> None:
    _, file, found = files
    for name in ("odd", "many blocks", "experts"):
        rows = LosslessRows.of(file.coded[name], found[name][1].shape)
        pieces = list(rows.pieces(n_bytes)) if n_bytes > 1 else list(rows[: min(len(rows), 9)].pieces(1))
        assert all(len(piece) == 1 or piece.nbytes <= n_bytes for piece in pieces)
        memory = [np.empty(piece.nbytes, np.uint8) for piece in pieces]
        for piece, into in zip(pieces, memory, strict=True):
            piece.read(into)
        joined = np.concatenate(memory)
        assert np.array_equal(joined, found[name][1].reshape(-1).view(np.uint8)[: len(joined)])


def test_one_expert_is_decoded_alone(files) -> None:
    _, file, found = files
    whole = found["experts"][1]
    rows, array = LosslessRows.of(file.coded["experts"], whole.shape), whole.view(np.uint8).reshape(4, -1)
    assert rows.shape == array.shape
    expert = rows[2].reshape(96, -1)
    assert isinstance(expert, LosslessRows)
    assert np.array_equal(np.asarray(expert[7:30]), array[2].reshape(96, -1)[7:30])
    assert np.array_equal(np.asarray(rows.reshape(8, -1)), array.reshape(8, -1))


@pytest.mark.parametrize("shape", [*SHAPES.values(), (4096, 14336), (128_256, 4096), (7, 11), (3, 1 << 20)])
def test_blocks_cover_a_tensor_once(shape: tuple[int, ...]) -> None:
    grid, before = Grid.of(shape), 0
    for block in range(grid.n_blocks):
        assert grid.preceding(block) == before
        assert 0 < grid.size(block) <= BLOCK_NUMBERS
        before += grid.size(block)
    assert before == math.prod(shape)


def test_eight_ranks_decode_no_block_twice() -> None:
    grid = Grid.of((4096, 14336))
    parts = [grid.runs(slice(0, 4096), slice(n * 1792, (n + 1) * 1792)) for n in range(8)]
    assert sorted(block for part in parts for run in part for block in run) == list(range(grid.n_blocks))
