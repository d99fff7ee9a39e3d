from math import inf

import msgspec
import pytest

from emberline.engine.core.latency_target import LatencyTarget
from emberline.engine.core.limits import Limits, WorkLimits
from emberline.engine.core.plan import DeviceLost, StepPlan
from emberline.engine.core.planner import MAX_RETRY_TOKENS
from emberline.engine.core.prefill_policy import NO_TARGET, PrefillPolicy
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.gpu.shapes import CHUNK_ROWS, GPU_SHAPES, MAX_GRAPH_TOKENS
from emberline.kv.cache import KVCache
from emberline.protocol import block_hash as blockhash
from emberline.protocol.errors import BadInput, ContextExceeded
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import Priority, ThinkingLimit
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import (
    EOS,
    FULL,
    VOCAB,
    Drawn,
    FakeRunner,
    expected,
    loop_of,
    request,
    scheduler_of,
    window_group,
)

A = [n * n % VOCAB for n in range(200)]
B = [(n * n + n + 1) % VOCAB for n in range(200)]


class Bench:
    """A scheduler with a fake model, and the deltas by request."""

    def __init__(self, **setup):
        self.scheduler, self.cache = scheduler_of(**setup)
        self.runner = FakeRunner(self.cache)
        self.loop = StepLoop(self.scheduler, self.runner)
        self.deltas: dict[str, list[TokenDelta]] = {}

    def submit(self, *args, **kwargs):
        self.scheduler.submit(request(*args, **kwargs), 0.0)

    def step(self, now=0.0) -> StepPlan | None:
        n = len(self.runner.plans)
        self.take(self.loop.step(now))
        return self.runner.plans[n] if len(self.runner.plans) > n else None

    def take(self, deltas):
        for delta in deltas:
            self.deltas.setdefault(delta.id, []).append(delta)

    def finish(self):
        for _ in range(1000):
            if not self.loop.busy:
                return self
            self.step()
        raise AssertionError("it never ends")

    def tokens(self, id):
        return [token for delta in self.deltas[id] for token in unpack(delta.token_ids)]

    def order(self):
        return list(self.deltas)


def sizes(plan):
    return [row.end - row.start for row in plan.rows]


# --- the shape of a step ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_first():
    bench = Bench(token_budget=32)
    bench.submit("a", A[:10], max_tokens=9)
    assert sizes(bench.step()) == [10]
    bench.submit("b", B[:70])
    assert sizes(bench.step()) == [1, 31]
    assert sizes(bench.step()) == [1, 31]
    plan = bench.step()
    assert sizes(plan) == [1, 8]
    assert [row.samples for row in plan.rows] == [True, True]
    assert "b" in bench.deltas


def test_only_the_last_chunk_samples():
    bench = Bench(token_budget=32)
    bench.submit("a", A[:40])
    assert [row.samples for row in bench.step().rows] == [False]
    assert "a" not in bench.deltas
    assert [row.samples for row in bench.step().rows] == [True]


def test_admission_is_by_class_then_arrival():
    bench = Bench(max_running=1, n_blocks=64)
    bench.submit("late", A[:5], priority=3)
    bench.submit("first", A[:6], priority=1)
    bench.submit("second", A[:7], priority=1)
    bench.submit("urgent", A[:8], priority=0)
    bench.finish()
    assert bench.order() == ["urgent", "first", "second", "late"]


def test_a_better_class_preempts_a_worse_one_and_an_equal_one_waits():
    bench = Bench(max_running=1)
    bench.submit("batch", A[:40], priority=3, max_tokens=20)
    bench.step(), bench.step(), bench.step()
    bench.submit("equal", B[:5], priority=3)
    bench.step()
    assert bench.scheduler.load().preemptions == 0
    bench.submit("sync", B[:5], priority=1)
    bench.step()
    assert bench.scheduler.load().preemptions == 1
    assert "sync" in bench.deltas
    bench.finish()
    assert bench.order() == ["batch", "sync", "equal"]
    assert bench.tokens("batch") == expected(A[:40], request("x", A, max_tokens=20).sampling, [FULL], 512)[0]


def test_prefill_of_a_worse_class_does_not_block_a_better_one():
    bench = Bench(token_budget=16)
    bench.submit("batch", A[:160], priority=3)
    bench.step()
    bench.submit("sync", B[:20], priority=0)
    plan = bench.step()
    assert sizes(plan) == [16]
    assert plan.admissions[0].request.id == "sync"


def test_a_request_that_does_not_fit_is_not_overtaken():
    bench = Bench(n_blocks=9, token_budget=64)
    bench.submit("running", A[:60], max_tokens=6)
    bench.step()
    bench.submit("big", B[:100])
    bench.submit("small", B[100:105])
    bench.step()
    assert "small" not in bench.deltas
    bench.finish()
    assert bench.order() == ["running", "big", "small"]
    assert bench.scheduler.load().preemptions == 0


