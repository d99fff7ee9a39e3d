import pytest
import torch

from emberline.engine.gpu.memory_budget import GIB, RESERVE_BYTES, device_memory_budget, runner_state_bytes
from emberline.engine.scheduler.limits import Limits
from emberline.protocol.errors import BadInput
from tests.engine.gpu.test_runner import FULL, WINDOW, Padded, runner_of

WEIGHTS, WORKSPACE, STATE = 15 * GIB, GIB // 2, GIB // 8


def plan(kv_bytes=None, total=140 * GIB, elsewhere=GIB // 2):
    allocated = WEIGHTS + WORKSPACE  # the runner state is not allocated yet
    return device_memory_budget(total, total - elsewhere - allocated, WEIGHTS, WORKSPACE, STATE, allocated, kv_bytes)


def test_the_kv_cache_gets_the_remaining_memory():
    made = plan()
    assert made.elsewhere == GIB // 2
    assert made.free == 0
    assert made.kv == 140 * GIB - GIB // 2 - WEIGHTS - WORKSPACE - STATE - RESERVE_BYTES
    assert "weights 15.00, kv 123.44" in made.table()


def test_requested_kv_bytes_are_used():
    made = plan(kv_bytes=8 * GIB)
    assert made.kv == 8 * GIB
    assert made.free == plan().kv - 8 * GIB


@pytest.mark.parametrize("asked", [dict(kv_bytes=130 * GIB), dict(total=16 * GIB)])
def test_a_budget_that_does_not_fit_is_refused(asked):
    with pytest.raises(BadInput, match=r"weights take 15\.0, a step 1\.1: that leaves"):
        plan(**asked)


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
