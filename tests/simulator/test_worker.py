"""A simulated worker: step times in closed form, and no request lost for any arrivals."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emberline.simulator.coefficients import Coefficients, FixedTokenBudget, LatencyTargetBudget, PrefillPolicy
from emberline.simulator.request import SimRequest, SimSequence
from emberline.simulator.virtual_clock import VirtualClock
from emberline.simulator.worker import SimWorker
from tests.examples import n_examples

MODEL = Coefficients(
    name="test",
    source="test",
    step_s=0.004,
    row_s=1e-5,
    context_s=4e-8,
    token_s=2e-5,
    pair_s=1e-9,
    kv_tokens=4096,
    kv_bytes=1000,
    token_budget=1024,
    context_len=3000,
)


class Record:
    """Records events, and checks at each that the KV cache is within its capacity."""

    def __init__(self, clock: VirtualClock) -> None:
        self.first_token_s: dict[str, float] = {}
        self.end_s: dict[str, float] = {}
        self._clock = clock

    def on_prefill(self, worker: SimWorker, seq: SimSequence, n_tokens: int) -> None: ...

    def on_first_token(self, worker: SimWorker, seq: SimSequence) -> None:
        assert seq.request.id not in self.first_token_s
        self.first_token_s[seq.request.id] = self._clock.now_s

    def on_finish(self, worker: SimWorker, seq: SimSequence) -> None:
        assert seq.request.id not in self.end_s
        self.end_s[seq.request.id] = self._clock.now_s

    def on_step(self, worker: SimWorker, seconds: float, n_tokens: int) -> None:
        assert seconds > 0

    def on_change(self, worker: SimWorker) -> None:
        cache = worker.cache
        assert cache.reserved + cache.n_cached <= cache.capacity


def make_request(
    number: int, path: tuple[int, ...], lengths: tuple[int, ...], n_output: int, n_prompt: int = 0
) -> SimRequest:
    n = n_prompt or 16 * sum(lengths)
    return SimRequest(f"j{number}", number, 0, 0, path, lengths, n, n_output, block_tokens=16, arrival_s=0.0)


def worker(prefill_policy: PrefillPolicy, model: Coefficients = MODEL) -> tuple[VirtualClock, Record, SimWorker]:
    clock = VirtualClock()
    record = Record(clock)
    return clock, record, SimWorker("w", model, prefill_policy, clock, record, block_tokens=16)


def test_single_request_takes_the_modelled_time() -> None:
    clock, record, one = worker(LatencyTargetBudget())
    one.submit(make_request(0, (0,), (125,), 101), 101)  # 2,000 tokens: chunks of 1,024 and 976
    clock.run(100)
    prefill_s = 2 * 0.004 + 2000 * 2e-5 + 1e-9 * (1024 * 512 + 976 * (1024 + 488))
    assert record.first_token_s["j0"] == pytest.approx(prefill_s)
    assert prefill_s == pytest.approx(MODEL.prefill_s(2000))
    decode_s = sum(MODEL.decode_s(1, 2001 + n) for n in range(100))
    assert record.end_s["j0"] == pytest.approx(prefill_s + decode_s)
    assert one.busy_s == pytest.approx(prefill_s + decode_s)
    assert (one.computed, one.cached, one.n_output) == (2000, 0, 101)


def test_cached_prefix_is_not_computed_again() -> None:
    clock, record, one = worker(LatencyTargetBudget())
    one.submit(make_request(0, (0,), (60,), 1), 1)
    clock.run(10)
    second = make_request(1, (0, 1), (60, 10), 1)
    one.submit(second, 1)
    clock.run(20)
    assert second.cached_tokens == 960
    assert one.computed == 960 + 160
    assert record.first_token_s["j1"] - 10 == pytest.approx(MODEL.prefill_s(160, 960))


def test_reply_known_to_the_trace_is_cached() -> None:
    clock, _, one = worker(LatencyTargetBudget())
    first = make_request(0, (0,), (10,), 33)
    first.reply = (1, 2)
    one.submit(first, 33)
    clock.run(10)
    second = make_request(1, (0, 1, 2), (10, 2, 3), 1)
    one.submit(second, 1)
    clock.run(20)
    assert second.cached_tokens == 192
    assert one.cache.n_used == 0


def test_sequence_waits_for_a_prefix_that_another_computes() -> None:
    clock, _, one = worker(FixedTokenBudget(256))
    one.submit(make_request(0, (0,), (60,), 1), 1)
    late = make_request(1, (0, 1), (60, 4), 1)
    one.submit(late, 1)
    clock.run(10)
    assert late.cached_tokens == 960
    assert one.computed == 960 + 64


def test_arrival_shortens_fused_steps() -> None:
    clock, record, one = worker(LatencyTargetBudget())
    one.submit(make_request(0, (0,), (1,), 1000), 1000)
    clock.run(1.0)
    one.submit(make_request(1, (1,), (1,), 5), 5)
    clock.run(100)
    alone_s = MODEL.decode_s(1, 16 + 250)
    assert 1.0 < record.first_token_s["j1"] < 1.0 + 3 * alone_s  # the step that runs, then its own
    assert one.n_output == 1005


@pytest.mark.parametrize("prefill_policy", [FixedTokenBudget(256), LatencyTargetBudget(target_s=0.008)])
def test_prefill_is_bounded_while_sequences_decode(prefill_policy: PrefillPolicy) -> None:
    clock, record, one = worker(prefill_policy)
    steps = []
    record.on_step = lambda worker, seconds, n_tokens: steps.append((seconds, n_tokens))  # type: ignore[method-assign]
    one.submit(make_request(0, (0,), (1,), 400), 400)
    clock.run(0.1)
    one.submit(make_request(1, (1,), (120,), 2), 2)
    clock.run(100)
    longest_s = max(seconds for seconds, n_tokens in steps if n_tokens)
    limit_s = (
        0.0085 if isinstance(prefill_policy, LatencyTargetBudget) else MODEL.decode_s(1, 500) + MODEL.chunk_s(256, 1920)
    )
    assert longest_s <= limit_s
    assert record.end_s.keys() == {"j0", "j1"}


def test_full_memory_queues_and_preempts_the_latest() -> None:
    clock, record, one = worker(LatencyTargetBudget())
    for number in range(3):
        one.submit(make_request(number, (number,), (75,), 200), 200)  # 3 × (1,200 + 200) tokens: more than 4,096
    clock.run(1000)
    assert record.end_s.keys() == {"j0", "j1", "j2"}
    assert one.n_preempted >= 1
    assert one.n_output == 600
    assert one.cache.n_used == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # shared prefix
        st.integers(1, 60),  # further blocks
        st.integers(1, 120),  # output tokens
        st.floats(0.0, 0.5),  # seconds since the previous
    ),
    min_size=1,
    max_size=15,
)


@given(REQUESTS, st.sampled_from([FixedTokenBudget(128), FixedTokenBudget(2048), LatencyTargetBudget(target_s=0.006)]))
@example(  # preempting one of many sequences must keep the others in the order of their last tokens
    [(3, 31, 80, 0.0), (0, 18, 117, 0.0), (0, 31, 75, 0.0), (2, 19, 112, 0.0), (0, 34, 74, 0.0), (1, 34, 58, 0.0)],
    FixedTokenBudget(2048),
)
@settings(max_examples=n_examples(60), deadline=None)
def test_every_request_finishes_once_and_tokens_add_up(
    requests: list[tuple[int, int, int, float]], prefill_policy: PrefillPolicy
) -> None:
    clock, record, one = worker(prefill_policy)
    sent, at_s = [], 0.0
    for number, (kind, blocks, n_output, wait_s) in enumerate(requests):
        at_s += wait_s
        sent.append(make_request(number, (kind, 10 + number), (20, blocks), n_output))
        clock.at(at_s, one.submit, sent[-1], n_output)
    clock.run(10_000)
    assert record.end_s.keys() == record.first_token_s.keys() == {one.id for one in sent}
    assert one.n_output == sum(n_output for _, _, n_output, _ in requests)
    assert one.n_running == one.load().waiting == one.load().waiting_tokens == one.cache.n_used == 0
    if not one.n_preempted:
        assert one.computed + one.cached == sum(request.n_prompt for request in sent)
    assert one.busy_s <= clock.now_s
