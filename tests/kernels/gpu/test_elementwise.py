"""Block copies between KV pools, against plain PyTorch."""

import pytest
import torch

triton = pytest.importorskip("triton")
from emberline.kernels.gpu.elementwise import copy_blocks, copy_blocks_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n_words", [1, 8, 2047, 2048, 16_384, 20_001])
@pytest.mark.parametrize("n_pairs", [0, 1, 5])
def test_copy_blocks(n_words, n_pairs):
    torch.manual_seed(n_words)
    source = torch.randint(-(2**62), 2**62, (9, n_words)).to(DEVICE)
    target = torch.randint(-(2**62), 2**62, (7, n_words)).to(DEVICE)
    pairs = torch.stack([torch.randperm(9)[:n_pairs], torch.randperm(7)[:n_pairs]], dim=1).int().to(DEVICE)
    expected = target.clone()
    copy_blocks_reference(source, expected, pairs)
    copy_blocks(source, target, pairs)
    assert torch.equal(target, expected)
