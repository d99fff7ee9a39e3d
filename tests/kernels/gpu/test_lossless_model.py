"""A BF16 model whose matrices are packed losslessly, against the same model as the checkpoint has it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.kernels.gpu.backend.workspace import AttentionShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.gpu.formats.matrix_format import Fusion
from emberline.kernels.gpu.formats.registry import load_stacked, workspace_needs
from emberline.kernels.gpu.lossless import LosslessMatrix
from emberline.kernels.gpu.lossless_packing import pack_lossless
from emberline.models.decoder import Decoder
from emberline.models.llama import llama
from emberline.models.registry import lay_out
from emberline.models.shard import Shard, loopback_groups
from emberline.protocol.parallel_layout import Layout, Position
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.lossless_files import LosslessFile
from emberline.weights.lossless_writer import LosslessWriter
from emberline.weights.safetensors_file import SafetensorsFile, write_safetensors
from emberline.weights.tensors import Bytes, Weight
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, everyday, noise
from tests.kernels.gpu.test_fp8_gemm import fp8
from tests.kernels.gpu.test_lossless import odd
from tests.kernels.gpu.test_matmul import CASES, expected
from tests.kernels.gpu.test_triton_backend import run
from tests.weights.quantized_folder import CONFIG

DOCUMENT = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 384}


def loaded(checkpoint: Checkpoint, deterministic: bool, compress: bool) -> Decoder:
    backend, loader = TritonBackend(DEVICE, deterministic=deterministic, compress=compress), WeightLoader(DEVICE)
    model = Decoder(DeferredCheckpoint(checkpoint, loader), backend, llama)
    loader.finish()
    backend.reserve(WorkspaceSizes.of(model, 80, 8, 80, item=DTYPE.itemsize, **workspace_needs(model.matrices)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_model_computes_the_same(deterministic: bool) -> None:
    checkpoint = generate_checkpoint(DOCUMENT, 5)
    plain, packed = (loaded(checkpoint, deterministic, compress) for compress in (False, True))
    block = packed.layers[0]
    assert all(isinstance(m, LosslessMatrix) for m in (block.attention.qkv, *block.feed_forward.matrices))
    for got, want in zip(run(packed), run(plain), strict=True):
        if deterministic:
            assert torch.equal(got, want)
        else:
            assert error(got, want) < 2 * LIMIT


def test_a_plan_counts_packed_matrices() -> None:
    checkpoint = generate_checkpoint(DOCUMENT | {"hidden_size": 2048, "intermediate_size": 8192}, 5)
    layout, position = Layout(tp=2), Position(0, 1)
    shard = Shard.of(checkpoint.config, layout, position, loopback_groups(layout, position))
    sizes = []
    for compress in (False, True):
        (layer,) = lay_out(checkpoint, shard=shard, compress=compress).layers
        sizes.append(sum(_bytes(matrix) for matrix in layer.feed_forward.matrices))
    assert 0.74 < sizes[1] / sizes[0] < 0.76


def _bytes(matrix: object) -> int:
    fields = (getattr(matrix, name, None) for name in ("weight", "codes", "scale", "starts", "places", "values", "raw"))
    return sum(field.nbytes for field in fields if isinstance(field, torch.Tensor))


@pytest.mark.parametrize(
    ("m", "norm", "bias", "gate", "add"),
    everyday([(m, *case) for m in (1, 2, 70, 300) for case in CASES], [(1, *CASES[1]), (70, *CASES[3])]),
)
def test_products_of_few_and_many_tokens(m: int, norm: bool, bias: bool, gate: int, add: bool) -> None:
    n, k = 32, 256
    w, more = odd(n * (2 if gate else 1), k, True), noise(n, seed=5) if bias else None
    matrix = pack_lossless(w, more)
    sizes = WorkspaceSizes(
        256, 100, (AttentionShape(2, 1, 32),), 256, 300, 4, 4, DTYPE.itemsize, **workspace_needs([matrix])
    )
    multiply = Matmul(Workspace(sizes, DEVICE, DTYPE), False, False)
    x, out = noise(m, k, seed=1), noise(m, n, seed=3)
    weight = noise(k, seed=4).float() + 1 if norm else None
    want = expected(x, w.to(DTYPE), out, weight, more, gate, add)
    multiply(x, matrix, out, Fusion(weight, 1e-5, gate, add))
    assert error(out, want) < LIMIT


def test_all_tokens_of_a_step_have_room_where_only_gate_and_up_are_packed() -> None:
    """FP8 matrices quantize their input, here of all tokens at once, in memory of the workspace."""
    gate_up, down, tokens = pack_lossless(odd(512, 64, True)), fp8(64, 256, 0), 4096
    needs = workspace_needs([gate_up, down])
    sizes = WorkspaceSizes(64, 100, (AttentionShape(2, 1, 32),), 256, tokens, 4, 4, DTYPE.itemsize, **needs)
    workspace = Workspace(sizes, DEVICE, DTYPE)
    at_once = workspace.mlp_tokens(gate_up, tokens)
    assert workspace.take("fp8", at_once, 256, dtype=torch.float8_e4m3fn).shape == (tokens, 256)


def test_deterministic_products_are_those_of_the_dense_matrix() -> None:
    w = odd(40, 256, True)
    matrix = pack_lossless(w)
    sizes = WorkspaceSizes(
        256, 100, (AttentionShape(2, 1, 32),), 256, 8, 4, 4, DTYPE.itemsize, **workspace_needs([matrix])
    )
    multiply, x = Matmul(Workspace(sizes, DEVICE, DTYPE), True, False), noise(3, 256, seed=1)
    outs = [torch.full((3, 40), torch.nan, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    for each, out in zip((matrix, DenseMatrix(w.to(DTYPE))), outs, strict=True):
        multiply(x, each, out, Fusion(noise(256, seed=4).float(), 1e-5))
    assert torch.equal(*outs)


@pytest.mark.parametrize("compressed", [True, False])
def test_matrices_are_packed_from_either_form_of_a_checkpoint(tmp_path: Path, compressed: bool) -> None:
    weight = (torch.randn(600, 512, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16()
    stored_bytes = weight.view(torch.uint8).numpy().tobytes()
    write_safetensors(tmp_path / "model.safetensors", {"w": ("BF16", (600, 512), stored_bytes)})
    source = SafetensorsFile.open(tmp_path / "model.safetensors")
    with ThreadPoolExecutor(2) as threads:
        LosslessWriter(source, tmp_path, threads).write(lambda *_: None)
    file = LosslessFile.open(tmp_path / "model.lossless.safetensors") if compressed else source
    raw, location = file.rows_of("w")
    loader = WeightLoader(DEVICE)
    stored = Weight("w", (600, 512), "bf16", cast(Bytes, raw), location=location, loader=loader)
    parts = [stored.slice(0, 0, 70), stored.slice(0, 70, 600)]  # as ranks and stacked matrices have them
    packed = load_stacked(parts, None, torch.bfloat16, DEVICE, compress=True)
    loader.finish()
    assert isinstance(packed, LosslessMatrix)
    assert torch.equal(packed.dense().view(torch.int16).cpu(), weight.view(torch.int16))
