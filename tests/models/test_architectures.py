"""Every architecture against transformers, on small random models saved as checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from emberline.kernels.cpu.native_backend import NativeBackend
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES
from emberline.weights.checkpoint import open_checkpoint
from tests.lazy_modules import transformers
from tests.models.step_inputs import all_logits

SMALL = dict(
    vocab_size=203,  # not a multiple of the kernels' panel rows
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rope_theta=10000.0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama3": lambda: transformers.LlamaConfig(**{**SMALL, "rope_scaling": LLAMA3_ROPE}),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=24, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=24, query_pre_attn_scalar=16, tie_word_embeddings=True
    ),
}
TOLERANCE = {"torch": 2e-5, "native": 2e-3}  # relative; the native backend's KV cache is float16


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    torch.manual_seed(7)
    config = CONFIGS[request.param]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: their initial values would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder, model


@pytest.mark.parametrize("backend", [TorchBackend, NativeBackend], ids=["torch", "native"])
def test_logits_match_transformers(reference, backend) -> None:
    folder, theirs = reference
    checkpoint = open_checkpoint(folder)
    ours = Decoder(checkpoint, backend(), ARCHITECTURES[checkpoint.config.architecture])
    ids = torch.randint(3, 203, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    got = all_logits(ours, ids)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].float()
    assert ((got - want).norm() / want.norm()).item() < TOLERANCE[ours.backend]


@pytest.mark.parametrize("backend", [TorchBackend, NativeBackend], ids=["torch", "native"])
def test_biases_of_a_llama_are_loaded(tmp_path: Path, backend) -> None:
    """Some checkpoints say "llama" and have biases on q, k and v: Qwen 2 by another name."""
    torch.manual_seed(7)
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (1.0 if name.endswith("bias") else 0.1))
    theirs.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"model_type": "llama"}))
    checkpoint = open_checkpoint(tmp_path)
    ours = Decoder(checkpoint, backend(), ARCHITECTURES[checkpoint.config.architecture])
    ids = torch.randint(3, 203, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].float()
    assert ((all_logits(ours, ids) - want).norm() / want.norm()).item() < TOLERANCE[ours.backend]
