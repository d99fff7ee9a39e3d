"""The kernels of `doctor --gpus`, and that it tells a wrong one."""

import pytest
import torch

triton = pytest.importorskip("triton")
from emberline.kernels.gpu import self_test  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_all_kernels_agree_with_their_references():
    assert self_test.failures(DEVICE) == []


def test_wrong_and_failing_kernels_are_named():
    def wrong(device, noise):
        return torch.ones(3), torch.tensor([1.0, 1.0, float("nan")])

    def failing(device, noise):
        raise RuntimeError("no kernel image is available")

    first, second = self_test.failures(DEVICE, {"sum": wrong, "scan": failing})
    assert first.startswith("sum: differs from its reference by nan")
    assert second == "scan: RuntimeError: no kernel image is available"
