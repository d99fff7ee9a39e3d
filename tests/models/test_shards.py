"""Every architecture divided among ranks, which are threads: the same tokens and logits as of one rank."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from emberline.kernels.collectives import ParallelGroups
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES, load_model
from emberline.models.shard import Shard, check_layout, loopback_groups
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout, Position, StageSplit
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import LatentConfig, ModelConfig, MoEConfig, QueryTemperature
from standins.thread_collectives import run_ranks, thread_groups
from tests.models.step_inputs import pools, step
from tests.weights.test_rank_checkpoint import checkpoint

SHAPES = Path(__file__).parents[2] / "emberline" / "catalog" / "shapes"
SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "mlp_size": 32,
    "context_len": 64, "norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
LATENT = SIZES | {
    "n_kv_heads": 8,
    "head_dim": 24,
    "latent": LatentConfig(q_lora=24, kv_lora=32, nope=16, rope=8, v_dim=16),
}
PLAIN_QUERIES = LatentConfig(q_lora=None, kv_lora=32, nope=16, rope=8, v_dim=16)
SHARED = MoEConfig(
    layers=(1, 2, 3), experts=8, top_k=3, width=16, shared_width=16, scoring="sigmoid", correction_bias=True, scale=2.0,
    n_groups=4, top_groups=2,
)  # fmt: skip
EXPERTS = MoEConfig(layers=(0, 2, 3), experts=8, top_k=2, width=16)
CONFIGS = {
    "llama": ModelConfig(architecture="llama", tie_embeddings=True, **SIZES),
    "qwen2": ModelConfig(architecture="qwen2", qkv_bias=True, **SIZES),
    "qwen3": ModelConfig(architecture="qwen3", qk_norm=True, **SIZES),
    "gemma3": ModelConfig(
        architecture="gemma3", qk_norm=True, post_norms=True, windows=(20, None, 20, None), local_rope_theta=1000.0,
        activation="gelu_tanh", embedding_scale=5.0, tie_embeddings=True, **SIZES,
    ),
    "qwen3_moe": ModelConfig(architecture="qwen3_moe", qk_norm=True, moe=EXPERTS, **SIZES),
    "mixtral": ModelConfig(architecture="mixtral", moe=EXPERTS, **SIZES),
    "deepseek_v3": ModelConfig(architecture="deepseek_v3", moe=SHARED, **LATENT),
    "kimi_k2": ModelConfig(
        architecture="kimi_k2", moe=msgspec.structs.replace(SHARED, shared_width=32, n_groups=1, top_groups=1), **LATENT
    ),
    "glm4_moe_lite": ModelConfig(
        architecture="glm4_moe_lite", moe=SHARED, **LATENT | {"latent": PLAIN_QUERIES}
    ),
    "llama4": ModelConfig(
        architecture="llama4", chunks=(16, 16, 16, None), nope_layers=(3,), qk_l2_norm=True,
        query_temperature=QueryTemperature(0.1, 8),
        moe=MoEConfig(layers=(1, 3), experts=4, top_k=1, width=16, shared_width=16, scoring="sigmoid",
                      normalize=False, weight_on_input=True), **SIZES,
    ),
    "gpt_oss": ModelConfig(
        architecture="gpt_oss", windows=(20, None, 20, None), sinks=True, qkv_bias=True, output_bias=True,
        moe=MoEConfig(layers=(0, 1, 2, 3), experts=8, top_k=2, width=16, biases=True, activation="swiglu_clamped"),
        **SIZES,
    ),
}  # fmt: skip
CASES = [
    ("llama", Layout(tp=4)), ("llama", Layout(pp=3)), ("llama", Layout(tp=2, pp=2)), ("qwen2", Layout(tp=2)),
    ("qwen3", Layout(tp=2)), ("gemma3", Layout(tp=2, pp=2)), ("qwen3_moe", Layout(tp=4, ep=True)),
    ("mixtral", Layout(tp=2)), ("deepseek_v3", Layout(tp=4)), ("deepseek_v3", Layout(tp=2, pp=2, dcp=2)),
    ("deepseek_v3", Layout(tp=4, dcp=2)), ("kimi_k2", Layout(tp=2, ep=True, dcp=2)), ("kimi_k2", Layout(tp=8, dcp=8)),
    ("glm4_moe_lite", Layout(tp=4, ep=True, dcp=4)), ("llama4", Layout(tp=2)), ("llama4", Layout(tp=4, ep=True)),
    ("gpt_oss", Layout(tp=2)), ("gpt_oss", Layout(tp=4, ep=True)), ("gpt_oss", Layout(pp=2)),
]  # fmt: skip
PROMPTS = [[(7 * i + 3) % 67 for i in range(22)], [5, 1, 60], [(5 * i) % 67 for i in range(17)]]
TABLES = torch.tensor([[3, 1, 9], [4, 8, 2], [7, 5, 6]])


def generate(model: Decoder, n: int = 2, told: list[list[int]] | None = None) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of three prompts, one of them in two chunks beside a decoding row, and all sampled logits.

    told: the tokens, for stages before the last, which have no logits.
    """
    kv, n_groups = pools(model, 10), len(model.kv_groups)
    ids, logits = [list(prompt) for prompt in PROMPTS], []

    def run(rows: list[tuple[list[int], int]], samples: list[int]) -> None:
        result = model.forward(step(rows, TABLES[: len(rows)], n_groups, samples), kv)
        logits.append(result)
        drawn = result.argmax(-1).tolist()
        if not len(result):
            assert told is not None
            drawn = [sequence[len(known)] for known, sequence in zip(ids, told)][: len(samples)]
        for sequence, token in zip(ids, drawn, strict=False):
            sequence.append(token)

    run([(ids[0], 0), (ids[1], 0)], [21, 24])
    run([(ids[0][-1:], 22), (ids[1][-1:], 3), (ids[2][:9], 0)], [0, 1])
    run([(ids[0][-1:], 23), (ids[1][-1:], 4), (ids[2][9:], 9)], [0, 1, 9])
    for _ in range(n):
        run([(sequence[-1:], len(sequence) - 1) for sequence in ids], [0, 1, 2])
    return ids, torch.cat(logits)