def test_when_blocks_run_out_the_last_in_rank_is_preempted():
    bench = Bench(n_blocks=8, token_budget=100)  # 7 usable
    bench.submit("a", A[:20], max_tokens=50)  # 2 blocks, and a third with its 13th token
    bench.submit("b", B[:62], max_tokens=50)  # 4 blocks, and a fifth with its 3rd token
    bench.finish()
    assert bench.scheduler.load().preemptions > 0
    for id, prompt in (("a", A[:20]), ("b", B[:62])):
        assert bench.tokens(id) == expected(prompt, request("x", A, max_tokens=50).sampling, [FULL], 112)[0]
        assert [delta.usage is not None for delta in bench.deltas[id]] == [True] + [False] * 48 + [True]
    assert len(bench.deltas["a"]) == 50
    rows_of_a = [any(row.number == 0 for row in plan.rows) for plan in bench.runner.plans]
    assert rows_of_a == [True] * 50 + [False] * (len(rows_of_a) - 50), "the first in rank never gives way"


def test_an_attention_window_lets_a_long_sequence_run_in_a_small_pool():
    layouts = (window_group(20),)
    bench = Bench(layouts=layouts, n_blocks=6, token_budget=16, context_len=400)
    bench.submit("a", A[:90], max_tokens=120)
    bench.finish()
    assert bench.tokens("a") == expected(A[:90], request("x", A, max_tokens=120).sampling, layouts, 400)[0]


# --- the prefix cache ---------------------------------------------------------------------------------------------


def test_the_next_turn_hits_the_prompt_and_the_reply():
    bench = Bench(token_budget=64)
    bench.submit("one", A[:40], max_tokens=30)
    bench.finish()
    turn = A[:40] + bench.tokens("one") + B[:7]
    bench.submit("two", turn)
    bench.finish()
    usage = bench.deltas["two"][0].usage
    assert usage.cached_by_tier == {"device": 64}  # 69 of 70 tokens have KV: 4 full blocks
    assert usage.prompt_tokens == 77
    assert bench.deltas["two"][-1].usage.cached_by_tier == {"device": 64}
    assert bench.tokens("two") == expected(turn, request("x", A).sampling, [FULL], 512)[0]
    assert bench.scheduler.load().cached_tokens == 64


def test_a_full_prefix_hit_still_computes_one_token():
    bench = Bench(token_budget=64)
    for id in ("one", "two"):
        bench.submit(id, A[:32])
        bench.finish()
    assert bench.deltas["two"][0].usage.cached_tokens == 16
    assert bench.tokens("one") == bench.tokens("two")


def test_another_salt_does_not_hit():
    bench = Bench(token_budget=64)
    bench.submit("one", A[:40], salt=b"a")
    bench.finish()
    bench.submit("two", A[:40], salt=b"b")
    bench.finish()
    assert bench.deltas["one"][0].usage.cached_tokens == bench.deltas["two"][0].usage.cached_tokens == 0


def test_cached_tokens_are_those_of_the_first_admission():
    bench = Bench(n_blocks=8, token_budget=64)
    bench.submit("a", A[:30], max_tokens=50)
    bench.submit("b", B[:30], max_tokens=50)
    bench.finish()
    assert bench.scheduler.load().preemptions > 0
    assert bench.deltas["b"][-1].usage.cached_by_tier == {"device": 0}


def test_a_prefix_being_computed_is_awaited_and_hit():
    bench = Bench(token_budget=100)
    bench.submit("a", A[:40])
    bench.submit("b", [*A[:33], 1, 2])
    bench.submit("c", B[:20])
    assert sizes(bench.step()) == [40, 20]
    bench.step()
    assert bench.deltas["b"][0].usage.cached_tokens == 32


def test_a_failed_computation_is_not_cached():
    bench = Bench(token_budget=64)
    bench.runner.nan_ids.add("bad")
    bench.submit("bad", A[:40])
    bench.submit("good", B[:40])
    bench.finish()
    assert bench.deltas["bad"][-1].error.kind == "internal"
    assert bench.deltas["good"][-1].finish == "length"
    bench.submit("again", A[:40])
    bench.finish()
    assert bench.deltas["again"][0].usage.cached_tokens == 0
    assert bench.cache.n_used == 0


# --- ends ---------------------------------------------------------------------------------------------------------


def run_tokens(drawn, **sampling):
    """What the client gets when the model samples these tokens."""
    scheduler, _ = scheduler_of(context_len=32)
    scheduler.submit(request("a", [1, 2], **sampling), 0.0)
    deltas, banned = [], []
    for token in drawn:
        if not scheduler.busy:
            break
        plan = scheduler.plan()
        banned.append(plan.rows[0].banned)
        deltas += scheduler.absorb(plan, [Drawn(token)])
    return deltas, banned


def test_an_end_token_ends_and_is_included():
    deltas, _ = run_tokens([3, 4, EOS], ignore_eos=False, max_tokens=9)
    assert [unpack(delta.token_ids) for delta in deltas] == [[3], [4], [EOS]]
    assert [delta.finish for delta in deltas] == [None, None, "stop"]
    assert deltas[-1].usage.completion_tokens == 3


