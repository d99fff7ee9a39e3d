"""The library's matcher and our automaton, on the same grammars: what one allows the other can end."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emberline.engine.grammar import compiler as compiler_module
from emberline.engine.grammar import grammar_automaton as automaton_module
from emberline.engine.grammar import matcher
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.grammar.grammar_automaton import DEAD, Automaton
from emberline.engine.grammar.lark import recursive_rules
from emberline.engine.grammar.matcher import MatcherFailed
from emberline.engine.grammar.validation import check
from emberline.engine.grammar.vocabulary import Vocabulary
from emberline.protocol.errors import BadInput, Internal, Overloaded
from emberline.protocol.grammar import Chars, Free, Grammar, OneOf, Repeat, Rule, Sequence, Text, Token, encode
from tests.engine.grammar.bench import compiler
from tests.engine.grammar.samples import ALL, CALLS, END_ID, JSON, SPECIAL, WORDS, choice, frame, grammars, seq
from tests.examples import n_examples
from tests.soak.server_process import children

VOCAB = 302


@pytest.fixture(scope="module")
def engine():
    with compiler() as made:
        yield made


def kept(n):
    """A small grammar; all of them are encoded in as many bytes."""
    return Grammar((Text(f"kept {n}"),))


def compiled(engine, grammar):
    pending = engine.request(encode(grammar))
    give_up = time.monotonic() + 120
    while not pending.ready:
        assert time.monotonic() < give_up, "it is never compiled"
        time.sleep(0.0005)
    return pending


def allowed(guide):
    bits = np.zeros(guide.n_words, np.uint32)
    guide.fill(bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def by_automaton(automaton, vocabulary, state):
    found = [t for t, text in enumerate(vocabulary.tokens) if text and automaton.feed(state, text) is not DEAD]
    return found + [t for t in vocabulary.special if automaton.token(state, t) is not DEAD]


def check_mask(theirs, ours, guide, vocabulary):
    """A mask has every token of the grammar; where only one text may follow, the tokenizer's own token of it alone."""
    if theirs != sorted(ours):
        texts = sorted((vocabulary.tokens[t] for t in ours), key=len)
        assert all(texts[-1].startswith(text) for text in texts), "tokens are missing where several texts may follow"
        assert theirs == guide.forced()[:1]


def after(automaton, vocabulary, state, token_id):
    if token_id in vocabulary.special:
        return automaton.token(state, token_id)
    return automaton.feed(state, vocabulary.tokens[token_id])


@settings(max_examples=n_examples(200))
@given(grammars, st.integers(0, 2**32))
def test_both_allow_the_same(engine, grammar, seed):
    try:
        check(grammar)
    except BadInput:
        assume(False)
    rng = random.Random(seed)
    vocabulary = Vocabulary(frame(WORDS), VOCAB)
    automaton = Automaton(grammar)
    guide, state = compiled(engine, grammar).guide(), automaton.start
    for _ in range(8):
        ours = by_automaton(automaton, vocabulary, state)
        theirs = allowed(guide)
        if recursive_rules(grammar):
            assert set(theirs) <= set(ours)
        else:
            check_mask(theirs, ours, guide, vocabulary)
        assert guide.complete == (state.cost == 0)
        if not theirs:
            assert guide.complete, "there is always a way to the end"
            return
        token_id = rng.choice(theirs)
        assert guide.accept(token_id)
        state = after(automaton, vocabulary, state, token_id)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_real_shapes_agree_to_the_byte(engine, name, seed):
    rng = random.Random(seed)
    vocabulary = Vocabulary(frame(WORDS), VOCAB)
    automaton = Automaton(ALL[name])
    guide, state = compiled(engine, ALL[name]).guide(), automaton.start
    for _ in range(40):
        check_mask(allowed(guide), by_automaton(automaton, vocabulary, state), guide, vocabulary)
        assert guide.complete == (state.cost == 0)
        if not (choices := allowed(guide)):
            break
        token_id = rng.choice(choices)
        assert guide.accept(token_id)
        state = after(automaton, vocabulary, state, token_id)
        assert guide.fits(state.cost)


@pytest.mark.parametrize("name", ALL)
def test_rollback_restores_everything(engine, name):
    rng = random.Random(7)
    guide = compiled(engine, ALL[name]).guide()
    trail = []
    for _ in range(12):
        trail.append((allowed(guide), guide.complete, guide.finished, guide.fits(9), guide.closing()))
        if not trail[-1][0]:
            break
        guide.accept(rng.choice(trail[-1][0]))
    accepted = len(trail) - 1 if not trail[-1][0] else len(trail)
    for n in (1, 2, accepted - 3):
        guide.rollback(n)
        accepted -= n
        seen = (allowed(guide), guide.complete, guide.finished, guide.fits(9), guide.closing())
        assert seen == trail[accepted]


