"""Blocks on their way to the tiers: as fast as steps publish them, and referenced no longer than they are copied."""

import time

import pytest

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.tiers.saving import MAX_PINNED_SHARE, MAX_STEPS, PART_BYTES
from emberline.engine.tiers.tiering import Tiering
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.messages import Saved
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from tests.engine.fakes import EOS, VOCAB, FakeRunner, request

LLAMA_8B = KVGroup("full", tuple(range(32)), 8, 128, "bfloat16")  # 2 MiB a block
BUDGET = 8192  # tokens of a step: 1 GiB
WAIT_S = 60.0


class InstantMover:
    """Copies nothing: memory of this size is only reserved."""

    def save(self, copies):
        return self

    def wait(self):
        pass


class RecordedTiers(GroupTiers):
    def __init__(self, own):
        super().__init__(own)
        self.parts = {}  # blocks of each save, by number

    def save(self, number, blocks):
        self.parts[number] = blocks
        super().save(number, blocks)


class Engine:
    def __init__(self, n_blocks, host_bytes):
        self.cache = KVCache([LLAMA_8B], [n_blocks], chunk=BUDGET)
        self.host = HostTier(host_bytes, [LLAMA_8B.block_bytes])
        self.tiers = RecordedTiers(TierManager([LLAMA_8B], InstantMover(), self.host, [], 1e9))
        limits = Limits(4 * BUDGET, VOCAB, (EOS,), max_running=32, token_budget=BUDGET)
        scheduler = build_scheduler(self.cache, limits, "fake", tiers=self.tiers)
        self.loop = StepLoop(scheduler, FakeRunner(self.cache))

    def submit(self, n_tokens, max_tokens=1, number=0):
        prompt = [number % 7, number // 7, *(n // 7 % 7 for n in range(2, n_tokens))]
        id = str(number)
        self.loop.submit(request(id, prompt, max_tokens=max_tokens, ignore_eos=True), 0.0)

    def step(self):
        """A step, after which all that it has handed over is copied before the next one."""
        self.loop.step(time.monotonic())
        assert self.tiers.own.flush(WAIT_S)


@pytest.fixture
def engine(request):
    made = Engine(*request.param)
    yield made
    made.tiers.close()


@pytest.mark.parametrize("engine", [(16384, 16 << 30)], indirect=True)
def test_all_blocks_of_a_step_are_saved_before_the_next_one(engine):
    engine.submit(3 * BUDGET + 1)
    for n_steps in range(1, 4):
        engine.step()
        assert engine.host.stats().blocks == n_steps * BUDGET // BLOCK_TOKENS
    while engine.loop.busy:
        engine.step()
    assert engine.cache.n_used == 0


@pytest.mark.parametrize(
    ("engine", "most"),
    [((2049, 16 << 30), 2048 // MAX_PINNED_SHARE), ((16384, 1 << 30), (1 << 28) // LLAMA_8B.block_bytes)],
    indirect=["engine"],
    ids=["device", "host"],
)
def test_a_part_of_the_pools_at_most_is_being_saved(engine, most):
    """The rest is saved in later steps."""
    saver = engine.loop.scheduler.feature(Tiering).saver
    engine.submit(BUDGET + 1)
    engine.step()
    assert engine.host.stats().blocks == saver._n_pinned == most
    while engine.loop.busy:
        engine.step()
        assert saver._n_pinned <= most
    assert engine.host.stats().blocks == BUDGET // BLOCK_TOKENS


@pytest.mark.parametrize("engine", [(2049, 16 << 30)], indirect=True)
def test_the_last_blocks_are_saved_though_no_request_follows(engine):
    n_blocks = 2048 // MAX_PINNED_SHARE + 1
    engine.submit(n_blocks * BLOCK_TOKENS + 1)
    while engine.loop.busy:
        engine.step()
    assert engine.host.stats().blocks == n_blocks


@pytest.mark.parametrize("engine", [(16384, 16 << 30)], indirect=True)
def test_parts_are_released_as_they_are_copied(engine):
    engine.submit(BUDGET + 1)
    engine.step()
    taken = engine.tiers.notices()
    parts = [engine.tiers.parts[notice.number] for notice in taken if isinstance(notice, Saved)]
    assert sum(map(len, parts)) == BUDGET // BLOCK_TOKENS
    assert {len(part) * LLAMA_8B.block_bytes for part in parts} == {PART_BYTES}


@pytest.mark.parametrize("engine", [(16384, 16 << 30)], indirect=True)
def test_blocks_of_running_sequences_are_saved_together_and_soon(engine):
    for number in range(32):  # whose blocks are full in different steps
        engine.submit(3 + number % BLOCK_TOKENS, max_tokens=30 * BLOCK_TOKENS, number=number)
    used, steps = [], 10 * BLOCK_TOKENS
    for _ in range(steps):
        engine.step()
        used.append(engine.cache.n_used)
        if len(used) > MAX_STEPS + 2:
            in_work = 2 * 32  # the block that each sequence fills, and the next one
            assert engine.host.stats().blocks >= used[-MAX_STEPS - 3] - in_work
    assert len(engine.tiers.parts) <= steps // MAX_STEPS + 2
    for number in range(32):
        engine.loop.abort(str(number))
    while engine.loop.busy:
        engine.step()
    assert engine.cache.n_used == 0
    assert engine.host.stats().blocks == sum(map(len, engine.tiers.parts.values())) >= 32 * 9
