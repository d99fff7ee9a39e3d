"""Quantized checkpoints of the Hub on the GPU's kernels, against the same checkpoint dequantized by the reference."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.formats.registry import load_stacked, workspace_needs
from emberline.kernels.gpu.fp8_gemm import FP8Matrix
from emberline.kernels.gpu.launch import INTERPRETED
from emberline.kernels.gpu.packed_gemm import PackedMatrix
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.llama import llama
from emberline.models.registry import lay_out
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday, noise
from tests.kernels.gpu.test_fp8_gemm import fp8
from tests.kernels.gpu.test_matmul import CASES, expected
from tests.kernels.gpu.test_packed_gemm import packed
from tests.kernels.gpu.test_triton_backend import run
from tests.weights.quantized_folder import SCHEMES, write_llama

MODEL_LIMIT = LIMIT if INTERPRETED else 0.04  # two layers of bfloat16 differ from float32 by up to 0.02
FP8_LIMIT = 0.1  # activations have three bits of mantissa


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_computes_the_same(tmp_path: Path, scheme: str, deterministic: bool) -> None:
    write_llama(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    backend = TritonBackend(DEVICE, deterministic=deterministic)
    loader = WeightLoader(DEVICE)
    model = Decoder(DeferredCheckpoint(checkpoint, loader), backend, llama)
    loader.finish()
    assert all(isinstance(matrix, PackedMatrix | FP8Matrix) for matrix in model.matrices[2:])
    backend.reserve(WorkspaceSizes.of(model, 80, 8, 80, item=DTYPE.itemsize, **workspace_needs(model.matrices)))
    reference = Decoder(checkpoint, TorchBackend(DEVICE, DTYPE), llama)
    quantizes = not deterministic and any(getattr(matrix, "quantize_input", False) for matrix in model.matrices)
    for got, want in zip(run(model), run(reference), strict=True):
        assert error(got, want) < (FP8_LIMIT if quantizes else MODEL_LIMIT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_loaded_and_stacked(tmp_path: Path, scheme: str) -> None:
    """K and V have 64 rows, half an FP8 block."""
    write_llama(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    weights = [checkpoint.weight(f"blk.1.attn_{part}.weight") for part in "qkv"]
    loader = WeightLoader(DEVICE)
    deferred = DeferredCheckpoint(checkpoint, loader)
    matrix = load_stacked([deferred.weight(weight.name) for weight in weights], None, DTYPE, DEVICE)
    assert isinstance(matrix, PackedMatrix | FP8Matrix)
    loader.finish()
    want = torch.cat([weight.tensor(torch.float32, "cpu") for weight in weights])
    assert torch.equal(matrix.dense().cpu(), want)


@pytest.mark.parametrize("scheme", ["int4 g128", "fp8 block"])
def test_the_layout_is_known_before_anything_is_loaded(tmp_path: Path, scheme: str) -> None:
    write_llama(tmp_path, scheme)
    model = lay_out(open_checkpoint(tmp_path))
    assert {matrix.codes.device.type if scheme == "int4 g128" else matrix.weight.device.type
            for matrix in model.matrices[2:]} == {"meta"}  # fmt: skip


def test_columns_that_fill_no_tile_are_padded(tmp_path: Path) -> None:
    from tests.weights import quantized_folder

    parts, dense = quantized_folder.quantize("int4 g32", torch.randn(48, 160))
    prefix = "model.layers.0.mlp.down_proj."
    stored = {f"{prefix}{suffix}": part for suffix, part in parts.items()}
    quantized_folder.write_folder(tmp_path, {}, stored)
    weight = _only_weight(tmp_path)
    matrix = load_stacked([weight, weight], None, DTYPE, DEVICE)
    assert isinstance(matrix, PackedMatrix)
    assert torch.equal(matrix.dense().cpu(), torch.cat([dense, dense]))


def _only_weight(folder: Path) -> object:
    from emberline.weights.hf_checkpoint import SafetensorsFile, _weights
    from emberline.weights.hf_config import read_config
    from emberline.weights.quantization import join_quantized, read_quantization
    from tests.weights.quantized_folder import CONFIG

    file = SafetensorsFile.open(folder / "model.safetensors")
    found = {weight.name: weight for weight in _weights(file, read_config(CONFIG, {}))}
    (weight,) = join_quantized(found, read_quantization({"quantization_config": SCHEMES["int4 g32"]})).values()
    return weight


@pytest.mark.parametrize(
    ("kind", "m", "norm", "bias", "gate", "add"),
    everyday(
        [(kind, m, *case) for kind in ("int4", "mxfp4", "fp8", "blocks") for m in (2, 600) for case in CASES],
        [("int4", 2, *CASES[1]), ("fp8", 2, *CASES[0]), ("blocks", 2, *CASES[3])],
    ),
)
def test_products_of_few_and_many_tokens(kind: str, m: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    n, k = 32, 256
    total, more = n * (2 if gate else 1), noise(n, seed=5) if bias else None
    matrix = (
        packed(total, k, kind, 32, more) if kind in ("int4", "mxfp4") else fp8(total, k, 16 * (kind == "blocks"), more)
    )
    sizes = WorkspaceSizes(
        256, 100, (AttentionShape(2, 1, 32),), 256, 600, 4, 4, DTYPE.itemsize, **workspace_needs([matrix])
    )
    multiply = Matmul(Workspace(sizes, DEVICE, DTYPE), False, False)
    x, out = noise(m, k, seed=1), noise(m, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    want = expected(x, matrix.dense(), out, weight, more, gate, add)
    multiply(x, matrix, out, Fusion(weight, 1e-5, gate, add))
    assert error(out, want) < (LIMIT if kind in ("int4", "mxfp4") else 0.08)
    assert not isinstance(matrix, DenseMatrix)
