import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar
from emberline.text.grammar.expressions.builder import Builder
from emberline.text.grammar.expressions.ebnf import grammar_expression
from tests.text.grammar.reference import Sampler, matches

ARITHMETIC = r"""
# sums of products
root  ::= expr
expr  ::= term (("+" | "-") term)*
term  ::= factor ("*" factor)*
factor ::= number | "(" expr ")"
number ::= [0-9]+ ("." [0-9]{1,3})?
"""
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""
LARK = r"""
start: greeting (","  name)* "!"?
greeting: "hello" | "hi"
name: /[a-z]+/
"""


def grammar(text: str) -> Grammar:
    builder = Builder()
    found = builder.finish(grammar_expression(builder, text))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "possible", "impossible"),
    [
        (ARITHMETIC, ["1", "1+2*3", "(1.25-2)*3"], ["", "1+", "1.2345", "()"]),
        (SQL, ["SELECT col_1  from table_2 "], ["SELECT col_3  from table_2 "]),
        (LARK, ["hello", "hi,ann,bob!"], ["hello,Ann", "hi,"]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["aab"]),
        ('root ::= root "+" num | num\nnum ::= [0-9]', ["1", "1+2+3"], ["+1", "1+"]),
        (r'root ::= "\"\n\t\x41\u00e9" [^a-z\]] .', ['"\n\tAé]x'.replace("]", "Z")], ['"\n\tAéax']),
        ('root ::= ("a" | "b"){2,3} // twice or more', ["ab", "bbb"], ["a", "aaaa"]),
        ('root ::= "Yes"i', ["yes", "YES"], ["ye"]),
        ("root ::= a-b\na-b ::= 'x'", ["x"], ["a"]),
    ],
)
def test_texts_of_a_grammar(text: str, possible: list[str], impossible: list[str]) -> None:
    found = grammar(text)
    for each in possible:
        assert matches(found, each), each
    for each in impossible:
        assert not matches(found, each), each
    sampler = Sampler(found, 5)
    for _ in range(50):
        sample = sampler.text(20)
        assert matches(found, sample), sample


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('root ::= "a" other', "'other'"),
        ('a ::= "x"', "no rule named root"),
        ('root ::= a "x"\na ::= b\nb ::= root', "begins with itself"),
        ('root ::= "a" root', "never be completed"),
        ('root ::= "a', "not closed"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a"{3,1}', "counts"),
        ('root ::= (("a"{1,999}){1,999}){1,999}', "counted repetitions"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("%import common.WORD\nstart: WORD", "directives"),
        ("root = = 3", "="),
        ("", "no rule named root"),
        ('root ::= [z-a]', "reversed"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "deep"),
        ('root ::= "a"\n' * 40_000, "256 KiB"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(text: str, named: str) -> None:
    with pytest.raises(BadInput) as caught:
        grammar(text)
    assert named in caught.value.message
    assert caught.value.param == "output"
