"""Published variants of EAGLE-3 heads: on one rank and divided, against their plain form; and their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emberline.engine.runners.cpu.torch_runner import allocate_pool
from emberline.kernels.collectives import ParallelGroups
from emberline.kernels.reference import TorchBackend
from emberline.models import eagle3_files
from emberline.models.decoder import Decoder
from emberline.models.draft_head import DraftHead
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.eagle3_files import CONFIG as CONFIG_FILE
from emberline.models.eagle3_files import WEIGHTS, load_head, save_head
from emberline.models.registry import ARCHITECTURES
from emberline.protocol.parallel_layout import Layout
from emberline.weights.lossless_folder import compress_folder
from emberline.weights.model_config import BadCheckpoint, LatentConfig, ModelConfig
from standins.thread_collectives import run_ranks, thread_groups
from tests.models.test_draft_head import error, step_of
from tests.models.test_shards import CONFIGS, shard_of
from tests.weights.test_rank_checkpoint import checkpoint

MLA = LatentConfig(q_lora=16, kv_lora=16, nope=16, rope=8, v_dim=16)
PLAIN_QUERIES = LatentConfig(q_lora=None, kv_lora=16, nope=16, rope=8, v_dim=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "gqa of two layers": {"n_layers": 2},
    "mla": {"latent": MLA, "n_heads": 4, "head_dim": 24},
    "mla of three layers, scaled": {
        "latent": PLAIN_QUERIES, "n_heads": 4, "head_dim": 24, "n_layers": 3, "rope_divisors": (1.0, 2.0, 4.0, 8.0),
        "rope_scale": 0.9, "yarn_factor": 1.4,
    },
    "3.1": {"fc_norm": True, "norm_output": True, "own_embedding": True, "latent": MLA, "n_heads": 4, "head_dim": 24},
}  # fmt: skip
IDS = torch.tensor([(11 * n + 5) % 67 for n in range(40)])


def head_for(target: ModelConfig, variant: dict[str, Any]) -> Eagle3Head:
    torch.manual_seed(3)
    config = msgspec.structs.replace(Eagle3Config.of(target, 31), **variant)
    head = Eagle3Head(msgspec.structs.replace(config, head_dim=variant.get("head_dim", 8)))
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.15 + (tensor.dim() == 1))
    head.d2t.copy_(2 * torch.arange(31) - torch.arange(31))
    return head


def on_backend(head: Eagle3Head, model: Decoder, taps: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The states that the taps make, the outputs of a sequence in four parts, and the last part's logits."""
    drafting = DraftHead(head, model)
    pool = allocate_pool(drafting.kv_group, 5, torch.device("cpu"))
    combined = drafting.combine(taps)
    bounds = (0, 20), (20, 33), (33, 34), (34, 40)
    parts = [drafting.extend(step_of(IDS[a:b], a), combined[a:b], pool) for a, b in bounds]
    logits = drafting.logits(parts[-1])
    fed = parts[-1].clone()
    drafting.feed_back(fed)
    assert error(fed, head.feed_back(parts[-1])) < 1e-5
    return combined, torch.cat(parts), logits


