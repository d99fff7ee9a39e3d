"""Architectures with a mixture of experts against transformers, on small random models saved as checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from emberline.kernels.backend import MoE
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES, lay_out
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.generated import generate_checkpoint
from tests.models.small_moe_models import MODELS, save_small_model
from tests.models.step_inputs import all_logits, pools, step

TOLERANCE = 3e-5  # relative
IDS = torch.randint(3, 160, (90,), generator=torch.Generator().manual_seed(1)).tolist()


class Reference(NamedTuple):
    folder: Path
    logits: Tensor  # [len(IDS), vocab]

    def model(self, backend: Any) -> Decoder:
        checkpoint = open_checkpoint(self.folder)
        return Decoder(checkpoint, backend, ARCHITECTURES[checkpoint.config.architecture])


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_small_model(folder, request.param)
    with torch.no_grad():
        return Reference(folder, theirs(torch.tensor([IDS])).logits[0].float())


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ((got - want).norm() / want.norm()).item() < tolerance


def test_prefill(reference: Reference) -> None:
    close(all_logits(reference.model(TorchBackend()), IDS), reference.logits)


def test_chunked_prefill_prefix_hits_and_decoding(reference: Reference) -> None:
    """A prompt in two steps, then a second sequence that shares its first blocks, then both decode token by token."""
    model = reference.model(TorchBackend())
    n_groups, kv = len(model.kv_groups), pools(model, 16)
    table = torch.tensor([[3, 7, 1, 12, 5, 9]])
    first = model.forward(step([(IDS[:40], 0)], table, n_groups), kv)
    second = model.forward(step([(IDS[40:64], 40)], table, n_groups), kv)
    close(torch.cat([first, second]), reference.logits[:64])
    shared = 4 * BLOCK_TOKENS
    both = torch.tensor([[3, 7, 1, 12, 5, 9], [3, 7, 1, 12, 2, 15]])
    for at in range(shared, shared + 8):
        rows = [([IDS[at]], at), ([IDS[at]], at)]
        got = model.forward(step(rows, both, n_groups), kv)
        close(got, reference.logits[[at, at]])


def test_a_shared_expert_in_another_format_is_a_matrix_of_its_own():
    def scheme(group: int, target: str) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
        return {"targets": [target], "weights": weights}

    groups = {"routed": scheme(32, r"re:.*\.experts\..*"), "shared": scheme(64, "re:.*shared_experts.*")}
    document = dict(
        model_type="deepseek_v3", hidden_size=128, num_attention_heads=2, intermediate_size=128, vocab_size=64,
        moe_intermediate_size=64, num_hidden_layers=1, max_position_embeddings=256, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=0, kv_lora_rank=32, q_lora_rank=32,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        quantization_config={"quant_method": "compressed-tensors", "config_groups": groups},
    )  # fmt: skip
    (layer,) = lay_out(generate_checkpoint(document, 0)).layers
    assert isinstance(layer.feed_forward, MoE)
    assert layer.feed_forward.routing.n_shared == 0
    assert layer.feed_forward.shared is not None
