"""A plan is made by the engine's own code on the meta device: sizes without memory, rank by rank what is allocated."""

import json

import msgspec
import pytest
import torch

from emberline.catalog.published_shapes import find_shape
from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import GIB, GPUS, parse_gpus
from emberline.engine.planning.layout_plan import DoesNotFit, Planner, StepTimes, Workload
from emberline.engine.planning.step_time import StageWork
from emberline.engine.runners.gpu import engine
from emberline.engine.runners.gpu.rank_memory import NCCL_BYTES, StepMemory, bound_context, weight_bytes
from emberline.engine.worker import main as worker
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.models import registry
from emberline.models.decoder import Decoder
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.registry import lay_out
from emberline.models.shard import Shard, loopback_groups
from emberline.models.vision.loading import tower_bytes
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.weights.generated import generate_checkpoint
from emberline.weights.image_settings import image_processor
from emberline.weights.outline import OutlineCheckpoint
from emberline.weights.stage_balance import split_stages
from emberline.weights.vision_config import tower_config

LLAMA_8B = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5,
)  # fmt: skip
LIMITS = Limits(131072, 128256, (0,), 256, 8192)
KIMI_HEAD = Eagle3Config(
    hidden_size=7168, n_heads=64, n_kv_heads=64, head_dim=192, mlp_size=18_432, vocab_size=163_840,
    draft_vocab_size=32_000, taps=(2, 30, 58),
)  # fmt: skip


def planner(document, gpu="H200", max_running=256, token_budget=8192, **changes):
    source = OutlineCheckpoint(document)
    config = source.config
    limits = Limits(config.context_len, config.vocab_size, (0,), max_running, token_budget)
    return Planner(source, GPUS[gpu], limits, **changes)


@pytest.fixture(scope="module")
def llama():
    return planner(LLAMA_8B)


@pytest.fixture(scope="module")
def kimi():
    return planner(find_shape("@cf/moonshotai/kimi-k2.5").config, "H100")


def test_counts_the_weights_exactly_and_gives_the_rest_to_kv(llama):
    plan = llama.plan(Layout(), Workload())
    (stage,) = plan.stages
    matrices = 2 * 128256 * 4096 + 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    assert stage.weights_bytes == plan.weights_bytes == 2 * matrices + 32 * 2 * 4096 * 4  # norms are float32
    parts = (stage.weights_bytes, stage.workspace_bytes, stage.state_bytes, stage.reserve_bytes, stage.context_bytes)
    block = 131072 * 16
    assert 0 <= plan.memory_bytes - sum(parts) - plan.kv_bytes < 2 * block
    assert stage.collective_bytes == 0
    assert plan.kv_bytes_per_token == pytest.approx(131072, rel=1e-3)
    assert plan.kv_tokens == plan.kv_bytes // 131072 - 16  # but the null block


def test_nothing_is_allocated():
    model = lay_out(OutlineCheckpoint(LLAMA_8B))
    assert all(matrix.weight.device.type == "meta" for matrix in model.matrices)
    assert weight_bytes(model) > 15e9


# --- large models: published sizes, and what was computed of them by hand ---------------------------------------------

ASIDE, VISION = 2.0, 0.9  # GiB: of a GPU with NCCL, without NCCL 1.4; of the vision encoder, which is not loaded


@pytest.mark.parametrize(
    ("layout", "weights", "tokens"),
    [
        (Layout(tp=8), 71.1, 92_000),
        (Layout(tp=8, ep=True), 71.1, 92_000),
        (Layout(tp=8, dcp=8), 71.1, 738_000),
        (Layout(tp=4, pp=2), 70.1, 212_000),
        (Layout(tp=2, pp=4), 70.3, 394_000),
        (Layout(pp=8), 73.1, 538_000),
    ],
)
def test_kimi_on_eight_h100_is_what_was_computed_by_hand(kimi, layout, weights, tokens):
    plan = kimi.plan(layout, Workload())
    found = plan.rank_weights_bytes / GIB
    assert found == pytest.approx(weights, rel=0.02)
    vision = VISION / 8 if layout.pp == 1 else 0
    left = 79.1 - (1.4 if layout.tp == 1 else ASIDE) - vision
    rooms = [
        (left - stage.weights_bytes / GIB) * GIB * layout.dcp / (1152 * (stage.layers[1] - stage.layers[0]))
        for stage in plan.stages
    ]
    assert min(rooms) == pytest.approx(tokens, rel=0.02)


