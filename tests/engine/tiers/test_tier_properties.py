"""Saving and fetching under random schedules, with tiers that are slow, lose blocks, hang and lie: same tokens."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.kv.tiers.messages import BlocksFetched, LookedUp, Saved
from emberline.protocol.token_ids import unpack
from tests.engine.fakes import EOS, FULL, VOCAB, FakeRunner, LateRunner, expected, request, window_group
from tests.examples import n_examples

MAX_STEPS = 4000
LAYOUTS = [(FULL,), (FULL, window_group(20)), (window_group(40),)]


class ScriptedTier:
    """In the place of `GroupTiers` and its own tiers. Its threads do something when `act` is called; blocks of the
    fake runner are Python lists."""

    names = ("host",)
    changes, has_notices = (), False
    own = property(lambda self: self)

    def __init__(self, rng, faults, remote):
        self.rng, self.faults, self.remote = rng, faults, remote
        self.runner = None
        self.blocks = {}  # content by group and key
        self.saves, self.fetches, self.writing, self.look_ups = [], {}, {}, []
        self.out = []
        self.n_loaded = 0

    def notices(self):
        out, self.out = self.out, []
        return out

    @property
    def max_saving(self):
        return 1 << 20 if len(self.saves) < 3 else 0

    def save(self, number, blocks):
        self.saves.append((number, list(blocks)))

    def find(self, group, keys):
        lies = self.faults["lie"]
        return ["host" if (group, key) in self.blocks or self.rng.random() < lies else None for key in keys]

    def look_up(self, number, keys):
        self.look_ups.append(number)

    def fetch(self, number, blocks):
        added = list(blocks)
        assert added
        self.fetches.setdefault(number, []).extend(added)

    def cancel(self, number):
        self.fetches.pop(number, None)
        return [block.item for block in self.writing.get(number, ())]

    def retire(self, owner, session, first):
        pass

    def follow(self, retention):
        pass

    def used(self, keys, conversation):
        pass

    def remove(self, keys):
        self.blocks = {id: content for id, content in self.blocks.items() if id[1] not in keys}

    def queues(self):
        queue = TierQueue(1e9, 0, self.rng.choice([0.0, 0.0, 30.0]))
        return {"host": queue}, queue

    def stats(self):
        return ()

    def act(self):
        rng, content = self.rng, self.runner.blocks
        if rng.random() < self.faults["hang"]:
            return
        if self.look_ups and rng.random() < 0.5:
            self.out.append(LookedUp(self.look_ups.pop(0)))
        if self.saves and rng.random() < 0.7:
            number, batch = self.saves.pop(0)
            for saved in batch:
                if rng.random() >= self.faults["lose"]:
                    self.blocks[saved.group, saved.key] = list(content[saved.group][saved.block])
            self.out.append(Saved(number))
        for number in list(self.writing):  # what was begun is written, cancelled or not
            if rng.random() < 0.5:
                batch = self.writing.pop(number)
                for wanted in batch:
                    content[wanted.item[0]][wanted.block][:] = self.blocks[wanted.group, wanted.key]
                self.n_loaded += len(batch)
                self.out.append(BlocksFetched(number, [wanted.item for wanted in batch]))
        for number, left in list(self.fetches.items()):
            if left and number not in self.writing and rng.random() < 0.6:
                n = rng.randrange(1, 5)
                batch, self.fetches[number] = left[:n], left[n:]
                known = [
                    wanted
                    for wanted in batch
                    if (wanted.group, wanted.key) in self.blocks and rng.random() >= self.faults["miss"]
                ]
                missing = [wanted.item for wanted in batch if wanted not in known]
                if missing:
                    self.out.append(BlocksFetched(number, (), missing))
                if known:
                    self.writing[number] = known
                    for wanted in known:  # half-written
                        content[wanted.item[0]][wanted.block][:8] = [("garbage", -1)] * 8


def build(layouts, n_blocks, tier, late, in_flight):
    cache = KVCache(layouts, [n_blocks] * len(layouts), chunk=32)
    limits = Limits(min(400, cache.capacity), VOCAB, (EOS,), 4, 32)
    runner = (LateRunner if late else FakeRunner)(cache)
    if tier is not None:
        tier.runner = runner
    return StepLoop(build_scheduler(cache, limits, "fake", tiers=tier), runner, in_flight), cache, limits


faults = st.fixed_dictionaries(
    {
        "lie": st.sampled_from([0.0, 0.0, 0.0, 0.3]),
        "lose": st.sampled_from([0.0, 0.0, 0.2]),
        "miss": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "hang": st.sampled_from([0.0, 0.0, 0.5, 0.97]),
    }
)


@settings(max_examples=n_examples(120), deadline=None)
@given(
    st.integers(0, 1 << 30),
    faults,
    st.sampled_from(LAYOUTS),
    st.integers(16, 28),
    st.booleans(),
    st.integers(1, 2),
    st.booleans(),
)
def test_tokens_do_not_depend_on_tiers(seed, faults, layouts, n_blocks, late, in_flight, remote):
    rng = random.Random(seed)
    tier = ScriptedTier(rng, faults, remote)
    loop, cache, limits = build(layouts, n_blocks, tier, late, in_flight)
    if late:
        loop.runner.meanwhile = tier.act
    wanted, tokens, ended = {}, {}, {}
    heads = [[rng.randrange(VOCAB) for _ in range(rng.choice([90, 150]))] for _ in range(3)]
    for n in range(14):
        prompt = rng.choice(heads)[: rng.randrange(60, 151)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))
        ]
        prompt = prompt[: limits.context_len - 10]
        aborted = rng.randrange(60) if rng.random() < 0.15 else None
        wanted[f"r{n}"] = (
            rng.randrange(120),
            aborted,
            request(f"r{n}", prompt, rng.randrange(4), max_tokens=rng.choice([1, 5, 20])),
        )
    now_s = 0.0
    for step in range(MAX_STEPS):
        now_s += rng.choice([0.001, 0.02])
        deltas = []
        for id, (at, aborted, each) in wanted.items():
            if at == step:
                loop.submit(each, now_s)
            if aborted is not None and at + aborted == step and id not in ended and (delta := loop.abort(id)):
                deltas.append(delta)
        tier.act()
        deltas += loop.step(now_s)
        for delta in deltas:
            assert delta.id not in ended
            tokens.setdefault(delta.id, []).extend(unpack(delta.token_ids))
            if delta.finish is not None:
                ended[delta.id] = delta
        if len(ended) == len(wanted):
            break
    assert len(ended) == len(wanted)
    for id, (_, _, each) in wanted.items():
        if ended[id].finish != "cancelled":
            prompt = list(unpack(each.prompt_ids))
            assert (tokens[id], ended[id].finish) == expected(prompt, each.sampling, layouts, limits.context_len)
            assert sum(ended[id].usage.cached_by_tier.values()) < len(prompt)
    faults["hang"] = 0.0
    for _ in range(400):
        tier.act()
        loop.step(now_s)
    assert cache.n_used == 0
    load = loop.load
    assert (load.fetching, load.running, load.waiting) == (0, 0, 0)


def test_a_returning_session_is_fetched():
    rng = random.Random(3)
    tier = ScriptedTier(rng, dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0), False)
    tier.queues = lambda: ({"host": TierQueue(1e9)}, TierQueue(1e9))
    loop, _, _ = build((FULL,), 24, tier, False, 1)

    def ask(id, prompt):
        loop.submit(request(id, prompt, max_tokens=3), 0.0)
        got, now_s = [], 0.0
        while True:
            now_s += 0.001
            tier.act()
            for delta in loop.step(now_s):
                got += unpack(delta.token_ids)
                if delta.finish is not None:
                    return got, delta.usage.cached_by_tier

    session, other = [[(seed * i) % VOCAB for i in range(300)] for seed in (3, 5)]
    first, cached = ask("a", session)
    assert cached == {"device": 0}
    ask("b", other)
    again, cached = ask("c", session)
    assert again == first
    assert cached["host"] >= 200
    assert sum(cached.values()) == 288


def test_recomputing_starts_at_the_deadline():
    tier = ScriptedTier(random.Random(1), dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0), False)
    tier.queues = lambda: ({"host": TierQueue(1e9)}, TierQueue(1e9))
    loop, _, _ = build((FULL,), 24, tier, False, 1)
    session, other = [[(seed * i) % VOCAB for i in range(300)] for seed in (3, 5)]
    for id, prompt in (("a", session), ("b", other)):
        loop.submit(request(id, prompt, max_tokens=1), 0.0)
        while loop.busy:
            tier.act()
            loop.step(0.0)
    loop.scheduler.set_prefill_rate(1000.0)
    loop.submit(request("c", session, max_tokens=1), 1.0)
    loop.step(1.0)
    load = loop.load
    assert (load.fetching, load.waiting, load.running) == (1, 0, 0)
    assert load.fetching_tokens > 200
    assert 1.0 < loop.wake_s < 1.3  # it was to save 0.3 s
    assert loop.blocked
    loop.step(loop.wake_s)
    assert loop.load.fetching == 0
    deltas = []
    while loop.busy:
        deltas += loop.step(2.0)
    assert deltas[-1].usage.cached_by_tier == {"device": 0} or deltas[-1].usage.cached_by_tier["device"] < 100


def test_an_abort_while_fetching_gives_the_blocks_back():
    tier = ScriptedTier(random.Random(1), dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0), False)
    tier.queues = lambda: ({"host": TierQueue(1e9)}, TierQueue(1e9))
    loop, cache, _ = build((FULL,), 24, tier, False, 1)
    session, other = [[(seed * i) % VOCAB for i in range(300)] for seed in (3, 5)]
    for id, prompt in (("a", session), ("b", other)):
        loop.submit(request(id, prompt, max_tokens=1), 0.0)
        while loop.busy:
            tier.act()
            loop.step(0.0)
    while tier.saves or tier.out:
        tier.act()
        loop.step(0.0)
    loop.submit(request("c", session, max_tokens=1), 1.0)
    loop.step(1.0)
    while not tier.writing:
        tier.act()
    assert loop.abort("c").finish == "cancelled"
    assert 0 < cache.n_used <= 4  # what is being written
    while tier.writing:
        tier.act()
    loop.step(1.0)
    assert cache.n_used == 0


def test_blocks_in_the_middle_of_a_prefix_may_be_in_the_device_pool():
    """Eviction follows no chain: the device pool may lack blocks before some that it has."""
    tier = ScriptedTier(random.Random(1), dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0), False)
    tier.queues = lambda: ({"host": TierQueue(1e9)}, TierQueue(1e9))
    loop, cache, _ = build((FULL,), 40, tier, False, 1)
    session = [(3 * i) % VOCAB for i in range(300)]
    usages = []
    for id in ("a", "b"):
        loop.submit(request(id, session, max_tokens=1), 0.0)
        while loop.busy or tier.saves:
            tier.act()
            usages += [delta.usage for delta in loop.step(0.0) if delta.finish is not None]
        held = sorted(cache.groups[0].index.blocks(list(cache.groups[0].index)).tolist())
        cache._evict(cache.groups[0], held[2:9])
    assert usages[1].cached_by_tier == {"host": 7 * 16, "device": 11 * 16}