def test_what_only_the_matcher_can_follow_can_be_taken_back(engine, monkeypatch):
    monkeypatch.setattr(automaton_module, "MAX_NESTING", 9)
    nested = choice(*(seq(Text("("), Rule(1), Text(end)) for end in ")]"), Text("x"))
    guide = compiled(engine, Grammar((Rule(1), nested))).guide()
    trail = []
    while guide.fits(1000):
        trail.append(guide.closing())
        assert guide.accept(ord("("))
    for _ in range(5):
        assert guide.accept(ord("("))
        assert not guide.fits(1000)
    guide.rollback(7)
    assert guide.closing() == trail[-2]
    assert guide.accept(ord("x"))
    assert guide.fits(len(trail[-2]))


def test_a_refused_token_changes_nothing(engine):
    guide = compiled(engine, JSON).guide()
    before = allowed(guide)
    assert not guide.accept(ord("]"))
    assert not guide.accept(SPECIAL)
    assert not guide.accept(END_ID)
    assert allowed(guide) == before
    assert guide.accept(ord("["))


def test_special_tokens_only_where_the_grammar_has_them(engine):
    guide = compiled(engine, ALL["thinking"]).guide()
    assert SPECIAL in allowed(guide)
    assert END_ID not in allowed(guide)
    for byte in b"hm <special>":
        assert guide.accept(byte)
    assert guide.accept(SPECIAL)
    assert allowed(guide) == [WORDS.index('{"') + 256], "the token that merging makes of the forced text"


def test_sequences_of_one_grammar_do_not_disturb_each_other(engine):
    pending = compiled(engine, JSON)
    first, second = pending.guide(), pending.guide()
    assert first.accept(ord("["))
    assert not second.accept(ord("]"))
    assert second.accept(ord("{"))
    assert first.accept(ord("]"))
    assert first.finished
    assert not second.finished


def test_a_closing_path_is_short(engine):
    guide = compiled(engine, ALL["linked"]).guide()
    path = guide.closing()
    assert guide.fits(len(path))
    assert not guide.fits(len(path) - 1)
    assert len(path) == 5  # {"value": 0 ,"next": null }
    for token_id in path:
        assert guide.accept(token_id)
    assert guide.finished


# --- compiling --------------------------------------------------------------------------------------------------------


def test_a_grammar_needs_the_vocabulary():
    with pytest.raises(BadInput, match="vocabulary"):
        MatcherCompiler(VOCAB).request(encode(JSON))


def test_clients_must_agree_on_the_vocabulary(engine):
    engine.learn(frame(WORDS))
    with pytest.raises(BadInput, match="differs"):
        engine.learn(frame(("other",)))
    with pytest.raises(BadInput, match="302 tokens, the model 4"):
        MatcherCompiler(4).learn(frame())


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar((Rule(5),)), "does not exist"),
        (Grammar((Token(5),)), "not a special token"),
        (Grammar((Token(999),)), "not a special token"),
    ],
)
def test_a_bad_grammar_fails_alone(engine, grammar, reason):
    pending = compiled(engine, grammar)
    with pytest.raises(BadInput, match=reason):
        pending.guide()
    compiled(engine, JSON).guide()


def test_a_grammar_is_compiled_once(engine):
    grammar = Grammar((Text("just this one"),))
    assert compiled(engine, grammar) is compiled(engine, grammar)


def test_counted_texts_outlive_the_library_s_table(monkeypatch):
    monkeypatch.setitem(matcher.LIMITS, "max_lexer_states", 4000)
    with compiler() as made:
        grammar = Grammar((seq(Text('"'), Repeat(choice(Chars(((97, 122),)), Text("\\n")), 0, 5000), Text('"')),))
        first, second = (compiled(made, grammar).guide() for _ in range(2))
        assert first.accept(ord('"'))
        for n in range(2000):
            assert ord("a") in allowed(first)
            assert first.accept(97 + n % 26)
        assert first._matcher._origin is not second._matcher._origin, "the table was full, and replaced"
        first.rollback(1500)
        assert first.accept(ord('"'))
        assert first.finished
        assert second.accept(ord('"'))
        assert ord("a") in allowed(second)


@pytest.mark.parametrize(("bound", "most"), [("max_cached", 4), ("max_cached_bytes", 4 * len(encode(kept(0))))])
def test_the_cache_is_bounded(bound, most):
    with compiler(**{bound: most}) as made:
        pending = [compiled(made, kept(n)) for n in range(9)]
        assert [compiled(made, kept(n)) is pending[n] for n in (8, 7, 6, 5)] == [True] * 4
        assert compiled(made, kept(4)) is not pending[4]
        assert compiled(made, kept(5)) is pending[5]
        assert compiled(made, kept(8)) is not pending[8], "the least recently used one made way"


def test_a_grammar_larger_than_the_cache_is_kept_alone():
    with compiler(max_cached_bytes=1) as made:
        first = compiled(made, kept(1))
        assert compiled(made, kept(1)) is first
        compiled(made, kept(2))
        assert compiled(made, kept(1)) is not first


def test_a_failure_of_ours_is_not_cached(engine, monkeypatch):
    grammar = Grammar((Text("once more"),))
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_compile", lambda pending: 1 / 0)
        with pytest.raises(Internal):
            compiled(engine, grammar).guide()
    compiled(engine, grammar).guide()


