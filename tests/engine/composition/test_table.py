"""The table of what works together: the page printed from it, and whoever refuses from it."""

from pathlib import Path

import msgspec
import pytest

from emberline.config import EngineConfig
from emberline.engine import composition
from emberline.engine.worker.build import build
from emberline.engine.worker.main import parse_arguments
from emberline.protocol.errors import BadInput
from emberline.supervisor.engine_workers import plan_workers
from emberline.supervisor.machine import Hardware

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
COMMAND = ["--model", "m", "--socket", "s"]
FLAGS = {  # that ask a worker for a feature
    "tp": ["--tp", "2"],
    "pp": ["--pp", "2"],
    "ep": ["--tp", "2", "--ep"],
    "dcp": ["--tp", "2", "--dcp", "2"],
    "grammar": ["--speculation", "grammar"],
    "suffix": ["--speculation", "suffix"],
    "draft_model": ["--draft-model", "folder"],
    "eagle3": ["--draft-head", "folder"],
    "roles": ["--role", "decode"],
    "joined_roles": ["--role", "decode", "--join", "http://10.0.0.1:8686"],
    "mooncake": ["--mooncake", "tcp"],
    "deterministic": ["--deterministic"],
}


def test_the_page_is_the_table() -> None:
    """`python -m emberline.engine.composition > docs/compatibility.md` writes it anew."""
    assert PAGE.read_text() == composition.page()


def test_refusals_name_features_once_and_say_why() -> None:
    for refusal in composition.REFUSALS:
        assert set(refusal.features) <= composition.BY_NAME.keys()
        assert len(set(refusal.features)) == len(refusal.features) >= 2
        assert refusal.reason
        assert refusal.instead
    assert len({frozenset(each.features) for each in composition.REFUSALS}) == len(composition.REFUSALS)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_ask_for_a_feature(name: str) -> None:
    asked = composition.asked(parse_arguments([*COMMAND, *FLAGS[name]]))
    assert name in asked
    assert asked <= {name, "tp"}
    assert composition.asked(parse_arguments(COMMAND), "cpu") == {"cpu"}


BY_FLAGS = [each for each in composition.REFUSALS if set(each.features) <= FLAGS.keys() | {"gpu"}]  # not by requests


@pytest.mark.parametrize("refusal", BY_FLAGS, ids=lambda each: "-".join(each.features))
def test_a_worker_refuses_at_once(refusal: composition.Refusal) -> None:
    """Before it opens its checkpoint, which does not exist here."""
    flags = [flag for name in refusal.features if name in FLAGS for flag in FLAGS[name]]
    names = composition.asked(parse_arguments([*COMMAND, *flags])) | set(refusal.features)
    with pytest.raises(BadInput, match="does not work with") as caught:
        composition.check(names)
    assert refusal.reason in str(caught.value)
    if "gpu" not in refusal.features:
        with pytest.raises(BadInput, match="does not work with"):
            build(parse_arguments([*COMMAND, *flags]))


def test_a_server_refuses_before_it_starts_workers() -> None:
    config = msgspec.convert({"draft_model": "m", "draft_head": "folder"}, EngineConfig, strict=False)
    with pytest.raises(BadInput, match="--draft-model does not work with --draft-head"):
        plan_workers(config, {"m": Path("m")}, hardware=Hardware(cores=2, free_bytes=1 << 30, gpus=()))