def test_kimi_serves_with_more_kv_than_workers_ai_tells(kimi):
    plan = kimi.plan(Layout(tp=8, dcp=8), Workload())
    assert plan.kv_bytes >= 30 * GIB
    assert plan.kv_tokens >= 450_000
    assert plan.kv_bytes_per_token == pytest.approx(70_272, rel=0.01)
    assert plan.context_len == 262_144
    assert kimi.plan(Layout(tp=8), Workload()).kv_tokens < plan.kv_tokens / 7.5, "every rank would keep every latent"


@pytest.fixture(scope="module")
def tower():
    document = find_shape("@cf/moonshotai/kimi-k2.5").config
    return tower_config(document, image_processor(document))


def test_kimi_with_its_vision_tower_and_a_draft_head_keeps_more_kv_than_workers_ai_tells(tower):
    assert tower_bytes(tower) / GIB == pytest.approx(0.886, rel=0.01)
    document = find_shape("@cf/moonshotai/kimi-k2.5").config
    with torch.device("meta"):
        head = Eagle3Head(msgspec.structs.replace(KIMI_HEAD, latent=OutlineCheckpoint(document).config.latent))
    kimi = planner(document, "H100", tower=tower, drafting=lambda model: GpuDraftHead(head, model))
    (stage,) = (plan := kimi.plan(Layout(tp=8, dcp=8), Workload())).stages
    assert stage.tower_bytes < 1.3 * tower_bytes(tower) / 8
    assert stage.image_bytes > GIB / 8
    assert stage.draft_weights_bytes > 256 << 20
    assert plan.kv_bytes > 30 * GIB


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=2)])
def test_the_first_stage_divides_a_tower(llama, tower, layout):
    without = llama.plan(layout, Workload())
    plan = planner(LLAMA_8B, tower=tower).plan(layout, Workload())
    own = tower_bytes(tower, n_ranks=layout.tp)
    assert [stage.tower_bytes for stage in plan.stages] == [own] + [0] * (layout.pp - 1)
    assert plan.weights_bytes == without.weights_bytes + layout.tp * own
    assert [stage.weights_bytes for stage in plan.stages] == [stage.weights_bytes for stage in without.stages]
    taken, added = without.stages[0].kv_bytes - plan.stages[0].kv_bytes, own + plan.stages[0].image_bytes
    assert taken == pytest.approx(added, rel=0.01) if layout.pp == 1 else 0 < taken <= 1.01 * added


def test_scout_on_two_h200_keeps_few_tokens_of_local_layers():
    scout = planner(find_shape("llama-4-scout").config, max_running=12)
    plan = scout.plan(Layout(tp=2), Workload())
    assert plan.weights_bytes / GIB == pytest.approx(202.4, rel=0.02)
    assert plan.kv_bytes >= 56 * GIB
    assert plan.kv_tokens >= 1_200_000
    assert plan.context_len <= plan.kv_tokens
    assert plan.stages[0].state_bytes < GIB, "tables for ten million tokens would take more"


def test_attention_replicated_on_every_gpu_would_not_fit(kimi):
    with pytest.raises(DoesNotFit, match=r"tp4: weights take 139\.9 GiB of a GPU, .* of 79\.1: \d+\.\d GiB too many"):
        kimi.plan(Layout(tp=4), Workload())


# --- rank by rank what is built ---------------------------------------------------------------------------------------