def check_same(found: list[tuple[list[list[int]], Tensor]], want: tuple[list[list[int]], Tensor], tp: int) -> None:
    """Of all ranks: those of the last stage have the logits."""
    assert not any(len(logits) for _, logits in found[:-tp])
    for ids, logits in found[-tp:]:
        torch.testing.assert_close(logits, want[1], rtol=1e-3, atol=1e-3)
        assert ids == want[0]


def positions(layout: Layout) -> list[Position]:
    return [layout.position(rank) for rank in range(layout.n_ranks)]


def shard_of(config: ModelConfig, layout: Layout, groups: ParallelGroups) -> Shard:
    return Shard.of(config, layout, Position(groups.pp.rank, groups.tp.rank), groups)


@pytest.fixture(scope="module")
def whole() -> dict[str, tuple[list[list[int]], Tensor]]:
    return {}


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda case: getattr(case, "name", case).replace(" ", "-"))
def test_a_divided_model_gives_the_same(name: str, layout: Layout, whole: dict[str, Any]) -> None:
    config = CONFIGS[name]
    source = checkpoint(config)
    if name not in whole:
        whole[name] = generate(Decoder(source, TorchBackend(), ARCHITECTURES[config.architecture]))

    def run(groups: ParallelGroups) -> tuple[list[list[int]], Tensor]:
        shard = shard_of(config, layout, groups)
        backend = TorchBackend(groups=groups)
        model = Decoder(shard.checkpoint(source), backend, ARCHITECTURES[config.architecture], shard)
        return generate(model, told=whole[name][0])

    check_same(run_ranks(thread_groups(layout.tp, layout.pp, layout.dcp), run), whole[name], layout.tp)


PUBLISHED: dict[str, dict[str, Any]] = {  # cut to what is quick to compute
    "kimi-k2.5": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "num_key_value_heads": 2},
    "deepseek-v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
}
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "vocab_size": 67, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [
        ("kimi-k2.5", Layout(tp=2, dcp=2), "int4"),
        ("gpt-oss-20b", Layout(tp=4), "mxfp4"),
        pytest.param("gpt-oss-20b", Layout(tp=2, ep=True), "mxfp4", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", Layout(tp=2), "fp8", marks=pytest.mark.slow),
    ],
)
def test_quantized_weights_divided(name: str, layout: Layout, kind: str) -> None:
    document = json.loads((SHAPES / f"{name}.json").read_text())["config"]
    document = document.get("text_config", document)
    fields = {key: value for key, value in SMALL.items() if key in document}
    document |= fields | PUBLISHED[name]
    source = generate_checkpoint(document, 3)
    assert source.weight("blk.1.ffn_down_exps.1.weight").kind == kind
    want = generate(load_model(source), 1)

    def run(groups: ParallelGroups) -> tuple[list[list[int]], Tensor]:
        return generate(load_model(source, shard=shard_of(source.config, layout, groups)), 1)

    check_same(run_ranks(thread_groups(layout.tp, dcp=layout.dcp), run), want, layout.tp)


@pytest.mark.parametrize("threads", [1, 2])
def test_stages_on_the_cpu_kernels(threads: int) -> None:
    """A stage needs nothing of other ranks within a layer, so the C kernels compute it; two stages run concurrently."""
    source = checkpoint(CONFIGS["gemma3"])
    whole = load_model(source, threads=threads)
    want, reference = generate(whole), generate(Decoder(source, TorchBackend(), ARCHITECTURES["gemma3"]))

    def run(groups: ParallelGroups) -> tuple[str, Any]:
        model = load_model(source, threads=threads, shard=shard_of(source.config, Layout(pp=2), groups))
        return model.backend, generate(model, told=want[0])

    backends, found = zip(*run_ranks(thread_groups(pp=2), run), strict=True)
    assert {whole.backend, *backends} == {"native"}
    check_same(list(found), want, 1)
    check_same(list(found), reference, 1)


