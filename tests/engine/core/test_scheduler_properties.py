"""Invariants of the scheduler under random requests, orders and pool sizes."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kv.block_pool import NULL_BLOCK
from emberline.protocol.errors import ContextExceeded, Internal
from emberline.protocol.token_ids import unpack
from tests.engine.fakes import FULL, VOCAB, FakeRunner, expected, loop_of, request, window_group
from tests.examples import n_examples

MAX_STEPS = 3000


@dataclass
class Arrival:
    step: int
    prompt: list
    priority: int
    salt: bytes
    sampling: dict
    deadline: int | None
    abort_after: int | None
    nan: bool
    id: str = ""
    tokens: list = field(default_factory=list)


prompts = st.builds(
    lambda start, n, tail: [(start + i) % VOCAB for i in range(n)] + tail,
    st.integers(0, 1),
    st.sampled_from([0, 5, 16, 31, 32, 33, 48]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=prompts,
    priority=st.integers(0, 3),
    salt=st.sampled_from([b"", b"b"]),
    sampling=st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([1, 3, 17, 40, None])},
        optional={"ignore_eos": st.booleans(), "min_tokens": st.integers(0, 6), "stop_ids": st.just((3,))},
    ),
    deadline=st.none() | st.integers(0, 60),
    abort_after=st.none() | st.integers(0, 40),
    nan=st.integers(0, 9).map(lambda n: n == 0),
)
setups = st.fixed_dictionaries(
    {
        "layouts": st.sampled_from(
            [(FULL,), (window_group(8),), (FULL, window_group(20)), (FULL, window_group(16), window_group(37))]
        ),
        "n_blocks": st.integers(4, 24),
        "context_len": st.integers(20, 120),
        "max_running": st.integers(1, 5),
        "token_budget": st.integers(5, 64),
    }
)


class InvariantChecker:
    """Runs a scenario and checks the invariants after every step."""

    def __init__(self, setup, steps_in_flight=1, speculation=None, runner=FakeRunner):
        # Prompts are looked up block by block: else they are too short for more than one lookup.
        self.loop = loop_of(steps_in_flight, runner, keys_at_once=1, look_ups=1, speculation=speculation, **setup)
        self.scheduler, self.runner = self.loop.scheduler, self.loop.runner
        self.cache = self.scheduler.cache
        self.accepted = {}
        self.ended = {}

    def submit(self, arrival, step):
        wanted = request(
            arrival.id, arrival.prompt, arrival.priority, arrival.salt, arrival.deadline, **arrival.sampling
        )
        if len(arrival.prompt) >= self.scheduler.limits.context_len:
            with pytest.raises(ContextExceeded):
                self.scheduler.submit(wanted, step)
            return
        self.scheduler.submit(wanted, step)
        self.accepted[arrival.id] = (arrival, wanted)
        if arrival.nan:
            self.runner.nan_ids.add(arrival.id)

    def step(self, now):
        steps, in_flight = len(self.runner.plans), self.loop.n_in_flight
        was_busy = self.loop.busy
        self.take(self.loop.step(now))
        for plan in self.runner.plans[steps:]:
            limits = self.scheduler.limits
            assert all(row.start < row.end for row in plan.rows)
            assert plan.n_tokens == sum(row.stop - row.start for row in plan.rows) <= limits.token_budget
            assert plan.n_drafts == sum(row.n_drafts for row in plan.rows)
            assert len(plan.rows) == len({row.slot for row in plan.rows}) <= limits.max_running
        done = len(self.runner.plans) > steps or self.loop.n_in_flight < in_flight
        assert done or not self.loop.busy or not was_busy, "work to do and nothing done"
        self.check_blocks()

    def take(self, deltas):
        for delta in deltas:
            assert delta.id in self.accepted
            assert delta.id not in self.ended, "nothing follows a terminal delta"
            arrival, _ = self.accepted[delta.id]
            if not arrival.tokens and delta.token_ids:
                assert delta.usage is not None
                assert delta.usage.prompt_tokens == len(arrival.prompt)
                assert delta.usage.cached_tokens < len(arrival.prompt)
            arrival.tokens += unpack(delta.token_ids)
            if delta.finish is not None:
                self.ended[delta.id] = delta
                assert delta.usage.completion_tokens == len(arrival.tokens)
                assert (delta.error is not None) == (delta.finish == "error")

    def check_blocks(self):
        sequences = self.scheduler.snapshot()
        running = [seq for seq in sequences if seq.state == "running"]
        ranks = [(seq.effective_class, seq.number) for seq in running]
        assert ranks == sorted(ranks)
        assert all(seq.state == "running" or not any(seq.blocks) for seq in sequences)
        for g, group in enumerate(self.cache.groups):
            refs = Counter(block for seq in running for block in seq.blocks[g] if block != NULL_BLOCK)
            assert {b: n for b, n in enumerate(group.pool.refs) if n} == refs
            assert len(refs) + group.pool.n_free == group.pool.n_total
            for seq in running:  # blocks that will still be written belong to one sequence
                for block in seq.blocks[g][seq.n_computed // 16 :]:
                    assert refs[block] == 1

    def check_answers(self):
        layouts = [group.layout for group in self.cache.groups]
        for id, (arrival, wanted) in self.accepted.items():
            delta = self.ended[id]
            context_len = self.scheduler.limits.context_len
            ids, finish = expected(arrival.prompt, wanted.sampling, layouts, context_len, salt=arrival.salt)
            assert arrival.tokens == ids[: len(arrival.tokens)]
            if delta.finish in ("stop", "length"):
                assert (arrival.tokens, delta.finish) == (ids, finish)
            elif delta.finish == "cancelled":
                assert arrival.abort_after is not None
            else:
                assert delta.error.kind in ("deadline_exceeded", "internal")
                assert arrival.nan or delta.error.kind == "deadline_exceeded" or self.runner.failed


def play(checker, crowd, failing=frozenset()):
    """Run a scenario to its end; a step fails that is launched while the clock is at one of `failing`."""
    for n, arrival in enumerate(crowd):
        arrival.id, arrival.tokens = f"r{n}", []
    aborts = {}
    for arrival in crowd:
        if arrival.abort_after is not None:
            aborts.setdefault(arrival.step + arrival.abort_after, []).append(arrival.id)
    for step in range(MAX_STEPS):
        for arrival in crowd:
            if arrival.step == step:
                checker.submit(arrival, step)
        for id in aborts.get(step, ()):
            checker.take(filter(None, [checker.scheduler.abort(id)]))
        checker.runner.fail_next = RuntimeError("out of luck") if step in failing else None
        checker.step(step)
        if step > 70 and not checker.loop.busy:
            break
    assert not checker.loop.busy, "starved"
    assert checker.ended.keys() == checker.accepted.keys()
    assert checker.cache.n_used == 0
    load = checker.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks) == (0, 0, 0, 0)
    checker.check_answers()


@settings(max_examples=n_examples(150), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=9), setups, st.integers(1, 3))
def test_every_request_ends_once_with_the_right_tokens_and_all_blocks_freed(crowd, setup, steps_in_flight):
    play(InvariantChecker(setup, steps_in_flight), crowd)


@settings(max_examples=n_examples(60), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=9), setups, st.integers(1, 3), st.sets(st.integers(0, 80), max_size=8))
def test_the_same_while_steps_fail_now_and_then(crowd, setup, steps_in_flight, failing):
    play(InvariantChecker(setup, steps_in_flight), crowd, failing)


@settings(max_examples=n_examples(60), deadline=None)
@given(st.lists(arrivals, min_size=2, max_size=9), setups, st.integers(1, 3), st.sets(st.integers(0, 8), max_size=3))
def test_only_requests_that_steps_fail_for_end_with_an_internal_error(crowd, setup, steps_in_flight, bad):
    checker = InvariantChecker(setup, steps_in_flight)
    checker.runner.poison_ids = {f"r{n}" for n in bad}
    play(checker, crowd)
    for id, delta in checker.ended.items():
        arrival, _ = checker.accepted[id]
        assert delta.error is None or delta.error.kind != "internal" or arrival.nan or id in checker.runner.poison_ids
        assert id not in checker.runner.poison_ids or delta.finish in ("error", "cancelled")


@settings(max_examples=n_examples(60), deadline=None)
@given(st.lists(arrivals, min_size=2, max_size=6), setups, st.data())
def test_an_abort_at_any_moment_ends_the_request_once(crowd, setup, data):
    checker = InvariantChecker(setup)
    for n, arrival in enumerate(crowd):
        arrival.id, arrival.tokens, arrival.deadline, arrival.abort_after, arrival.nan = f"r{n}", [], None, 0, False
        checker.submit(arrival, 0)
    for _ in range(MAX_STEPS):
        if not checker.scheduler.busy:
            break
        plan = checker.scheduler.plan()
        handle = checker.runner.launch(plan)
        if data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(sorted(checker.accepted)))
            checker.take(filter(None, [checker.scheduler.abort(victim)]))
        if data.draw(st.integers(0, 15)) == 0:
            checker.take(checker.scheduler.abort_all(Internal("over")))
        if data.draw(st.booleans()):
            checker.scheduler.catch_up()
        checker.take(checker.scheduler.absorb(plan, handle.result()))
        checker.check_blocks()
    assert checker.ended.keys() == checker.accepted.keys()
    assert checker.cache.n_used == 0