SIZES = dict(
    hidden_size=256, num_attention_heads=8, num_hidden_layers=5, vocab_size=1003, max_position_embeddings=4096,
    intermediate_size=512, moe_intermediate_size=256, num_experts_per_tok=2, rms_norm_eps=1e-6,
)  # fmt: skip
DEEPSEEK = SIZES | dict(
    model_type="deepseek_v3", num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
    num_nextn_predict_layers=0,
)  # fmt: skip
QWEN = SIZES | dict(model_type="qwen3_moe", num_key_value_heads=2, head_dim=64, num_experts=8, tie_word_embeddings=True)
FP8 = QWEN | dict(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
LAYOUTS = (Layout(tp=2), Layout(tp=4, ep=True), Layout(pp=3), Layout(tp=2, pp=2, dcp=2))


@pytest.mark.parametrize("document", [DEEPSEEK, QWEN, FP8], ids=["deepseek", "qwen", "fp8"])
def test_every_rank_builds_what_was_planned(document):
    made, plans = generate_checkpoint(document, 0), planner(document, max_running=8, token_budget=64)
    for layout in LAYOUTS:
        if layout.dcp > 1 and document is not DEEPSEEK:
            continue
        plan, split = plans.plan(layout, Workload(input_tokens=32, output_tokens=8)), split_stages(made, layout.pp)
        for rank in range(layout.n_ranks):
            position = layout.position(rank)
            shard = Shard.of(made.config, layout, position, loopback_groups(layout, position), split)
            backend = TritonBackend("cpu", torch.bfloat16, groups=shard.groups)
            architecture = registry.ARCHITECTURES[made.config.architecture]
            model = Decoder(shard.checkpoint(made), backend, architecture, shard)
            stage = plan.stages[position.stage]
            assert (model.shard.layers.start, model.shard.layers.stop) == stage.layers
            more = stage.weights_bytes - weight_bytes(model)  # a row of the vocabulary, which does not divide
            ends = (model.embedding is not None) + (model.head is not None)
            assert 0 <= more <= (0 if position.tp_rank == layout.tp - 1 else ends * 256 * 2), (layout.name, rank)
            step = StepMemory.of(model, bound_context(plans.limits, model, plans.gpu.memory), speculates=True)
            assert (step.workspace, step.state, step.reserve, step.collectives) == (
                stage.workspace_bytes, stage.state_bytes, stage.reserve_bytes, stage.collective_bytes,
            )  # fmt: skip


def test_a_draft_model_takes_what_was_planned():
    limits = Limits(4096, 256, (0,), 8, 64)

    def decoder_of(document):
        made = generate_checkpoint(document, 0)
        architecture = registry.ARCHITECTURES[made.config.architecture]
        return Decoder(made, TritonBackend("cpu", torch.bfloat16), architecture)

    def drafting(model):
        return DraftModel(lay_out(OutlineCheckpoint(QWEN)), "", model.config.n_layers, model.config.vocab_size)

    plans = Planner(OutlineCheckpoint(DEEPSEEK), GPUS["H200"], limits, drafting=drafting)
    (stage,) = plans.plan(Layout(), Workload(input_tokens=32, output_tokens=8)).stages
    model, draft = decoder_of(DEEPSEEK), decoder_of(QWEN)
    head = DraftModel(draft, "", model.config.n_layers, model.config.vocab_size)
    assert stage.draft_weights_bytes == weight_bytes(draft)
    assert stage.weights_bytes == weight_bytes(model) + weight_bytes(draft)
    step = StepMemory.of(model, bound_context(limits, model, plans.gpu.memory), speculates=True, head=head)
    assert (step.workspace, step.state, step.reserve) == (
        stage.workspace_bytes, stage.state_bytes, stage.reserve_bytes,
    )  # fmt: skip


def test_a_stage_has_a_communicator_for_each_neighbor(kimi):
    plan = kimi.plan(Layout(pp=8), Workload())
    assert [stage.collective_bytes // NCCL_BYTES for stage in plan.stages] == [1, 2, 2, 2, 2, 2, 2, 1]


def test_stages_have_blocks_of_the_same_numbers(kimi):
    plan = kimi.plan(Layout(pp=8), Workload())
    per_layer = {stage.kv_bytes / (stage.layers[1] - stage.layers[0]) for stage in plan.stages}
    assert len(per_layer) == 1


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_pipeline_computes_its_stages_at_once(llama):
    one, two = (llama.plan(Layout(pp=n), Workload(concurrency=64)) for n in (1, 2))
    assert one.itl_ms / 2 < two.itl_ms < one.itl_ms, "half of the sequences in each micro-batch, all of the weights"
    assert two.ttft_s == pytest.approx(one.ttft_s, rel=0.05), "one chunk"
    assert two.tokens_s > 1.3 * one.tokens_s
    alone, staged = (llama.plan(Layout(pp=n), Workload(concurrency=1)) for n in (1, 2))
    assert alone.itl_ms < staged.itl_ms < 1.05 * alone.itl_ms, "a sequence alone passes one stage after the other"


def test_a_filled_pipeline_is_as_slow_as_its_slowest_stage(llama):
    work = StageWork(lay_out(llama.source))
    one, two, uneven = (StepTimes(stages, llama.gpu, 8192) for stages in ([[work]], [[work]] * 2, [[work], [work] * 2]))
    step = one.decode(16, 4096).total
    assert two.decode(32, 4096).total == pytest.approx(2 * step), "a micro-batch of 16 in each stage"
    assert two.decode(1, 4096).total == pytest.approx(2 * one.decode(1, 4096).total)
    assert uneven.decode(32, 4096).total == pytest.approx(4 * step)
    chunk = one.prefill(8192).ttft_s
    assert two.prefill(8192).ttft_s == pytest.approx(2 * chunk)
    assert two.prefill(8192).busy_s == pytest.approx(chunk)
    assert two.prefill(16_384).busy_s == pytest.approx(one.prefill(16_384).ttft_s)
    assert two.prefill(16_384).ttft_s < 0.8 * 2 * one.prefill(16_384).ttft_s


def test_tensor_parallelism_pays_for_what_ranks_say(llama):
    one, two = (llama.plan(Layout(tp=n), Workload(concurrency=1)) for n in (1, 2))
    assert one.itl_collective_ms == 0 < two.itl_collective_ms
    assert one.itl_ms / 2 < two.itl_ms < one.itl_ms


def test_sequences_are_those_that_fit(kimi):
    plan = kimi.plan(Layout(tp=8), Workload(input_tokens=30_000, output_tokens=1000, concurrency=32))
    assert plan.sequences == 2
    with pytest.raises(DoesNotFit, match=r"holds \d\d,\d+ tokens, and a request has 100,000"):
        kimi.plan(Layout(tp=8), Workload(input_tokens=90_000, output_tokens=10_000))


def test_prefill_and_decode_replicas_are_matched_by_their_rates(llama):
    long = llama.plan(Layout(), Workload(input_tokens=16_384, output_tokens=64, concurrency=64), 8)
    short = llama.plan(Layout(), Workload(input_tokens=128, output_tokens=2048, concurrency=64), 8)
    assert long.split.prefill > long.split.decode
    assert short.split.prefill == 1
    assert long.split.ratio > 1 > short.split.ratio
    asked = Workload(input_tokens=16_384, output_tokens=64, concurrency=64, split=(4, 4))
    assert llama.plan(Layout(), asked, 8).split.requests_s <= long.split.requests_s


def test_a_start_is_limited_by_the_drive(kimi, llama):
    assert kimi.start_s == pytest.approx(553.4 * 1.0737 / 3.0, rel=0.02)
    assert llama.start_s == 9.0


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_more_kv_than_there_is_room_is_refused():
    with pytest.raises(BadInput, match=r"weights take 15\.0.* fewer than asked; give a smaller --kv-bytes"):
        planner(LLAMA_8B, "H100", kv_bytes=70 * GIB).plan(Layout(), Workload())


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=3), r"--tp 3 does not divide the model's 32 attention heads: use 2 or 4"),
        (Layout(pp=33), "at most 32"),
        (Layout(tp=2, dcp=2), "latent attention"),
        (Layout(tp=2, ep=True), "no experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(llama, layout, says):
    with pytest.raises(BadInput, match=says):
        llama.plan(layout, Workload())


def test_a_share_of_the_memory_is_planned_with():
    whole, half = (planner(LLAMA_8B, memory_share=share).plan(Layout(), Workload()) for share in (1.0, 0.5))
    assert half.memory_bytes == whole.memory_bytes // 2
    assert half.kv_bytes < whole.kv_bytes - 69 * GIB


def test_a_start_that_runs_out_of_memory_says_what_is_missing(tmp_path, monkeypatch):
    def begin_loading(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(registry, "begin_loading", begin_loading)
    monkeypatch.setattr(registry, "select_device", lambda asked: "cuda")
    monkeypatch.setattr(engine, "load_attention", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 13 * GIB)
    args = worker.parse_arguments(["--model", str(tmp_path), "--socket", "unix:x", "--random-weights", "0"])
    with pytest.raises(BadInput, match=r"15\.0 GiB of the device are available; weights take 15\.0.* too many"):
        worker.build(args)


def test_plans_are_plain_data(llama):
    plan = llama.plan(Layout(), Workload())
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
    assert parse_gpus("1xH200")[1] == llama.gpu
