"""The choice of the draft length, on simulated devices: it pays, or it stays out of the way."""

import random
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.speculation.length_policy import _CAUTION, AcceptanceRates, DraftTimes, LengthPolicy, PlainTimes
from emberline.engine.speculation.speculator import GPU_MARGINAL, GPU_WAIT_S


class Simulation:
    """n_rows sequences; each has a draft of 8 tokens with a probability, whose tokens are accepted with another."""

    def __init__(self, step_s, n_rows, accepts, has_draft=1.0, overhead_s=0.0, marginal=0.3, noise=0.03, seed=1):
        self.policy = LengthPolicy(lambda cell: 0.5, marginal)
        self.step_s, self.n_rows, self.accepts = step_s, n_rows, accepts
        self.has_draft, self.overhead_s, self.noise = has_draft, overhead_s, noise
        self.random = random.Random(seed)
        self.n_tokens = self.n_drafted = self.n_accepted = 0
        self.seconds = 0.0

    def step(self):
        drafts = []
        if self.policy.begin_step(self.n_rows):
            for _ in range(self.n_rows):
                if self.random.random() < self.has_draft:
                    n, _ = self.policy.choose([0] * 8)
                    drafts += [[0] * n] if n else []
        n_drafts = sum(map(len, drafts))
        n_output = self.n_rows
        for each in drafts:
            n = 0
            while n < len(each) and self.random.random() < self.accepts:
                n += 1
            self.policy.rates.add(each, n)
            n_output += n
            self.n_accepted += n
        longest = max(map(len, drafts), default=0)
        seconds = self.took_s(n_drafts, longest) + (self.overhead_s if drafts else 0)
        seconds *= 1 + self.noise * self.random.uniform(-1, 1)
        self.policy.measured(self.n_rows, n_drafts, n_output, seconds)
        self.n_tokens += n_output
        self.n_drafted += n_drafts
        self.seconds += seconds

    def run(self, n):
        for _ in range(n):
            self.step()
        return self

    def took_s(self, n_drafts, longest):
        return self.step_s(self.n_rows + n_drafts)

    @property
    def speedup(self):
        return self.n_tokens / self.seconds * self.took_s(0, 0) / self.n_rows


def gpu(n_tokens):
    """Flat until 300 tokens, then compute-bound."""
    return 0.006 + 0.00002 * max(0, n_tokens - 300)


def cpu(n_tokens):
    return 0.003 + 0.002 * n_tokens


@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("n_rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("device", "overhead_s", "marginal"),
    [(gpu, 0.0, 0.003), (gpu, 0.0015, 0.003), (gpu, 0.0015, 0.5), (cpu, 0.0002, 0.3)],
)
def test_never_much_slower_than_without(device, overhead_s, marginal, n_rows, accepts):
    run = Simulation(device, n_rows, accepts, overhead_s=overhead_s, marginal=marginal)
    assert run.run(1000 if n_rows < 64 else 300).speedup > 0.98


def test_a_fixed_cost_of_drafting_is_shared_by_the_rows():
    """A step with drafts waits for the host; with many rows that draft it pays all the same."""
    assert Simulation(gpu, 64, 0.8, overhead_s=0.0015, marginal=0.003).run(400).speedup > 1.8


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=15), min_size=1, max_size=8),
    st.floats(0.0, 0.003),
    st.sampled_from([0.0, 0.001]),
)
def test_the_chosen_length_gives_the_most_tokens_per_second(rows, token_s, fixed_s):
    """Of each row's draft, given the rows before it."""
    policy = LengthPolicy(lambda cell: cell / 9, 0.0, fixed_s)
    policy._drafts[len(rows).bit_length()] = DraftTimes(token_s, fixed_s)
    policy.measured(len(rows), 0, len(rows), 0.005)
    assert policy.begin_step(len(rows))
    for cells in rows:
        expected, step_s, fixed = policy._expected, policy._step_s, policy._fixed_s
        likely = list(accumulate((cell / 9 for cell in cells), mul, initial=_CAUTION))[1:]
        gains = list(accumulate(likely, initial=0.0))
        rates = [expected / step_s] + [
            (expected + gain) / (step_s + fixed + n * token_s) for n, gain in enumerate(gains[1:], 1)
        ]
        n, gain = policy.choose(cells)
        assert rates[n] == pytest.approx(max(rates))
        assert gain == pytest.approx(gains[n])


def test_long_drafts_where_tokens_are_free():
    run = Simulation(gpu, 1, 0.8, marginal=0.01).run(600)
    assert run.n_drafted / 600 > 6
    assert run.speedup > 0.9 * sum(0.8**n for n in range(9))


