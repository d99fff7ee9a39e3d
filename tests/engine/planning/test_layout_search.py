"""Which layouts are compared, which one is taken, and what is said where none fits."""

from functools import cache

import pytest

from emberline.catalog.published_shapes import find_shape, published_shapes
from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import GPUS
from emberline.engine.planning.layout_plan import Planner, Workload
from emberline.engine.planning.layout_search import compare, recommend, sensible_layouts
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.weights.outline import OutlineCheckpoint


def source_of(name):
    return OutlineCheckpoint(find_shape(name).config)


def limits_of(source):
    return Limits(source.config.context_len, source.config.vocab_size, (0,), 256, 8192)


@cache
def planner(name, gpu="H100"):
    source = source_of(name)
    return Planner(source, GPUS[gpu], limits_of(source))


def layouts(name, count, replicas=None):
    return set(sensible_layouts(source_of(name).config, GPUS["H100"], count, replicas))


def test_layouts_divide_the_gpus_and_the_model():
    assert layouts("llama-3.1-8b", 2) == {Layout(), Layout(tp=2), Layout(pp=2)}
    assert layouts("llama-3.1-8b", 4, replicas=1) == {Layout(tp=4), Layout(tp=2, pp=2), Layout(pp=4)}
    kimi = layouts("kimi-k2.5", 8, replicas=1)
    assert {Layout(tp=8), Layout(tp=8, dcp=8), Layout(tp=8, ep=True), Layout(tp=4, pp=2, dcp=4)} <= kimi
    assert Layout(tp=16) not in layouts("kimi-k2.5", 16), "tensor parallelism stays inside a machine"
    assert {layout.dcp for layout in layouts("llama-4-scout", 8)} == {1}, "its KV heads are divided already"


def test_a_small_model_gets_replicas_and_a_large_one_all_gpus():
    llama, busy = source_of("llama-3.1-8b"), Workload(input_tokens=512, output_tokens=256, concurrency=512)
    assert recommend(llama, GPUS["H100"], 2, limits_of(llama), busy).n_ranks == 1
    assert compare(planner("kimi-k2.5"), 8, Workload()).plans[0].gpus == 8


def test_the_workload_decides():
    kimi = planner("kimi-k2.5")
    long = compare(kimi, 8, Workload(input_tokens=150_000, output_tokens=2000, concurrency=4))
    assert long.plans[0].layout.dcp > 1, "without it the latents would be stored several times"
    assert "tp8: the KV cache holds" in " ".join(each.reason for each in long.refused)
    order = [plan.tokens_s for plan in long.plans]
    assert order == sorted(order, reverse=True)


def test_replicas_that_prefill_and_decode_are_as_many_as_asked():
    found = compare(planner("llama-3.1-8b"), 8, Workload(split=(1, 3)))
    assert {(plan.replicas, plan.gpus) for plan in found.plans} == {(4, 2)}
    assert {(plan.split.prefill, plan.split.decode) for plan in found.plans} == {(1, 3)}


@pytest.mark.parametrize(
    ("name", "gpu", "count", "says"),
    [
        (
            "kimi-k2.5",
            "H100",
            4,
            r"4 × H100 do not hold the model\. .* GiB too many.* What would: 8 GPUs, as many B200",
        ),
        ("llama-3.1-70b", "H100", 1, r"2 GPUs, as many H200 .*the model in FP8"),
        ("deepseek-v3", "H100", 8, r"16 GPUs, as many "),
    ],
)
def test_what_does_not_fit_says_by_how_much_and_what_would(name, gpu, count, says):
    with pytest.raises(BadInput, match=says):
        compare(planner(name, gpu), count, Workload())


def test_requests_longer_than_the_room_are_named():
    with pytest.raises(BadInput, match=r"holds [\d,]+ tokens, and a request has 3,000,512.*shorter requests"):
        compare(planner("llama-3.1-8b"), 1, Workload(input_tokens=3_000_000))


def test_a_layout_that_does_not_fit_the_gpus_is_refused():
    with pytest.raises(BadInput, match=r"tp8 takes 8 GPUs, which do not divide 4: give layouts of 4 GPUs"):
        compare(planner("llama-3.1-8b"), 4, Workload(), [Layout(tp=8)])
    with pytest.raises(BadInput, match=r"1:2 are 3 replicas, and 4 GPUs hold 2 of tp2"):
        compare(planner("llama-3.1-8b"), 4, Workload(split=(1, 2)), [Layout(tp=2)])
    with pytest.raises(BadInput, match="4 GPUs cannot be divided among 3 replicas: give a multiple of 3"):
        compare(planner("llama-3.1-8b"), 4, Workload(split=(1, 2)))


@pytest.mark.parametrize("shape", published_shapes(), ids=lambda shape: shape.id.rpartition("/")[2])
def test_every_published_model_can_be_planned(shape):
    source = OutlineCheckpoint(shape.config)
    tp = next(n for n in (4, 2, 1) if source.config.n_heads % n == 0)
    layout = Layout(tp=tp, pp=2, ep=source.config.moe is not None)
    found = compare(Planner(source, GPUS["B200"], limits_of(source)), layout.n_ranks, Workload(), [layout])
    assert min(plan.kv_tokens for plan in found.plans) > 50_000
