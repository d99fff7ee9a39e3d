"""Real threads, memory and files: a returning session comes from a tier with the same tokens, whatever that does."""

import argparse
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from emberline.engine.cache_control import StoredCache
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.tiers.opening import add_arguments, open_tiers
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.mover import HostMover
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import CacheCommand, TierStats
from emberline.protocol.token_ids import unpack
from tests.engine.client import wait_until
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, TorchFake

LIMITS = Limits(context_len=300, vocab_size=VOCAB, eos_ids=(0,), max_running=4, token_budget=48)
LAYOUTS = {"full": (FULL,), "window": (FULL, WINDOW), "window first": (WINDOW, FULL)}
N_BLOCKS = 24
WAIT_S = 60.0


class Engine:
    """A step loop over small pools, with the tiers that `open_tiers` or a test makes."""

    def __init__(self, layouts, make_tiers, steps_in_flight=1):
        self.layouts, sizes = layouts, [N_BLOCKS] * len(layouts)
        runner = TorchRunner(TorchFake(layouts), sizes, LIMITS)
        self.cache = KVCache(layouts, sizes, chunk=LIMITS.token_budget)
        self.tiers = GroupTiers(make_tiers(layouts, HostMover(runner.memory)))
        scheduler = build_scheduler(self.cache, LIMITS, "fake", tiers=self.tiers)
        self.loop = StepLoop(scheduler, runner, steps_in_flight)
        self.serial = 0

    def ask(self, *prompts):
        """Tokens checked; the tiers that the prompts came from."""
        wanted = {}
        for prompt in prompts:
            self.serial += 1
            wanted[f"r{self.serial}"] = prompt
            self.loop.submit(request(f"r{self.serial}", prompt, temperature=0.0, max_tokens=5), time.monotonic())
        tokens, usages = {id: [] for id in wanted}, {}
        until_s = time.monotonic() + WAIT_S
        while len(usages) < len(wanted):
            assert time.monotonic() < until_s, "a request did not end"
            for delta in self.loop.step(time.monotonic()):
                tokens[delta.id] += unpack(delta.token_ids)
                if delta.finish is not None:
                    assert delta.finish == "length"
                    usages[delta.id] = delta.usage.cached_by_tier
            time.sleep(0.0005)
        for id, prompt in wanted.items():
            ids, _ = expected(prompt, request("x", prompt, max_tokens=5).sampling, self.layouts, 300)
            assert tokens[id] == ids
        return list(usages.values())

    def settle(self):
        """Until everything that was published is saved and written."""
        until_s = time.monotonic() + WAIT_S
        while self.cache.n_used:
            assert time.monotonic() < until_s
            self.loop.step(time.monotonic())
            time.sleep(0.001)
        assert self.tiers.own.flush(WAIT_S)  # what is copied is told before it is handed to the tiers


def prompts(n=2, length=250):
    rng = random.Random(7)
    return [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(n)]


