"""Judgements of `doctor --gpus` on measurements that the test gives, and its kernels under the interpreter."""

import json

from emberline.engine.planning.gpu_check import ENOUGH, REDUCE_BYTES, memory, pairs, peers
from emberline.engine.planning.hardware import GPUS

GPU = GPUS["H100"]
LINK = GPU.link_gb_s * 1e9


def test_memory_is_compared_with_what_is_expected() -> None:
    expected = GPU.bandwidth_tb_s * 1e12
    assert memory(0, GPU, expected).status == "ok"
    slow = memory(1, GPU, (ENOUGH - 0.1) * expected)
    assert (slow.name, slow.status) == ("memory 1", "warn")
    assert "70% of what is expected" in slow.detail
    assert slow.fix


def test_peers_without_access_and_slow_or_damaged_links_are_told() -> None:
    assert peers(0, 1, GPU, True, LINK).status == "ok"
    assert "no peer access" in peers(0, 1, GPU, False, LINK / 20).detail
    assert peers(0, 1, GPU, True, LINK / 2).status == "warn"
    damaged = peers(0, 1, GPU, True, 0.0)
    assert (damaged.status, damaged.detail) == ("fail", "a copy arrived damaged")


def test_every_pair_of_nccl_is_judged_also_those_that_never_answered() -> None:
    fast = {"one": 0, "other": 1, "seconds": REDUCE_BYTES / LINK}
    wrong = {"one": 0, "other": 2, "problem": "a wrong sum"}
    found = {each.name: each for each in pairs(3, GPU, [json.dumps(fast), json.dumps(wrong)])}
    assert [found[f"nccl {pair}"].status for pair in ("0-1", "0-2", "1-2")] == ["ok", "fail", "fail"]
    assert found["nccl 0-2"].detail == "a wrong sum"
    assert "no answer" in found["nccl 1-2"].detail
    (shared,) = pairs(2, GPU, [json.dumps({**fast, "seconds": 1.0})], shared=True)
    assert (shared.status, "no link to judge" in shared.detail) == ("ok", True)
