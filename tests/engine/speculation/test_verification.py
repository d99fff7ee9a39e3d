"""Drafts change no token, whoever proposes them: hypothesis against the plain path."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Draws, drawn_ids, n_accepted
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.shapes import GPU_SHAPES
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.request import Push
from emberline.protocol.token_ids import pack, unpack
from tests.engine.core.test_scheduler_properties import InvariantChecker, arrivals, play, setups
from tests.engine.fakes import FULL, VOCAB, FakeRunner, LateRunner, expected, request
from tests.engine.speculation.standin import StandinSpeculation, output_of
from tests.engine.speculation.test_device_drafts import PublishChecker, prompt_ending_at
from tests.engine.transfer.fake_wire import Wire
from tests.engine.transfer.test_transfer_properties import TransferChecker, layouts, prompts
from tests.engine.transfer.test_transfer_properties import setups as transfer_setups
from tests.examples import n_examples


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=6), st.data())
def test_draws_count_as_long_as_they_are_the_drafts(ids, data):
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=len(ids) - 1, max_size=len(ids) - 1))
    n = n_accepted(ids, pack(drafts))
    assert ids[:n] == drafts[:n]
    assert min(ids[1 : 1 + n], default=0) >= 0
    if n < len(drafts):
        assert ids[n] != drafts[n] or ids[n + 1] < 0


def test_draws_without_probabilities_are_a_sequence_like_any_other():
    draws = Draws([3, -1, 5])
    assert drawn_ids(draws) == drawn_ids(list(draws)) == drawn_ids(draws[:]) == [3, -1, 5]
    assert [draw.token_id for draw in draws[1:]] == [-1, 5]
    assert (draws[2].token_id, draws[2].logprob, len(draws)) == (5, None, 3)


def speculation_of(checker_setup, wrong):
    """Knows what the fake model will say."""
    layouts = checker_setup["layouts"]

    def oracle(seq):
        sampling = seq.request.sampling
        prompt = unpack(seq.request.prompt_ids)
        ids, _ = expected(prompt, sampling, layouts, 10_000 if sampling.max_tokens else 120, salt=seq.request.salt)
        done = output_of(seq)
        return ids[len(done) :] if ids[: len(done)] == done else []

    return StandinSpeculation(oracle, wrong)


@settings(max_examples=n_examples(100), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=7), setups, st.integers(1, 3), st.sampled_from([0, 1, 2, 5]))
def test_every_request_ends_once_with_the_right_tokens(crowd, setup, steps_in_flight, wrong):
    speculation = speculation_of(setup, wrong)
    checker = PublishChecker(setup, steps_in_flight, speculation, LateRunner)
    play(checker, crowd)
    assert sorted(speculation.ended_ids) == sorted(checker.accepted)


@settings(max_examples=n_examples(40), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=7), setups, st.integers(1, 3), st.sets(st.integers(0, 80), max_size=8))
def test_the_same_while_steps_fail_now_and_then(crowd, setup, steps_in_flight, failing):
    play(PublishChecker(setup, steps_in_flight, speculation_of(setup, 5), LateRunner), crowd, failing)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(("wrong", "most_steps"), [(0, 20), (1, 62)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(steps_in_flight, wrong, most_steps):
    setup = {"layouts": (FULL,), "n_blocks": 64, "context_len": 512}
    speculation = speculation_of(setup, wrong)
    checker = InvariantChecker(setup, steps_in_flight, speculation)
    scheduler = checker.scheduler
    scheduler.submit(request("a", [1, 2, 3], max_tokens=60), 0.0)
    n_tokens = 0
    while checker.loop.busy:
        n_tokens += sum(len(delta.token_ids) // 4 for delta in checker.loop.step(0.0))
    assert n_tokens == 60
    assert len(checker.runner.plans) <= most_steps + steps_in_flight
    assert speculation.n_verified > 3
    assert speculation.n_accepted == (0 if wrong else speculation.n_drafted)


def test_published_blocks_end_with_the_accepted_tokens():
    """Another request that begins with the same tokens finds them in the cache, and nothing else."""
    setup = {"layouts": (FULL,), "n_blocks": 64, "context_len": 512}
    checker = InvariantChecker(setup, 1, speculation_of(setup, 3))
    first = request("a", list(range(7)) * 2, max_tokens=70)
    checker.scheduler.submit(first, 0.0)
    output = []
    while checker.loop.busy:
        output += [t for delta in checker.loop.step(0.0) for t in unpack(delta.token_ids)]
    prompt = list(range(7)) * 2 + output
    checker.scheduler.submit(request("b", prompt, max_tokens=30), 0.0)
    deltas = []
    while checker.loop.busy:
        deltas += checker.loop.step(0.0)
    assert deltas[0].usage.cached_tokens >= (len(prompt) - 2) // 16 * 16
    ids = [t for delta in deltas for t in unpack(delta.token_ids)]
    assert ids == expected(prompt, request("b", prompt, max_tokens=30).sampling, (FULL,), 512)[0]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("total", range(2 * BLOCK_TOKENS - 2, 2 * BLOCK_TOKENS + 3))
def test_a_reply_that_ends_on_a_stop_token_within_its_drafts_ends_once(total, steps_in_flight):
    """And all its full blocks are published, as far as they are computed: the last token may be no draft."""
    setup = {"layouts": (FULL,), "n_blocks": 64, "context_len": 512, "token_budget": 64}
    n_accepted = 0
    for n_output in range(3, 11):
        prompt, ids = prompt_ending_at(n_output, total - n_output)
        checker = PublishChecker(setup, steps_in_flight, speculation_of({"layouts": (FULL,)}, 0), LateRunner)
        # The drafter does not know of the stop token: it goes on behind it.
        checker.speculation.oracle = lambda seq, prompt=prompt: expected(
            prompt, request("a", prompt, max_tokens=40).sampling, (FULL,), 512
        )[0][len(output_of(seq)) :]
        checker.scheduler.submit(request("a", prompt, max_tokens=40, stop_ids=(ids[-1],)), 0.0)
        deltas = []
        while checker.loop.busy:
            deltas += checker.loop.step(0.0)
        assert [token for delta in deltas for token in unpack(delta.token_ids)] == ids
        assert [delta.finish for delta in deltas if delta.finish is not None] == ["stop"]
        assert checker.n_published in (total // BLOCK_TOKENS, (total - 1) // BLOCK_TOKENS)
        assert checker.cache.n_used == 0
        n_accepted += checker.speculation.n_accepted
    assert n_accepted > 20


def test_blocks_of_replies_are_published_behind_the_next_launch():
    """While the device waits for that launch the host does nothing else; no step returns before it has caught up."""
    setup = {"layouts": (FULL,), "n_blocks": 64, "context_len": 512}
    checker = PublishChecker(setup, 2, speculation_of(setup, 0), LateRunner)
    publish, happened = checker.cache.publish, []

    def launch(plan):
        happened.append("launch")
        return LateRunner.launch(checker.runner, plan)

    checker.runner.launch = launch
    checker.cache.publish = lambda *args: (happened.append("publish"), publish(*args))
    checker.scheduler.submit(request("a", [1, 2, 3], max_tokens=100), 0.0)
    n_deferred = 0
    while checker.loop.busy:
        happened.clear()
        checker.loop.step(0.0)
        assert all(seq.n_unpublished <= 0 for seq in checker.scheduler.snapshot())
        n_deferred += happened == ["launch", "publish"]
        assert happened != ["publish", "launch"]
    assert n_deferred >= 4


@pytest.mark.parametrize("n_resumed", [1, 15, 16, 40, 59])
def test_a_reply_is_resumed_with_drafts(n_resumed):
    """Failover: another engine has sampled the first tokens."""
    setup = {"layouts": (FULL,), "n_blocks": 64, "context_len": 512}
    sampling = {"max_tokens": 60, "min_tokens": 30, "ignore_eos": False}
    ids, finish = expected([1, 2, 3], request("a", [1], **sampling).sampling, (FULL,), 512)
    n_resumed = min(n_resumed, len(ids) - 1)
    checker = InvariantChecker(setup, 2, speculation_of(setup, 4))
    resumed = structs.replace(request("a", [1, 2, 3], **sampling), output_ids=pack(ids[:n_resumed]))
    checker.scheduler.submit(resumed, 0.0)
    deltas = []
    while checker.loop.busy:
        deltas += checker.loop.step(0.0)
    assert [t for delta in deltas for t in unpack(delta.token_ids)] == ids[n_resumed:]
    assert (deltas[-1].finish, deltas[-1].usage.completion_tokens) == (finish, len(ids))


@settings(max_examples=n_examples(30), deadline=None)
@given(
    layouts,
    transfer_setups,
    transfer_setups,
    st.lists(prompts, min_size=1, max_size=5),
    st.sampled_from([0, 3]),
)
def test_the_same_where_another_engine_has_computed_the_prompt(layouts, prefill, decode, wanted, wrong):
    """Disaggregation: drafts follow a prompt whose KV was received."""
    speculation = speculation_of({"layouts": layouts}, wrong)
    checker = TransferChecker(layouts, prefill, {**decode, "speculation": speculation})
    for n, prompt in enumerate(wanted):
        checker.pair(prompt, (n % 3, n % 2 == 0, ""), max_tokens=25)
    checker.finish()
    checker.check()
    assert {delta.finish for delta in checker.wire.decode.ended.values()} <= {"stop", "length"}


def test_drafts_behind_a_received_prompt_are_accepted():
    setup = {"n_blocks": 24, "max_running": 2, "token_budget": 64, "steps_in_flight": 2}
    speculation = speculation_of({"layouts": (FULL,)}, 0)
    checker = TransferChecker((FULL,), setup, {**setup, "speculation": speculation})
    for _ in range(3):
        checker.pair(list(range(7)) * 7, (1, True, ""), max_tokens=30)
    checker.finish()
    checker.check()
    assert speculation.n_accepted > 20


class Repeating(StandinSpeculation):
    """Proposes as many tokens as it may, right or wrong; for prompts that are computed for others only, or for all."""

    def __init__(self, only_pushed=False):
        super().__init__(lambda seq: [])
        self.only_pushed = only_pushed

    def propose(self, seq, n):
        return pack([1] * n) if seq.request.push is not None or not self.only_pushed else b""


def test_a_prompt_for_another_engine_drafts_nothing():
    """Its last token alone is left for a step: the row samples nothing, so there is nothing to verify."""
    wire = Wire({"token_budget": 32, "speculation": Repeating(True), "context_len": 400}, {"context_len": 400})
    prefill = wire.prefill
    prefill.scheduler.submit(request("decodes", [1, 2, 3], max_tokens=40), 0.0)
    for _ in range(3):
        prefill.loop.step(0.0)
    pushed = structs.replace(
        request("pushed", [3, 1, 4, 1, 5] * 6 + [2, 6, 3], max_tokens=9), push=Push(transfer="t", address="", ticket="")
    )
    prefill.scheduler.submit(pushed, 0.0)
    for _ in range(4):
        prefill.loop.step(0.0)
    rows = [row for plan in prefill.runner.plans for row in plan.rows]
    assert any(len(row.token_ids) == 4 and not row.samples for row in rows), "its last token is not alone"
    assert not any(row.n_drafts for row in rows)


@pytest.mark.parametrize(("n_rows", "most"), [(4, 4), (4, 9), (8, 20), (3, 30)])
def test_rows_share_what_a_step_may_draft(n_rows, most):
    prefill = LatencyTarget(GPU_SHAPES, most_drafts=lambda rows: most)
    cache = KVCache((FULL,), [200], chunk=128)
    limits = Limits(512, VOCAB, (0,), n_rows, 128)
    scheduler = build_scheduler(cache, limits, "fake", prefill=prefill, speculation=Repeating())
    loop = StepLoop(scheduler, FakeRunner(cache), 1)
    for n in range(n_rows):
        loop.submit(request(f"r{n}", [n % 6, 2, 3], max_tokens=60, ignore_eos=True), 0.0)
    for _ in range(8):
        loop.step(0.0)
    drafted = [row.n_drafts for row in loop.runner.plans[-1].rows]
    assert len(drafted) == n_rows
    assert min(drafted) >= 1
    assert sum(drafted) <= most
