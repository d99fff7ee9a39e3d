"""Grammars, drafts and tiers at the same time, in a pool that is too small, with aborts at any moment: same tokens.

The fake model's tokens depend on all the KV that it attends to. A plain engine computes the same requests one by one.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.grammar.guide_jobs import GuideThreads, GuideTimings
from emberline.engine.grammar.guided_decoding import GuidedDecoding
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.protocol.request import ThinkingLimit
from emberline.protocol.token_ids import pack, unpack
from tests.engine.client import wait_until
from tests.engine.fakes import EOS, FULL, VOCAB, Drawn, FakeRunner, Handle, mix, request, window_group
from tests.engine.speculation.standin import StandinSpeculation, output_of
from tests.engine.tiers.test_tier_properties import ScriptedTier
from tests.examples import n_examples

MAX_STEPS = 4000
PERIOD = 4  # a text of the grammar is complete when it has a multiple of this many tokens
WHILE_FETCHING = -1
NO_FAULTS = dict.fromkeys(("lie", "lose", "miss", "hang"), 0.0)


class HashGrammar:
    """Which tokens may follow is decided by a hash of seed, position and last token; often one alone may."""

    n_words = 1

    def __init__(self, seed, n_most):
        self.seed, self.n_most, self.text = seed, n_most, []

    @property
    def complete(self):
        return len(self.text) > 0 and len(self.text) % PERIOD == 0

    @property
    def finished(self):
        return len(self.text) >= self.n_most

    def allowed(self):
        state = mix(mix(self.seed, len(self.text)), self.text[-1] if self.text else 0)
        if self.finished:
            return []
        return [1 + state % 6] if state % 3 == 0 else [token for token in range(1, VOCAB) if mix(state, token) % 3]

    def fill(self, bits):
        for token in self.allowed() or [1] * (not self.finished):
            bits[0] |= 1 << token

    def accept(self, token_id):
        if token_id not in (self.allowed() or [1] * (not self.finished)):
            return False
        self.text.append(token_id)
        return True

    def rollback(self, n):
        del self.text[len(self.text) - n :]

    def forced(self):
        allowed = self.allowed()
        return allowed if len(allowed) == 1 else []

    def fits(self, room):
        return not self.text or len(self.closing()) <= room

    def closing(self):
        n, before, ids = (PERIOD if not self.text else -len(self.text) % PERIOD), len(self.text), []
        for _ in range(n):
            ids.append((self.allowed() or [1])[0])
            self.text.append(ids[-1])
        self.rollback(len(self.text) - before)
        return ids


@dataclass
class Pending:
    encoded: bytes
    n_polls: int  # before it is compiled
    digest: str = "hash"

    @property
    def ready(self):
        self.n_polls -= 1
        return self.n_polls < 0

    def guide(self):
        return HashGrammar(self.encoded[0], PERIOD * (1 + self.encoded[1] % 8))


class Grammars:
    def __init__(self, rng=None):
        self.rng = rng

    def request(self, encoded):
        return Pending(encoded, 0 if self.rng is None else self.rng.choice([0, 0, 3, 20]))

    def learn(self, vocabulary):
        pass

    def close(self):
        pass


class LateThreads(GuideThreads):
    """Steps wait for their jobs, or do not."""

    def __init__(self, rng, share):
        super().__init__(GuideTimings(slow_cpu_s=60.0, step_wait_s=60.0))
        self.rng, self.share = rng, share

    def wait(self, n_jobs):
        if self.rng.random() >= self.share:
            super().wait(n_jobs)


class MaskedRunner(FakeRunner):
    """Draws once it has the masks: the token that the model prefers, or another one that is allowed."""

    def launch(self, plan):
        return MaskedHandle(self, plan)

    def compute(self, plan, masks):
        self.masks = {} if masks is None else dict(zip(masks.rows, masks.bits))
        self.n_drawn = 0
        return self._compute(plan)

    def draw(self, row, tables, end):
        drawn, place = super().draw(row, tables, end), self.n_drawn
        self.n_drawn += 1
        if place not in self.masks:
            return drawn
        allowed = [token for token in range(VOCAB) if self.masks[place][0] >> token & 1]
        if drawn.token_id in allowed:
            return drawn
        return Drawn(allowed[drawn.token_id % len(allowed)] if allowed else -1)


@dataclass
class MaskedHandle:
    runner: MaskedRunner
    plan: object
    computed: Handle | None = None

    def sample(self, masks=None):
        self.computed = self.runner.compute(self.plan, masks)

    def result(self):
        return self.computed.result()


@dataclass
class Asked:
    request: object
    at: int
    aborted: int | None  # so many steps later; WHILE_FETCHING: in the first step in which it may be fetched
    tokens: list = field(default_factory=list)
    end: object = None


def engine(n_blocks, layouts, max_running, in_flight, **features):
    cache = KVCache(layouts, [n_blocks] * len(layouts), chunk=32)
    limits = Limits(min(240, cache.capacity), VOCAB, (EOS,), max_running, 32)
    return StepLoop(build_scheduler(cache, limits, "fake", **features), MaskedRunner(cache), in_flight)


def arrivals(rng, n):
    heads = [[rng.randrange(1, VOCAB) for _ in range(150)] for _ in range(3)]
    found = {}
    for number in range(n):
        prompt = rng.choice(heads)[: rng.randrange(30, 151)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))
        ]
        options = {"max_tokens": rng.choice([1, 6, 25, 40]), "ignore_eos": rng.random() < 0.5}
        options |= {"logprobs": 0} if rng.random() < 0.3 else {}
        options |= {"min_tokens": rng.randrange(9)} if rng.random() < 0.3 else {}
        options |= {"bad_ids": (pack([2, 3]), pack([5]))} if rng.random() < 0.2 else {}
        made = request(f"r{number}", prompt, rng.randrange(4), **options)
        if rng.random() < 0.6:
            made = structs.replace(made, grammar=bytes([rng.randrange(256), rng.randrange(256)]))
        if rng.random() < 0.2:
            made = structs.replace(made, thinking_limit=ThinkingLimit(rng.randrange(1, 9), (6,), pack([1, 6])))
        aborted = rng.choice([rng.randrange(60), WHILE_FETCHING]) if rng.random() < 0.3 else None
        found[made.id] = Asked(made, rng.randrange(120), aborted)
    return found


def plain_replies(asked, layouts):
    found = {}
    for each in asked.values():
        loop = engine(40, layouts, 1, 1, grammars=Grammars())
        loop.submit(each.request, 0.0)
        found[each.request.id] = []
        while loop.busy:
            for delta in loop.step(0.0):
                found[delta.id] += unpack(delta.token_ids)
                finish = delta.finish
        found[each.request.id] = found[each.request.id], finish
    return found


def drafts_of(plain, wrong):
    def oracle(seq):
        said, done = plain[seq.id][0], output_of(seq)
        return said[len(done) :] if said[: len(done)] == done else [1, 2, 3]

    return StandinSpeculation(oracle, wrong, VOCAB)


@settings(max_examples=n_examples(32), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    late=st.sampled_from([0.0, 0.3, 1.0]),
    layouts=st.sampled_from([(FULL,), (FULL, window_group(20))]),
    n_blocks=st.integers(14, 24),
    in_flight=st.integers(1, 3),
    wrong=st.sampled_from([0, 2, 5]),
)
def test_tokens_do_not_depend_on_features(seed, late, layouts, n_blocks, in_flight, wrong):
    rng = random.Random(seed)
    asked = arrivals(rng, 10)
    plain = plain_replies(asked, layouts)
    tier, threads = ScriptedTier(rng, dict(NO_FAULTS, miss=0.1), False), LateThreads(rng, late)
    speculation = drafts_of(plain, wrong)
    features = {"grammars": Grammars(rng), "guide_threads": threads, "speculation": speculation, "tiers": tier}
    loop = engine(n_blocks, layouts, 4, in_flight, **features)
    tier.runner, guided = loop.runner, loop.scheduler.feature(GuidedDecoding)
    now_s, left = 0.0, set(asked)
    for step in range(MAX_STEPS):
        now_s += 0.001
        deltas = []
        for id, each in asked.items():
            if each.at == step:
                loop.submit(each.request, now_s)
            is_due = each.aborted is not None and each.at + each.aborted == step
            if each.aborted == WHILE_FETCHING and each.at < step and not each.tokens:
                is_due = loop.load.fetching > 0
            if is_due and (delta := loop.abort(id)):
                deltas.append(delta)
        tier.act()
        deltas += loop.step(now_s)
        for delta in deltas:
            assert asked[delta.id].end is None, "every request ends once"
            asked[delta.id].tokens += unpack(delta.token_ids)
            if delta.finish is not None:
                asked[delta.id].end = delta
                left.remove(delta.id)
        load = loop.load
        n_open = sum(each.at <= step and each.end is None for each in asked.values())
        assert load.running + load.waiting + load.fetching == n_open, "what has ended is not fetched any more"
        if not left:
            break
        if not deltas and guided.jobs:
            wait_until(lambda: any(job.done for job in guided.jobs))
    assert not left
    for id, each in asked.items():
        tokens, finish = plain[id]
        if each.end.finish == "cancelled":
            assert each.tokens == tokens[: len(each.tokens)]
        else:
            assert (each.tokens, each.end.finish) == (tokens, finish), each.end.error
    for _ in range(200):
        tier.act()
        loop.step(now_s)
    load = loop.load
    assert (guided.n_compiling, guided.jobs) == (0, [])
    assert not any(guided.forced_ids(n) or guided.mask(n) is not None for n in range(len(asked)))
    assert sorted(speculation.ended_ids) == sorted(asked)
    assert (load.running, load.waiting, load.waiting_tokens, load.fetching, load.kv_used_blocks) == (0, 0, 0, 0, 0)


def test_a_request_that_ends_is_fetched_no_longer():
    tier = ScriptedTier(random.Random(1), NO_FAULTS, False)
    tier.queues = lambda: ({"host": TierQueue(1e9)}, TierQueue(1e9))
    speculation = StandinSpeculation(lambda seq: [], 0, VOCAB)
    loop = engine(24, (FULL,), 4, 2, grammars=Grammars(), speculation=speculation, tiers=tier)
    tier.runner = loop.runner
    session, other = ([n * n * factor % VOCAB for n in range(230)] for factor in (3, 5))
    for id, prompt in (("a", session), ("b", other)):
        loop.submit(request(id, prompt, max_tokens=1), 0.0)
        while loop.busy or tier.saves:
            tier.act()
            loop.step(0.0)
    loop.submit(structs.replace(request("c", session), grammar=bytes([1, 1])), 0.0)
    while not loop.load.fetching:
        loop.step(0.0)
    assert tier.fetches
    assert loop.abort("c").finish == "cancelled"
    assert (loop.load.fetching, loop.load.kv_used_blocks, tier.fetches) == (0, 0, {})
