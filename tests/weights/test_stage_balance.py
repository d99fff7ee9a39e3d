"""Pipeline stages: no division of the layers has a faster slowest stage; the ends hold more than layers."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.catalog.published_shapes import find_shape
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import StageSplit
from emberline.weights.outline import OutlineCheckpoint
from emberline.weights.stage_balance import BALANCED, Cost, ModelCost, balance_stages, predict_cost, split_stages

GIB = 1 << 30
costs = st.builds(Cost, st.integers(0, 50).map(float), st.integers(0, 50))


@given(st.lists(costs, min_size=1, max_size=9), costs, costs, st.data())
def test_of_the_balanced_divisions_none_leaves_more_memory(layers, embedding, head, data):
    cost, n = ModelCost(layers, embedding, head), len(layers)
    n_stages = data.draw(st.integers(1, n))
    split = balance_stages(cost, n_stages)
    split.check(n, n_stages)

    def rank(stages):
        times, sizes = zip(*stages, strict=True)
        return max(sizes), max(times), sum(size**2 for size in sizes)

    every = [cost.stages(StageSplit((0, *inner, n))) for inner in combinations(range(1, n), n_stages - 1)]
    slowest = [max(stage.time for stage in stages) for stages in every]
    mean = sum(stage.time for stage in every[0]) / n_stages
    balanced = [each for each, time in zip(every, slowest, strict=True) if time <= max(min(slowest), BALANCED * mean)]
    assert rank(cost.stages(split)) == min(map(rank, balanced))


@given(st.lists(st.booleans(), min_size=2, max_size=12), st.integers(2, 13))
def test_every_stage_has_layers_of_every_kind_of_cache(local, n_stages):
    cost = ModelCost([Cost(1.0, 1)] * len(local), Cost(0, 0), Cost(0, 0), local)

    def possible(inner):
        bounds = (0, *inner, len(local))
        return all(set(local[a:b]) == set(local) for a, b in pairwise(bounds))

    divisions = combinations(range(1, len(local)), n_stages - 1)
    if any(map(possible, divisions)):
        assert possible(balance_stages(cost, n_stages).bounds[1:-1])
    else:
        with pytest.raises(BadInput, match=f"--pp {n_stages}: each stage needs .* use at most"):
            balance_stages(cost, n_stages)


def test_a_stage_has_its_layers_and_the_ends_more():
    cost = ModelCost([Cost(1, 10), Cost(2, 20), Cost(3, 30)], Cost(0, 5), Cost(4, 7))
    assert cost.stages(StageSplit((0, 2, 3))) == [Cost(3, 35), Cost(7, 37)]
    assert cost.imbalance(StageSplit((0, 2, 3))) == pytest.approx(7 / 5)
    assert ModelCost([Cost(0, 1)], Cost(0, 0), Cost(0, 0)).imbalance(StageSplit((0, 1))) == 1


@pytest.fixture(scope="module")
def kimi():
    return OutlineCheckpoint(find_shape("kimi-k2.5").config)


def test_kimi_in_eight_stages_is_balanced(kimi):
    cost, split = predict_cost(kimi), split_stages(kimi, 8)
    assert cost.imbalance(split) <= 1.05 < cost.imbalance(StageSplit.even(61, 8))
    assert split.layers(0) == range(8), "the dense layer is one of eight, and the embedding takes no time"
    assert len(split.layers(7)) == 6, "the head takes the time of one layer with experts"
    dense, moe = (cost.layers[n].n_bytes / GIB for n in (0, 1))
    assert (dense, moe) == (pytest.approx(0.93, rel=0.02), pytest.approx(9.14, rel=0.02))
    assert cost.head.n_bytes / GIB == pytest.approx(2.19, rel=0.01)
    assert max(stage.n_bytes for stage in cost.stages(split)) / GIB <= 73.2


def test_a_stage_may_be_slightly_slower_where_that_leaves_more_memory(kimi):
    cost = predict_cost(kimi)
    stages = cost.stages(split_stages(kimi, 4))
    assert max(stage.n_bytes for stage in stages) / GIB == pytest.approx(2 * 70.1, abs=0.2)
    assert 1.05 < cost.imbalance(split_stages(kimi, 4)) <= 1.06


def test_where_a_step_reads_every_expert_whole_layers_cannot_be_balanced_better_than_60_in_8(kimi):
    """Eight layers with experts in one stage, 7.54 on average: the head is too small to fill a stage of seven."""
    cost = predict_cost(kimi, rows=256)
    assert cost.imbalance(balance_stages(cost, 8)) == pytest.approx(8 / 7.54, abs=0.01)


def test_stages_of_a_deep_model_are_found_quickly():
    cost = ModelCost([Cost(n % 7, n % 5) for n in range(500)], Cost(0, 9), Cost(9, 9))
    bounds = balance_stages(cost, 64).bounds
    assert all(start < stop for start, stop in pairwise(bounds))
