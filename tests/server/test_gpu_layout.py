"""`serve --gpus`: the layout that the plan recommends becomes the configuration of the workers."""

from pathlib import Path

import pytest

from emberline.config import EngineConfig
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.server.gpu_layout import with_recommended_layout

ONE = [Path("/m")]


def eight_gpus() -> list[str]:
    return [str(n) for n in range(8)]


@pytest.mark.parametrize(("gpus", "count"), [("auto", 8), ("4", 4)])
def test_the_recommended_layout_is_taken(gpus: str, count: int) -> None:
    asked: list[int] = []

    def recommended(path: Path, n: int, engine: EngineConfig) -> Layout:
        asked.append(n)
        return Layout(tp=2, ep=True, dcp=2)

    engine = with_recommended_layout(EngineConfig(gpus=gpus, max_running=7), ONE, eight_gpus, recommended)
    assert asked == [count]
    assert (engine.tp, engine.pp, engine.ep, engine.dcp) == (2, 1, True, 2)
    assert (engine.replicas, engine.max_running) == (count // 2, 7)


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(BadInput, match="--gpus 9: this machine has 8"):
        with_recommended_layout(EngineConfig(gpus="9"), ONE, eight_gpus)
    with pytest.raises(BadInput, match="no GPU to run on"):
        with_recommended_layout(EngineConfig(gpus="auto", device="cpu"), ONE, eight_gpus)
    with pytest.raises(BadInput, match="leave --tp"):
        with_recommended_layout(EngineConfig(gpus="auto", tp=2), ONE, eight_gpus)
    with pytest.raises(BadInput, match="there are 2"):
        with_recommended_layout(EngineConfig(gpus="auto"), [*ONE, Path("/n")], eight_gpus)


def test_without_gpus_nothing_changes() -> None:
    assert with_recommended_layout(EngineConfig(tp=2), []) == EngineConfig(tp=2)
