import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.runners.gpu.memory_budget import (
    CONTEXT_BYTES,
    GIB,
    device_memory_budget,
    reserve_bytes,
    runner_state_bytes,
)
from emberline.engine.runners.gpu.shapes import max_graphs
from emberline.protocol.errors import BadInput
from tests.engine.runners.gpu.test_runner import FULL, WINDOW, Padded, runner_of

WEIGHTS, WORKSPACE, STATE, RESERVE = 15 * GIB, GIB // 2, GIB // 8, 448 << 20


def plan(kv_bytes=None, total=140 * GIB, elsewhere=GIB // 2, share=1.0):
    allocated = WEIGHTS + WORKSPACE  # the runner state is not allocated yet
    free = total - elsewhere - allocated
    return device_memory_budget(total, free, WEIGHTS, WORKSPACE, STATE, RESERVE, allocated, kv_bytes, share)


def test_the_kv_cache_gets_the_remaining_memory():
    made = plan()
    assert made.elsewhere == GIB // 2
    assert made.free == 0
    assert made.kv == 140 * GIB - GIB // 2 - WEIGHTS - WORKSPACE - STATE - RESERVE
    assert "weights 15.00, kv 123.44" in made.table()


def test_requested_kv_bytes_are_used():
    made = plan(kv_bytes=8 * GIB)
    assert made.kv == 8 * GIB
    assert made.free == plan().kv - 8 * GIB


@pytest.mark.parametrize(
    ("asked", "short"),
    [
        (dict(kv_bytes=130 * GIB), r"that leaves 123\.4 for KV, 6\.6 fewer than asked"),
        (dict(total=16 * GIB), r"0\.6 too many, before any KV"),
    ],
)
def test_a_budget_that_does_not_fit_is_refused_and_says_by_how_much(asked, short):
    with pytest.raises(BadInput, match=rf"weights take 15\.0, a step 1\.1: {short}; give a smaller --kv-bytes"):
        plan(**asked)


def test_a_share_leaves_the_rest_of_the_device_to_others():
    half = plan(share=0.5)
    assert half.kv == 70 * GIB - CONTEXT_BYTES - WEIGHTS - WORKSPACE - STATE - RESERVE
    assert plan(share=0.5, elsewhere=60 * GIB).kv == half.kv, "another process may have taken its own share already"
    assert plan(share=0.5, elsewhere=90 * GIB).kv < half.kv, "or more than that"
    with pytest.raises(BadInput, match="a larger --gpu-memory-share"):
        plan(share=0.1)


def test_the_reserve_follows_the_model_and_the_limits():
    llama_8b = reserve_bytes(Limits(131072, 128256, (0,), 256, 8192), 1, 32 * 260)
    assert llama_8b == pytest.approx(448 << 20, rel=0.05), "as measured"
    assert reserve_bytes(Limits(8192, 49152, (0,), 256, 8192), 1, 9 * 132) < llama_8b - (100 << 20)
    assert reserve_bytes(Limits(131072, 128256, (0,), 256, 8192), 1, 32 * 260, dense_layers=64) > llama_8b + (100 << 20)
    twice_as_wide = reserve_bytes(Limits(131072, 128256, (0,), 256, 8192), 1, 64 * 260)
    assert twice_as_wide > llama_8b + 2 * 8192 * 32 * 128 * 2
    assert reserve_bytes(Limits(131072, 128256, (0,), 512, 16384), 1, 32 * 260) > twice_as_wide


def test_graphs_are_counted_in_the_reserve():
    for most in (1, 4, 80, 256, 600):
        assert len(runner_of(max_running=most).step_kinds()) <= max_graphs(most)


def test_runner_state_stays_within_its_estimate():
    runner = runner_of(Padded((FULL, WINDOW)), max_running=40)
    sizes = {}
    todo, seen = [runner._slots, runner._decode, runner._mixed, runner._sampled], set()
    while todo:
        thing = todo.pop()
        if isinstance(thing, torch.Tensor):
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif id(thing) not in seen and type(thing).__module__.startswith("emberline"):
            seen.add(id(thing))
            fields = getattr(thing, "__slots__", None) or vars(thing)
            todo += [getattr(thing, name) for name in fields if name not in ("_upload", "_sharing", "sampler")]
    assert len(sizes) > 8
    assert sum(sizes.values()) <= runner_state_bytes(Limits(200, 7, (0,), 40, 64), 2)
