"""Features of the scheduler: which of their methods are called, how often, and what they may ask for."""

from collections import Counter

import pytest

from emberline.engine.core.feature import Feature, Moments
from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.sequence import Hold, Sequence
from emberline.engine.core.step_loop import StepLoop
from emberline.kv.cache import KVCache
from emberline.protocol.errors import BadInput
from emberline.protocol.request import SamplingParams
from emberline.protocol.token_ids import unpack
from tests.engine.fakes import EOS, FULL, VOCAB, FakeRunner, expected, request

PER_STEP = ("advance", "before_plan", "catch_up")
PER_SEQUENCE = ("check", "enter", "queued", "admitted", "leave")


class Counting(Feature):
    """Counts calls."""

    def __init__(self):
        self.calls = Counter()
        self.first_blocks = Counter()  # published, by request

    def check(self, request):
        self.calls["check"] += 1

    def enter(self, seq, now_s):
        self.calls["enter"] += 1

    def queued(self, seq):
        self.calls["queued"] += 1

    def admitted(self, seq, n_hit):
        self.calls["admitted"] += 1

    def published(self, new):
        self.calls["published"] += 1
        for seq, first, end in new:
            assert self.first_blocks[seq.id] == first, "blocks are published one after the other"
            self.first_blocks[seq.id] = end

    def leave(self, seq):
        self.calls["leave"] += 1

    def advance(self, now_s, device_waits):
        self.calls["advance"] += 1

    def before_plan(self):
        self.calls["before_plan"] += 1

    def planned(self, plan):
        self.calls["planned"] += 1

    def catch_up(self):
        self.calls["catch_up"] += 1


def loop_of(*features, n_blocks=400, max_running=32, in_flight=1):
    cache = KVCache((FULL,), [n_blocks], chunk=64)
    limits = Limits(200, VOCAB, (EOS,), max_running, 64)
    return StepLoop(Scheduler(cache, limits, "fake", features), FakeRunner(cache), in_flight)


def finish(loop, limit=500):
    said = {}
    for _ in range(limit):
        for delta in loop.step(0.0):
            said.setdefault(delta.id, []).extend(unpack(delta.token_ids))
        if not loop.busy:
            return said
    raise AssertionError("it never ends")


def answer(ids, max_tokens=4):
    return expected(ids, SamplingParams(ignore_eos=True, max_tokens=max_tokens), (FULL,), 200)[0]


def test_a_sequence_has_few_fields():
    """What a feature keeps of a sequence is in the feature: a new field is needed by the core, or has no place here."""
    assert len(Sequence.__slots__) <= 30


def test_a_moment_that_no_feature_implements_has_nothing_to_call():
    assert set(map(len, vars(Moments([Feature(), Feature()])).values())) == {0}
    known = vars(Moments([Feature(), Counting()]))
    assert {name for name, calls in known.items() if calls} == {*PER_STEP, *PER_SEQUENCE, "planned", "published"}


def test_moments_come_once_per_step_and_once_per_sequence():
    feature = Counting()
    loop = loop_of(feature)
    for n in range(20):
        loop.submit(request(f"{n}", [n % 7, 1, 2], max_tokens=40), 0.0)
    assert feature.calls == {"check": 20, "enter": 20, "queued": 20}
    for n_steps in range(1, 11):
        loop.step(0.0)
        assert {feature.calls[name] for name in PER_STEP} == {n_steps}
        assert feature.calls["planned"] == sum(bool(plan.others) for plan in loop.runner.plans) < max(n_steps, 2)
    assert len(loop.runner.plans[-1].rows) == 20
    finish(loop)
    assert {feature.calls[name] for name in PER_SEQUENCE} == {20}
    assert set(feature.first_blocks.values()) == {2}
    assert feature.calls["published"] == 2, "blocks that become full in one step come together"


def test_a_request_that_a_feature_refuses_leaves_nothing():
    class Refusing(Counting):
        def check(self, request):
            if request.session == "no":
                raise BadInput("not this one", param="session")

    feature = Refusing()
    loop = loop_of(feature)
    with pytest.raises(BadInput):
        loop.submit(request("a", [1, 2], session="no"), 0.0)
    assert not loop.busy
    assert not feature.calls
    loop.submit(request("a", [1, 2]), 0.0)
    assert finish(loop) == {"a": answer([1, 2])}


class Holding(Feature):
    """Holds the sequences of one session until `go`."""

    def __init__(self):
        self.held = []

    def enter(self, seq, now_s):
        if seq.request.session == "held":
            seq.holds |= Hold.GRAMMAR
            self.held.append(seq)

    def go(self):
        for seq in self.held:
            seq.holds &= ~Hold.GRAMMAR


def test_others_pass_a_sequence_that_is_held():
    feature = Holding()
    loop = loop_of(feature, max_running=1)
    loop.submit(request("held", [1, 2, 3], session="held"), 0.0)
    assert loop.blocked
    loop.submit(request("plain", [3, 2, 1]), 0.0)
    assert not loop.blocked
    said = {}
    for _ in range(6):
        for delta in loop.step(0.0):
            said.setdefault(delta.id, []).extend(unpack(delta.token_ids))
    assert said == {"plain": answer([3, 2, 1])}
    feature.go()
    assert finish(loop) == {"held": answer([1, 2, 3])}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_parked_sequence_is_in_no_queue_and_goes_on_where_it_was(in_flight):
    class Parking(Feature):
        def enter(self, seq, now_s):
            self.seq = seq

    feature = Parking()
    loop = loop_of(feature, in_flight=in_flight)
    ids = [n % 7 for n in range(40)]
    loop.submit(request("a", ids, max_tokens=20), 0.0)
    said = [token for _ in range(6) for delta in loop.step(0.0) for token in unpack(delta.token_ids)]
    assert 0 < len(said) < 20
    feature.core.park(feature.seq, Hold.FETCH)
    load = loop.load
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks) == (0, 0, 0, 0)
    assert [seq.state for seq in loop.scheduler.snapshot()] == ["fetching"]
    for _ in range(3):
        assert not loop.step(0.0), "what was sampled for it meanwhile is ignored"
    feature.core.unpark(feature.seq, Hold.FETCH)
    assert said + finish(loop)["a"] == answer(ids, 20)


def test_a_parked_sequence_may_be_aborted():
    class Parking(Feature):
        def queued(self, seq):
            self.core.park(seq, Hold.TRANSFER)

    loop = loop_of(Parking())
    loop.submit(request("a", [1, 2, 3]), 0.0)
    assert [seq.state for seq in loop.scheduler.snapshot()] == ["transferring"]
    assert loop.abort("a").finish == "cancelled"
    assert not loop.busy
    assert loop.load.waiting_tokens == 0


def test_the_engine_says_which_feature_it_has():
    feature = Holding()
    scheduler = loop_of(feature).scheduler
    assert scheduler.feature(Holding) is feature
    with pytest.raises(LookupError, match="Counting"):
        scheduler.feature(Counting)


def test_a_notice_wakes_the_loop_and_a_feature_asks_for_a_load_report():
    class Noticing(Feature):
        notices, due_s = [], 7.0

        def has_notices(self):
            return bool(self.notices)

        def advance(self, now_s, device_waits):
            self.notices.clear()

        def report_s(self):
            return self.due_s

    loop = loop_of(Noticing(), Feature())
    assert (loop.busy, loop.report_s, loop_of().report_s) == (False, 7.0, float("inf"))
    Noticing.notices.append("a fetch is done")
    assert loop.busy
    assert not loop.blocked
    loop.step(0.0)
    assert not loop.busy
