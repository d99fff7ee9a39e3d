"""Ranks on one GPU: what is timed, how efficiency is computed, and how figures are told. Without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import rank_processes, ranks
from benchmarks.gpu.rank_alone import CASES, LayerTime, RankSteps, layer_times
from emberline.engine.planning.step_time import LayerSeconds, StepSeconds
from emberline.kernels.backend import MoE
from emberline.models.registry import load_model
from emberline.models.shard import Shard, loopback_groups
from emberline.protocol.parallel_layout import Layout, Position
from tests.models.step_inputs import pools
from tests.models.test_shards import CONFIGS
from tests.weights.test_rank_checkpoint import checkpoint

LAYER = LayerTime("experts", 60, 8, rank_us=70.0, planned_rank_us=40.0, collectives_us=10.0, single_us=160.0)


def test_efficiency_is_a_share_of_one_gpus_time_over_the_ranks():
    assert LAYER.ideal_us == 20
    assert LAYER.efficiency == pytest.approx(20 / 80)
    assert LAYER.ideal_us + LAYER.undivided_us + LAYER.slower_us == LAYER.rank_us


def test_layers_of_a_kind_are_averaged_whatever_their_window():
    def layers(compute, collectives):
        kinds = ((False, 1, 9e-6), (True, 3, compute), (True, 1, 2 * compute))
        return [LayerSeconds(experts, n, StepSeconds(each, collectives)) for experts, n, each in kinds]

    dense, experts = layer_times({"dense": 30.0, "experts": 50.0}, layers(4e-6, 2e-6), layers(16e-6, 0.0), 4)
    assert (dense.n_layers, experts.n_layers) == (1, 4)
    assert (dense.planned_rank_us, experts.planned_rank_us) == pytest.approx((9, 5))
    assert (experts.collectives_us, experts.single_us, experts.rank_us) == pytest.approx((2, 20, 50))
    assert experts.efficiency == pytest.approx(5 / 52)


@pytest.mark.parametrize("position", [Position(0, 0), Position(0, 1)])
def test_steps_of_a_rank_alone_are_timed_by_kind_of_layer(position):
    source, layout = checkpoint(CONFIGS["deepseek_v3"]), Layout(tp=2, dcp=2)
    shard = Shard.of(source.config, layout, position, loopback_groups(layout, position))
    model = load_model(source, "cpu", shard=shard)
    whole = model.layers

    def timed(run, n):
        run(0)
        return 5.0 + sum(20.0 if isinstance(layer.feed_forward, MoE) else 3.0 for layer in ran[-1])

    ran = []
    forward = model.forward
    model.forward = lambda *args: ran.append(model.layers) or forward(*args)
    steps = RankSteps(model, pools(model, 16), timed)
    inputs = steps.decode_inputs(3)
    first, stop = ((0, 34), (34, 67))[position.tp_rank]
    assert all(first <= token < stop for token in inputs.token_ids.tolist()), "the rank's part of the vocabulary"
    assert steps.layer_us(inputs) == {"dense": 3.0, "experts": 20.0}
    assert steps.step_us(inputs) == 5 + 3 + 3 * 20
    assert steps.step_us(inputs, []) == 5
    assert model.layers is whole
    chunk = steps.prefill_inputs(20, 12)
    assert chunk is not None
    assert (chunk.context_lens.tolist(), chunk.positions[0].item()) == ([32], 12)
    with torch.inference_mode():
        steps.forward(chunk)
    assert steps.prefill_inputs(1 << 20, 0) is None, "more than the pools hold"


def test_cases_are_planned_as_they_are_asked_for():
    plan = CASES["scout"].plan
    assert plan.kv_tokens >= CASES["scout"].kv_tokens
    assert {rank for case in ("kimi-pp8", "kimi-tp4-pp2") for rank in CASES[case].ranks} == {0, 4, 7}


def test_the_table_tells_what_was_asked_and_what_was_measured():
    memory = {"weights_gib": 70.97, "planned_weights_gib": 70.95, "weights_off": 0.0003}
    layer = {"step_us": 6300.0, "context": 8192, "kernels": {"experts": {"_grouped_gemm": 30.5}}}
    figures = {
        "plan kimi rank 0": memory | {"device_gib": 77.1, "planned_gib": 76.8, "off": 0.004},
        "plan kimi rank 7": memory | {"device_gib": 80.0, "planned_gib": 76.8, "off": 0.042},
        "all-reduce 2": {
            "14": {"us": 4.5, "copy_us": 1.3, "ratio": 3.46}, "8190": {"us": 13, "copy_us": 10, "ratio": 1.3},
        },
        "all-reduce 4": {"14": {"us": 10.0, "copy_us": 1.3, "ratio": 7.7}},
        "worker tp2": {"same": True, "n_tokens": 128, "one_rank_s": 0.1, "several_ranks_s": 0.2},
        "alone kimi": {
            "kv_gib": 38.8, "kv_tokens": 400_000, "kv_off": -0.001, "weights_gib": 70.97, "weights_off": 0.0,
            "device_gib": 77.9, "limit_gib": 78.5, "prefill": {"2048 after 0": {"ms": 107.1, "planned_ms": 33.0}},
            "decode": {"1": layer | {"layers": [vars(LAYER) | {"efficiency": LAYER.efficiency}]}},
        },
        "alone scout": {"failed": "OutOfMemoryError: no"},
    }  # fmt: skip
    lines = ranks.table(figures).splitlines()

    def verdict(start):
        return next(line for line in lines if line.startswith(start)).split("  ")[-1].strip()

    assert verdict("kimi rank 0: memory") == "ok"
    assert verdict("kimi rank 7: memory") == "short"
    assert verdict("2 processes, 14 KiB") == "short"
    assert verdict("2 processes, 8190 KiB") == "ok"
    assert verdict("4 processes, 14 KiB").endswith("7.70×"), "nothing is asked of four"
    assert verdict("128 tokens of tp2 and of one rank") == "ok"
    assert verdict("kimi: KV of all ranks") == "ok"
    assert verdict("kimi: tokens of it") == "short"
    assert verdict("alone scout") == "failed"
    assert verdict("experts (60 layers), 1 sequences") == "25 %"
    assert verdict("experts, 1 sequences") == "_grouped_gemm 30.5"


def test_parts_are_chosen_by_name(capsys):
    assert ranks._parse([]).parts == list(ranks.PARTS)
    args = ranks._parse(["alone", "--cases", "glm"])
    assert [name for name, _ in ranks._measurements(args)] == ["alone glm"]
    planned = [name for name, _ in ranks._measurements(ranks._parse(["plan"]))]
    assert planned[-1] == "plan scout rank 1"
    assert len(planned) == 8
    with pytest.raises(SystemExit):
        ranks._parse(["everything"])
    assert (
        "'everything' is none of plan, alone, drafts, all-reduce, worker, drafting, disk, nccl"
        in capsys.readouterr().err
    )


def test_a_rank_that_fails_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(rank_processes, "COMMAND", ("-c", "raise SystemExit(3)"))
    with pytest.raises(RuntimeError, match=r"of 2 ranks these failed .*: {0: 3, 1: 3}"):
        rank_processes.all_reduce(2)
