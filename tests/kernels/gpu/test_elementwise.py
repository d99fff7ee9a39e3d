"""Block copies between KV pools, against plain PyTorch."""

import pytest
import torch

triton = pytest.importorskip("triton")
from emberline.kernels.gpu.elementwise import (  # noqa: E402
    COPY_WORDS,
    copy_block_runs,
    copy_block_runs_reference,
    copy_blocks,
    copy_blocks_reference,
)

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


@pytest.mark.parametrize("n_pairs", [0, 1, 5])
@pytest.mark.parametrize(
    "runs",
    [
        [],
        [(0, 0, 1)],
        [(3, 40, 8), (20, 48, 8), (11, 0, 3)],
        [(0, 5000, COPY_WORDS), (COPY_WORDS, 5000 + COPY_WORDS, 7)],
        [(16 * at, 8 * at, 8) for at in range(64)],  # more runs than programs
    ],
    ids=len,
)
def test_copy_block_runs(runs, n_pairs):
    torch.manual_seed(n_pairs)
    source = torch.randint(-(2**62), 2**62, (9, 5003)).to(DEVICE)
    target = torch.randint(-(2**62), 2**62, (7, 7100)).to(DEVICE)
    pairs = torch.stack([torch.randperm(9)[:n_pairs], torch.randperm(7)[:n_pairs]], dim=1).int().to(DEVICE)
    table = torch.tensor(runs, dtype=torch.int32).view(-1, 3).to(DEVICE)
    expected = target.clone()
    copy_block_runs_reference(source, expected, pairs, table)
    copy_block_runs(source, target, pairs, table)
    assert torch.equal(target, expected)
