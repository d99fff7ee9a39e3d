"""Grammars are checked and translated in a process that can be killed."""

import os
import signal
import threading

import pytest

from emberline.engine.grammar import translator_process
from emberline.engine.grammar.lark import to_lark
from emberline.engine.grammar.translator_process import TranslatorProcess
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.grammar import Grammar, Rule, Sequence, Text, Token, encode
from tests.engine.grammar.samples import ALL, SPECIAL


@pytest.fixture(scope="module")
def process():
    made = TranslatorProcess()
    yield made
    made.kill()


@pytest.mark.parametrize("name", ALL)
def test_a_grammar_is_translated_as_in_this_process(process, name):
    found = process.translate(encode(ALL[name]))
    assert found.source == to_lark(ALL[name])
    assert found.token_ids == ((SPECIAL,) if name == "thinking" else ())


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xff\xff", b"\x91" * 60_000, b"\x91\x91\x92\xa4text\xa2\xff\xff", encode(Grammar((Rule(0),)))],
    ids=["empty", "garbage", "nested", "not UTF-8", "left recursion"],
)
def test_what_is_no_grammar_is_refused_and_the_process_goes_on(process, encoded):
    process.start()
    before = process.pid
    with pytest.raises(BadInput, match="grammar"):
        process.translate(encoded)
    assert process.translate(encode(Grammar((Sequence((Text("a"), Token(5))),)))).token_ids == (5,)
    assert process.pid == before


def test_at_the_time_limit_it_is_killed_and_the_next_grammar_gets_another():
    process = TranslatorProcess(limit_s=1e-9)
    process.start()
    before = process.pid
    with pytest.raises(BadInput, match="takes longer"):
        process.translate(encode(ALL["json"]))
    assert process.pid is None
    process.start()
    assert process.pid != before
    process.kill()


def test_a_process_that_gets_no_processor_is_waited_for():
    """The limit is of its processor time: on busy cores a large grammar took longer by the clock and was refused."""
    process = TranslatorProcess(limit_s=0.2)
    process.start()
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
    waker.start()
    assert process.translate(encode(ALL["json"])).source
    waker.join()
    process.kill()
    stuck = TranslatorProcess(wall_s=0.1)
    stuck.start()
    os.kill(stuck.pid, signal.SIGSTOP)
    with pytest.raises(BadInput, match="takes longer"):
        stuck.translate(encode(ALL["json"]))
    stuck.kill()


def test_a_process_that_died_is_started_again(process):
    process.start()
    os.kill(process.pid, 9)
    assert process.translate(encode(ALL["json"])).source


def test_one_that_starts_too_late_is_replaced_and_not_the_fault_of_a_grammar(monkeypatch):
    process = TranslatorProcess()
    monkeypatch.setattr(translator_process, "START_S", -1.0)
    with pytest.raises(TimeoutError):
        process.start()
    with pytest.raises(Internal):
        process.translate(encode(ALL["json"]))
    monkeypatch.undo()
    assert process.translate(encode(ALL["json"])).source == to_lark(ALL["json"])
    process.kill()