def test_stop_ids_end_even_when_end_tokens_are_ignored():
    deltas, _ = run_tokens([EOS, 5], ignore_eos=True, stop_ids=(5,), max_tokens=9)
    assert [delta.finish for delta in deltas] == [None, "stop"]


def test_max_tokens_and_the_context_are_lengths():
    assert len(run_tokens([3] * 9, max_tokens=3)[0]) == 3
    deltas, _ = run_tokens([3] * 99, max_tokens=None)
    assert len(deltas) == 30
    assert deltas[-1].finish == "length"
    assert len(run_tokens([3] * 99, max_tokens=1000)[0]) == 30


def test_min_tokens_bans_stop_tokens():
    _, banned = run_tokens([3, 3, 3, 3], min_tokens=2, ignore_eos=False, stop_ids=(5,), max_tokens=4)
    assert [set(ids) for ids in banned] == [{EOS, 5}, {EOS, 5}, set(), set()]


def test_bad_words_ban_their_last_token_behind_the_others():
    words = (pack([5]), pack([3, 4]), pack([3, 4, 6]), pack([2, 1]))
    _, banned = run_tokens([1, 3, 4, 3, 6], bad_ids=words, max_tokens=5)
    # The prompt ends with 2, but [2, 1] would not lie in the output.
    assert [set(ids) for ids in banned] == [{5}, {5}, {5, 4}, {5, 6}, {5, 4}]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_bad_words_are_never_generated(steps_in_flight):
    bench = Bench()
    bench.loop = StepLoop(bench.scheduler, bench.runner, steps_in_flight)
    bench.submit("free", A[:20], max_tokens=30)
    bench.finish()
    free = bench.tokens("free")
    words = [[free[3]], free[7:9], free[12:15]]
    bench.submit("single", A[:20], max_tokens=30, bad_ids=(pack(words[0]),))
    bench.submit("several", A[:20], max_tokens=30, bad_ids=tuple(map(pack, words)))
    bench.finish()
    assert free[3] not in bench.tokens("single")
    got = bench.tokens("several")
    assert len(got) == 30
    assert not [word for word in words for at in range(30) if got[at : at + len(word)] == word]


def test_logprobs_only_when_requested():
    assert run_tokens([3], max_tokens=1)[0][0].logprobs is None
    [logprob] = run_tokens([3], max_tokens=1, logprobs=0)[0][0].logprobs
    assert (logprob.token_id, logprob.logprob) == (3, -1.0)


def test_abort_waiting_and_running():
    bench = Bench(max_running=1)
    bench.submit("a", A[:20])
    bench.submit("b", A[:20])
    bench.step()
    for id in ("a", "b"):
        delta = bench.scheduler.abort(id)
        assert delta.finish == "cancelled"
        assert (delta.usage.prompt_tokens, delta.usage.partial) == (20 if id == "a" else 0, True)
    assert bench.scheduler.abort("a") is None
    assert not bench.loop.busy
    assert bench.cache.n_used == 0


def test_an_aborted_prefill_reports_the_prompt_tokens_computed_so_far():
    bench = Bench(token_budget=32)
    bench.submit("a", A[:100])
    bench.step()
    bench.step()
    assert bench.scheduler.abort("a").usage.prompt_tokens == 64
    bench.submit("again", A[:100])
    bench.step()
    usage = bench.scheduler.abort("again").usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (96, 64), "found in the cache, and computed"


def test_a_failed_prefill_reports_what_it_computed_before_it_was_preempted():
    bench = Bench(token_budget=32, max_running=1)
    bench.submit("a", A[:100], priority=Priority.BATCH, deadline_s=5)
    bench.step()
    bench.submit("b", B[:40], priority=Priority.PRIORITY, max_tokens=9)
    bench.step()  # "a" waits again
    bench.step(5)
    delta = bench.deltas["a"][-1]
    assert (delta.error.kind, delta.usage.prompt_tokens, delta.usage.partial) == ("deadline_exceeded", 32, True)


def test_a_finished_sequence_reports_its_whole_prompt():
    bench = Bench()
    bench.submit("a", A[:20])
    usage = bench.finish().deltas["a"][-1].usage
    assert (usage.prompt_tokens, usage.partial) == (20, False)


def test_deadlines_end_running_and_waiting():
    bench = Bench(max_running=1)
    bench.submit("a", A[:20], deadline_s=5, max_tokens=None)
    bench.submit("b", A[:20], deadline_s=3)
    bench.submit("c", A[:20])
    bench.step(2.9)
    assert list(bench.deltas) == ["a"]
    bench.step(3)
    assert bench.deltas["b"][-1].error.kind == "deadline_exceeded"
    bench.step(5)
    assert bench.deltas["a"][-1].error.kind == "deadline_exceeded"
    bench.finish()
    assert bench.deltas["c"][-1].finish == "length"


def test_a_failed_step_is_retried():
    bench = Bench()
    bench.submit("a", A[:20])
    bench.step()
    bench.submit("b", A[:20])
    bench.runner.fail_next = RuntimeError("out of luck")
    bench.finish()
    assert bench.tokens("a") == expected(A[:20], request("x", A).sampling, [FULL], 512)[0]
    assert bench.tokens("b") == bench.tokens("a")
    assert bench.cache.n_used == 0


