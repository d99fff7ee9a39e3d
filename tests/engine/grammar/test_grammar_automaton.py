"""The automaton means what the grammar means: against all texts of small grammars."""

import time
from itertools import product

import pytest
from hypothesis import assume, given, settings

from emberline.engine.grammar.closer import Closer
from emberline.engine.grammar.grammar_automaton import DEAD, END, Automaton, TooComplex
from emberline.engine.grammar.validation import MAX_DEPTH, check, read
from emberline.engine.grammar.vocabulary import Vocabulary
from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Chars, Free, Grammar, OneOf, Repeat, Rule, Sequence, Text, Token, encode
from tests.engine.grammar.samples import (
    ALL,
    CALLS,
    JSON,
    LINKED,
    PERSON,
    SPECIAL,
    STRING,
    choice,
    frame,
    grammars,
    language,
    seq,
)
from tests.examples import n_examples

MOST = 6
SYMBOLS = (97, 98, 0xC3, 0xA9, 256 + SPECIAL)


def walk(automaton, symbols):
    state = automaton.start
    for symbol in symbols:
        state = automaton.step(state, symbol)
    return state


def symbols_of(pieces):
    return [s for piece in pieces for s in ([256 + piece] if isinstance(piece, int) else piece)]


@settings(max_examples=n_examples(300))
@given(grammars)
def test_every_prefix_is_known_with_its_shortest_completion(grammar):
    try:
        check(grammar)
    except BadInput:
        assume(False)
    words = language(grammar, MOST)
    automaton = Automaton(grammar)
    for n in range(4):
        for prefix in product(SYMBOLS, repeat=n):
            state = walk(automaton, prefix)
            known = min((len(word) - n for word in words if word[:n] == prefix), default=None)
            if known is not None:
                assert state.cost == known
            else:
                assert state is DEAD or n + state.cost > MOST
            if state is not DEAD and n + state.cost <= MOST:
                completion = symbols_of(automaton.completion(state))
                assert len(completion) == state.cost
                assert (*prefix, *completion) in words


@pytest.mark.parametrize(
    ("name", "text", "closing"),
    [
        ("numbers", "", b"[]"),
        ("numbers", "[12,", b"0]"),
        ("numbers", "[-", b"0]"),
        ("numbers", "[1.", b"0]"),
        ("linked", '{"value":3,"next":{"va', b'lue":0,"next":null}}'),
        ("json", '{"a":[[{"b\\', b'"":0}]]}'),
        ("person", '{"name":"caf\xe9","age":1,"role":"userl', b'and"}'),
        ("calls", "text <cal", b""),
        ("calls", "text <call>", b'{"f":0}</call>'),
    ],
)
def test_closing(name, text, closing):
    automaton = Automaton(ALL[name])
    state = automaton.feed(automaton.start, text.encode())
    pieces = automaton.completion(state)
    joined = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    assert len(joined) == state.cost == len(closing)
    assert automaton.feed(state, joined).cost == 0


def test_special_tokens_are_on_the_way():
    automaton = Automaton(ALL["thinking"])
    state = automaton.feed(automaton.start, b"let me see")
    assert automaton.completion(state) == [SPECIAL, b'{"value":0,"next":null}']
    after = automaton.token(state, SPECIAL)
    assert automaton.feed(after, b"x") is DEAD
    assert automaton.token(after, SPECIAL) is DEAD
    assert automaton.feed(after, b'{"value":0,"next":null}') is END


def test_a_call_is_the_only_way_on_from_its_opening():
    automaton = Automaton(CALLS)
    text = automaton.feed(automaton.start, b"a < b <call")
    assert text.cost == 0
    assert automaton.feed(text, b">{}") is DEAD
    assert automaton.feed(text, b'>{"f":12}</call> and <call>{"f":').cost == len("0}</call>")


@pytest.mark.parametrize("byte", [0x80, 0xC0, 0xF5, 0xFF])
def test_text_is_unicode(byte):
    for grammar in (CALLS, Grammar((STRING,))):
        automaton = Automaton(grammar)
        start = automaton.start if grammar is CALLS else automaton.feed(automaton.start, b'"')
        assert automaton.step(start, byte) is DEAD
        half = automaton.feed(start, "€".encode()[:2])
        assert half.cost in (1, 2)
        assert automaton.feed(half, b"a") is DEAD


