"""Whether weights are packed in a GPU's memory: the rule of `auto`, what plans count, and the check before a start."""

import json
from pathlib import Path

import pytest

from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import parse_gpus
from emberline.engine.planning.layout_plan import Planner, Workload
from emberline.engine.runners.gpu.weight_storage import GIB, Room, choose
from emberline.engine.worker import build as worker
from emberline.engine.worker.main import parse_arguments
from emberline.kernels.gpu.lossless_packing import PACKING_BYTES
from emberline.protocol.parallel_layout import Layout
from emberline.weights.lossless_files import MANIFEST
from emberline.weights.lossless_folder import compress_folder
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.outline import OutlineCheckpoint
from tests.engine.planning.test_layout_plan import LLAMA_8B
from tests.weights.lossless_models import write_model


def room(kv: float, wanted: float, packed: float = 11.3) -> Room:
    return Room(15 * GIB, int(packed * GIB), int(kv * GIB), int(wanted * GIB))


@pytest.mark.parametrize(
    ("asked", "case", "compress", "reason"),
    [
        ("compressed", room(90, 10), True, "asked for: 3.7 GiB are saved"),
        ("compressed", room(1, 10, packed=15), False, "no BF16 matrix that becomes smaller"),
        ("auto", room(90, 10), False, "plain weights leave 90.0 GiB for KV, and 10.0 GiB are wanted"),
        ("auto", room(9, 10), True, "leave 9.0 GiB for KV, and 10.0 GiB are wanted: 3.7 GiB are saved"),
        ("auto", room(-3, 10), True, "leave 0.0 GiB"),
        ("auto", room(9, 10, packed=16), False, "no BF16 matrix"),
        ("auto", room(90, 10)._replace(few=4), True, "up to 4 sequences decode faster from them: 3.7 GiB"),
    ],
)
def test_the_choice_and_its_reason(asked, case: Room, compress: bool, reason: str) -> None:
    choice = choose(asked, case)
    assert choice.compress is compress
    assert reason in choice.reason


def test_a_plan_counts_packed_weights() -> None:
    source, plans = OutlineCheckpoint(LLAMA_8B), {}
    for weights, max_running in (("plain", 256), ("compressed", 256), ("auto", 256), ("auto", 16), ("auto", 8)):
        config = source.config
        limits = Limits(config.context_len, config.vocab_size, config.eos_ids, max_running, 8192)
        planner = Planner(source, parse_gpus("1xH200")[1], limits, weights=weights)
        plans[weights, max_running] = planner.plan(Layout(), Workload())
    plain, packed = plans["plain", 256], plans["compressed", 256]
    assert not plain.compressed
    assert packed.compressed
    assert packed.kv_bytes - plain.kv_bytes > 3.4 * GIB
    assert packed.weights_bytes < 0.76 * plain.weights_bytes
    # What packing takes while weights are read and steps are prepared is no room for KV.
    assert packed.stages[0].reserve_bytes - plain.stages[0].reserve_bytes == PACKING_BYTES
    assert plans["auto", 256].compressed  # 256 sequences of 4,096 tokens want more KV than plain weights leave
    assert not plans["auto", 16].compressed
    assert plans["auto", 8].compressed  # so few decode faster


def test_a_worker_that_is_told_to_verifies_before_it_loads(tmp_path: Path) -> None:
    compress_folder(write_model(tmp_path / "model"), tmp_path / "packed")
    document = json.loads((tmp_path / "packed" / MANIFEST).read_text())
    document["files"][0]["source"]["sha256"] = 64 * "0"
    (tmp_path / "packed" / MANIFEST).write_text(json.dumps(document))
    args = ["--model", str(tmp_path / "packed"), "--socket", "unix:x", "--device", "cpu", "--verify-weights"]
    with pytest.raises(BadCheckpoint, match=r"does not hold the weights of model\.safetensors"):
        worker.build(parse_arguments(args))
