"""Selecting a device, and checkpoints that hold more than a model uses."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emberline.models import registry
from emberline.models.registry import load_model, select_device
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.model_config import BadCheckpoint
from tests.weights.tiny_gguf import tiny_gguf

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, shared_memory_per_block_optin=232448)
DRIVER = ("/dev/null",)  # the file of a driver that is there
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, shared_memory_per_block_optin=166912)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends that this machine has such a GPU, or none."""

    def pretend(properties: SimpleNamespace | None, triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: properties is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(properties is not None))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(registry, "find_spec", lambda name: "there" if triton or name == "torch" else None)

    return pretend


def test_auto_takes_a_gpu_that_the_kernels_run_on(gpu, caplog) -> None:
    gpu(H200)
    assert [select_device(asked, DRIVER) for asked in ("auto", "cuda", "cuda:0", "cpu")] == [
        "cuda",
        "cuda",
        "cuda:0",
        "cpu",
    ]
    gpu(None)
    assert select_device("auto", DRIVER) == "cpu"
    assert not caplog.records


def test_auto_is_the_cpu_where_there_is_no_driver(gpu) -> None:
    gpu(H200)
    assert select_device("auto", ("/dev/no-such-driver",)) == "cpu"


def test_auto_says_why_it_does_not_take_a_gpu(gpu, caplog) -> None:
    gpu(A100)
    assert select_device("auto", DRIVER) == "cpu"
    [record] = caplog.records
    assert "NVIDIA A100 (compute capability 8.0) has 163 KiB" in record.getMessage()
    assert "need 227" in record.getMessage()


@pytest.mark.parametrize(
    ("asked", "properties", "message"),
    [
        ("cuda", A100, "--device cuda: NVIDIA A100 .* has 163 KiB of shared memory per block"),
        ("cuda", None, "--device cuda: no CUDA device is available"),
        ("cuda:1", H200, "--device cuda:1: there are 1 CUDA devices"),
    ],
)
def test_a_device_that_was_asked_for_is_refused_with_the_reason(gpu, asked, properties, message) -> None:
    gpu(properties)
    with pytest.raises(ValueError, match=message):
        select_device(asked)


def test_without_triton_any_gpu_runs_pytorch(gpu) -> None:
    gpu(A100, triton=False)
    assert select_device("auto", DRIVER) == "cuda"


def test_a_tensor_that_the_model_would_ignore_is_named(tmp_path: Path) -> None:
    norms = {f"blk.{n}.attn_{part}_norm.weight": np.ones(16, np.float32) for n in (0, 1) for part in "qk"}
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors=norms))
    with pytest.raises(BadCheckpoint, match=r"a llama model has no use for 4 tensors .*'blk\.0\.attn_q_norm\.weight'"):
        load_model(checkpoint)
