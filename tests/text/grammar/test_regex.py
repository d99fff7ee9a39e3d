import random
import re

import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar
from emberline.text.grammar.expressions.builder import Builder
from emberline.text.grammar.expressions.regex import regex_expression
from tests.text.grammar.reference import Sampler, matches


def grammar(pattern: str) -> Grammar:
    builder = Builder()
    found = builder.finish(regex_expression(builder, pattern))
    assert found is not None
    return found


PATTERNS = [
    "abc", "a|bc|", "[a-f0-9]{4}", "(ab)+c?", r"\d{3}-\d{4}", r"\w+@\w+\.com", "a.c", "[^abc]x", r"\s*x\s*", "(a*)*b",
    "(a|b|)+", "x{2,}", "x{0,3}y", "(?:ab|cd){2}", "(?P<year>[0-9]{4})", r"^a$", r"\u0041\x42", r"[\d\-\]]+",
    "a+?b*?", r"\{\}",
    r"[\w.]+", r"\.\*\+", "((a|b)(c|d)){1,3}", r"\p{Lu}\p{Ll}+", "(?i)yes|no", r"\D\W\S", "[a]b", "",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_samples_match_as_python_reads_it(pattern: str) -> None:
    sampler = Sampler(grammar(pattern), 1)
    plain = pattern.replace(r"\p{Lu}", "[A-ZÀ-Þ\\W\\w]").replace(r"\p{Ll}", "[\\w\\W]")
    for _ in range(100):
        text = sampler.text(20)
        assert re.fullmatch(plain, text, re.DOTALL if r"\p" in pattern else 0), text


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if r"\p" not in p and r"\D" not in p])
def test_the_same_texts_match_as_in_python(pattern: str) -> None:
    found = grammar(pattern)
    choose = random.Random(2)
    for _ in range(300):
        text = "".join(choose.choice("abcdxyz0123-.@{}AB ") for _ in range(choose.randrange(7)))
        assert matches(found, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a(?=b)", "look-ahead"), ("(?!a)b", "negative look-ahead"), ("(?<=a)b", "look-behind"),
        (r"(a)\1", "back-reference"), (r"a\bb", "word boundary"), ("a$b", "inside it"), ("(a", "not closed"),
        ("a)", "unbalanced"), ("*a", "repeats nothing"), ("[a", "unfinished"), ("a{3,2}", "exceeds"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"), (r"\q", "unknown escape"), ("(((a{1,99}){1,99}){1,99}){1,99}", "counted repetitions"),
        (r"\p{Klingon}", "Unicode property"), ("[z-a]", "reversed"), ("a{,3}", "{0,3} is clear"),
        ("(" * 200 + ")" * 200, "deep"), ("[[:alpha:]]", "POSIX"), (r"\ud800", "surrogate"), ("a" * 20_000, "16384"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(pattern: str, named: str) -> None:
    with pytest.raises(BadInput, match=re.escape(named)) as caught:
        grammar(pattern)
    assert caught.value.param == "output"


def test_a_regex_is_a_string() -> None:
    with pytest.raises(BadInput, match="must be a string"):
        regex_expression(Builder(), 3)


def test_loops_over_nothing_end() -> None:
    found = grammar("((a*)*|(b?)+)*")
    assert matches(found, "aabba")
    assert not matches(found, "c")
