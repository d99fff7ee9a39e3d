"""The GPU's mover and its pinned memory, with a driver that copies in host memory. On a GPU:
`python -m benchmarks.gpu.kv_tiers --only copy`."""

import ctypes
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.runners.gpu import tiers as module
from emberline.engine.runners.gpu.tiers import CudaError, CudaMover, PinnedAllocator, joined
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.mover import BlockCopy
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW


def test_neighbors_on_both_sides_are_one_copy():
    assert joined([(0, 100, 8), (8, 108, 8), (16, 200, 8), (24, 208, 8), (40, 216, 8)]) == [
        (0, 100, 16),
        (16, 200, 16),
        (40, 216, 8),
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_joined_copies_move_the_same_bytes(blocks):
    copies = [(8 * target, 1000 + 8 * source, 8) for target, source in blocks]
    moved = [(target + at, source + at) for target, source, n in joined(copies) for at in range(0, n, 8)]
    assert moved == [(target, source) for target, source, _ in copies]


COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


class Driver:
    """Copies at once, and records what is pinned."""

    def __init__(self, fails=False):
        self.fails, self.pinned, self.n_copies = fails, [], 0
        self.cuMemcpyHtoDAsync_v2 = self.cuMemcpyDtoHAsync_v2 = COPY(self.copy)

    def copy(self, target, source, n_bytes, stream):
        assert stream == Stream.cuda_stream
        if self.fails:
            return 700
        self.n_copies += 1
        ctypes.memmove(target, source, n_bytes)
        return 0

    def cuMemHostRegister_v2(self, address, n_bytes, flags):
        self.pinned.append((address.value, n_bytes.value))
        return 304 if self.fails else 0

    def cuGetErrorString(self, code, text):
        return 1


class Stream:
    cuda_stream = 7

    def __init__(self, device):
        assert device.index == 0 or device.type == "cpu"


class Event:
    def __init__(self, blocking):
        assert blocking

    def record(self, stream):
        assert stream.cuda_stream == 7

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "make_current", lambda device: None)


@pytest.mark.parametrize("n", [1, 7, 20])
def test_blocks_go_out_and_come_back(n):
    rng, driver, layouts = random.Random(n), Driver(), (FULL, WINDOW)
    pools = [torch.randn(24, *layout.block_shape) for layout in layouts]
    before = [pool.clone() for pool in pools]
    host = HostTier(1 << 20, [layout.block_bytes for layout in layouts], allocate=PinnedAllocator("cuda", driver))
    host.allocate_all()
    mover = CudaMover(pools, layouts, driver)
    wanted = []
    for group, layout in enumerate(layouts):
        slots = host.take(layout.block_bytes, n)
        wanted += [BlockCopy(group, block, slot) for block, slot in zip(rng.sample(range(1, 24), n), slots)]
    mover.save(wanted).wait()
    for pool in pools:
        pool.zero_()
    mover.load(wanted).wait()
    for group, (pool, was) in enumerate(zip(pools, before)):
        moved = {copy.block for copy in wanted if copy.group == group}
        for block in range(24):
            assert torch.equal(pool[block], was[block] if block in moved else torch.zeros_like(was[block]))
    assert all(address % 4096 == 0 for address, _ in driver.pinned)
    assert 2 <= driver.n_copies <= 4 * n


def test_a_copy_that_fails_raises():
    host = HostTier(1 << 20, [FULL.block_bytes])
    host.allocate_all()
    mover = CudaMover([torch.zeros(2, *FULL.block_shape)], [FULL], Driver(fails=True))
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync_v2: 700"):
        mover.save([BlockCopy(0, 1, *host.take(FULL.block_bytes, 1))])


def test_memory_that_cannot_be_pinned_degrades_the_tier():
    host = HostTier(1 << 20, [FULL.block_bytes], allocate=PinnedAllocator("cuda:0", Driver(fails=True)))
    host.allocate_all()
    assert "degraded" in host.stats().state
    assert host.capacity_bytes == 0
    assert host.take(FULL.block_bytes, 1) == []