def test_deterministic_mode_divided() -> None:
    source = checkpoint(CONFIGS["deepseek_v3"])
    layout = Layout(tp=2, dcp=2)

    def run(groups: ParallelGroups) -> bool:
        model = load_model(source, deterministic=True, shard=shard_of(source.config, layout, groups))
        together = generate(model, 0)[1]
        kv = pools(model, 10)
        alone = model.forward(step([(PROMPTS[1], 0)], TABLES[1:2], 1, [2]), kv)
        return torch.equal(alone[0], together[1])

    assert run_ranks(thread_groups(2, dcp=2), run) == [True, True]


def test_the_hidden_states_of_a_stage_by_hand() -> None:
    source, layout = checkpoint(CONFIGS["llama"]), Layout(pp=3)
    shards = [Shard.of(source.config, layout, at, loopback_groups(layout, at)) for at in positions(layout)]
    stages = [load_model(source, shard=shard) for shard in shards]
    inputs, hidden = step([(PROMPTS[0], 0)], TABLES[:1], 1, [21]), None
    for stage in stages:
        hidden = stage.forward_stage(inputs, pools(stage, 10), hidden)
    want = load_model(source)
    torch.testing.assert_close(hidden, want.forward(inputs, pools(want, 10)), rtol=1e-3, atol=1e-3)
    assert [stage.kv_groups[0].layers for stage in stages] == [(0,), (1, 2), (3,)]


def read_names(source: Checkpoint, layout: Layout, stages: StageSplit | None = None) -> list[set[str]]:
    shards = [Shard.of(source.config, layout, at, loopback_groups(layout, at), stages) for at in positions(layout)]
    return [set(shard.checkpoint(source).names) for shard in shards]


def test_a_stage_reads_its_own_layers() -> None:
    tied, untied = checkpoint(CONFIGS["llama"]), checkpoint(CONFIGS["qwen3"])
    first, last = read_names(tied, Layout(pp=2), StageSplit((0, 1, 4)))
    assert first & last == {"token_embd.weight"}, "which is the head"
    assert first | last == set(tied.names)
    assert {int(name.split(".")[1]) for name in last if name.startswith("blk.")} == {1, 2, 3}
    first, middle, last = read_names(untied, Layout(pp=3))
    assert not first & middle | middle & last | first & last
    assert {"output.weight", "output_norm.weight"} <= last


def test_tags_name_the_slice() -> None:
    source, layout = checkpoint(CONFIGS["gpt_oss"]), Layout(tp=2, pp=2)
    at = Position(1, 1)
    shard = Shard.of(source.config, layout, at, loopback_groups(layout, at))
    assert [group.tag for group in load_model(source, shard=shard).kv_groups] == [
        "full:float32:token:L3-3x1:H1-2:2x16",
        "window20:float32:token:L2-2x1:H1-2:2x16",
    ]
    latent, layout, at = checkpoint(CONFIGS["kimi_k2"]), Layout(tp=4, dcp=2), Position(0, 3)
    model = load_model(latent, shard=Shard.of(latent.config, layout, at, loopback_groups(layout, at)))
    (group,) = model.kv_groups
    assert group.tag == "full:float32:token:L0-3x4:H0-1:1x40:T8-16"
    assert group.block_bytes * 2 == load_model(latent).kv_groups[0].block_bytes


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("llama", Layout(tp=3), "--tp 3 does not divide the model's 8 attention heads: use 2 or 4"),
        ("llama", Layout(pp=5), "at most 4"),
        ("llama", Layout(tp=2, dcp=2), "--dcp is for models with latent attention"),
        ("llama", Layout(tp=2, ep=True), "llama models have no experts"),
        ("mixtral", Layout(tp=16, ep=True), "--tp 16 does not divide the model's 8 attention heads: use 8"),
        ("llama4", Layout(tp=8, ep=True), "--tp 8 does not divide the model's 4 experts: use 4"),
        ("gemma3", Layout(pp=4), "stage 0 (layers 0 to 0) has only layers that cache 'window20'"),
    ],
)
def test_layouts_that_do_not_fit(name: str, layout: Layout, message: str) -> None:
    source, at = checkpoint(CONFIGS[name]), Position()
    with pytest.raises(BadInput, match=re.escape(message)):
        load_model(source, shard=Shard.of(source.config, layout, at, loopback_groups(layout, at)))


def test_dcp_divides_a_block() -> None:
    config = msgspec.structs.replace(CONFIGS["kimi_k2"], n_heads=96, mlp_size=96, moe=None)
    with pytest.raises(BadInput, match="--dcp 3 does not divide a block of 16 tokens: use 2 or 4"):
        check_layout(config, Layout(tp=3, dcp=3))
