"""Layouts of rank groups: positions, checks and their messages, pipeline stages."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout, Position, StageSplit, divisors, nearest_divisors


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_rank_has_one_position(tp: int, pp: int) -> None:
    layout = Layout(tp=tp, pp=pp)
    positions = [layout.position(rank) for rank in range(layout.n_ranks)]
    assert len(set(positions)) == layout.n_ranks
    assert [layout.rank(position) for position in positions] == list(range(layout.n_ranks))
    for stage in range(pp):
        assert {positions[rank].stage for rank in layout.stage_ranks(stage)} == {stage}


def test_ranks_of_a_stage_are_neighbors() -> None:
    assert Layout(tp=4, pp=2).position(5) == Position(stage=1, tp_rank=1)
    assert list(Layout(tp=4, pp=2).stage_ranks(1)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("layout", "param", "says"),
    [
        (Layout(tp=0), "tp", "at least 1"),
        (Layout(pp=-1), "pp", "at least 1"),
        (Layout(tp=8, dcp=3), "dcp", "use 2 or 4"),
        (Layout(tp=64, pp=2), "tp", "128 ranks"),
        (Layout(ep=True), "ep", "--tp 2"),
    ],
)
def test_numbers_that_do_not_fit_each_other(layout: Layout, param: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as raised:
        layout.check()
    assert raised.value.param == param


def test_what_does_not_divide_is_named_with_the_nearest_that_do() -> None:
    with pytest.raises(BadInput, match=r"--tp 8 does not divide the model's 9 attention heads: use 3 or 9"):
        Layout(tp=8).check_divides("attention heads", 9)
    with pytest.raises(BadInput, match="at most 30"):
        Layout(pp=31).check_layers(30)
    Layout(tp=8, dcp=8, ep=True).check()
    Layout(tp=8).check_divides("attention heads", 64)


@given(st.integers(1, 500), st.integers(1, 600))
def test_nearest_divisors_divide(number: int, wanted: int) -> None:
    near = [int(text) for text in nearest_divisors(number, wanted).split(" or ")]
    assert near
    assert near
    assert all(number % n == 0 for n in near)
    assert not any(min(near) < n < max(near) for n in divisors(number))


@given(st.integers(1, 100), st.data())
def test_an_even_split_covers_each_layer_once(n_layers: int, data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, n_layers))
    split = StageSplit.even(n_layers, n_stages)
    split.check(n_layers, n_stages)
    assert [layer for stage in range(n_stages) for layer in split.layers(stage)] == list(range(n_layers))
    sizes = [len(split.layers(stage)) for stage in range(n_stages)]
    assert max(sizes) - min(sizes) <= 1
    assert split.is_first(0)
    assert split.is_last(n_stages - 1)


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 2, 4), (1, 2, 4), (0, 2, 5), (0, 3, 2, 4)])
def test_bounds_that_are_no_division(bounds: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="do not divide 4 layers"):
        StageSplit(bounds).check(4, 2 if len(bounds) == 3 else 3)


def test_a_layout_crosses_process_borders() -> None:
    layout = Layout(tp=8, dcp=8, ep=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout
    assert layout.name == "tp8 dcp8 ep"
    assert Layout().name == "one rank"