def arguments(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(rank=0)
    return parser.parse_args(list(flags))


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBERLINE_KV_KEY", "22" * 32)
    monkeypatch.setattr("emberline.kv.tiers.fetch_policy.UNRATED_S", WAIT_S)  # this machine may be busy
    made = []

    def make(layouts, *flags, steps_in_flight=1):
        args = arguments(*flags)
        make_tiers = partial(open_tiers, args, "fake")
        made.append(Engine(layouts, make_tiers, steps_in_flight))
        return made[-1]

    yield make
    for engine in made:
        engine.tiers.close()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tier", ["host", "disk", "both"])
def test_a_session_that_was_evicted_comes_from_a_tier(opened, tmp_path, name, tier):
    host = ("--kv-host-bytes", str(8 << 20)) if tier != "disk" else ()
    disk = ("--kv-disk-bytes", str(16 << 20), "--kv-disk-path", str(tmp_path)) if tier != "host" else ()
    engine = opened(LAYOUTS[name], *host, *disk)
    session, other = prompts()
    for prompt in (session, other):
        assert engine.ask(prompt) == [{"device": 0}]
        engine.settle()
    [cached] = engine.ask(session)
    assert sum(cached.values()) == 240
    assert cached["host" if host else "disk"] >= 100
    engine.settle()
    stats = {each.name: each for each in engine.tiers.own.stats()}
    assert stats[tier if tier != "both" else "disk"].blocks > 0


def test_the_disk_tier_is_warm_after_a_restart(opened, tmp_path):
    flags = ("--kv-disk-bytes", str(16 << 20), "--kv-disk-path", str(tmp_path))
    session = prompts()[0]
    first = opened((FULL, WINDOW), *flags)
    first.ask(session)
    first.settle()
    first.tiers.close()
    second = opened((FULL, WINDOW), *flags)
    [cached] = second.ask(session)
    assert cached == {"disk": 240, "device": 0}


def test_an_export_has_the_saves_that_wait_for_a_plan(opened, tmp_path):
    engine = opened((FULL,), "--kv-host-bytes", str(8 << 20), steps_in_flight=2)
    loop, stored = engine.loop, StoredCache("fake", engine.tiers, bytes(32))
    loop.submit(request("a", prompts()[0], max_tokens=5), 0.0)
    while not loop.scheduler.orders:
        loop.step(0.0)
    assert engine.tiers.own.flush(WAIT_S)
    n_saved = engine.tiers.own.all_tiers[0].stats().blocks
    with ThreadPoolExecutor(1) as pool:
        export = pool.submit(stored.run, CacheCommand(1, "export", b"", path=str(tmp_path / "export")))
        wait_until(lambda: export.done() or loop.scheduler.orders.urgent)
        while not export.done():
            loop.step(0.0)
            time.sleep(0.001)
    assert export.result()["exported"] > n_saved


def test_many_sessions_at_once(opened, tmp_path):
    engine = opened((FULL,), "--kv-host-bytes", str(8 << 20))
    rng = random.Random(2)
    heads = prompts(5, 120)
    for _ in range(6):
        some = [rng.choice(heads) + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
        engine.ask(*some)
    engine.settle()
    assert engine.loop.load.fetching == 0


class BadTier:
    """Says that it holds every block that was ever written to it, and then does what it is told to."""

    name, remote = "disk", False

    def __init__(self, behavior):
        self.behavior, self.ids = behavior, set()
        self.released = threading.Event()

    def holds(self, ids):
        if self.behavior == "holds":
            return [True] * len(ids)
        return [id in self.ids for id in ids]

    def held(self):
        return list(self.ids)

    def look_up(self, ids):
        pass

    def touch(self, ids):
        raise RuntimeError("broken")

    def read(self, ids, buffers):
        for buffer in buffers:
            buffer[:] = b"\xff" * len(buffer)
        if self.behavior == "hangs":
            self.released.wait(WAIT_S)
        if self.behavior == "raises":
            raise RuntimeError("broken")
        if self.behavior == "too few":
            return [True]
        return [False] * len(ids)

    def write(self, ids, buffers, metas):
        if self.behavior == "writing hangs":
            self.released.wait(WAIT_S)
        self.ids.update(ids)
        if self.behavior == "raises":
            raise RuntimeError("broken")

    def stats(self):
        return TierStats(self.name)

    def close(self):
        pass


@pytest.mark.parametrize("behavior", ["garbage", "raises", "too few", "holds", "hangs", "writing hangs"])
def test_no_tier_can_do_harm(behavior):
    tier = BadTier(behavior)

    def make(layouts, mover):
        sizes = [layout.block_bytes for layout in layouts]
        return TierManager(layouts, mover, HostTier(4 << 20, sizes, keep=False), [tier], 1e9)

    engine = Engine((FULL, WINDOW), make)
    session, other = prompts()
    for prompt in (session, other, session, other):
        engine.loop.scheduler.set_prefill_rate(1000.0)  # else a fetch may take a second
        engine.ask(prompt)
    assert engine.loop.load.fetching == 0
    tier.released.set()
    engine.settle()
    assert engine.cache.n_used == 0
    engine.tiers.close()


def test_flags_that_cannot_work_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("EMBERLINE_KV_KEY", raising=False)
    disk = ("--kv-disk-bytes", str(16 << 20), "--kv-disk-path", str(tmp_path))
    for flags, problem in (
        (disk[:2], "--kv-disk-path"),
        (disk, "EMBERLINE_KV_KEY"),
        (("--kv-host-bytes", "5000"), "at least"),
    ):
        with pytest.raises(BadInput, match=problem):
            open_tiers(arguments(*flags), "fake", (FULL,), mover=None)
    assert open_tiers(arguments(), "fake", (FULL,), mover=None) is None