def test_a_vocabulary_that_cannot_be_prepared_fails_requests_and_hangs_none(monkeypatch):
    monkeypatch.setattr(compiler_module.Vocabulary, "llguidance_tokenizer", lambda self: 1 / 0)
    with compiler(vocabulary=frame()) as made, pytest.raises(Internal):
        compiled(made, JSON).guide()


def test_too_many_concurrent_compilations_are_refused_as_overloaded():
    with compiler(vocabulary=frame(), max_waiting=0) as made, pytest.raises(Overloaded):
        made.request(encode(JSON))


def translators():
    return set(children(os.getpid(), ("emberline.engine.grammar.translator_process",)))


def n_threads():
    return sum(thread.name == "grammars" for thread in threading.enumerate())


def test_closing_a_compiler_ends_its_thread_and_its_process():
    before = translators(), n_threads()
    with compiler() as made:
        compiled(made, kept(1))
        assert (len(translators() - before[0]), n_threads()) == (1, before[1] + 1)
    assert (translators(), n_threads()) == before


def test_closing_a_compiler_does_not_wait_for_a_grammar_that_takes_long():
    before = translators()
    with compiler() as made:
        compiled(made, kept(1))
        (process,) = translators() - before
        os.kill(process, signal.SIGSTOP)
        pending = [made.request(encode(kept(n))) for n in (2, 3)]
    assert all(each.ready for each in pending)
    for each in pending:
        with pytest.raises(Internal):
            each.guide()
    assert translators() == before


def test_a_compiler_that_never_learned_a_vocabulary_can_be_closed():
    MatcherCompiler(VOCAB).close()


def test_without_the_library_only_grammars_are_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with compiler(vocabulary=frame()) as made, pytest.raises(BadInput, match="llguidance is not installed"):
        compiled(made, JSON).guide()


def test_which_rules_lead_back_to_themselves():
    calls = {0: [1, 2], 1: [3], 2: [2], 3: [4], 4: [1, 5], 5: [], 6: [0], 7: [8], 8: []}
    rules = tuple(Sequence((Text("x"), *map(Rule, called))) for called in calls.values())
    assert recursive_rules(Grammar(rules)) == {1, 2, 3, 4}


@settings(max_examples=n_examples(200))
@given(st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=7, max_size=7))
def test_recursion_is_found_however_rules_call(calls):
    reach = [set(called) for called in calls]
    for _ in calls:
        reach = [one | {far for near in one for far in reach[near]} for one in reach]
    rules = tuple(Sequence((Text("x"), *map(Rule, called))) for called in calls)
    assert recursive_rules(Grammar(rules)) == {n for n, one in enumerate(reach) if n in one}


def bomb(depth):
    """(((a{1,9}){1,9}){1,9}…: few expressions, endless counts."""
    nested = OneOf((Text("a"), Text("b"), Chars(((97, 122),))))
    for _ in range(depth):
        nested = Repeat(nested, 1, 9)
    return Grammar((seq(nested, Text("!")),))


@pytest.mark.parametrize(
    "grammar",
    [
        bomb(30),
        Grammar((seq(Repeat(Chars(((97, 122),)), 0, 100_000), Repeat(Chars(((97, 122),)), 0, 100_000)),)),
        Grammar((seq(Repeat(choice(Text("a"), Text("b"))), Text("a"), Repeat(choice(Text("a"), Text("b")), 40, 40)),)),
        Grammar(
            tuple(choice(Text("x"), seq(Text("("), Rule((n + 1) % 300), Rule((n * 7 + 3) % 300))) for n in range(300))
        ),
        Grammar((Sequence(tuple(Repeat(Text(f"k{n}"), 0, 1) for n in range(3000))),)),
        Grammar((*(choice(Text("x"), seq(Text(f"{n}"), Rule(n + 1))) for n in range(5000)), Text("y"))),
        Grammar((seq(Free(tuple(f"stop{n}" for n in range(300))), Text("stop7")),)),
        Grammar((*(seq(Text("first:"), Rule(n + 1), Text("second:"), Rule(n + 1)) for n in range(40)), Text("y"))),
        Grammar((Repeat(Repeat(Repeat(Text("ab"), 999, 999), 999, 999), 999, 999),)),
    ],
    ids=["counts", "overlap", "lookback", "calls", "optional", "chain", "avoids", "doubling", "lengths"],
)
def test_hostile_grammars_end_in_time(engine, grammar):
    """Refused, failed at a step, or followed: never a hang."""
    began = time.monotonic()
    pending = compiled(engine, grammar)
    try:
        guide = pending.guide()
        rng = random.Random(1)
        for _ in range(30):
            if not (choices := allowed(guide)):
                break
            guide.accept(rng.choice(choices))
            guide.fits(20)
    except (BadInput, MatcherFailed):
        pass
    assert time.monotonic() - began < 120
    compiled(engine, CALLS).guide()
