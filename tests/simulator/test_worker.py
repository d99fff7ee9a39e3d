"""A modelled worker: closed forms where there are any, and nothing lost whatever comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.simulator.coefficients import Chunking, Coefficients, Fixed, Timed
from emberline.simulator.job import Job, Seq
from emberline.simulator.virtual_clock import Clock
from emberline.simulator.worker import Worker

MODEL = Coefficients(
    name="test",
    source="made up",
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
    """Listens, and checks whenever something changed that memory is not overdrawn."""

    def __init__(self, clock: Clock) -> None:
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self._clock = clock

    def chunk(self, worker: Worker, seq: Seq, n_tokens: int) -> None: ...

    def first(self, worker: Worker, seq: Seq) -> None:
        assert seq.job.id not in self.first_s
        self.first_s[seq.job.id] = self._clock.now_s

    def ended(self, worker: Worker, seq: Seq) -> None:
        assert seq.job.id not in self.ended_s
        self.ended_s[seq.job.id] = self._clock.now_s

    def stepped(self, worker: Worker, seconds: float, n_tokens: int) -> None:
        assert seconds > 0

    def changed(self, worker: Worker) -> None:
        cache = worker.cache
        assert cache.reserved + cache.n_cached <= cache.capacity


def job(number: int, path: tuple[int, ...], lengths: tuple[int, ...], n_output: int, n_prompt: int = 0) -> Job:
    n = n_prompt or 16 * sum(lengths)
    return Job(f"j{number}", number, 0, 0, path, lengths, n, n_output, block_tokens=16, asked_s=0.0)


def worker(chunking: Chunking, model: Coefficients = MODEL) -> tuple[Clock, Record, Worker]:
    clock = Clock()
    record = Record(clock)
    return clock, record, Worker("w", model, chunking, clock, record, block_tokens=16)


def test_one_request_alone_takes_what_the_formula_says() -> None:
    clock, record, one = worker(Timed())
    one.submit(job(0, (0,), (125,), 101), 101)  # 2,000 tokens: chunks of 1,024 and 976
    clock.run(100)
    prefill_s = 2 * 0.004 + 2000 * 2e-5 + 1e-9 * (1024 * 512 + 976 * (1024 + 488))
    assert record.first_s["j0"] == pytest.approx(prefill_s)
    assert prefill_s == pytest.approx(MODEL.prefill_s(2000))
    decode_s = sum(MODEL.decode_s(1, 2001 + n) for n in range(100))
    assert record.ended_s["j0"] == pytest.approx(prefill_s + decode_s)
    assert one.busy_s == pytest.approx(prefill_s + decode_s)
    assert (one.computed, one.cached, one.n_written) == (2000, 0, 101)


def test_a_cached_beginning_is_not_computed_again() -> None:
    clock, record, one = worker(Timed())
    one.submit(job(0, (0,), (60,), 1), 1)
    clock.run(10)
    second = job(1, (0, 1), (60, 10), 1)
    one.submit(second, 1)
    clock.run(20)
    assert second.cached_tokens == 960
    assert one.computed == 960 + 160
    assert record.first_s["j1"] - 10 == pytest.approx(MODEL.prefill_s(160, 960))


def test_a_reply_that_the_trace_knows_is_cached_too() -> None:
    clock, _, one = worker(Timed())
    first = job(0, (0,), (10,), 33)
    first.reply = (1, 2)
    one.submit(first, 33)
    clock.run(10)
    second = job(1, (0, 1, 2), (10, 2, 3), 1)
    one.submit(second, 1)
    clock.run(20)
    assert second.cached_tokens == 192
    assert one.cache.n_used == 0


def test_one_who_needs_what_another_computes_waits_for_it() -> None:
    clock, _, one = worker(Fixed(256))
    one.submit(job(0, (0,), (60,), 1), 1)
    late = job(1, (0, 1), (60, 4), 1)
    one.submit(late, 1)
    clock.run(10)
    assert late.cached_tokens == 960
    assert one.computed == 960 + 64


def test_a_stream_that_joins_is_counted_from_its_step_on() -> None:
    clock, record, one = worker(Timed())
    one.submit(job(0, (0,), (1,), 1000), 1000)
    clock.run(1.0)
    one.submit(job(1, (1,), (1,), 5), 5)
    clock.run(100)
    alone_s = MODEL.decode_s(1, 16 + 250)
    assert 1.0 < record.first_s["j1"] < 1.0 + 3 * alone_s  # the step that runs, then its own
    assert one.n_written == 1005


@pytest.mark.parametrize("chunking", [Fixed(256), Timed(target_s=0.008)])
def test_chunks_beside_streams_are_bounded(chunking: Chunking) -> None:
    clock, record, one = worker(chunking)
    longest = []
    record.stepped = lambda worker, seconds, n_tokens: longest.append((seconds, n_tokens))  # type: ignore[method-assign]
    one.submit(job(0, (0,), (1,), 400), 400)
    clock.run(0.1)
    one.submit(job(1, (1,), (120,), 2), 2)
    clock.run(100)
    beside = max(seconds for seconds, n_tokens in longest if n_tokens)
    limit_s = 0.0085 if isinstance(chunking, Timed) else MODEL.decode_s(1, 500) + MODEL.chunk_s(256, 1920)
    assert beside <= limit_s
    assert record.ended_s.keys() == {"j0", "j1"}


def test_who_does_not_fit_waits_and_when_memory_ends_the_last_gives_way() -> None:
    clock, record, one = worker(Timed())
    for number in range(3):
        one.submit(job(number, (number,), (75,), 200), 200)  # 3 × (1,200 + 200) tokens: more than 4,096
    clock.run(1000)
    assert record.ended_s.keys() == {"j0", "j1", "j2"}
    assert one.n_preempted >= 1
    assert one.n_written == 600
    assert one.cache.n_used == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose beginning it has
        st.integers(1, 60),  # blocks of its own
        st.integers(1, 120),  # tokens of its reply
        st.floats(0.0, 0.5),  # seconds after the one before
    ),
    min_size=1,
    max_size=15,
)


@given(REQUESTS, st.sampled_from([Fixed(128), Fixed(2048), Timed(target_s=0.006)]))
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_tokens_add_up(
    requests: list[tuple[int, int, int, float]], chunking: Chunking
) -> None:
    clock, record, one = worker(chunking)
    jobs, at_s = [], 0.0
    for number, (kind, blocks, n_output, wait_s) in enumerate(requests):
        at_s += wait_s
        jobs.append(job(number, (kind, 10 + number), (20, blocks), n_output))
        clock.at(at_s, one.submit, jobs[-1], n_output)
    clock.run(10_000)
    assert record.ended_s.keys() == record.first_s.keys() == {one.id for one in jobs}
    assert one.n_written == sum(n_output for _, _, n_output, _ in requests)
    assert one.n_running == one.load().waiting == one.load().waiting_tokens == one.cache.n_used == 0
    if not one.n_preempted:
        assert one.computed + one.cached == sum(one_job.n_prompt for one_job in jobs)
    assert one.busy_s <= clock.now_s
