"""The reference backend on a CUDA device computes what it computes on a CPU."""

import pytest
import torch

from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.qwen import qwen3
from emberline.weights.model_config import ModelConfig
from tests.models.random_checkpoint import RandomCheckpoint
from tests.models.step_inputs import pools, step

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=500,
    hidden_size=128,
    n_layers=4,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    mlp_size=256,
    context_len=512,
    norm_eps=1e-6,
    rope_theta=10000.0,
    windows=(None, 40, None, 40),
    tie_embeddings=True,
)


def model(device: str, dtype: torch.dtype, *, row_by_row: bool = False) -> Decoder:
    return Decoder(RandomCheckpoint(CONFIG), TorchBackend(device, dtype, row_by_row=row_by_row), qwen3)


def on(device: str, s: StepInputs) -> StepInputs:
    names = ("token_ids", "positions", "query_starts", "context_lens", "sample_tokens")
    moved = {name: getattr(s, name).to(device) for name in names}
    return StepInputs(**moved, block_tables=[t.to(device) for t in s.block_tables])


def logits(m: Decoder, rows: list[tuple[list[int], int]], kv: list[torch.Tensor]) -> torch.Tensor:
    tables = torch.arange(32).view(2, 16)[: len(rows)]
    return m.forward(on(m.device, step(rows, tables, len(m.kv_groups))), kv).cpu()


IDS = torch.randint(0, 500, (200,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_cuda_matches_cpu(dtype: torch.dtype, tolerance: float) -> None:
    cpu, cuda = model("cpu", torch.float32), model("cuda", dtype)
    want = logits(cpu, [(IDS, 0)], pools(cpu, 32))
    got = logits(cuda, [(IDS, 0)], [p.cuda() for p in pools(cuda, 32)])
    assert ((got - want).norm() / want.norm()).item() < tolerance


def test_deterministic_mode_does_not_depend_on_batch_or_chunks() -> None:
    cuda = model("cuda", torch.bfloat16, row_by_row=True)
    kv = [p.cuda() for p in pools(cuda, 32)]
    alone = logits(cuda, [(IDS[:90], 0)], kv)
    both = [p.cuda() for p in pools(cuda, 32)]
    first = logits(cuda, [(IDS[:37], 0), (IDS[90:130], 0)], both)[:37]
    second = logits(cuda, [(IDS[37:90], 37), (IDS[130:131], 40)], both)[:53]
    assert torch.equal(alone, torch.cat([first, second]))
