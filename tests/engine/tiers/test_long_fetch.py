"""A long prefix is fetched over many steps: each handles a bounded number of blocks, whoever else decodes."""

import random
import time
from itertools import pairwise

import pytest

from emberline.engine.core.admission import AdmissionPolicy
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.tiers.step_budget import MAX_STEPS, STEP_S, StepBudget
from emberline.engine.tiers.tiering import Tiering
from emberline.engine.worker.build import build_scheduler
from emberline.kv.block_pool import BlockPool
from emberline.kv.cache import KVCache
from emberline.kv.prefix_index import PrefixIndex
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.kv.tiers.messages import BlocksFetched, Saved
from emberline.protocol import block_hash
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.token_ids import pack
from tests.engine.fakes import Drawn, Handle, request

FULL = KVGroup("full", (0,), 1, 1, "float16")
N_TOKENS = 16 * 1000
N_BATCH = 50  # blocks of a notice
VOCAB = 50


class MemoryTier:
    """In the place of `GroupTiers` and its own tiers: has every block that was saved, and brings them at once."""

    names, remote, max_saving = ("host",), False, 1 << 40
    changes, has_notices = (), False
    own = property(lambda self: self)

    def __init__(self):
        self.ids, self.out, self.fetches = set(), [], {}
        self.n_found = 0

    def notices(self):
        out, self.out = self.out, []
        return out

    def save(self, number, blocks):
        self.ids.update((block.group, block.key) for block in blocks)
        self.out.append(Saved(number))

    def find(self, group, keys):
        self.n_found += len(keys)
        return ["host" if (group, key) in self.ids else None for key in keys]

    def fetch(self, number, blocks):
        items = [block.item for block in blocks]
        self.out += [BlocksFetched(number, items[at : at + N_BATCH]) for at in range(0, len(items), N_BATCH)]

    def cancel(self, number):
        return ()

    def queues(self):
        return {"host": TierQueue(1e12)}, TierQueue(1e12)

    def used(self, *arguments):
        pass

    retire = remove = follow = used

    def stats(self):
        return ()


class CountingRunner:
    """Computes nothing."""

    def launch(self, plan):
        return Handle([Drawn(7) for row in plan.rows if row.samples])


def counted(monkeypatch, cls, name, counts, amount):
    real = getattr(cls, name)

    def count(self, *arguments, **named):
        result = real(self, *arguments, **named)
        counts[name] = counts.get(name, 0) + amount(result, *arguments)
        return result

    monkeypatch.setattr(cls, name, count)


@pytest.fixture(autouse=True)
def slow_prefill(monkeypatch):
    """As if measured: computing takes seconds, so that fetching pays and no deadline is missed."""
    rate = property(lambda self: 1000.0, lambda self, value: None)
    monkeypatch.setattr(AdmissionPolicy, "tokens_per_s", rate, raising=False)


def engine(max_running=8):
    cache = KVCache([FULL], [1400], chunk=512)
    tier = MemoryTier()
    limits = Limits(N_TOKENS + 100, VOCAB, (), max_running, 512)
    return StepLoop(build_scheduler(cache, limits, "fake", tiers=tier), CountingRunner()), cache, tier


def run(loop, now_s, until):
    """Steps until one delivers the end of this request; the time after that."""
    for _ in range(3000):
        now_s += STEP_S
        if any(delta.id == until and delta.finish for delta in loop.step(now_s)):
            return now_s
    raise AssertionError(f"{until} did not end")


def test_no_step_handles_more_than_its_share_of_a_long_fetch(monkeypatch):
    loop, cache, tier = engine()
    rng = random.Random(1)
    session = [rng.randrange(1, VOCAB) for _ in range(N_TOKENS)]
    loop.submit(request("first", session, max_tokens=2), 0.0)
    now_s = run(loop, 0.0, "first")
    loop.scheduler.purge(None, b"")
    for n in range(4):
        loop.submit(request(f"stream {n}", [n + 1] * 20, max_tokens=400), now_s)
    for _ in range(4):
        loop.step(now_s := now_s + STEP_S)

    counts = {}
    counted(monkeypatch, PrefixIndex, "put", counts, lambda result, keys, blocks, owners: len(blocks))
    counted(monkeypatch, PrefixIndex, "find", counts, lambda result, keys: len(keys))
    counted(monkeypatch, BlockPool, "hold_all", counts, lambda result, blocks: len(blocks))
    counted(monkeypatch, BlockPool, "drop_all", counts, lambda result, blocks, *rest: len(list(blocks)))
    loop.submit(request("again", session, max_tokens=2), now_s)
    seq = loop.scheduler._by_id["again"]
    seen, n_steps, started = {}, 0, False
    while not started:
        counts.clear()
        tier.n_found = 0
        deltas = loop.step(now_s := now_s + STEP_S)
        n_steps += 1
        assert n_steps < 200
        assert tier.n_found <= StepBudget.LOOKED_UP
        assert counts.get("find", 0) <= StepBudget.LOOKED_UP + StepBudget.TAKEN
        assert counts.get("hold_all", 0) <= StepBudget.TAKEN + 16, "blocks taken, and a few of streams"
        assert counts.get("put", 0) <= StepBudget.PUBLISHED + 16
        assert counts.get("drop_all", 0) <= 64, "what was fetched is handed over, not given back and found again"
        seen = {name: max(seen.get(name, 0), n) for name, n in counts.items()}
        assert len({delta.id for delta in deltas if delta.id.startswith("stream")}) == 4, "all others go on"
        started = any(delta.id == "again" for delta in deltas)
    assert seq.cached_by_tier == {"host": 16 * 999, "device": 0}
    assert n_steps >= 999 // StepBudget.TAKEN
    assert seen["put"] > 100
    now_s = run(loop, now_s, "again")
    for n in range(4):
        loop.abort(f"stream {n}")
    loop.step(now_s + 1)
    assert cache.n_used == 0