def test_a_request_that_no_step_can_be_computed_with_ends_alone():
    bench = Bench(max_running=1)
    bench.runner.poison_ids.add("bad")
    bench.submit("bad", A[:20])
    bench.submit("b", A[:20])
    bench.finish()
    assert [delta.finish for delta in bench.deltas["bad"]] == ["error"]
    assert bench.deltas["bad"][0].error.kind == "internal"
    assert "request" not in bench.deltas["bad"][0].error.message.partition("this request")[0]
    assert bench.deltas["b"][-1].finish == "length"
    assert len(bench.runner.plans) == 2 + 4, "it was retried once"


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("bad", [(0,), (5,), (2, 11)])
def test_the_sequences_that_a_step_fails_for_are_isolated(bad, steps_in_flight):
    """Some fail from the start, the others' steps fail because of them; nobody else ends or gets other tokens."""
    scheduler, cache = scheduler_of(max_running=12, n_blocks=64)
    runner = FakeRunner(cache)
    loop = StepLoop(scheduler, runner, steps_in_flight)
    prompts = {f"r{n}": [*A[n : n + 20], n % 7] for n in range(12)}
    for id, prompt in prompts.items():
        loop.submit(request(id, prompt, max_tokens=20), 0.0)
    deltas: dict[str, list[TokenDelta]] = {id: [] for id in prompts}
    for n in range(400):
        if n == 12:  # all of them decode
            runner.poison_ids = {f"r{i}" for i in bad}
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    assert not loop.busy
    for n, (id, prompt) in enumerate(prompts.items()):
        output = [token for delta in deltas[id] for token in unpack(delta.token_ids)]
        answer = expected(prompt, request("x", prompt, max_tokens=20).sampling, [FULL], 512)[0]
        assert deltas[id][-1].finish == ("error" if n in bad else "length")
        assert output == answer[: len(output)] if n in bad else output == answer
    assert cache.n_used == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_that_are_too_large_are_retried_smaller(steps_in_flight):
    """Running out of memory depends on what a step computes; it ends no request."""
    scheduler, cache = scheduler_of(max_running=16, n_blocks=700, context_len=2048, token_budget=4096)
    runner = FakeRunner(cache)
    runner.max_tokens = MAX_RETRY_TOKENS
    loop = StepLoop(scheduler, runner, steps_in_flight)
    for n in range(4):
        loop.submit(request(f"r{n}", [(n + i * i) % 7 for i in range(1500)], max_tokens=4), 0.0)
    ends = [delta.finish for _ in range(200) for delta in loop.step(0.0) if delta.finish]
    assert ends == ["length"] * 4
    assert cache.n_used == 0


def test_seeds():
    scheduler, _ = scheduler_of(max_running=3)
    for id, seed in (("a", -1), ("b", 7), ("c", None)):
        scheduler.submit(request(id, [1], seed=seed), 0.0)
    seeds = [admission.seed for admission in scheduler.plan().admissions]
    assert seeds[:2] == [(1 << 64) - 1, 7]
    assert 0 <= seeds[2] < 1 << 64


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "error", "param"),
    [
        (request("a", [1] * 64), ContextExceeded, "prompt"),
        (request("a", []), BadInput, "prompt"),
        (request("a", [VOCAB]), BadInput, "prompt"),
        (request("a", [1], max_tokens=-1), BadInput, "max_tokens"),
        (request("a", [1], temperature=float("nan")), BadInput, "temperature"),
        (request("a", [1], top_p=1.5), BadInput, "top_p"),
        (request("a", [1], repetition_penalty=0.0), BadInput, "repetition_penalty"),
        (request("a", [1], stop_ids=(VOCAB,)), BadInput, "stop_ids"),
        (request("a", [1], logit_bias={-1: 1.0}), BadInput, "logit_bias"),
        (request("a", [1], logit_bias={1: float("inf")}), BadInput, "logit_bias"),
        (request("a", [1], logprobs=21), BadInput, "logprobs"),
    ],
)
def test_invalid_requests_are_refused_with_the_parameter(wanted, error, param):
    scheduler, _ = scheduler_of(context_len=64)
    with pytest.raises(error) as caught:
        scheduler.submit(wanted, 0.0)
    assert caught.value.param == param
    assert not scheduler.busy


def test_the_pool_bounds_the_context():
    bench = Bench(n_blocks=5, context_len=512)
    assert bench.scheduler.limits.context_len == 64
    with pytest.raises(ContextExceeded, match="64"):
        bench.submit("a", A[:64])
    bench.submit("b", A[:63], max_tokens=None)
    bench.finish()
    assert len(bench.tokens("b")) == 1


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    bench = Bench()
    bench.submit("a", A[:5])
    with pytest.raises(BadInput, match="in use"):
        bench.submit("a", A[:6])
    bench.finish()
    bench.submit("a", A[:5])
    bench.finish()


