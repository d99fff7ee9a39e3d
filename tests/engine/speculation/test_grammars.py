"""Drafts under grammars, thinking limits, minimum lengths and bad words: the output is that of the plain path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.grammar import guided_rules
from emberline.engine.grammar.guide_jobs import GuideThreads
from emberline.protocol.token_ids import pack
from tests.engine.grammar.bench import PATIENT, TASTES, VOCAB, Bench, compiler
from tests.engine.grammar.samples import ALL, END_ID, SPECIAL
from tests.engine.speculation.standin import StandinSpeculation, output_of
from tests.examples import n_examples


@pytest.fixture(scope="module")
def grammars():
    with compiler() as made:
        yield made


def replay(outputs, wrong):
    """Drafts what a run without drafts has said."""

    def oracle(seq):
        done = output_of(seq)
        said = outputs[seq.id]
        return said[len(done) :] if said[: len(done)] == done else [1, 2, 3]

    return StandinSpeculation(oracle, wrong, VOCAB)


def play(bench, arrivals):
    for n, (name, taste, most, n_prompt, seed, options) in enumerate(arrivals):
        prompt = [1 + (n * 31 + i) % 200 for i in range(n_prompt)]
        bench.submit(f"{n}", name, f"{taste}:{seed}", prompt, max_tokens=most, **{"logprobs": 0} | options)
        bench.step()
    bench.finish()
    assert bench.cache.n_used == 0
    return {id: (bench.tokens(id), bench.end(id).finish, bench.end(id).usage.completion_tokens) for id in bench.deltas}


options = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.none(),  # then tokens may be appended without a draw
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 20),
        "bad_ids": st.lists(st.lists(st.integers(48, 58), min_size=1, max_size=2).map(pack), max_size=3).map(tuple),
        "thinking": st.tuples(st.integers(0, 12), st.just((SPECIAL,)), st.just([ord("x"), SPECIAL])),
    },
)
arrivals = st.tuples(
    st.sampled_from([*ALL, None]),
    st.sampled_from(list(TASTES)),
    st.integers(1, 50),
    st.integers(1, 30),
    st.integers(0, 5),
    options,
)


@settings(max_examples=n_examples(60), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=5), st.sampled_from([0, 2, 6]), st.integers(9, 40))
def test_the_output_is_that_of_the_plain_path(grammars, arrived, wrong, n_blocks):
    plain = play(Bench(grammars=grammars), arrived)
    speculation = replay({id: tokens for id, (tokens, _, _) in plain.items()}, wrong)
    small = Bench(n_blocks, max_running=3, token_budget=32, grammars=grammars, speculation=speculation)
    assert play(small, arrived) == plain
    for id, deltas in small.deltas.items():
        for delta in deltas if "logprobs" not in arrived[int(id)][-1] else ():
            assert [entry.token_id for entry in delta.logprobs or []] == [*memoryview(delta.token_ids).cast("I")]


def test_a_grammar_that_follows_drafts_too_slowly_is_ignored_for_the_step(grammars):
    arrived = [("json", "nesting", 40, 5, 1, {}), (None, "none", 40, 5, 1, {})]
    plain = play(Bench(grammars=grammars), arrived)
    speculation = replay({id: tokens for id, (tokens, _, _) in plain.items()}, 0)
    waits = iter(range(1_000_000))

    class EveryOtherLate(GuideThreads):
        def wait(self, n_jobs):
            if next(waits) % 2:
                super().wait(n_jobs)

    assert play(Bench(grammars=grammars, speculation=speculation, threads=EveryOtherLate), arrived) == plain
    assert speculation.n_verified > 0


def test_drafts_of_an_end_token_end_the_output(grammars):
    bench = Bench(grammars=grammars, speculation=StandinSpeculation(lambda seq: [END_ID] * 15, 0, VOCAB))
    bench.submit("a", "json", "nesting", max_tokens=40)
    bench.submit("b", None, "none", max_tokens=40, min_tokens=10)
    bench.finish()
    alone = Bench(grammars=grammars)
    alone.submit("a", "json", "nesting", max_tokens=40)
    alone.submit("b", None, "none", max_tokens=40, min_tokens=10)
    alone.finish()
    for id in ("a", "b"):
        assert (bench.tokens(id), bench.end(id).finish) == (alone.tokens(id), alone.end(id).finish)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_right_drafts_are_accepted_under_a_grammar(grammars, in_flight):
    arrived = [("json", "nesting", 60, 5, n, {}) for n in range(3)]
    plain_bench = Bench(grammars=grammars, **PATIENT)
    plain = play(plain_bench, arrived)
    speculation = replay({id: tokens for id, (tokens, _, _) in plain.items()}, 0)
    bench = Bench(grammars=grammars, speculation=speculation, in_flight=in_flight, **PATIENT)
    assert play(bench, arrived) == plain
    assert speculation.n_accepted > 30
    assert bench.runner.steps < plain_bench.runner.steps / 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_only_token_of_a_mask_is_appended_without_a_draw(grammars, in_flight):
    arrived = [("linked", "digits", 80, 5, n, {"logprobs": None}) for n in range(3)]
    benches = [
        Bench(grammars=grammars, speculation=speculation, in_flight=in_flight, **PATIENT)
        for speculation in (None, StandinSpeculation(lambda seq: []))
    ]
    plain, appended = (play(bench, arrived) for bench in benches)
    assert appended == plain
    n = benches[1].scheduler.speculation.n_appended
    if in_flight == 1:
        assert n > 40
        assert benches[1].runner.steps <= benches[0].runner.steps - n / 3
    else:
        assert n == 0  # the next row samples the token already


def test_appended_tokens_and_drafts_share_the_budget_of_a_step(grammars):
    arrived = [("linked", "digits", 80, 2, n, {"logprobs": None}) for n in range(4)]
    plain = play(Bench(grammars=grammars), arrived)
    speculation = replay({id: tokens for id, (tokens, _, _) in plain.items()}, 0)
    bench = Bench(grammars=grammars, speculation=speculation, token_budget=12)
    launch, sizes = bench.runner.launch, []
    bench.runner.launch = lambda plan: sizes.append(plan.n_tokens) or launch(plan)
    assert play(bench, arrived) == plain
    assert speculation.n_appended
    assert speculation.n_verified
    assert max(sizes) <= 12


def test_the_only_token_of_a_mask():
    mask = np.zeros(4, np.uint32)
    assert guided_rules.only_token(mask) is None
    mask[2] = 1 << 31
    assert guided_rules.only_token(mask) == 95
    mask[2] |= 1
    assert guided_rules.only_token(mask) is None
    mask[:] = [1, 0, 0, 1]
    assert guided_rules.only_token(mask) is None