def test_every_character_and_no_surrogate():
    automaton = Automaton(Grammar((Repeat(Chars(((0, 0xD7FF), (0xE000, 0x10FFFF)))),)))
    for code in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x10FFFF):
        assert automaton.feed(automaton.start, chr(code).encode()).cost == 0, hex(code)
    for bad in (b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\xf8"):
        assert automaton.feed(automaton.start, bad) is DEAD


def test_counts_are_not_unrolled():
    automaton = Automaton(
        Grammar((seq(Text("["), Repeat(OneOf((Text("x"), Text("yy"))), 500_000, 1_000_000), Text("]")),))
    )
    began = time.process_time()
    state = automaton.feed(automaton.start, b"[" + b"x" * 20_000)
    assert state.cost == 480_001
    assert time.process_time() - began < 5


def test_memory_is_bounded_and_old_states_stay_valid():
    automaton = Automaton(Grammar((Repeat(OneOf((Text("x"), Text("yy"))), 0, 200_000),)))
    states = [automaton.start]
    for _ in range(60_000):
        states.append(automaton.step(states[-1], ord("x")))
    assert len(automaton._known) <= 25_000
    assert automaton.feed(states[100], b"xyy").cost == 0


def test_deep_nesting():
    automaton = Automaton(JSON)
    state = automaton.feed(automaton.start, b"[" * 5000)
    assert state.cost == 5000
    assert automaton.feed(state, b"1" + b"]" * 5000) is not DEAD
    assert automaton.feed(state, b"]" * 5000).cost == 0


def test_many_options_share_their_beginnings():
    options = tuple(Text(f'"item-{n:05}"') for n in range(5000))
    automaton = Automaton(Grammar((OneOf(options),)))
    state = automaton.feed(automaton.start, b'"item-012')
    assert state.cost == len('34"')
    assert automaton.feed(state, b'34"') is END


def test_a_text_of_endless_readings_is_given_up():
    ambiguous = Grammar((Rule(1), choice(*(seq(Text("("), Rule(1), Text(c)) for c in ")]}"), Text("x"))))
    automaton = Automaton(ambiguous)
    with pytest.raises(TooComplex):
        automaton.feed(automaton.start, b"(" * 2000)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(()), "no rules"),
        (Grammar((Rule(1),)), "does not exist"),
        (Grammar((seq(Repeat(Text("a")), Rule(0)),)), "left-recursive"),
        (Grammar((seq(Text("a"), Rule(0)),)), "no text"),
        (Grammar((OneOf(()),)), "no text"),
        (Grammar((Token(-1),)), "token id"),
        (Grammar((Repeat(Text("a"), 3, 2),)), "repeating"),
        (Grammar((Repeat(Text("a"), 0, 1 << 40),)), "repeating"),
        (Grammar((Chars(((5, 3),)),)), "range"),
        (Grammar((Chars(((0xD000, 0xE000),)),)), "surrogates"),
        (Grammar((Free(("",)),)), "empty"),
        (Grammar(tuple(Sequence((Text("a"),) * 2000) for _ in range(200))), "expressions"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar, reason):
    with pytest.raises(BadInput, match=reason):
        read(encode(grammar))


def test_what_cannot_be_read_is_refused():
    nested = Text("a")
    for _ in range(MAX_DEPTH):
        nested = Repeat(nested, 1, 2)
    with pytest.raises(BadInput, match="deep"):
        read(encode(Grammar((nested,))))
    for raw in (b"", b"\xff\xff", encode(Grammar((Text("a"),)))[:-1]):
        with pytest.raises(BadInput, match="cannot be decoded"):
            read(raw)


@pytest.mark.parametrize("grammar", [JSON, LINKED, PERSON], ids=["json", "linked", "person"])
def test_left_to_itself_a_text_never_gets_stuck(grammar):
    """Any byte that is allowed leads to a state that can end."""
    automaton = Automaton(grammar)
    state = automaton.start
    for n in range(300):
        allowed = [byte for byte in range(256) if automaton.step(state, byte) is not DEAD]
        if not allowed:
            assert state.cost == 0
            break
        state = automaton.step(state, allowed[(n * 7919) % len(allowed)])
        assert automaton.feed(state, b"".join(p for p in automaton.completion(state) if isinstance(p, bytes))).cost == 0


def test_a_shortest_reply_that_is_enormous_is_not_written_out():
    item = Text("1,")
    for _ in range(3):
        item = Repeat(item, 1000, 1000)
    closer = Closer(Automaton(Grammar((item,))), Vocabulary(frame(), 302))
    began_s = time.process_time()
    assert not closer.fits(8000)
    assert not closer.fits(10**8)
    assert closer.fits(2 * 10**9)
    assert time.process_time() - began_s < 1


def test_endings_of_a_closing_are_spelled_with_it():
    vocabulary = Vocabulary(frame(["aaaa"]), 302)
    closer = Closer(Automaton(Grammar((seq(Repeat(Text("a"), 4000, 4000), Text("!")),))), vocabulary)
    assert closer.fits(1001)
    vocabulary.spelling = None  # not called again
    for n_left in reversed(range(3800, 4000)):
        assert closer.accept(ord("a"))
        n_tokens = n_left // 4 + n_left % 4 + 1
        assert closer.fits(n_tokens)
        assert not closer.fits(n_tokens - 1)


def test_a_byte_without_a_token_is_in_the_way_of_its_own_texts_only():
    """Vocabularies lack bytes that texts hardly have: what needs none of them fits, and need not be spelled."""
    lacking = frame()
    lacking.tokens[0x04] = lacking.tokens[0xF1] = b""
    for text in ("\x04", "\U00040000"):
        assert not Closer(Automaton(Grammar((Text(text),))), Vocabulary(lacking, 302)).fits(100)
    vocabulary = Vocabulary(lacking, 302)
    vocabulary.spelling = None  # not called
    closer = Closer(Automaton(Grammar((STRING,))), vocabulary)
    assert closer.fits(2)
    assert not closer.fits(0)
    assert closer.accept(ord('"'))
    assert closer.accept(0xF3)
    assert closer.fits(4)