def test_the_load_counts_waiting_tokens():
    bench = Bench(max_running=1, token_budget=16)
    bench.submit("a", A[:40])
    bench.submit("b", B[:30])
    bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.waiting) == (1, 1)
    assert load.waiting_tokens == 23 + 30
    assert load.kv_used_blocks == 1
    assert (load.steps, load.prompt_tokens) == (1, 16)


class LateResults(FakeRunner):
    """Its results are computed when they are asked for, and may fail then."""

    def __init__(self, cache, error=None):
        super().__init__(cache)
        self.error = error

    def launch(self, plan):
        handle = super().launch(plan)
        if self.error is not None and len(self.plans) == 3:
            handle.sampled = self.error
        return handle


def test_a_failed_step_with_another_in_flight_is_retried():
    scheduler, cache = scheduler_of(max_running=2)
    loop = StepLoop(scheduler, LateResults(cache, RuntimeError("bad step")), steps_in_flight=2)
    loop.submit(request("a", [1, 2, 3], max_tokens=9), 0.0)
    ends = {}
    for n in range(60):
        if n == 4:
            loop.submit(request("b", [2, 2, 2], max_tokens=3), 0.0)
        ends |= {delta.id: delta for delta in loop.step(0.0) if delta.finish}
    assert ends["a"].finish == ends["b"].finish == "length"
    assert ends["a"].usage.completion_tokens == 9
    assert cache.n_used == 0
    assert not loop.busy


def test_a_lost_device_ends_the_engine():
    scheduler, cache = scheduler_of()
    loop = StepLoop(scheduler, LateResults(cache, DeviceLost("an illegal memory access")), steps_in_flight=2)
    loop.submit(request("a", [1, 2, 3], max_tokens=9), 0.0)
    loop.step(0.0)
    loop.step(0.0)
    loop.step(0.0)
    with pytest.raises(DeviceLost, match="illegal"):
        loop.step(0.0)


@pytest.mark.parametrize("keys_at_once", [1, 16])
def test_a_shared_prefix_is_computed_once_with_steps_in_flight(keys_at_once):
    loop = loop_of(steps_in_flight=2, n_blocks=64, token_budget=32, keys_at_once=keys_at_once)
    prompt = [n % 5 for n in range(96)]
    for n in range(3):
        loop.submit(request(f"r{n}", [*prompt, n], max_tokens=2), 0.0)
    cached = {}
    while loop.busy:
        for delta in loop.step(0.0):
            if delta.usage is not None:
                cached[delta.id] = delta.usage.cached_tokens
    assert cached == {"r0": 0, "r1": 96, "r2": 96}


def test_a_long_cached_prompt_is_looked_up_over_several_steps_while_others_decode():
    bench = Bench(token_budget=256, look_ups=4)
    bench.submit("a", A, max_tokens=1)
    assert bench.step() is not None, "nobody waits for the lookup of a lone prompt"
    bench.finish()
    bench.submit("stream", B[:5], max_tokens=40)
    bench.step()
    bench.submit("b", A, max_tokens=1)  # 12 blocks are cached
    bench.submit("short", B[50:60], max_tokens=1)
    rows = [[row.number for row in bench.step().rows] for _ in range(4)]
    assert rows == [[1], [1], [1, 2], [1, 3]], "the stream is in each step, and nobody overtakes"
    assert bench.deltas["b"][0].usage.cached_tokens == 192
    assert bench.finish().tokens("b") == bench.tokens("a")


def test_a_block_that_is_purged_while_a_prompt_is_looked_up_is_computed_again():
    bench = Bench(token_budget=256, look_ups=4)
    for id, n_tokens, session in (("before", 5 * 16, "kept"), ("block 5", 6 * 16 + 1, "purged"), ("a", len(A), "kept")):
        returning(bench, 0.0, request(id, A[:n_tokens], session=session, max_tokens=1))
    bench.submit("stream", B[:5], max_tokens=40)
    bench.step()
    bench.submit("b", A, max_tokens=1)
    bench.step()
    bench.step()  # eight blocks are looked up
    assert bench.scheduler.purge(blockhash.root("fake", b""), blockhash.session_digest("purged")) == 1
    assert bench.finish().deltas["b"][0].usage.cached_tokens == 5 * 16
    assert bench.tokens("b") == bench.tokens("a")


def test_a_new_prompt_is_hashed_after_the_launch(monkeypatch):
    hashed, at_launch = [], []
    blake2b = blockhash.blake2b
    monkeypatch.setattr(blockhash, "blake2b", lambda *args, **kwargs: hashed.append(1) or blake2b(*args, **kwargs))
    bench = Bench(n_blocks=64, context_len=700, token_budget=320)
    launch = bench.runner.launch
    bench.runner.launch = lambda plan: at_launch.append(len(hashed)) or launch(plan)
    prompt = [n * n % 7 for n in range(640)]
    bench.submit("a", prompt, max_tokens=1)
    hashed.clear()
    bench.finish()
    assert at_launch == [WorkLimits().keys_at_once, 21]  # and the block behind: the next chunk's first
    assert len(hashed) == 40
    bench.submit("b", prompt, max_tokens=1)
    bench.finish()
    assert bench.deltas["b"][0].usage.cached_tokens == 39 * 16