def test_a_cpu_verifies_likely_tokens_alone():
    likely, unlikely = Simulation(cpu, 1, 0.9).run(600), Simulation(cpu, 1, 0.2).run(600)
    assert likely.speedup > 1.5
    assert unlikely.n_drafted < 0.1 * likely.n_drafted


def test_no_drafts_in_a_compute_bound_step():
    run = Simulation(gpu, 256, 0.3).run(100)
    assert run.n_drafted / 100 < 150
    full = Simulation(lambda n: 0.001 * n, 64, 0.5).run(400)
    assert full.n_drafted / 400 < 10


def test_acceptance_that_changes_is_noticed():
    run = Simulation(cpu, 1, 0.95).run(400)
    before = run.n_drafted
    run.accepts = 0.0
    run.run(200)
    late = run.n_drafted
    run.run(400)
    assert before > 1000
    assert run.n_drafted - late < 100
    run.accepts = 0.95
    run.run(3000)
    assert run.speedup > 1.2


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(-0.01, 1.0)), min_size=1, max_size=60))
def test_drafts_never_shorten_a_step(measured):
    times = DraftTimes(0.001)
    for n_drafts, seconds in measured:
        times.add(n_drafts, seconds)
        assert times.fixed_s >= 0
        assert times.token_s >= 0


def test_what_drafts_cost_is_learned():
    times, plain = DraftTimes(0.01), PlainTimes()
    for n in range(200):
        times.add(n % 9 + 1, 0.003 + 0.0005 * (n % 9 + 1))
        plain.add(n % 20 + 1, 0.002 * (n % 20 + 1))
    assert times.fixed_s == pytest.approx(0.003, rel=0.1)
    assert times.token_s == pytest.approx(0.0005, rel=0.1)
    assert plain.of(10) == pytest.approx(0.02, rel=0.1)
    assert plain.of(64) is None


def test_rates_follow_what_is_measured():
    rates = AcceptanceRates(lambda cell: 0.5)
    assert rates.rate(3) == 0.5
    for _ in range(50):
        rates.add([3, 4, 5], 1)
    assert rates.rate(3) > 0.9
    assert rates.rate(4) < 0.1
    assert rates.rate(5) == 0.5  # never reached
    for _ in range(200):
        rates.add([3], 0)
    assert rates.rate(3) < 0.1


@given(st.integers(1, 200), st.lists(st.integers(0, 5), min_size=1, max_size=15), st.floats(0.0, 1.0))
def test_a_choice_is_within_the_draft(n_rows, cells, trust):
    policy = LengthPolicy(lambda cell: 0.2 * cell, 0.1)
    policy.measured(n_rows, 0, n_rows, 0.01)
    assert policy.begin_step(n_rows)
    n, gain = policy.choose(cells, trust=trust)
    assert 0 <= gain <= n <= len(cells)
    assert policy.choose(cells, n_guessed=len(cells)) == (0, 0.0)


# Seconds of a step of a model of 8B parameters on an H200, by rows: drafts of each row to seconds.
H200 = {
    1: {0: 0.004003, 2: 0.004319, 4: 0.004390, 8: 0.004535},
    4: {0: 0.004377, 2: 0.004475, 4: 0.004785, 8: 0.005209},
    16: {0: 0.004555, 2: 0.005105, 4: 0.005843, 8: 0.006881},
    256: {0: 0.0122, 2: 0.0254, 4: 0.0407, 8: 0.0732},  # compute-bound
}
HOST_WAIT_S = 0.001


class OnH200(Simulation):
    """Between measured steps the next longer one counts: their tokens are padded to it."""

    def __init__(self, n_rows, accepts, **more):
        super().__init__(None, n_rows, accepts, overhead_s=HOST_WAIT_S, marginal=GPU_MARGINAL, **more)
        self.policy = LengthPolicy(lambda cell: 0.6, GPU_MARGINAL, GPU_WAIT_S)
        timed = {(rows, rows * (1 + n)): s for rows, by in H200.items() if rows <= 64 for n, s in by.items()}
        self.policy.calibrate(timed)

    def took_s(self, n_drafts, longest):
        return H200[self.n_rows][min(n for n in (0, 2, 4, 8) if n * self.n_rows >= n_drafts)]


