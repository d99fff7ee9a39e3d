"""The roofline is near what was measured on an H200, and a rank's part takes its part of the time."""

import msgspec
import pytest

from emberline.catalog.published_shapes import find_shape
from emberline.engine.planning.hardware import GPUS
from emberline.engine.planning.step_time import StageWork, Step, step_seconds
from emberline.models.registry import lay_out
from emberline.models.shard import Shard, loopback_groups
from emberline.protocol.parallel_layout import Layout
from emberline.weights.outline import OutlineCheckpoint
from tests.engine.planning.test_layout_plan import LLAMA_8B

H200 = GPUS["H200"]


@pytest.fixture(scope="module")
def llama():
    return lay_out(OutlineCheckpoint(LLAMA_8B))


def test_the_roofline_is_near_what_was_measured_on_an_h200(llama):
    for rows, measured_ms in ((1, 4.0), (64, 5.9)):  # at 576 tokens
        assert 1e3 * step_seconds(llama, H200, Step(rows, 1, 576)) == pytest.approx(measured_ms, rel=0.12)
    assert step_seconds(llama, H200, Step(1, 8192)) == pytest.approx(0.221, rel=0.12)


def test_kimi_cut_to_nine_layers_is_near_what_was_measured():
    document = msgspec.json.decode(msgspec.json.encode(find_shape("kimi-k2.5").config))
    document["text_config"]["num_hidden_layers"] = 9
    model = lay_out(OutlineCheckpoint(document))
    for rows, measured in ((1, 433), (8, 1644), (32, 2727), (64, 3711)):
        assert rows / step_seconds(model, H200, Step(rows, 1, 576)) == pytest.approx(measured, rel=0.4), rows


def test_fp8_is_multiplied_at_its_own_rate(llama):
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    quantized, step = lay_out(OutlineCheckpoint(LLAMA_8B | fp8)), Step(1, 8192)
    assert 0.5 < step_seconds(quantized, H200, step) / step_seconds(llama, H200, step) < 0.75


def part(document, layout, stage=0):
    source = OutlineCheckpoint(document)
    position = layout.position(stage * layout.tp)
    shard = Shard.of(source.config, layout, position, loopback_groups(layout, position))
    return StageWork(lay_out(source, shard=shard))


def test_a_rank_computes_its_part_and_talks(llama):
    step = Step(8, 1, 4096)
    whole, half = StageWork(llama).seconds(H200, step), part(LLAMA_8B, Layout(tp=2)).seconds(H200, step)
    assert whole.collectives == 0 < half.collectives
    assert half.compute == pytest.approx(whole.compute / 2, rel=0.1)
    stages = [part(LLAMA_8B, Layout(pp=2), stage).seconds(H200, step) for stage in (0, 1)]
    assert sum(stage.compute for stage in stages) == pytest.approx(whole.compute, rel=0.01)
    assert stages[0].collectives > 0 == stages[1].collectives, "the first sends hidden states to the second"


def test_layers_are_told_by_kind_and_add_up_to_the_step():
    document = find_shape("kimi-k2.5").config
    work, step = part(document, Layout(tp=8, dcp=8)), Step(8, 1, 4096)
    dense, experts = work.layers(H200, step)
    assert (dense.has_experts, dense.n, experts.has_experts, experts.n) == (False, 1, True, 60)
    assert dense.seconds.collectives == experts.seconds.collectives > 0
    whole = work.seconds(H200, step)
    for at in range(2):  # embedding and head take the rest
        assert 0.9 < (dense.seconds[at] + 60 * experts.seconds[at]) / whole[at] < 1


def test_context_parallelism_reads_a_part_of_the_cache_and_exchanges_outputs():
    document, step = find_shape("glm-4.7-flash").config, Step(32, 1, 60_000)
    plain, divided = (part(document, Layout(tp=4, dcp=n)).seconds(H200, step) for n in (1, 4))
    assert divided.compute < 0.6 * plain.compute
    assert divided.collectives > plain.collectives


def test_experts_on_whole_ranks_wait_for_the_busiest():
    document, step = find_shape("qwen3-30b-a3b").config, Step(8, 1, 1000)
    by_width, whole = (part(document, Layout(tp=4, ep=ep)).seconds(H200, step) for ep in (False, True))
    assert by_width.compute < whole.compute < 1.7 * by_width.compute
    everyone = Step(2000, 1, 10)
    by_width, whole = (part(document, Layout(tp=4, ep=ep)).seconds(H200, everyone) for ep in (False, True))
    assert whole.compute == pytest.approx(by_width.compute, rel=0.02), "every expert is chosen"