def test_chunks_are_what_the_prefill_policy_allows():
    class Strict(PrefillPolicy):
        def chunk(self, work, context, most, slack, limit_s):
            assert slack == (1.0 if work.n_decodes else inf)
            return min(most, 5 - work.n_tokens) if work.n_decodes else most

    cache = KVCache((FULL,), [64], chunk=32)
    scheduler = Scheduler(cache, Limits(512, VOCAB, (EOS,), 4, 32), "fake", prefill=Strict())
    runner = FakeRunner(cache)
    loop = StepLoop(scheduler, runner)
    loop.submit(request("decoding", [1] * 30, max_tokens=30), 0.0)
    for _ in range(2 + WorkLimits().burst_gap):
        loop.step(0.0)
    assert runner.plans[0].n_tokens == 30, "nothing decodes: all at once"
    loop.submit(request("a", [2] * 12, max_tokens=1), 0.0)
    loop.submit(request("b", [3] * 12, max_tokens=1), 0.0)
    while scheduler.load().running > 1 or scheduler.load().waiting:
        loop.step(0.0)
    assert max(plan.n_tokens for plan in runner.plans[1:]) == 6
    assert all(plan.rows[0].number == 0 for plan in runner.plans), "the decoding sequence has a row in every step"


class FiveTokens(PrefillPolicy):
    """Five prompt tokens per step while sequences decode."""

    def chunk(self, work, context, most, slack=1.0, limit_s=inf):
        return most if slack >= NO_TARGET or not work.n_decodes else min(most, max(0, 5 - work.n_tokens))


def limited_loop(token_budget=32, steps_in_flight=1, **work):
    setup = {"n_blocks": 256, "context_len": 1024, "max_running": 8, "token_budget": token_budget}
    loop = loop_of(steps_in_flight, prefill=FiveTokens(), **setup, **work)
    return loop, loop.runner


def run(loop):
    while loop.busy:
        loop.step(0.0)


def test_prompts_that_arrived_together_ignore_the_target():
    loop, runner = limited_loop()
    for n in range(4):
        loop.submit(request(f"r{n}", [n + 1] * 30, max_tokens=20), 0.0)
    run(loop)
    assert [plan.n_tokens for plan in runner.plans[:4]] == [32, 32, 32, 27 + 3], "decoding sequences wait"


def late_prompts(n_late, n_steps_before, length=30, **work):
    """The tokens of the steps that compute prompts which arrive while a sequence already decodes."""
    loop, runner = limited_loop(**work)
    loop.submit(request("decoding", [1] * 30, max_tokens=90), 0.0)
    for _ in range(n_steps_before):
        loop.step(0.0)
    begun = len(runner.plans)
    for n in range(n_late):
        loop.submit(request(f"late{n}", [n + 2] * length, max_tokens=60), 0.0)
    run(loop)
    return [plan.n_tokens for plan in runner.plans[begun:] if plan.n_tokens > len(plan.rows)]


def test_later_prompts_keep_the_target():
    assert max(late_prompts(4, WorkLimits().burst_gap + 4)) <= 5 + 5


def test_late_prompts_of_a_burst_are_computed_in_full_steps():
    """Over HTTP the last of them arrive long after the first token of the first."""
    assert late_prompts(4, 3) == [32, 32, 32, 32, 6], "only one of them is left in the end"
    assert max(late_prompts(1, 3, length=15)) == 6, "one short prompt is no burst"


def test_a_burst_is_bounded():
    assert max(late_prompts(4, 3, burst_steps=2)) <= 5 + 5


def test_long_prompts_keep_the_target_of_those_they_arrived_with():
    loop, runner = limited_loop()
    loop.submit(request("decoding", [1] * 30, max_tokens=90), 0.0)
    for n in range(3):
        loop.submit(request(f"long{n}", [n + 2] * 50, max_tokens=1), 0.0)
    run(loop)
    assert max(plan.n_tokens for plan in runner.plans[2:]) == 6, "nor does the first chunk of one of them fill a step"


@pytest.mark.parametrize("worse", [Priority.FLEX, Priority.BATCH])
def test_prompts_that_waited_because_of_their_class_keep_the_target(worse):
    loop, runner = limited_loop()
    for n in range(6):
        loop.submit(request(f"worse{n}", [n] * 30, max_tokens=1, priority=worse), 0.0)
    loop.submit(request("decoding", [1] * 30, max_tokens=60), 0.0)
    run(loop)
    begun = next(
        n for n, plan in enumerate(runner.plans) if any(row.number == 6 and row.start >= 30 for row in plan.rows)
    )
    assert max(plan.n_tokens for plan in runner.plans[begun:]) == 6


def test_a_decoding_sequence_without_a_row_still_counts():
    loop, runner = limited_loop(steps_in_flight=2)
    thinking = request("thinking", [1] * 30, max_tokens=60)
    loop.submit(msgspec.structs.replace(thinking, thinking_limit=ThinkingLimit(16, (6,), pack([6]))), 0.0)
    for _ in range(4 + WorkLimits().burst_gap):
        loop.step(0.0)
    for n in range(3):  # the first of them decodes before the others are computed
        loop.submit(request(f"late{n}", [n + 2] * 30, max_tokens=20), 0.0)
    run(loop)
    assert max(plan.n_tokens for plan in runner.plans[2:]) <= 5 + 4