@torch.no_grad()
def plain(head: Eagle3Head, target: ModelConfig, taps: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    weight = checkpoint(target).weight("token_embd.weight").tensor(torch.float32, "cpu")
    embeds = head.embedding[IDS] if head.config.own_embedding else weight[IDS] * target.embedding_scale
    combined = head.combine(torch.cat(taps, dim=-1))
    outputs = head.extend(embeds, combined, torch.arange(40))
    return combined, outputs, head.logits(outputs[34:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v3", Layout()), ("deepseek_v3", Layout(tp=4, dcp=2)), ("llama", Layout(tp=2))],
    ids=lambda case: getattr(case, "name", case).replace(" ", "-"),
)  # fmt: skip
def test_a_head_computes_as_its_plain_form(variant: str, name: str, layout: Layout) -> None:
    target = CONFIGS[name]
    head = head_for(target, VARIANTS[variant])
    taps = list(torch.randn(3, 40, target.hidden_size, generator=torch.Generator().manual_seed(1)))
    want = plain(head, target, taps)

    def run(groups: ParallelGroups) -> tuple[Tensor, Tensor, Tensor]:
        source, shard = checkpoint(target), shard_of(target, layout, groups)
        backend = TorchBackend(groups=groups)
        model = Decoder(shard.checkpoint(source), backend, ARCHITECTURES[target.architecture], shard)
        return on_backend(head, model, taps)

    for found in run_ranks(thread_groups(layout.tp, layout.pp, layout.dcp), run):
        assert [error(*pair) < 1e-4 for pair in zip(found, want, strict=True)] == [True, True, True]


# --- files ------------------------------------------------------------------------------------------------------------

KIMI = CONFIGS["kimi_k2"]


def write(folder: Path, variant: str = "mla", **fields: Any) -> Eagle3Head:
    head = head_for(KIMI, VARIANTS[variant] | {"rope_divisors": None, "rope_interleaved": "mla" in variant})
    save_head(head, folder)
    document = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(document | fields))
    return head


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_is_read_as_it_was_written(tmp_path: Path, variant: str) -> None:
    written, read = write(tmp_path, variant), load_head(tmp_path, KIMI.n_layers)
    for name, tensor in written.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=1e-2, atol=1e-2)


def test_rotated_rows_of_mla_are_reordered(tmp_path: Path) -> None:
    head = write(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)["midlayer.self_attn.kv_a_proj_with_mqa.weight"]
    own = head.layer.kv_a_proj.weight
    torch.testing.assert_close(stored[16::2].float(), own[16:20], rtol=1e-2, atol=1e-2)  # pairs 2i and 2i + 1
    torch.testing.assert_close(stored[17::2].float(), own[20:24], rtol=1e-2, atol=1e-2)


def test_names_and_settings_of_published_heads(tmp_path: Path) -> None:
    """nvidia's and lightseekorg's heads of the K2 family have these settings."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
               "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    write(tmp_path, rope_scaling=scaling, rope_theta=50_000.0, rope_interleave=None, norm_before_residual=False,
          eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]})  # fmt: skip
    change_tensors(
        tmp_path, lambda tensors: {name.replace("midlayer.", "model.layers.0."): t for name, t in tensors.items()}
    )
    config = load_head(tmp_path, KIMI.n_layers).config
    assert config.taps == (1, 2, 3)
    assert config.rope_divisors is not None
    assert config.yarn_factor == pytest.approx((0.1 * 4.158883 + 1) ** 2, rel=1e-5)
    config.check(KIMI, "any")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "architectures are none of"),
        ({"norm_before_residual": True}, "'norm_before_residual' is 'True', not False"),
        ({"attention_bias": True}, "'attention_bias'"),
        ({"num_aux_hidden_states": 2}, "not the number of taps, 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without taps"),
        ({"fc_norm": True}, r"lacks the tensor fc_norm\.0\.weight"),
        ({"num_hidden_layers": 2}, r"lacks the tensor layers\.0\."),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write(tmp_path, **fields)
    with pytest.raises(BadCheckpoint, match=message):
        load_head(tmp_path, KIMI.n_layers)


@pytest.mark.parametrize("name", ["midlayer.self_attn.q_proj.bias", "midlayer.mlp.gate.weight", "hidden_norm.weight"])
def test_an_unknown_tensor_is_an_error(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {name: torch.zeros(4)})
    with pytest.raises(BadCheckpoint, match=f"1 tensors that are not known: {name}"):
        load_head(tmp_path, KIMI.n_layers)


def test_a_compressed_head_has_the_same_numbers(tmp_path: Path) -> None:
    (folder,) = (Path(eagle3_files.__file__).parent / "draft_heads").iterdir()
    compress_folder(folder, tmp_path / "packed")
    plain, packed = (load_head(each, 30).state_dict() for each in (folder, tmp_path / "packed"))
    assert plain.keys() == packed.keys()
    assert all(torch.equal(plain[name], packed[name]) for name in plain)
    sizes = [sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in (folder, tmp_path / "packed")]
    assert sizes[1] < 0.68 * sizes[0]
