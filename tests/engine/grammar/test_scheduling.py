"""Requests with grammars through the scheduler: valid, within max_tokens, each to one end."""

import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.grammar import grammar_automaton as automaton
from emberline.engine.grammar import matcher
from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.vocabulary import Vocabulary
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.grammar import Free, Grammar, Repeat, Rule, Text, Token
from emberline.protocol.request import Priority
from emberline.protocol.token_ids import pack
from tests.engine.grammar.bench import PATIENT, TASTES, VOCAB, Bench, Taste, compiler, text, valid
from tests.engine.grammar.samples import ALL, END_ID, SPECIAL, WORDS, choice, frame, seq
from tests.examples import n_examples

CLOSED = ("numbers", "linked", "json", "person", "thinking")  # those that are not free to end at any time


@pytest.fixture(scope="module")
def grammars():
    with compiler() as made:
        yield made


@pytest.mark.parametrize("taste", TASTES)
@pytest.mark.parametrize("name", ALL)
def test_a_reply_ends_valid_within_max_tokens(grammars, name, taste):
    bench = Bench(grammars=grammars)
    least = len(shortest(name))
    for most in {least or 1, least + 2, least + 5, least + 17, 60}:
        bench.submit(f"{most}", name, taste, max_tokens=most)
    bench.finish()
    for id, deltas in bench.deltas.items():
        tokens, end = bench.tokens(id), deltas[-1]
        assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert len(tokens) <= int(id)
        assert end.usage.completion_tokens == len(tokens)
        assert end.finish == "stop" or (len(tokens) == int(id) and could_go_on(ALL[name], tokens)) or name == "calls"
        assert valid(ALL[name], tokens), text(tokens)
    if name in ("numbers", "linked", "json", "person"):
        parsed = text([t for t in bench.tokens("60") if t != END_ID])
        json.loads(parsed)


@settings(max_examples=n_examples(60))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*ALL, None]),
            st.sampled_from(list(TASTES)),
            st.integers(1, 50),
            st.integers(1, 30),
            st.integers(0, 5),
            st.booleans(),
            st.integers(0, 20),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(9, 40),
)
def test_whatever_arrives_ends_once_and_the_same_as_alone(grammars, arrivals, n_blocks):
    def submit(bench, n):
        name, taste, most, n_prompt, seed, ignore, least = arrivals[n]
        prompt = [1 + (n * 31 + i) % 200 for i in range(n_prompt)]
        options = {"max_tokens": most, "ignore_eos": ignore, "min_tokens": least, "logprobs": 0}
        bench.submit(f"{n}", name, f"{taste}:{seed}", prompt, **options)

    bench = Bench(n_blocks=n_blocks, max_running=3, token_budget=16, grammars=grammars)
    for n in range(len(arrivals)):
        submit(bench, n)
        bench.step()
    bench.finish()
    assert bench.cache.n_used == 0
    for n, (name, _, most, *_) in enumerate(arrivals):
        deltas, tokens = bench.deltas[f"{n}"], bench.tokens(f"{n}")
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].error is None
        assert len(tokens) <= most
        entries = [entry.token_id for delta in deltas for entry in delta.logprobs or []]
        assert entries == tokens
        if name is not None:
            fits = most >= len(shortest(name))
            assert valid(ALL[name], tokens) if fits or deltas[-1].finish == "stop" else valid(ALL[name], tokens, True)
        alone = Bench(grammars=grammars)
        submit(alone, n)
        alone.finish()
        assert (alone.tokens(f"{n}"), alone.end(f"{n}").finish) == (tokens, deltas[-1].finish)


def shortest(name):
    return Closer(Automaton(ALL[name]), Vocabulary(frame(WORDS), VOCAB)).closing()


def could_go_on(grammar, tokens):
    closer = Closer(Automaton(grammar), Vocabulary(frame(WORDS), VOCAB))
    assert all(closer.accept(token) for token in tokens)
    return closer.complete and not closer.finished