def test_prefill_progresses_with_more_decodes_than_a_cuda_graph_holds():
    cache = KVCache((FULL,), [5000], chunk=2048)
    scheduler = Scheduler(cache, Limits(512, VOCAB, (EOS,), 1200, 2048), "fake", prefill=LatencyTarget(GPU_SHAPES))
    loop = StepLoop(scheduler, FakeRunner(cache))
    for n in range(1100):
        loop.submit(request(f"r{n}", [n % 7, n % 5, n % 3, 1], max_tokens=40), 0.0)
    for _ in range(40):
        loop.step(0.0)
    loop.submit(request("late", [5] * 300, max_tokens=1), 0.0)
    assert any(delta.id == "late" and delta.finish for _ in range(12) for delta in loop.step(0.0))


def test_steps_with_many_short_prompts_fit_a_cuda_graph():
    cache = KVCache((FULL,), [500], chunk=2048)
    scheduler = Scheduler(cache, Limits(512, VOCAB, (EOS,), 128, 2048), "fake", prefill=LatencyTarget(GPU_SHAPES))
    runner = FakeRunner(cache)
    loop = StepLoop(scheduler, runner)
    for n in range(100):
        loop.submit(request(f"r{n}", [n % 7, n % 5, n % 3, n % 2, 1, 1], max_tokens=8), 0.0)
    run(loop)
    prompts = [sum(n > 1 for n in sizes(plan)) for plan in runner.plans]
    assert max(prompts) == CHUNK_ROWS - 1
    assert sum(prompts) == 100
    assert max(plan.n_tokens for plan in runner.plans) <= MAX_GRAPH_TOKENS


def test_a_thinking_limit_delays_only_the_token_that_may_reach_it():
    scheduler, cache = scheduler_of()
    runner = FakeRunner(cache)
    loop = StepLoop(scheduler, runner, steps_in_flight=2)
    thinking = request("thinking", [1] * 5, max_tokens=24)
    loop.submit(msgspec.structs.replace(thinking, thinking_limit=ThinkingLimit(12, (VOCAB,), pack([6, 6]))), 0.0)
    output = [token for _ in range(40) for delta in loop.step(0.0) for token in unpack(delta.token_ids)]
    assert len(output) == 24
    assert output[12:14] == [6, 6]
    waited = [row.start - 5 for plan in runner.plans[1:] for row in plan.rows if not row.follows]
    assert waited == [11], "the token behind the last one of the thinking; the other rows follow what is being sampled"


def test_the_target_does_not_protect_batch_class_decodes():
    loop, runner = limited_loop()
    loop.submit(request("batch", [1] * 30, max_tokens=40, priority=Priority.BATCH), 0.0)
    loop.step(0.0)
    loop.step(0.0)
    loop.submit(request("late", [2] * 30, max_tokens=1), 0.0)
    run(loop)
    assert max(plan.n_tokens for plan in runner.plans[1:]) >= 30


def test_the_first_delta_tells_how_long_the_sequence_waited():
    bench = Bench()
    bench.submit("r", A[:20], max_tokens=3)
    for _ in range(6):
        bench.step(now=2.5)
    first, *others = bench.deltas["r"]
    assert first.waited_s == 2.5
    assert not any(delta.waited_s for delta in others)


def returning(bench, now, *requests, tools=()):
    """Run requests to their ends at a time; then the client tells which of them called tools."""
    for one in requests:
        bench.scheduler.submit(one, now)
    while bench.loop.busy:
        bench.step(now)
    for id in tools:
        bench.scheduler.called_tools(id)


def test_a_session_that_called_tools_is_still_cached_when_an_idle_one_is_evicted():
    bench = Bench(n_blocks=33)
    tool, user, third = A[:112], B[:112], [(3 * n) % VOCAB for n in range(396)]
    returning(bench, 0.0, request("tool", tool, session="a"), tools=["tool", "unknown"])
    returning(bench, 5.0, request("user", user, session="b"))
    returning(bench, 10.0, request("third", third, session="c"))
    returning(bench, 15.0, request("tool2", tool, session="a"), request("user2", user, session="b"))
    assert bench.deltas["tool2"][0].usage.cached_by_tier == {"device": 96}
    assert bench.deltas["user2"][0].usage.cached_by_tier == {"device": 0}


def test_hints_of_a_request_reach_retention():
    bench = Bench(n_blocks=65)
    first, kept = request("a", A[:64], session="a"), request("b", B[:64], session="b")
    returning(bench, 0.0, msgspec.structs.replace(kept, cache_ttl_s=3600), first)
    returning(bench, 1.0, msgspec.structs.replace(request("a2", A[:64], session="a"), session_final=True))
    (order,) = [group.pool._free for group in bench.cache.groups]
    keys = [bench.cache.groups[0].index.key(block) for block, _ in order]
    cached = [key for key in keys if key is not None]
    hinted = set(blockhash.split(blockhash.chain(blockhash.root("fake", b""), pack(B[:64]))))
    assert set(cached[-4:]) == hinted
    assert sum(order.charged.values()) == 4