def test_what_was_fetched_and_cannot_be_admitted_is_given_back_in_parts():
    loop, cache, _ = engine()
    session = [1 + n % 40 for n in range(N_TOKENS)]
    loop.submit(request("first", session, max_tokens=2), 0.0)
    now_s = run(loop, 0.0, "first")
    loop.scheduler.purge(None, b"")
    loop.submit(request("again", session, max_tokens=2), now_s)
    fetches, scheduler = loop.scheduler.feature(Tiering).fetches, loop.scheduler
    admit, scheduler.admission.try_admit = scheduler.admission.try_admit, lambda plan, seq: False
    used = []
    while not used or used[-1]:
        loop.step(now_s := now_s + STEP_S)
        assert len(used) < 200
        used.append(cache.n_used if used or fetches._ended else 1)
    falls = [before - after for before, after in pairwise(used) if before > after]
    assert max(falls) <= StepBudget.PUBLISHED
    assert sum(falls) >= 900
    scheduler.admission.try_admit = admit
    now_s = run(loop, now_s, "again")
    until_s = time.monotonic() + 60
    while cache.n_used and time.monotonic() < until_s:  # the last block is being saved
        loop.step(now_s := now_s + STEP_S)
    assert cache.n_used == 0


def test_a_sequence_that_waits_for_the_fetch_of_another_does_not_keep_the_loop_busy():
    loop, _, tier = engine()
    session = [1 + n % 40 for n in range(N_TOKENS)]
    loop.submit(request("first", session, max_tokens=2), 0.0)
    now_s = run(loop, 0.0, "first")
    loop.scheduler.purge(None, b"")
    bring, held_back = tier.fetch, []
    tier.fetch = lambda number, blocks: held_back.append((number, list(blocks)))
    for name in ("a", "b"):
        loop.submit(request(name, session, max_tokens=2), now_s)
    for _ in range(40):
        loop.step(now_s := now_s + STEP_S / 100)
    assert sum(len(blocks) for _, blocks in held_back) == 999
    assert loop.blocked
    for number, blocks in held_back:
        bring(number, blocks)
    run(loop, now_s, "b")


def test_a_fetch_begins_while_the_request_is_queued():
    """Every slot is taken: the session's blocks arrive meanwhile, and it is admitted without waiting for a tier."""
    loop, cache, _ = engine(max_running=1)
    session = [1 + n % 40 for n in range(N_TOKENS)]
    loop.submit(request("first", session, max_tokens=2), 0.0)
    now_s = run(loop, 0.0, "first")
    loop.scheduler.purge(None, b"")
    loop.submit(request("running", [1] * 20, max_tokens=80), now_s)
    loop.step(now_s := now_s + STEP_S)
    loop.submit(request("session", session, max_tokens=2), now_s)
    for _ in range(30):
        deltas = loop.step(now_s := now_s + STEP_S)
        assert {delta.id for delta in deltas} <= {"running"}
    assert (loop.load.running, loop.load.waiting, loop.load.fetching) == (1, 1, 0)
    keys = block_hash.split(block_hash.chain(block_hash.root("fake", b""), pack(session)))
    assert sum(key in cache.groups[0].index for key in keys) == len(session) // 16 - 1
    run(loop, now_s, "session")


def test_a_long_step_may_handle_more():
    budget = StepBudget()
    budget.begin_step(0.0)
    budget.begin_step(2 * STEP_S)
    assert budget.take(10_000) == 2 * StepBudget.TAKEN
    assert budget.take(1) == 0
    budget.begin_step(1000.0)
    assert budget.publish(10_000) == MAX_STEPS * StepBudget.PUBLISHED
    assert budget.look_up(5) == 5
    budget.begin_step(2000.0)
    budget.begin_step(2000.16)  # a step of prompts, without streams: 8192 tokens on a GPU
    assert 16 * budget.take(10_000) >= 2 * 8192, "a prefix is fetched sooner than it is computed"
