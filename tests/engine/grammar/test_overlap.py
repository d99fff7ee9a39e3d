"""Several steps in flight: replies with and without grammars, thinking limits too, are those of one step at a time."""

import pytest

from emberline.engine.core.step_loop import StepLoop
from tests.engine.client import wait_until
from tests.engine.grammar.bench import PATIENT, TASTES, Bench, compiler
from tests.engine.grammar.samples import ALL


@pytest.fixture(scope="module")
def grammars():
    with compiler() as made:
        yield made


def replies(grammars, taste, steps_in_flight, n_blocks, micro_batches=1):
    bench = Bench(grammars=grammars, n_blocks=n_blocks, micro_batches=micro_batches)
    bench.loop = StepLoop(bench.scheduler, bench.runner, steps_in_flight)
    for n, name in enumerate([None, *ALL, None]):
        thinking = (7, (5,), [9, 8]) if name is None and n else None
        bench.submit(f"{n}", name, taste, max_tokens=25 + n, thinking=thinking)
    bench.finish()
    assert bench.cache.n_used == 0
    return {id: (bench.tokens(id), deltas[-1].finish) for id, deltas in bench.deltas.items()}, bench.runner.steps


@pytest.mark.parametrize("taste", TASTES)
@pytest.mark.parametrize("n_blocks", [200, 130])
def test_replies_are_the_same(grammars, taste, n_blocks):
    one, _ = replies(grammars, taste, 1, n_blocks)
    two, _ = replies(grammars, taste, 2, n_blocks)
    assert two == one
    stages, _ = replies(grammars, taste, 3, n_blocks, micro_batches=3)
    assert stages == one


def test_micro_batches_with_grammars_do_not_wait_for_each_other(grammars):
    bench = Bench(grammars=grammars, in_flight=2, micro_batches=2, **PATIENT)
    for n in range(2):
        bench.submit(f"{n}", "json", "strings", max_tokens=30)
    wait_until(lambda: bench.step() or not bench.guided.n_compiling)
    launch, n_before = bench.runner.launch, []

    def counted(plan):
        handle = launch(plan)
        sample = handle.sample

        def sampled(masks=None):
            if masks is not None:
                n_before.append(bench.loop.n_in_flight)
            sample(masks)

        handle.sample = sampled
        return handle

    bench.runner.launch = counted
    bench.finish()
    assert max(n_before) == 1, "a step was absorbed before the next one had its masks"


def test_a_grammar_costs_no_extra_steps(grammars):
    """Its rows follow like others: what it allows is asked when the token before is known, after the launch."""

    def steps(steps_in_flight):
        bench = Bench(grammars=grammars, in_flight=steps_in_flight, **PATIENT)
        bench.submit("a", "json", "strings", max_tokens=60)
        wait_until(lambda: bench.step() or not bench.guided.n_compiling)
        bench.submit("b", None, "none", max_tokens=60)
        bench.finish()
        return bench.runner.steps

    assert steps(2) <= steps(1) + 2