@pytest.mark.parametrize(("ended_requests", "cached"), [(2, 0), (3, 96)])
def test_the_ids_of_ended_requests_are_forgotten(ended_requests, cached):
    """A client that reports tool calls too late does not keep its session."""
    bench = Bench(n_blocks=33, ended_requests=ended_requests)
    tool, third = A[:112], [(3 * n) % VOCAB for n in range(396)]
    returning(bench, 0.0, request("tool", tool, session="a"))
    returning(bench, 1.0, request("x", B[:10], session="x"), request("y", B[:20], session="y"), tools=["tool"])
    returning(bench, 5.0, request("user", B[:112], session="b"))
    returning(bench, 10.0, request("third", third, session="c"))
    returning(bench, 15.0, request("tool2", tool, session="a"))
    assert bench.deltas["tool2"][0].usage.cached_by_tier == {"device": cached}


def test_a_purge_takes_what_was_computed_for_its_owner_alone():
    bench = Bench(n_blocks=65)
    returning(
        bench, 0.0, request("a", A[:64], session="a", salt=b"one"), request("b", B[:64], session="b", salt=b"one")
    )
    returning(bench, 1.0, request("c", A[:64], session="a", salt=b"two"))
    one, two = (blockhash.root("fake", salt) for salt in (b"one", b"two"))
    digest = blockhash.session_digest("a")
    assert len(bench.cache.groups[0].index) == 12
    assert bench.scheduler.purge(one, digest) == 4
    returning(bench, 2.0, request("b2", B[:64], session="b", salt=b"one"))
    returning(
        bench, 2.0, request("c2", A[:64], session="a", salt=b"two"), request("a2", A[:64], session="a", salt=b"one")
    )
    cached = {id: bench.deltas[id][0].usage.cached_by_tier["device"] for id in ("a2", "b2", "c2")}
    assert cached == {"a2": 0, "b2": 48, "c2": 48}
    assert bench.scheduler.purge(two, b"") == 4
    assert bench.scheduler.purge(None, b"") == 8
    assert not len(bench.cache.groups[0].index)


# --- micro-batches ----------------------------------------------------------------------------------------------------


class Micro:
    """A scheduler of a pipeline; steps are absorbed when the test says so."""

    def __init__(self, n_stages, n_sequences):
        self.scheduler, cache = scheduler_of(n_blocks=200, max_running=16, token_budget=64, micro_batches=n_stages)
        self.runner, self.in_flight = FakeRunner(cache), []
        for n in range(n_sequences):
            self.scheduler.submit(request(f"r{n}", [n % VOCAB, n % 5], max_tokens=50 if n % 2 else 9), 0.0)

    def launch(self):
        """The sequences of the step."""
        plan = self.scheduler.plan()
        self.in_flight.append((plan, self.runner.launch(plan)))
        return [row.number for row in plan.rows]

    def absorb(self):
        plan, handle = self.in_flight.pop(0)
        self.scheduler.absorb(plan, handle.result())


@pytest.mark.parametrize(
    ("n_stages", "n_sequences", "sizes"),
    [(2, 5, [3, 2]), (3, 4, [2, 1, 1]), (3, 2, [1, 1, 0]), (4, 16, [4, 4, 4, 4]), (4, 6, [2, 2, 1, 1])],
)
def test_every_stage_has_a_micro_batch_of_its_own(n_stages, n_sequences, sizes):
    micro = Micro(n_stages, n_sequences)
    assert len(micro.launch()) == n_sequences  # their prompts
    micro.absorb()
    batches = [micro.launch() for _ in range(n_stages)]
    assert [len(batch) for batch in batches] == sizes
    assert len({number for batch in batches for number in batch}) == n_sequences
    for batch in batches:
        micro.absorb()
        assert micro.launch() == batch


def test_micro_batches_are_even_again_after_sequences_have_ended():
    micro = Micro(2, 8)
    micro.launch()
    for _ in range(12):  # every other sequence has ended by then
        while len(micro.in_flight) < 2:
            micro.launch()
        micro.absorb()
        micro.absorb()
    assert [len(micro.launch()) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("before", [{"n_submitted": 2**31 - 1}, {"n_admitted": 2**31 - 1}])
def test_an_engine_outlives_two_billion_requests(before):
    """Columns of a plan have 32 bits for the numbers of a sequence and of its stay in the slot."""
    loop = loop_of()
    loop.scheduler.n_submitted = before.get("n_submitted", 0)
    loop.scheduler.queues.n_admitted = before.get("n_admitted", 0)
    for n in range(3):
        loop.submit(request(str(n), [1, 2, n], max_tokens=6), 0.0)
    ended = []
    for step in range(10):
        ended += [delta.finish for delta in loop.step(float(step)) if delta.finish is not None]
    assert ended == ["length"] * 3
