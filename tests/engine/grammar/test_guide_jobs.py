"""A grammar that is slow to apply delays its own sequence: the steps of others go on, and in the end it is refused."""

import threading
import time

import pytest

from emberline.engine.grammar import guide_jobs, guided_decoding
from emberline.engine.grammar.guide_jobs import GuideThreads, GuideTimings
from emberline.protocol.grammar import Grammar, Repeat, Rule, Text
from tests.engine.client import wait_until
from tests.engine.grammar.bench import Bench, compiler
from tests.engine.grammar.samples import choice, seq
from tests.engine.grammar.test_scheduling import Fake, Slow

# s ::= "a" | s s | s s s, without left recursion
AMBIGUOUS = Grammar((Rule(1), seq(Text("a"), Repeat(choice(Rule(1), seq(Rule(1), Rule(1)))))))


class Blocked(Fake):
    """Two tokens, 97 and 98; `accept` returns when the test says so."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def accept(self, token_id):
        assert self.go.wait(300), "nobody waits for it that long"
        return super().accept(token_id)


def blocked_bench(steps_in_flight, **timings):
    guides = Slow(Blocked())
    guides.ready = True
    bench = Bench(grammars=guides, in_flight=steps_in_flight, **timings)
    bench.submit("bound", "json")
    bench.submit("plain", None, max_tokens=400, ignore_eos=True)
    wait_until(lambda: bench.step() or (bench.guided.jobs and not bench.guided.n_compiling))
    return bench, guides.applied


def make_stuck(bench):
    """The job that runs has run for too long. (A shorter limit could hit others, too.)"""
    (job,) = bench.guided.jobs
    wait_until(lambda: job.started_s)
    job.started_s -= guide_jobs.MAX_JOB_S


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_steps_go_on_while_a_grammar_is_applied(steps_in_flight):
    bench, guide = blocked_bench(steps_in_flight, step_wait_s=0.001)
    n_before, n_steps = len(bench.tokens("plain")), bench.runner.steps
    for _ in range(100):
        bench.step()
    assert len(bench.tokens("plain")) >= n_before + 98, "a token in every step"
    assert bench.runner.steps == n_steps + 100
    assert "bound" not in bench.deltas
    guide.go.set()
    bench.finish()
    assert bench.tokens("bound") == [97, 98], "and no token that was sampled without a mask"
    assert bench.end("bound").finish == "stop"
    assert bench.end("plain").finish == "length"
    assert bench.cache.n_used == 0
    assert bench.scheduler.load().waiting_tokens == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_no_step_waits_for_a_sequence_whose_grammar_was_slow(steps_in_flight):
    began_s = time.monotonic()
    bench, guide = blocked_bench(steps_in_flight, slow_cpu_s=-1.0, step_wait_s=60.0)
    for _ in range(20):
        bench.step()
    assert time.monotonic() < began_s + 60
    guide.go.set()
    bench.finish()
    assert bench.tokens("bound") == [97, 98]


def test_a_sequence_may_be_aborted_while_its_grammar_is_applied():
    bench, guide = blocked_bench(2, step_wait_s=0.001)
    assert bench.scheduler.abort("bound").finish == "cancelled"
    guide.go.set()
    bench.finish()
    assert bench.end("plain").finish == "length"
    assert bench.cache.n_used == 0


def test_a_grammar_that_never_returns_ends_its_request():
    bench, guide = blocked_bench(1, step_wait_s=0.001)
    make_stuck(bench)
    bench.finish()
    assert (bench.end("bound").error.kind, bench.end("bound").error.message) == ("bad_input", guided_decoding.TOO_SLOW)
    bench.guided.grammars.applied = Fake()
    bench.submit("next", "json")
    bench.finish()
    assert bench.tokens("next") == [97, 98], "others have another thread"
    guide.go.set()


def test_a_grammar_that_never_returns_delays_no_others_after_its_request_was_aborted():
    bench, guide = blocked_bench(1, slow_cpu_s=-1.0)  # all take in their tokens in one slow thread
    make_stuck(bench)
    bench.scheduler.abort("bound")
    bench.guided.grammars.applied = Fake()
    bench.submit("next", "json")
    bench.finish()
    assert bench.tokens("next") == [97, 98]
    guide.go.set()


def test_a_request_whose_grammar_used_too_much_time_is_ended():
    guides = Slow(Fake())
    guides.ready = True
    bench = Bench(grammars=guides, base_cpu_s=-1.0)
    bench.submit("bound", "json")
    bench.submit("plain", None, max_tokens=5, ignore_eos=True)
    bench.finish()
    assert (bench.end("bound").error.kind, bench.end("bound").error.param) == ("bad_input", "grammar")
    assert bench.end("plain").finish == "length"


def test_ambiguous_grammars_end_and_others_take_a_token_in_every_step():
    with compiler() as grammars:
        bench = Bench(grammars=grammars, max_running=8)
        for n in range(6):
            bench.submit(f"{n}", AMBIGUOUS, f"strings:{n}", max_tokens=300)
        bench.submit("plain", None, max_tokens=1000, ignore_eos=True)
        wait_until(lambda: bench.step() or "plain" in bench.deltas)
        n_steps = bench.runner.steps
        while bench.end("plain").finish is None:
            bench.step()
        assert bench.runner.steps - n_steps == 999
        bench.finish()
    for n in range(6):
        end = bench.end(f"{n}")
        assert end.finish in ("stop", "length") or end.error.kind == "bad_input"


def test_jobs_behind_one_that_takes_too_long_run_in_another_thread():
    threads, go = GuideThreads(GuideTimings(step_wait_s=0.01)), threading.Event()
    jobs = [threads.start(lambda: go.wait(300), False), threads.start(lambda: 5, False)]
    wait_until(lambda: jobs[0].started_s)
    threads.wait(2)
    wait_until(lambda: jobs[1].done)
    assert jobs[1].result == 5
    assert not jobs[0].done
    go.set()
    wait_until(lambda: jobs[0].done)


def test_a_step_waits_longer_for_many_jobs():
    threads = GuideThreads(GuideTimings(step_wait_s=0.0, job_wait_s=10.0))
    jobs = [threads.start(lambda: time.sleep(0.02), False) for _ in range(3)]
    threads.wait(3)
    assert all(job.done for job in jobs)