@pytest.mark.parametrize("accepts", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("has_draft", [0.1, 1.0])
@pytest.mark.parametrize("n_rows", list(H200))
def test_auto_on_a_gpu_is_never_slower_than_off(n_rows, has_draft, accepts):
    """With the step times of a card."""
    run = OnH200(n_rows, accepts, has_draft=has_draft)
    assert run.run(1500 if n_rows < 64 else 300).speedup > 0.98


@pytest.mark.parametrize(("n_rows", "least"), [(1, 1.8), (4, 1.8), (16, 1.4)])
def test_likely_drafts_pay_on_a_gpu(n_rows, least):
    assert OnH200(n_rows, 0.85).run(1000).speedup > least


@pytest.mark.parametrize("n_prompts", [0, 10, 40])
def test_steps_that_ask_for_no_drafts_change_nothing(n_prompts):
    """As those that compute prompts: what rows might draft together is known when they decode again."""
    run = OnH200(16, 0.6, has_draft=0.5)
    for _ in range(60):
        run.run(10)
        for _ in range(n_prompts):
            run.policy.begin_step(16)
    assert run.speedup > 1.15


def test_measured_steps_say_what_drafts_cost():
    policy = LengthPolicy(lambda cell: 0.4, 0.001, 0.0)
    policy.calibrate({(16, 16): 0.004, (16, 48): 0.008, (16, 80): 0.012, (1, 5): 0.004})
    policy.measured(16, 0, 16, 0.004)
    assert policy.begin_step(16)
    assert policy.choose([0] * 4) == (0, 0.0)  # a token takes half as long as those of a plain step
    free = LengthPolicy(lambda cell: 0.4, 0.001, 0.0)
    free.measured(16, 0, 16, 0.004)
    assert free.begin_step(16)
    assert free.choose([0] * 4)[0] == 4


class WithHead(Simulation):
    """A draft head proposes behind every row, which takes pass_s for each token; the next step verifies."""

    def __init__(self, n_rows, accepts, plain_s, token_s, pass_s, noise=0.03, seed=1):
        super().__init__(
            lambda n_tokens: plain_s + token_s * (n_tokens - n_rows), n_rows, accepts, noise=noise, seed=seed
        )
        self.policy, self.pass_s = LengthPolicy(lambda cell: 0.6, GPU_MARGINAL), pass_s
        self.policy.calibrate({(n_rows, n * n_rows): self.step_s(n * n_rows) for n in (1, 3, 5)})
        self.n_proposed = self.n_passes = 0

    def step(self):
        depth, drafts = 0, []
        if self.policy.begin_step(self.n_rows):
            depth = self.policy.depth([0, 1, 2, 3])
            for _ in range(self.n_rows if self.n_proposed else 0):
                n, _ = self.policy.choose(list(range(self.n_proposed)))
                drafts += [n] if n else []
        self.n_proposed, n_output = depth, self.n_rows
        for n in drafts:
            accepted = next((i for i in range(n) if self.random.random() >= self.accepts), n)
            self.policy.rates.add(list(range(n)), accepted)
            n_output += accepted
        seconds = self.step_s(self.n_rows + sum(drafts)) + depth * self.pass_s
        seconds *= 1 + self.noise * self.random.uniform(-1, 1)
        self.policy.measured(self.n_rows, sum(drafts), n_output, seconds, depth)
        self.n_tokens += n_output
        self.n_drafted += sum(drafts)
        self.n_passes += depth
        self.seconds += seconds


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_rows", "accepts", "token_s", "pass_s", "least"),
    [
        (1, 0.6, 1e-5, 1e-4, 1.35),
        (8, 0.6, 5e-6, 2e-4, 1.12),
        (32, 0.6, 3e-6, 3e-4, 1.05),
        (32, 0.5, 6e-6, 1.2e-4, 1.03),
        (32, 0.35, 6e-6, 1.2e-4, 0.99),
        (32, 0.5, 6e-6, 5e-4, 0.98),
        (32, 0.0, 6e-6, 5e-4, 0.98),
    ],
)
def test_a_heads_own_passes_count(n_rows, accepts, token_s, pass_s, least, seed):
    assert WithHead(n_rows, accepts, 0.001, token_s, pass_s, seed=seed).run(1500).speedup > least


def test_a_head_that_does_not_pay_is_left_alone():
    run = WithHead(32, 0.5, 0.001, 6e-6, 5e-4).run(1500)
    assert run.n_drafted < 32 * 100
    assert run.n_passes < 100


def test_a_first_pass_that_was_slow_is_soon_forgotten():
    run = WithHead(1, 0.6, 0.001, 1e-5, 1e-4)
    run.policy.measured(1, 0, 1, 0.001)
    run.policy.measured(1, 0, 1, 0.5, depth=2)
    assert run.run(300).n_drafted > 300


def test_a_step_with_a_heads_passes_is_none_without_drafts():
    policy = LengthPolicy(lambda cell: 0.5, 0.01)
    policy.measured(8, 0, 8, 0.001)
    for _ in range(50):
        policy.measured(8, 0, 8, 0.002, depth=2)
    assert policy._plain.of(8) == pytest.approx(0.001)
    assert policy._pass_s(8) == pytest.approx(0.0005, rel=0.01)