def test_after_preemption_the_tokens_are_the_same(grammars):
    small = Bench(n_blocks=12, max_running=4, token_budget=32, grammars=grammars)
    large = Bench(grammars=grammars)
    for bench in (small, large):
        for n, name in enumerate(CLOSED):
            bench.submit(f"{n}", name, f"nesting:{n}", prompt=range(1, 30), max_tokens=60)
        bench.finish()
    assert small.scheduler.load().preemptions > 0
    assert {id: small.tokens(id) for id in small.deltas} == {id: large.tokens(id) for id in large.deltas}


def test_what_cannot_fit_is_cut(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", "linked", max_tokens=len(shortest("linked")) - 1)
    bench.submit("b", "linked", max_tokens=len(shortest("linked")))
    bench.finish()
    assert bench.end("a").finish == "length"
    assert valid(ALL["linked"], bench.tokens("a"), prefix=True)
    assert bench.end("b").finish == "stop"
    assert text(bench.tokens("b")).endswith(',"next":null}')
    assert len(bench.tokens("b")) == 5


def test_closing_comes_in_one_delta_with_zero_logprobs(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", "linked", "digits", max_tokens=14, logprobs=2)
    bench.finish()
    last = bench.end("a")
    forced = [entry.token_id for entry in last.logprobs]
    assert len(forced) > 1
    assert [(entry.logprob, entry.top) for entry in last.logprobs] == [(0.0, [])] * len(forced)
    assert all(delta.logprobs[0].logprob == -1.0 for delta in bench.deltas["a"][:-1])


def test_a_finished_reply_ends_without_another_step(grammars):
    for ignore in (False, True):
        bench = Bench(grammars=grammars)
        bench.submit("a", Grammar((Text("null"),)), ignore_eos=ignore)
        bench.finish()
        assert bench.end("a").finish == "stop"
        assert text(bench.tokens("a")) == "null"
        assert END_ID not in bench.tokens("a")


def test_the_empty_reply(grammars):
    for ignore in (False, True):
        bench = Bench(grammars=grammars)
        bench.submit("a", Grammar((Text(""),)), ignore_eos=ignore, min_tokens=3)
        bench.finish()
        assert (bench.tokens("a"), bench.end("a").finish) == ([END_ID], "stop")


class Eager(Taste):
    """Ends as soon as it may."""

    def draw(self, row, allowed):
        return END_ID if END_ID in allowed else super().draw(row, allowed)


def test_an_end_is_allowed_exactly_when_complete(grammars):
    bench = Bench(grammars=grammars, runner=Eager())
    bench.submit("numbers", "numbers", "digits")
    bench.submit("calls", "calls")
    bench.submit("later", "calls", min_tokens=5)
    bench.submit("stop", Grammar((Repeat(Text("ab")),)), stop_ids=(ord("z"),), ignore_eos=True, max_tokens=7)
    bench.finish()
    assert bench.tokens("calls") == [END_ID]
    assert 6 <= len(bench.tokens("later")) <= 9, "as soon as its last character is whole"
    assert END_ID not in bench.tokens("numbers"), "it ends with its last bracket"
    assert valid(ALL["numbers"], bench.tokens("numbers"))
    assert len(bench.tokens("stop")) in (6, 7) or bench.tokens("stop")[-1] == ord("z")


def test_a_text_of_endless_readings_is_closed_where_it_is_given_up(grammars, monkeypatch):
    monkeypatch.setattr(automaton, "MAX_NESTING", 12)
    nested = choice(*(seq(Text("("), Rule(1), Text(end)) for end in ")]}"), Text("x"))

    class Opens(Taste):
        def draw(self, row, allowed):
            return ord("(") if ord("(") in allowed else super().draw(row, allowed)

    bench = Bench(grammars=grammars, runner=Opens())
    bench.submit("a", Grammar((Rule(1), nested)), max_tokens=30)
    bench.finish()
    assert bench.end("a").finish == "stop"
    assert 3 < len(bench.tokens("a")) < 30
    assert valid(Grammar((Rule(1), nested)), bench.tokens("a"))


def test_no_mask_without_grammars(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", None)
    plan = bench.scheduler.plan()
    assert bench.scheduler.masks(plan) is None


def test_masks_are_for_the_rows_that_have_grammars(grammars):
    seen = set()

    class Watching(Taste):
        def launch(self, plan):
            handle = super().launch(plan)
            bound = [place for place, row in enumerate(handle.rows) if self.requests[row.slot].grammar]

            def sample(masks=None, draw=handle.sample):
                assert (masks.rows if masks is not None else []) == bound
                assert masks is None or masks.bits.shape == (len(bound), 10)
                seen.add((len(handle.rows), tuple(bound)))
                draw(masks)

            handle.sample = sample
            return handle

    bench = Bench(grammars=grammars, runner=Watching())
    for n in range(3):
        bench.submit(f"plain {n}", None, max_tokens=600, ignore_eos=True)
    bench.step()
    bench.submit("bound", "numbers", "digits", max_tokens=60)
    bench.finish()
    assert bench.end("bound").error is None
    alone, after_all = (1, (0,)), (4, (3,))
    assert seen & {alone, after_all}, "it ran with the others, or after them where its grammar took long to compile"


# --- while a grammar is compiled --------------------------------------------------------------------------------------


class Slow:
    """Grammars that are ready when the test says so."""

    digest = "fake"

    def __init__(self, guide=None, error=None):
        self.ready, self.applied, self._error = False, guide, error

    def request(self, encoded):
        return self

    def learn(self, vocabulary):
        pass

    def close(self):
        pass

    def guide(self):
        if self._error is not None:
            raise self._error
        return self.applied


class Fake:
    """A guide of the test's making: a, b, then the end."""

    n_words = 10

    def __init__(self, fail=None):
        self.accepted, self.fail = [], fail

    @property
    def complete(self):
        return len(self.accepted) == 2

    finished = complete

    def fill(self, bits):
        if self.fail == "fill":
            raise RuntimeError("the library broke")
        bits[:] = 0
        if not self.complete and self.fail != "empty":
            bits[3] = 2 << len(self.accepted)  # 97, 98

    def accept(self, token_id):
        if self.fail == "accept":
            return False
        self.accepted.append(token_id)
        return True

    def rollback(self, n):
        del self.accepted[len(self.accepted) - n :]

    def fits(self, room):
        return 2 - len(self.accepted) <= room

    def closing(self):
        return [97, 98][len(self.accepted) :]


def test_other_sequences_run_while_one_waits_for_its_grammar():
    slow = Slow(Fake())
    bench = Bench(grammars=slow)
    bench.submit("bound", "json")
    assert bench.loop.blocked
    bench.step()
    assert not bench.deltas
    bench.submit("plain", None, max_tokens=5)
    assert not bench.loop.blocked
    while "plain" not in bench.deltas or bench.end("plain").finish is None:
        bench.step()
    assert "bound" not in bench.deltas
    slow.ready = True
    bench.finish()
    assert bench.tokens("bound") == [97, 98]
    assert bench.end("bound").finish == "stop"


def test_one_that_waits_for_its_grammar_displaces_nobody():
    slow = Slow(Fake())
    bench = Bench(grammars=slow, max_running=1)
    bench.submit("plain", None, max_tokens=1500, ignore_eos=True)
    bench.step()
    bench.submit("bound", "json", priority=Priority.PRIORITY)
    bench.step()
    assert bench.scheduler.load().preemptions == 0
    slow.ready = True
    bench.finish()
    assert bench.scheduler.load().preemptions == 1
    assert bench.tokens("bound") == [97, 98]


def test_a_grammar_that_is_late_leaves_no_tokens_to_compute():
    """Its sequence has a slot, and nothing to do until the grammar has taken what was drawn."""
    accepts, may_accept = threading.Event(), threading.Event()

    class Late(Fake):
        def accept(self, token_id):
            accepts.set()
            assert may_accept.wait(60)
            return super().accept(token_id)

    slow = Slow(Late())
    bench = Bench(grammars=slow)
    bench.submit("bound", "json")
    slow.ready = True
    give_up = time.monotonic() + 60
    while not accepts.is_set():
        assert time.monotonic() < give_up
        bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.waiting_tokens) == (1, 0)
    may_accept.set()
    bench.finish()
    assert bench.tokens("bound") == [97, 98]


def test_a_grammar_that_fails_ends_its_request_alone():
    slow = Slow(error=BadInput("the grammar is not valid: no", param="grammar"))
    bench = Bench(grammars=slow)
    bench.submit("bound", "json")
    bench.submit("plain", None, max_tokens=5)
    slow.ready = True
    bench.finish()
    assert (bench.end("bound").error.kind, bench.end("bound").error.param) == ("bad_input", "grammar")
    assert bench.end("plain").finish == "length"
    assert not bench.guided.n_compiling


def test_abort_and_deadline_while_a_grammar_is_compiled():
    bench = Bench(grammars=Slow(Fake()))
    bench.submit("a", "json")
    assert bench.scheduler.abort("a").finish == "cancelled"
    bench.submit("b", "json")
    assert [delta.id for delta in bench.scheduler.abort_all(Internal("over"))] == ["b"]
    assert not bench.scheduler.busy
    assert not bench.guided.n_compiling


@pytest.mark.parametrize("fail", ["fill", "empty", "accept"])
def test_a_guide_that_breaks_ends_its_request_alone(fail, caplog):
    slow = Slow(Fake(fail))
    slow.ready = True
    bench = Bench(grammars=slow)
    bench.submit("bound", "json")
    bench.submit("plain", None, max_tokens=5)
    bench.finish()
    assert bench.end("bound").error.kind == "internal"
    assert "broke" not in bench.end("bound").error.message
    assert bench.end("plain").finish == "length"
    assert any(getattr(record, "grammar", "") == "fake" for record in caplog.records)
    assert bench.cache.n_used == 0


def test_a_grammar_beyond_the_library_is_the_callers_fault(monkeypatch):
    monkeypatch.setitem(matcher.LIMITS, "step_max_items", 1)
    with compiler() as made:
        bench = Bench(grammars=made)
        bench.submit("bound", "json", max_tokens=5)
        bench.submit("plain", None, max_tokens=5)
        bench.finish()
    assert bench.end("bound").error.kind == "bad_input"
    assert bench.end("plain").finish == "length"


def test_without_a_vocabulary_a_grammar_is_refused():
    bench = Bench(grammars=MatcherCompiler(VOCAB))
    with pytest.raises(BadInput, match="vocabulary"):
        bench.submit("a", "json")
    assert not bench.scheduler.busy


# --- thinking ---------------------------------------------------------------------------------------------------------

END_THINKING = (SPECIAL, ord("\n"))


def test_reasoning_is_ended_at_its_limit_and_the_reply_continues(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", None, "digits", max_tokens=30, thinking=(10, (SPECIAL,), END_THINKING), logprobs=0)
    bench.finish()
    tokens = bench.tokens("a")
    assert SPECIAL not in tokens[:10]
    assert tuple(tokens[10:12]) == END_THINKING
    assert len(tokens) == 30 or tokens[-1] == END_ID
    sizes = [len(delta.token_ids) // 4 for delta in bench.deltas["a"]]
    assert sizes[9] == 3
    assert [entry.logprob for entry in bench.deltas["a"][9].logprobs] == [-1.0, 0.0, 0.0]


def test_thinking_that_ended_in_time_is_left_alone():
    class Brief(Taste):
        def draw(self, row, allowed):
            return SPECIAL if row.end == 5 else ord("x")

    bench = Bench(runner=Brief())
    bench.submit("a", None, max_tokens=12, thinking=(6, (SPECIAL,), END_THINKING))
    bench.finish()
    assert bench.tokens("a").count(SPECIAL) == 1
    assert len(bench.tokens("a")) == 12


def test_a_grammar_decides_whether_thinking_may_be_ended(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("may", "thinking", "strings", max_tokens=40, thinking=(6, (SPECIAL,), (SPECIAL,)))
    bench.submit("not", "linked", max_tokens=40, thinking=(3, (SPECIAL,), (SPECIAL,)))
    bench.finish()
    assert bench.tokens("may").index(SPECIAL) <= 6
    assert valid(ALL["thinking"], bench.tokens("may"))
    assert SPECIAL not in bench.tokens("not")
    assert valid(ALL["linked"], bench.tokens("not"))


def test_thinking_is_not_ended_within_a_character_but_behind_it(grammars):
    class Accents(Taste):
        def draw(self, row, allowed):
            return next(t for t in (0xA9, 0xC3, *allowed) if t in allowed)

    thinking = Grammar((seq(Free(), Token(SPECIAL), Text("done")),))
    bench = Bench(runner=Accents(), grammars=grammars)
    bench.submit("a", thinking, max_tokens=40, thinking=(5, (SPECIAL,), (SPECIAL,)))
    bench.finish()
    assert bench.tokens("a").index(SPECIAL) == 6
    assert valid(thinking, bench.tokens("a"))


def test_max_tokens_holds_for_thinking_too(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", None, "digits", max_tokens=6, thinking=(5, (SPECIAL,), END_THINKING))
    bench.submit("b", None, "digits", max_tokens=7, thinking=(5, (SPECIAL,), END_THINKING))
    bench.finish()
    assert len(bench.tokens("a")) <= 6
    assert tuple(bench.tokens("b")[5:]) in (END_THINKING, ()), "all of it or nothing"
    assert bench.end("b").finish in ("length", "stop")


@pytest.mark.parametrize("limit", [(-1, (), (1,)), (3, (), ()), (3, (), (VOCAB,))])
def test_a_senseless_thinking_limit_is_refused(limit):
    with pytest.raises(BadInput, match="thinking"):
        Bench().submit("a", None, thinking=limit)


def test_a_special_token_may_be_the_whole_reply(grammars):
    bench = Bench(grammars=grammars)
    bench.submit("a", Grammar((choice(Token(SPECIAL), seq(Free(("x",)), Text("x"))),)), max_tokens=1)
    bench.finish()
    assert bench.end("a").finish == "stop"
    assert bench.tokens("a")[0] in (SPECIAL, ord("x"))


def test_masks_cost_little_beside_many_plain_rows(grammars):
    bench = Bench(grammars=grammars, max_running=8, **PATIENT)  # else no row may have a mask yet
    for n in range(8):
        bench.submit(f"{n}", "json", f"nesting:{n}", max_tokens=200)
    while len(bench.deltas) < 8:
        bench.step()
    plan = bench.scheduler.plan()
    began_s = time.process_time()
    masks = bench.scheduler.masks(plan)
    assert time.process_time() - began_s < 1.0  # 0.001 on an idle machine
    assert masks.bits.dtype == np.uint32


def test_bad_words_apply_where_the_grammar_leaves_a_choice(grammars):
    bench = Bench(grammars=grammars)
    bad = tuple(pack([token_id]) for token_id in b"ab")
    bench.submit("some", Grammar((choice(Text("a"), Text("b"), Text("c")),)), bad_ids=bad)
    bench.submit("none", Grammar((Text("a"),)), bad_ids=bad)
    bench.finish()
    assert text(bench.tokens("some")).startswith("c")
    assert text(bench.tokens("none")).startswith("a")
